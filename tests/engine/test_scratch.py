"""What is kept comes back as it was, nothing lies on the disk under a name, and a full disk is said beforehand."""

import errno
import os
from pathlib import Path

import pytest
import torch

from spectrace.engine.scratch import Scratch
from spectrace.tracer.errors import UserError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_boundaries_are_read_as_they_were_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    rows = {boundary: torch.randn(7, 5).to(dtype) for boundary in range(4)}
    scratch = Scratch(tmp_path / "not" / "there" / "yet", [0, 3], 7, 5, dtype)
    for boundary, whole in rows.items():
        scratch.keep(boundary, [whole[:2], whole[2:6], whole[6:]])
    found = scratch.read(slice(1, 6))
    assert list(found) == [0, 3] and scratch.row_bytes == 2 * 5 * dtype.itemsize
    assert all(torch.equal(tensor, rows[boundary][1:6]) for boundary, tensor in found.items())
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_said_before_anything_is_computed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match=r"no room for 2\.00 GiB \(No space left on device\).*fewer boundaries"):
        Scratch(tmp_path / "trace", [0, 1], 1 << 18, 1 << 10, torch.float32)
    assert list(tmp_path.iterdir()) == []

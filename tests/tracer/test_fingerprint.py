"""Hashes see what sums and XORs miss: order of rows, slots and columns, and signs that flip in pairs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from spectrace.tracer.fingerprint import file_fingerprint, file_fingerprints, row_hashes, tensor_fingerprint

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


def rows_of(dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(8, 12, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_hash_is_xxh3_over_the_bytes_of_a_slot(dtype: torch.dtype) -> None:
    rows = rows_of(dtype)
    hashes = row_hashes(rows, [4, 8])
    assert hashes.shape == (8, 2) and hashes.dtype == np.uint64
    assert hashes[3, 0] == xxhash.xxh3_64_intdigest(rows[3, :4].view(torch.uint8).numpy().tobytes())
    assert hashes[3, 1] == xxhash.xxh3_64_intdigest(rows[3, 4:].contiguous().view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("dtype", DTYPES)
def test_swapped_rows_swap_hashes(dtype: torch.dtype) -> None:
    rows, order = rows_of(dtype), torch.tensor([1, 0, 2, 3, 4, 5, 7, 6])
    assert (row_hashes(rows[order], [4] * 3) == row_hashes(rows, [4] * 3)[order.numpy()]).all()
    assert len(set(row_hashes(rows, [12])[:, 0].tolist())) == 8


@pytest.mark.parametrize("dtype", DTYPES)
def test_swapped_slots_show(dtype: torch.dtype) -> None:
    rows = rows_of(dtype)
    swapped = row_hashes(torch.cat([rows[:, 4:8], rows[:, :4], rows[:, 8:]], dim=1), [4] * 3)
    straight = row_hashes(rows, [4] * 3)
    assert (swapped[:, :2] != straight[:, :2]).all() and (swapped[:, :2] == straight[:, 1::-1]).all()


@given(st.integers(0, 11), st.integers(0, 11), st.sampled_from(DTYPES[:3]), st.integers(0, 99))
def test_swapped_columns_and_paired_sign_flips_show(a: int, b: int, dtype: torch.dtype, seed: int) -> None:
    rows = rows_of(dtype, seed)
    swapped, flipped = rows.clone(), rows.clone()
    swapped[:, [a, b]] = rows[:, [b, a]]
    flipped[:, [a, b]] = -rows[:, [a, b]]
    differs = (swapped != rows).any(dim=1).numpy()
    assert ((row_hashes(swapped, [12]) != row_hashes(rows, [12]))[:, 0] == differs).all()
    assert (row_hashes(flipped, [12]) != row_hashes(rows, [12])).all()


def test_types_are_part_of_the_bytes() -> None:
    rows = torch.ones(2, 4)
    assert (row_hashes(rows, [4]) != row_hashes(rows.bfloat16(), [4])).all()
    assert (row_hashes(torch.zeros(1, 4), [4]) != row_hashes(-torch.zeros(1, 4), [4])).all()


def test_empty_rows_and_wrong_widths() -> None:
    assert row_hashes(torch.empty(0, 12), [4] * 3).shape == (0, 3)
    with pytest.raises(ValueError, match="do not split"):
        row_hashes(torch.empty(2, 12), [4, 4])


def test_fingerprints_of_tensors_and_files(tmp_path: Path) -> None:
    tensor = rows_of(torch.bfloat16)
    data = tensor.view(torch.uint8).numpy().tobytes()
    (tmp_path / "file").write_bytes(data)
    assert tensor_fingerprint(tensor) == xxhash.xxh3_128_hexdigest(data) == file_fingerprint(tmp_path / "file")
    assert tensor_fingerprint(tensor.t()) != tensor_fingerprint(tensor)
    assert tensor_fingerprint(tensor.t().t()) == tensor_fingerprint(tensor)


def test_files_of_weights_are_safetensors_or_else_what_torch_saved(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert file_fingerprints(tmp_path) == {}
    (tmp_path / "pytorch_model.bin").write_bytes(b"weights")
    saved = file_fingerprints(tmp_path)
    assert saved == {"pytorch_model.bin": file_fingerprint(tmp_path / "pytorch_model.bin")}
    (tmp_path / "model.safetensors").write_bytes(b"others")
    assert file_fingerprints(tmp_path).keys() == {"model.safetensors"}

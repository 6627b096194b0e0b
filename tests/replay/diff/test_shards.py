"""Tensors that lie in parts on the ranks are compared whole; what was declared of them is checked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from spectrace.replay.diff.diff import Diff, Verdict, diff
from spectrace.replay.diff.layout import Layout
from spectrace.tracer import Keys, Recorder, Trace, create_trace, seal_trace
from spectrace.tracer.rows import Level

ROWS, WIDTH, RANKS = 24, 48, 3


@pytest.fixture
def whole() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2))


def recorded(folder: Path, parts: Sequence[Tensor], **facts: Any) -> Trace:
    """One request, whose slot each rank holds so."""
    create_trace(folder, {"dtype": "float32", "wiring": {"resolved": {"boundaries": [2]}}})
    for rank, part in enumerate(parts):
        with Recorder(folder, role="target", rank=rank, level=Level.FULL, facts=facts, strict=True) as recorder:
            recorder.emitted(Keys(request=0, pass_=0, position=np.arange(ROWS)), token=np.arange(ROWS), slots=part)
    seal_trace(folder)
    return Trace.open(folder)


def summands(whole: Tensor) -> list[Tensor]:
    parts = [torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(rank)) for rank in range(RANKS - 1)]
    return [*parts, whole - sum(parts, torch.zeros(ROWS, WIDTH))]


def held(found: Diff) -> tuple[str, Layout]:
    [one] = found.unsharded
    return one.of, one.found.layout


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (Layout.SHARDED, "sharded"),
        (Layout.PARTIAL, "partial"),
        (Layout.PERMUTED, "sharded"),
        (Layout.REPLICATED, "replicated"),
    ],
)
@pytest.mark.parametrize("side", [0, 1])
def test_parts_are_put_together_and_compared_with_the_whole(
    tmp_path: Path, whole: Tensor, layout: Layout, said: str, side: int
) -> None:
    columns = list(whole.chunk(RANKS, -1))
    parts = {
        Layout.SHARDED: columns,
        Layout.PERMUTED: [columns[1], columns[2], columns[0]],
        Layout.PARTIAL: summands(whole),
        Layout.REPLICATED: [whole] * RANKS,
    }[layout]
    split = recorded(tmp_path / "split", parts, layouts={"emitted.slots": said})
    alone = recorded(tmp_path / "whole", [whole])
    found = diff(*((alone, split) if side else (split, alone)))
    assert found.verdict in (Verdict.EQUAL, Verdict.WITHIN)
    assert held(found) == ("AB"[side], layout)
    assert found.unsharded[0].found.contradicts == (layout is Layout.PERMUTED)


def test_a_split_that_was_declared_replicated_is_a_contradiction(tmp_path: Path, whole: Tensor) -> None:
    split = recorded(tmp_path / "split", summands(whole))
    found = diff(recorded(tmp_path / "whole", [whole]), split)
    assert held(found) == ("B", Layout.PARTIAL)
    assert found.unsharded[0].found.contradicts
    [apart, _] = found.apart[1]
    assert (apart.family, apart.rank, apart.rows, apart.position) == ("emitted", 1, ROWS, 0)


def test_a_rank_that_differs_is_named_with_its_first_row(tmp_path: Path, whole: Tensor) -> None:
    other = whole.clone()
    other[7:, 3] += 1
    found = diff(recorded(tmp_path / "a", [whole]), recorded(tmp_path / "b", [whole, whole, other]))
    assert not found.apart[0]
    [apart] = found.apart[1]
    assert (apart.rank, apart.rows, apart.of, apart.position) == (2, ROWS - 7, ROWS, 7)
    assert held(found) == ("B", Layout.REPLICATED)
    assert found.unsharded[0].found.apart == (2,)


def test_a_whole_made_of_parts_that_is_another_is_different(tmp_path: Path, whole: Tensor) -> None:
    other = whole.clone()
    other[5] *= 2
    split = recorded(tmp_path / "split", list(other.chunk(RANKS, -1)), layouts={"emitted.slots": "sharded"})
    found = diff(recorded(tmp_path / "whole", [whole]), split)
    assert found.verdict is Verdict.DIFFERENT
    assert found.first
    assert found.first.where.position == 5

"""A position beyond which nothing is drafted shows by ids alone, where enough of them stand beyond it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from spectrace.replay.ends import find_end
from spectrace.tracer.keys import Keys
from spectrace.tracer.manifest import create_trace
from spectrace.tracer.recorder import Recorder
from spectrace.tracer.rows import Level
from spectrace.tracer.trace import Trace


def drafted(folder: Path, ids: list[int], positions: list[int]) -> Trace:
    """A trace of one request in which these ids were drafted at these positions."""
    create_trace(folder, {})
    with Recorder(folder, role="draft", level=Level.LIGHT, strict=True) as draft:
        keys = Keys(request=0, pass_=np.arange(len(ids)), position=positions)
        draft.drafted(keys, draft_token=ids, token=ids, state=torch.zeros(len(ids), 2))
    return Trace.open(folder)


def ids(end: int | None, length: int = 64, *, often: int = 7) -> list[int]:
    """One id a position, 0 from `end` on; before it every so many is 0, too."""
    return [0 if end is not None and at >= end else at % often for at in range(length)]


@pytest.mark.parametrize("end", [20, 40])
def test_an_end_is_where_the_last_other_id_was(end: int, tmp_path: Path) -> None:
    found = find_end(drafted(tmp_path / "trace", ids(end), list(range(64))))
    assert found and found.rows == 64 - found.position and 0 < found.share < 0.2
    assert end - 1 <= found.position <= end  # the row before may be 0 by itself
    assert f"all {found.rows} drafts" in found.told


@pytest.mark.parametrize("end", [None, 0, 55, 64])
def test_there_is_no_end_without_enough_rows_on_both_sides(end: int | None, tmp_path: Path) -> None:
    assert find_end(drafted(tmp_path / "trace", ids(end), list(range(64)))) is None


def test_a_draft_that_often_answers_its_first_id_has_no_end_by_chance(tmp_path: Path) -> None:
    mostly = [0 if at % 3 else 1 for at in range(40)] + [0] * 14
    assert find_end(drafted(tmp_path / "trace", mostly, list(range(54)))) is None


def test_rows_of_one_place_are_no_end(tmp_path: Path) -> None:
    assert find_end(drafted(tmp_path / "trace", [*ids(None, 40), *[0] * 30], [*range(40), *[41] * 30])) is None


def test_ids_that_were_not_seen_are_no_end(tmp_path: Path) -> None:
    assert find_end(drafted(tmp_path / "trace", [-1] * 64, list(range(64)))) is None

"""Acceptance counts the bonus token in the length, leaves cut rounds out, and needs no order of nodes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spectrace.tracer import Keys, Recorder, Trace, create_trace
from spectrace.tracer.acceptance import acceptance_of, acceptance_of_rows


def test_lengths_and_rates_of_four_rounds() -> None:
    found = acceptance_of([3, 0, 1, 2], [False, False, False, True], 3)
    assert found.acceptance_length == 1 + 4 / 3
    assert found.acceptance_untrimmed == 2.5
    assert found.cumulative_rates == (2 / 3, 1 / 3, 1 / 3)
    assert found.conditional_rates == (2 / 3, 1 / 2, 1.0)
    assert (found.rounds, found.correct_drafts) == (3, 4)
    assert (found.rounds_untrimmed, found.correct_drafts_untrimmed) == (4, 6)


@pytest.mark.parametrize(("cut", "mostly"), [(0, False), (1, False), (2, False), (3, True), (4, True)])
def test_rounds_that_an_end_cut_are_counted_and_told_where_they_are_most(cut: int, mostly: bool) -> None:
    found = acceptance_of([0, 2, 1, 3], np.arange(4) < cut, 3)
    assert (found.rounds, found.rounds_cut) == (4 - cut, cut) and found.mostly_cut == mostly


def test_nothing_to_divide_by_is_none() -> None:
    assert acceptance_of([], False, 2).acceptance_length is None
    assert acceptance_of([0, 0], False, 2).conditional_rates == (0.0, None)
    only_cut = acceptance_of([1], True, 1)
    assert (only_cut.acceptance_length, only_cut.acceptance_untrimmed, only_cut.cumulative_rates) == (
        None,
        2.0,
        (None,),
    )


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1))
def test_rates_add_up_to_the_length(rounds: list[tuple[int, bool]]) -> None:
    runs, cut = np.array(rounds).T
    found = acceptance_of(runs, cut > 0, 5)
    if found.acceptance_length is not None:
        assert found.acceptance_length == pytest.approx(1 + sum(rate or 0 for rate in found.cumulative_rates))


def test_rounds_are_read_from_verified_rows_in_any_order(tmp_path: Path) -> None:
    """A chain, a tree, a cut round and a restart; the same (request, round) twice in two incarnations."""
    create_trace(tmp_path / "t", {})
    rounds = [
        (0, 7, 0, [-1, 0, 1, 2], [1, 1, 1, 0], False),
        (0, 7, 1, [-1, 0, 0, 2, 3], [1, 0, 1, 1, 1], False),
        (0, 8, 0, [-1, 0], [1, 1], True),
        (1, 7, 0, [-1, 0], [1, 0], False),
    ]
    for incarnation in range(2):
        with Recorder(tmp_path / "t", role="scheduler", incarnation=incarnation, strict=True) as recorder:
            for of, request, round_, parent, accepted, cut in rounds:
                if of == incarnation:
                    order = np.random.default_rng(round_).permutation(len(parent))
                    recorder.verified(
                        Keys(request=request, pass_=0, position=0, node=order, round=round_),
                        parent=np.array(parent)[order],
                        token=0,
                        target_token=0,
                        accepted=np.array(accepted)[order] > 0,
                        cut=cut,
                        source_row=0,
                    )
    found = acceptance_of_rows(Trace.open(tmp_path / "t").rows("verified"))
    assert found == acceptance_of([2, 3, 1, 0], [False, False, True, False], 3)
    every = acceptance_of_rows(Trace.open(tmp_path / "t").rows("verified"), with_cut=True)
    assert every == acceptance_of([2, 3, 1, 0], False, 3)
    assert found.to_json()["correct_drafts"] == 5
    assert found.to_json()["correct_drafts_untrimmed"] == 6


def test_no_rows_no_numbers(whole: Path) -> None:
    rows = Trace.open(whole).rows("verified", request=99)
    assert acceptance_of_rows(rows).acceptance_length is None

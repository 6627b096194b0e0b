"""The walk counts the rounds a deployment would have had, no more and no fewer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spectrace.engine.tree import Tree
from spectrace.replay.walk import walk, walk_acceptance
from spectrace.tracer.errors import UserError


def test_periodic_runs_walk_to_four_where_the_position_mean_is_two_and_a_half() -> None:
    output = list(range(401))
    right = [i % 4 != 0 for i in range(404)]  # token i is foreseen unless it opens a period
    drafts = {t: Tree.chain([x if right[x] else -1 for x in range(t, t + 3)]) for t in range(1, 401)}
    assert walk_acceptance([walk(drafts, output)], 3).acceptance_length == 4.0


@given(
    right=st.lists(st.booleans(), min_size=1, max_size=40),
    depth=st.integers(1, 5),
)
def test_every_token_is_emitted_once(right: list[bool], depth: int) -> None:
    output = list(range(100, 100 + len(right)))
    drafts = {
        t: Tree.chain([output[x] if x < len(right) and right[x] else -1 for x in range(t, t + depth)])
        for t in range(1, len(right))
    }
    found = walk(drafts, output)
    emitted = 1
    for start, run, cut in zip(found.starts, found.runs, found.cut, strict=True):
        assert start == emitted
        assert run <= depth
        assert cut == (start + run >= len(output))
        emitted += run + 1
    assert emitted >= len(output)
    assert not any(found.cut[:-1])


def test_a_round_cut_by_the_end_is_left_out_of_the_length() -> None:
    found = walk({1: Tree.chain([11, 12, 13]), 3: Tree.chain([13, 14, 15])}, [10, 11, 99, 13, 14])
    assert found.runs == (1, 2) and found.cut == (False, True)
    acceptance = walk_acceptance([found], 3)
    assert (acceptance.rounds, acceptance.correct_drafts, acceptance.acceptance_length) == (1, 1, 2.0)
    assert (acceptance.rounds_untrimmed, acceptance.correct_drafts_untrimmed) == (2, 3)


def test_a_full_run_whose_bonus_token_is_the_last_is_not_cut() -> None:
    found = walk({1: Tree.chain([11, 12])}, [10, 11, 12, 13])
    assert found.runs == (2,) and found.cut == (False,)


def test_a_place_without_drafts_is_an_error_and_not_a_round_of_none() -> None:
    with pytest.raises(UserError, match="after 2 output tokens"):
        walk({1: Tree.chain([-1])}, [10, 11, 12])


def test_in_a_tree_any_branch_may_be_the_right_one() -> None:
    tree = Tree((11, 21, 12, 22), (-1, -1, 0, 1))
    assert walk({1: tree, 4: tree}, [10, 21, 22, 99, 11, 77]).runs == (2, 1)
    assert walk({1: tree}, [10, 11, 22]).runs == (1,)

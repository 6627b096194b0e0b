"""Greedy verification accepts the longest path that the target itself would have walked, and nothing else."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spectrace.engine.verify import verify_greedy


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Parents (before their children), tokens and the target's choice after each node, over few tokens."""
    count = draw(st.integers(1, 12))
    parents = [-1, *(draw(st.integers(0, node - 1)) for node in range(1, count))]
    token = st.integers(0, 2)
    return parents, draw(st.lists(token, min_size=count, max_size=count)), draw(
        st.lists(token, min_size=count, max_size=count)
    )  # fmt: skip


def walks(parents: list[int], tokens: list[int], targets: list[int]) -> list[list[int]]:
    """Every chain from the root whose tokens are the target's choices: what may be accepted."""
    found = [[0]]
    for walk in found:
        end = walk[-1]
        found += [[*walk, n] for n in range(1, len(parents)) if parents[n] == end and tokens[n] == targets[end]]
    return found


@given(trees())
def test_the_path_is_a_chain_of_the_targets_choices_from_the_root_and_cannot_go_on(
    tree: tuple[list[int], list[int], list[int]],
) -> None:
    """Where siblings have one token, the first counts: behind it the others say nothing new about the text."""
    parents, tokens, targets = tree
    verdict = verify_greedy(parents, tokens, targets)
    assert list(verdict.path) in walks(parents, tokens, targets)
    assert verdict.bonus == targets[verdict.path[-1]]
    first = {(parents[n], tokens[n]): n for n in reversed(range(1, len(parents)))}
    assert (verdict.path[-1], verdict.bonus) not in first
    assert all(node == first[above, tokens[node]] for above, node in pairwise(verdict.path))


@given(trees())
def test_without_twins_among_siblings_no_path_is_longer(tree: tuple[list[int], list[int], list[int]]) -> None:
    parents, tokens, targets = tree
    siblings = list(zip(parents, tokens, strict=True))
    if len(set(siblings)) == len(siblings):
        longest = max(walks(parents, tokens, targets), key=len)
        assert list(verify_greedy(parents, tokens, targets).path) == longest


@pytest.mark.parametrize(
    ("drafted", "choices", "accepted"),
    [
        ([], [5], 0),
        ([5, 6, 7], [5, 6, 7, 8], 3),
        ([5, 6, 7], [5, 6, 9, 8], 2),
        ([5, 6, 7], [9, 6, 7, 8], 0),
        ([5, 9, 7], [5, 6, 7, 8], 1),
    ],
)
def test_a_chain_is_accepted_up_to_the_first_difference(drafted: list[int], choices: list[int], accepted: int) -> None:
    """A draft that is right again after a wrong one does not count: its target row saw the wrong one."""
    verdict = verify_greedy(list(range(-1, len(drafted))), [4, *drafted], choices)
    assert verdict.path == tuple(range(accepted + 1))
    assert verdict.bonus == choices[accepted]


def test_a_tree_is_accepted_along_the_branch_that_goes_deepest_for_the_target() -> None:
    """Root 1; children 2 and 3; below 3: 4 and 5. The target goes 1, 3, 5, then 6."""
    verdict = verify_greedy([-1, 0, 0, 2, 2], [1, 2, 3, 4, 5], [3, 9, 5, 9, 6])
    assert (verdict.path, verdict.bonus) == ((0, 2, 4), 6)


def test_the_root_is_no_child_of_itself() -> None:
    """A target that repeats the root's token does not accept the root again."""
    assert verify_greedy([-1], [4], [4]).path == (0,)

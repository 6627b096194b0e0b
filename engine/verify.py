"""Greedy verification: the longest path of the tree that the target itself would have chosen."""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Verdict", "verify_greedy"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Accepted nodes from the root on (the root always is), and the bonus token that the target adds after the last."""

    path: tuple[int, ...]
    bonus: int


def verify_greedy(parents: Sequence[int], tokens: Sequence[int], target_tokens: Sequence[int]) -> Verdict:
    """Walk down from node 0: a child is accepted when its token is the target's choice after its parent."""
    children: dict[tuple[int, int], int] = {}
    for node, (parent, token) in enumerate(zip(parents, tokens, strict=True)):
        children.setdefault((parent, token), node)
    path = [0]
    while (child := children.get((path[-1], target_tokens[path[-1]]))) is not None:
        path.append(child)
    return Verdict(tuple(path), target_tokens[path[-1]])

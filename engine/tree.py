"""Draft trees: their shape, and how they grow as in EAGLE-2 (arXiv 2406.16858, section 4) and SGLang.

At every depth the `topk` best tokens below each row are candidates; the `topk` best of them, by the product of draft
probabilities along their path, are the next depth's rows. At the end the best candidates of all depths become the
tree: a candidate never scores above its parent, so what is kept is connected. A chain is the tree of width one.

Shapes: R trees, W rows of a depth per tree (1 at depth 0, then k), k topk, V draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["NO_TREE", "Candidates", "Growth", "Tree", "TreeShape", "top_candidates"]

Int = npt.NDArray[np.int64]
Float = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TreeShape:
    """`depth` tokens below the root at most, `topk` children per node, `nodes` that are verified, the root included."""

    depth: int
    topk: int
    nodes: int

    @property
    def candidates(self) -> int:
        """How many nodes below the root there are to choose from."""
        return self.topk + max(self.depth - 1, 0) * self.topk**2


@dataclass(frozen=True, slots=True)
class Tree:
    """Drafted nodes below a root, parents before children; a parent of -1 is the root."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> "Tree":
        """A tree of width one."""
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)))

    def run(self, answer: Sequence[int]) -> int:
        """How many of its tokens the answer confirms, from the root down."""
        steps = zip(self.parents, self.tokens, strict=True)
        children = {step: node for node, step in enumerate(steps)}
        at, length = -1, 0
        for token in answer:
            if (at := children.get((at, token), -2)) == -2:
                break
            length += 1
        return length


NO_TREE: Final = Tree((), ())


@dataclass(frozen=True, slots=True)
class Candidates:
    """The tokens below some rows and their log-probabilities, best first: [rows, k] each."""

    ids: Int
    log_probs: Float


def top_candidates(logits_NV: Tensor, topk: int) -> Candidates:
    """The best draft ids of every row; of equal ones the lowest id, whatever the batch they are computed in."""
    rest, found = logits_NV.float().clone() if topk > 1 else logits_NV.float(), []
    for at in range(topk):
        found.append(rest.argmax(-1, keepdim=True))
        if at + 1 < topk:
            rest.scatter_(-1, found[-1], -torch.inf)
    ids_Nk = torch.cat(found, -1)
    scores = logits_NV.float().log_softmax(-1).gather(-1, ids_Nk)
    return Candidates(ids_Nk.cpu().numpy(), scores.double().cpu().numpy())


class Growth:
    """Some trees of one shape, grown together: `add` a depth's candidates, draft the rows it returns, and so on."""

    def __init__(self, shape: TreeShape, trees: int) -> None:
        self.shape, self.depth = shape, 0
        self._tokens: list[Int] = []
        self._parents: list[Int] = []
        self._scores: list[Float] = []
        self._rows = np.full((trees, 1), -1)
        self._row_scores = np.zeros((trees, 1))

    def add(self, tokens_Nk: Int, log_probs_Nk: Float) -> tuple[Int, Int]:
        """Take the candidates below every row, tree by tree; returns the next depth's rows.

        These are their tokens [R, k] and, for each, which of this depth's rows of its tree it stands below [R, k].
        """
        trees, width = self._rows.shape
        topk = tokens_Nk.shape[-1]
        tokens = tokens_Nk.reshape(trees, width * topk)
        scores = (self._row_scores[..., None] + log_probs_Nk.reshape(trees, width, topk)).reshape(trees, -1)
        first = sum(known.shape[1] for known in self._tokens)
        self._tokens.append(tokens)
        self._parents.append(np.repeat(self._rows, topk, axis=1))
        self._scores.append(scores)
        best = np.argsort(-scores, axis=1, kind="stable")[:, : self.shape.topk]
        self._rows, self._row_scores = first + best, np.take_along_axis(scores, best, 1)
        self.depth += 1
        return np.take_along_axis(tokens, best, 1), best // topk

    def follow(self, tokens_Rk: Int, above_Rk: Int) -> None:
        """Go on below other candidates than the best: those with these tokens, below these rows of the depth before.

        Below one that is no candidate nothing is kept.
        """
        tokens, width = self._tokens[-1], self._parents[-1].shape[1] // self.shape.topk
        rows = np.repeat(np.arange(width), self.shape.topk)
        found = (tokens[:, None] == tokens_Rk[..., None]) & (rows == above_Rk[..., None])
        place = found.argmax(-1)
        known = np.take_along_axis(found, place[..., None], -1)[..., 0]
        self._rows = sum(x.shape[1] for x in self._tokens[:-1]) + place
        self._row_scores = np.where(known, np.take_along_axis(self._scores[-1], place, 1), -np.inf)

    @property
    def done(self) -> bool:
        """Whether the trees are as deep as they shall be."""
        return self.depth >= self.shape.depth

    def trees(self) -> list[Tree]:
        """The best `nodes - 1` candidates of each tree, shallow ones first."""
        tokens, parents, scores = (np.concatenate(x, 1) for x in (self._tokens, self._parents, self._scores))
        best = np.argsort(-scores, axis=1, kind="stable")[:, : self.shape.nodes - 1]
        return [_cut(*one) for one in zip(tokens, parents, scores, best, strict=True)]


def _cut(tokens: Int, parents: Int, scores: Float, best: Int) -> Tree:
    kept = np.sort(best[scores[best] != -np.inf])
    above = parents[kept]
    renamed = np.where(above < 0, -1, np.searchsorted(kept, above))
    return Tree(tuple(tokens[kept].tolist()), tuple(renamed.tolist()))

"""Trees grow as EAGLE-2 says: the best nodes by the product of probabilities along their path, found by brute force."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrace.engine.tree import Growth, Tree, TreeShape, top_candidates

VOCAB = 17
Path = tuple[int, ...]
SHAPES = [(1, 1, 2), (3, 1, 4), (6, 1, 7), (3, 4, 8), (5, 8, 32), (2, 3, 13), (4, 2, 2)]


class Model:
    """A draft that is a table: logits [V] after every path."""

    def __init__(self, seed: int, *, coarse: bool = False) -> None:
        self.seed, self.coarse = seed, coarse

    def logits(self, path: Path) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, *path)) % (1 << 40))
        logits = 3 * torch.randn(VOCAB, generator=generator)
        return logits.round() if self.coarse else logits

    def log_probs(self, path: Path) -> list[float]:
        return [float(x) for x in self.logits(path).float().log_softmax(-1).double()]


def grow(models: Sequence[Model], shape: TreeShape) -> list[Tree]:
    """As a draft shard does."""
    growth = Growth(shape, len(models))
    rows: list[list[Path]] = [[()] for _ in models]
    while True:
        logits = torch.stack([model.logits(path) for model, paths in zip(models, rows, strict=True) for path in paths])
        below = top_candidates(logits, shape.topk)
        tokens, above = growth.add(below.ids, below.log_probs)
        if growth.done:
            return growth.trees()
        rows = [
            [(*paths[at], int(token)) for at, token in zip(above[tree], tokens[tree], strict=True)]
            for tree, paths in enumerate(rows)
        ]


def brute_force(model: Model, shape: TreeShape) -> list[Path]:
    """The paths of the nodes that EAGLE-2 keeps: candidates in order, sorted by score without disturbing ties."""
    rows: list[tuple[float, Path]] = [(0.0, ())]
    candidates: list[tuple[float, Path]] = []
    for _ in range(shape.depth):
        below: list[tuple[float, Path]] = []
        for score, path in rows:
            scores = model.log_probs(path)
            best = sorted(range(VOCAB), key=lambda token: -scores[token])[: shape.topk]
            below += [(score + scores[token], (*path, token)) for token in best]
        candidates += below
        rows = sorted(below, key=lambda one: -one[0])[: shape.topk]
    return [path for _, path in sorted(candidates, key=lambda one: -one[0])[: shape.nodes - 1]]


def paths_of(tree: Tree) -> list[Path]:
    paths: list[Path] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        assert parent < len(paths), "parents come first"
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


@pytest.mark.parametrize("coarse", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tree_is_the_one_that_brute_force_finds(shape: tuple[int, int, int], coarse: bool) -> None:
    models, wanted = [Model(seed, coarse=coarse) for seed in range(20)], TreeShape(*shape)
    for model, tree in zip(models, grow(models, wanted), strict=True):
        paths = paths_of(tree)
        assert len(paths) == len(set(paths)) == wanted.nodes - 1
        assert set(paths) == set(brute_force(model, wanted))


def test_a_chain_is_the_tree_of_width_one() -> None:
    (tree,) = grow([Model(3)], TreeShape(5, 1, 6))
    assert tree.parents == (-1, 0, 1, 2, 3)
    path: Path = ()
    for token in tree.tokens:
        assert token == int(Model(3).logits(path).argmax())
        path = (*path, token)


def test_of_equal_candidates_the_lowest_id_comes_first_in_any_batch() -> None:
    logits = torch.zeros(1, 5000)
    logits[0, [7, 4000, 31]] = 1.0
    for rows in (1, 3, 64):
        found = top_candidates(logits.repeat(rows, 1), 4)
        assert (found.ids == [7, 31, 4000, 0]).all()
        assert np.allclose(np.exp(found.log_probs[:, 0]), np.exp(1.0) / (3 * np.exp(1.0) + 4997))


def test_logits_are_left_as_they_were() -> None:
    logits = torch.randn(3, 9)
    before = logits.clone()
    top_candidates(logits, 4)
    assert torch.equal(logits, before)


@given(st.integers(0, 1 << 30), st.lists(st.integers(0, VOCAB - 1), max_size=7))
@settings(max_examples=200, deadline=None)
def test_a_run_is_the_longest_path_that_the_answer_follows(seed: int, answer: list[int]) -> None:
    (tree,) = grow([Model(seed)], TreeShape(4, 3, 14))
    paths = set(paths_of(tree))
    followed = [length for length in range(1, len(answer) + 1) if tuple(answer[:length]) in paths]
    assert tree.run(answer) == max(followed, default=0)
    if paths:
        longest = max(paths, key=len)
        assert tree.run([*longest, 0]) == len(longest)

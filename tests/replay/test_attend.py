"""Replay's batched attention gives every row what it would have seen alone."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from spectrace.engine.attention import Reach
from spectrace.replay.attend import BranchAttend, PrefixAttend
from spectrace.replay.compare import row_error

HEADS, KV_HEADS, DIM = 4, 2, 8


def _random(rows: int, heads: int) -> torch.Tensor:
    return torch.randn(rows, heads, DIM)


def _alone(q_ND: torch.Tensor, k_SMD: torch.Tensor, v_SMD: torch.Tensor, scale: float) -> torch.Tensor:
    """One query over all its keys, by the definition."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k_SMD, v_SMD))
    weights = torch.einsum("nd,snd->ns", q_ND, k).mul(scale).softmax(-1)
    return torch.einsum("ns,snd->nd", weights, v)


def _positions(borders: np.ndarray) -> np.ndarray:
    return np.concatenate([np.arange(end - start) for start, end in pairwise(borders.tolist())])


REACHES = [Reach(0, None), Reach(0, 1), Reach(0, 3), Reach(0, 2, from_text=True)]


@pytest.mark.parametrize("reach", REACHES[:3], ids=str)
@pytest.mark.parametrize("lengths", [(5,), (3, 1, 7), (1, 1)])
def test_prefix_rows_see_their_request_up_to_themselves(lengths: tuple[int, ...], reach: Reach) -> None:
    torch.manual_seed(0)
    borders = np.cumsum([0, *lengths])
    q, k, v = _random(borders[-1], HEADS), _random(borders[-1], KV_HEADS), _random(borders[-1], KV_HEADS)
    out = PrefixAttend(borders, _positions(borders))(q, k, v, reach=reach, scale=0.3)
    wanted = []
    for start, end in pairwise(borders.tolist()):
        for row in range(start, end):
            first = start if reach.window is None else max(start, row - reach.window + 1)
            wanted.append(_alone(q[row], k[first : row + 1], v[first : row + 1], 0.3))
    assert row_error(torch.stack(wanted).flatten(1), out.flatten(1)).max() < 1e-5


@pytest.mark.parametrize("reach", REACHES, ids=str)
def test_branch_rows_see_the_prefix_of_their_base_and_their_own_ancestors(reach: Reach) -> None:
    """As far as their window goes, which counts positions: from the row itself, or from its base row."""
    torch.manual_seed(1)
    borders = np.array([0, 4, 9])
    positions = _positions(borders)
    prefix = PrefixAttend(borders, positions)
    k0, v0 = _random(9, KV_HEADS), _random(9, KV_HEADS)
    prefix(_random(9, HEADS), k0, v0, reach=reach, scale=0.5)
    branch = BranchAttend(prefix)
    bases = [np.array([1, 3, 6, 8]), np.array([3, 8]), np.array([3])]
    branch_borders = [np.array([0, 2, 4]), np.array([0, 1, 2]), np.array([0, 1, 1])]
    parents = [bases[0], np.array([1, 3]), np.array([0])]
    lineage: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in bases[0]]
    for depth in range(3):
        count = len(bases[depth])
        q, k, v = _random(count, HEADS), _random(count, KV_HEADS), _random(count, KV_HEADS)
        branch.enter(bases[depth], branch_borders[depth], parents[depth], positions[bases[depth]] + 1 + depth)
        out = branch(q, k, v, reach=reach, scale=0.5)
        above = lineage if depth == 0 else [lineage[parent] for parent in parents[depth]]
        lineage = [[*seen, (k[row : row + 1], v[row : row + 1])] for row, seen in enumerate(above)]
        for row, base in enumerate(bases[depth]):
            start = borders[np.searchsorted(borders, base, side="right") - 1]
            keys = torch.cat([k0[start : base + 1], *(key for key, _ in lineage[row])])
            values = torch.cat([v0[start : base + 1], *(value for _, value in lineage[row])])
            far = len(keys) if reach.window is None else reach.window + (1 + depth) * reach.from_text
            wanted = _alone(q[row], keys[-far:], values[-far:], 0.5)
            assert row_error(wanted.flatten()[None], out[row].flatten()[None]).max() < 1e-5


def test_a_row_that_is_not_a_number_is_never_within_tolerance() -> None:
    recorded = torch.tensor([[1.0, 2.0], [0.0, 0.0], [0.0, 0.0], [1.0, torch.nan]])
    replayed = torch.tensor([[1.0, 2.5], [0.0, 0.0], [0.0, 1e-9], [1.0, 1.0]])
    errors = row_error(recorded, replayed)
    assert errors[0] == 0.25 and errors[1] == 0 and errors[2] == torch.inf and errors[3].isnan()

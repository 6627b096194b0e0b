"""Acceptance, read from verified rows and never written down at emit time.

Correct drafts exclude the bonus token, acceptance length includes it: 1 + correct drafts / rounds. Rounds cut by
end of text or length count in the untrimmed number only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from spectrace.tracer.rowset import Rows

__all__ = ["Acceptance", "acceptance_of", "acceptance_of_rows"]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Over rounds that were not cut, so that acceptance_length = 1 + correct_drafts / rounds; all rounds: `_untrimmed`.

    Rates are per depth. A number whose denominator is 0 is None.
    """

    acceptance_length: float | None
    acceptance_untrimmed: float | None
    conditional_rates: tuple[float | None, ...]
    cumulative_rates: tuple[float | None, ...]
    rounds: int
    correct_drafts: int
    rounds_untrimmed: int
    correct_drafts_untrimmed: int

    @property
    def rounds_cut(self) -> int:
        """Rounds that the end of an answer cut."""
        return self.rounds_untrimmed - self.rounds

    @property
    def mostly_cut(self) -> bool:
        """Whether most rounds were cut, so that the length is too low: an end cuts the rounds that get far."""
        return self.rounds < self.rounds_cut

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def acceptance_of(
    run_lengths: Sequence[int] | np.ndarray, cut: Sequence[bool] | np.ndarray | bool, depth: int
) -> Acceptance:
    """From the number of correct drafts of every round, which rounds were cut, and the depth drafted to."""
    runs = np.asarray(run_lengths, np.int64)
    whole = runs[~np.broadcast_to(np.asarray(cut, bool), runs.shape)]
    reached = [len(whole), *(int((whole > k).sum()) for k in range(depth))]
    return Acceptance(
        acceptance_length=_length(whole),
        acceptance_untrimmed=_length(runs),
        conditional_rates=tuple(_ratio(reached[k + 1], reached[k]) for k in range(depth)),
        cumulative_rates=tuple(_ratio(reached[k + 1], reached[0]) for k in range(depth)),
        rounds=len(whole),
        correct_drafts=int(whole.sum()),
        rounds_untrimmed=len(runs),
        correct_drafts_untrimmed=int(runs.sum()),
    )


def acceptance_of_rows(verified: Rows, *, depth: int | None = None, with_cut: bool = False) -> Acceptance:
    """From `verified` rows: a round is one (incarnation, request, round) and its accepted nodes minus the root.

    `depth` is how far rates go; None goes as far as the deepest node. `with_cut` takes cut rounds for whole ones, as
    engines count.
    """
    if not len(verified):
        return acceptance_of([], False, depth or 0)
    columns = [verified[name].astype(np.int64) for name in ("incarnation", "request", "round")]
    _, of_round = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    of_round = of_round.reshape(-1)
    accepted = np.bincount(of_round, verified["accepted"]).astype(np.int64)
    cut = np.bincount(of_round, verified["cut"]) > 0
    if depth is None:
        depth = int(_depths(of_round, verified["node"].astype(np.int64), verified["parent"].astype(np.int64)).max())
    return acceptance_of(np.maximum(accepted - 1, 0), cut & (not with_cut), depth)


def _depths(of_round: np.ndarray, node: np.ndarray, parent: np.ndarray) -> np.ndarray:
    """Each node's distance from its round's root: every node climbs one parent per step until all are at the top."""
    stride = int(node.max()) + 1
    places = of_round * stride + node
    order = np.argsort(places)
    wanted = of_round * stride + parent
    found = order[np.searchsorted(places, wanted, sorter=order).clip(0, len(order) - 1)]
    up = np.where((parent >= 0) & (parent < node) & (places[found] == wanted), found, -1)
    depth, at = np.zeros(len(node), np.int64), up
    while (climbing := at >= 0).any():
        depth += climbing
        at = np.where(climbing, up[at], -1)
    return depth


def _length(runs: np.ndarray) -> float | None:
    return 1.0 + float(runs.mean()) if len(runs) else None


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None

"""Verification, decided again from what it rested on: the target's choices, or probabilities and draws.

At temperature 0 a child is accepted when its token is the target's choice after its accepted parent. Else it is
accepted when u q < r, where u is the draw, q the draft's probability of the token, and r the target's: p, or
p / (1 - s) after siblings with s of the target's probability were refused (`engine.verify` has the sources). What is
sampled after a refusal cannot be decided again from these numbers. Rounds that were cut are left out.

Shapes: N nodes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from spectrace.replay.finding import Finding
from spectrace.replay.inputs import Int, places
from spectrace.replay.pairing import Bool
from spectrace.tracer.rowset import Rows
from spectrace.tracer.trace import Trace

__all__ = ["Decisions", "decisions"]

Float = npt.NDArray[np.float64]

_KEY: Final = ("request", "pass", "node")
_ROUNDING, _LEAST_LEFT = 1e-6, 1e-3  # of recorded probabilities; of what refused siblings have left of the target's


@dataclass(frozen=True, slots=True)
class Decisions:
    """How many nodes below accepted ones were decided again."""

    compared: int
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class _Decided:
    """Nodes below accepted ones [N]: whether they were accepted and whether they should have been.

    `ratio` is u q / r of nodes decided by a draw, NaN of others.
    """

    accepted: Bool
    right: Bool
    ratio: Float


def decisions(trace: Trace) -> Decisions:
    """Decide again whatever can be."""
    verified = trace.rows("verified", rank=0)
    verified = verified.take(~verified["cut"])
    decided = _joined(_by_choice(verified, _greedy(trace)), _by_draw(verified))
    given, impossible = _impossible(verified)
    findings = (*_unwritten(given, impossible), *_disobeyed(decided))
    return Decisions(len(decided.right) + impossible, findings)


def _joined(one: _Decided, other: _Decided) -> _Decided:
    names = ("accepted", "right", "ratio")
    return _Decided(*(np.concatenate([getattr(one, name), getattr(other, name)]) for name in names))


def _greedy(trace: Trace) -> Int:
    """Requests that were answered at temperature 0."""
    requests = trace.rows("requests")
    return np.unique(requests["request"][requests["temperature"] == 0]).astype(np.int64)


def _parents(rows: Rows) -> Int:
    """Where each node's parent is among the rows; -1 for roots."""
    found = places([rows[name] for name in _KEY], [rows[name] for name in ("request", "pass", "parent")])
    return np.where(rows["node"] == 0, -1, found)


def _by_choice(verified: Rows, greedy: Int) -> _Decided:
    rows = verified.take(np.isin(verified["request"], greedy))
    parents = _parents(rows)
    below = np.flatnonzero((parents >= 0) & rows["accepted"][parents])
    above = parents[below]
    wanted = rows["token"][below] == rows["target_token"][above]
    twins = np.stack([above, rows["token"][below].astype(np.int64)], axis=1)
    first = np.zeros(len(below), np.bool_)
    first[np.unique(twins, axis=0, return_index=True)[1]] = True  # of equal siblings the first is accepted
    return _Decided(rows["accepted"][below], wanted & first, np.full(len(below), np.nan))


def _by_draw(verified: Rows) -> _Decided:
    parents = _parents(verified)
    p, q, u = (verified[name].astype(np.float64) for name in ("p", "q", "uniform"))
    drawn = np.flatnonzero((parents >= 0) & ~np.isnan(p) & ~np.isnan(q) & ~np.isnan(u) & (q > 0))
    left = 1.0 - _refused_before(verified, drawn, parents, p)
    p, q, u, accepted = p[drawn], q[drawn], u[drawn], verified["accepted"][drawn]
    sure = (left >= _LEAST_LEFT) & ((left == 1.0) | (q == 1.0))
    r = p / np.maximum(left, _LEAST_LEFT)
    sure &= np.abs(u * q - r) > _ROUNDING / np.maximum(left, _LEAST_LEFT)
    ratio = u * q / np.maximum(r, np.finfo(np.float64).tiny)
    return _Decided(accepted[sure], (u * q < r)[sure], ratio[sure])


def _refused_before(verified: Rows, drawn: Int, parents: Int, p: Float) -> Float:
    """The target's probability of siblings that were refused before a node [N]."""
    order = drawn[np.lexsort([verified["node"][drawn], parents[drawn]])]
    refused = np.where(verified["accepted"][order], 0.0, p[order])
    running = np.cumsum(refused) - refused
    _, first, family = np.unique(parents[order], return_index=True, return_inverse=True)
    found = np.zeros(len(parents))
    found[order] = running - running[first][family.reshape(-1)]
    return np.asarray(found[drawn])


def _impossible(verified: Rows) -> tuple[int, int]:
    """How many drafts were decided with a draft probability, and how many of them have 0."""
    q = verified["q"].astype(np.float64)
    return int((~np.isnan(q)).sum()), int((q <= 0).sum())


def _unwritten(given: int, impossible: int) -> Iterator[Finding]:
    if impossible:
        told = f"{impossible} of {given} drafts that were decided have a draft probability of 0, and yet were drafted"
        yield Finding("S2", "verification is given draft probabilities that were never written", (told,))


def _disobeyed(decided: _Decided) -> Iterator[Finding]:
    """Decisions that are not those of the rule."""
    count = len(decided.right)
    refused, accepted = decided.right & ~decided.accepted, ~decided.right & decided.accepted
    told = [
        f"{int(wrong.sum())} of {count} decisions {what} a draft where the target's choice, or the draw, says otherwise"
        for what, wrong in (("accept", accepted), ("refuse", refused)) if wrong.any()
    ]  # fmt: skip
    if accepted.any():
        yield Finding("S3", "drafts are accepted that the target refuses", tuple(told))
    elif refused.any():
        yield Finding("S1", "verification is stricter than it should be", (*told, *_as_if(decided)))


def _as_if(decided: _Decided) -> Iterator[str]:
    """By which factor on p all decisions were right, if by any."""
    ratio, drawn = decided.ratio, ~np.isnan(decided.ratio)
    least = ratio[drawn & decided.accepted].max(initial=0.0)
    most = ratio[drawn & ~decided.accepted].min(initial=1.0)
    if drawn.any() and least < most:
        yield f"all of them are right if the target's probability is taken {least:.3g} to {most:.3g} times"

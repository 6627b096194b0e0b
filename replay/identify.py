"""Which boundary each received slot holds, found by value: every slot against every boundary that can be had.

An error is max|Δ| over the row's max|true|, the median over rows, after the best scale where that is not 1.

Shapes: N rows, A slots, F target width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spectrace.replay.compare import row_error
from spectrace.replay.configuration import Slot, View
from spectrace.replay.diagnosis import Identified
from spectrace.replay.truth import TrueText, Truth
from spectrace.tracer.rowset import Rows

__all__ = ["Match", "identify"]

_REQUESTS, _ROWS, _BYTES = 4, 384, 256 << 20
_EXACT, _COARSE, _NEAR, _CLEAR = 1e-3, 3e-2, 0.12, 3.0
_SCALED = 0.02


@dataclass(frozen=True, slots=True)
class Match:
    """One slot: the boundary it holds, None where no known one comes near; `scale` is what it was multiplied by.

    `exact` means to within what rounding does in this precision; otherwise the values came near and no other did.
    `contradicted` means that it is not the configured boundary, and `everything` that all boundaries were compared.
    """

    held: Slot | None
    exact: bool
    scale: float
    rows: int
    shown: Identified
    contradicted: bool
    everything: bool


def identify(
    received: Rows, truth: Truth, configured: Sequence[Slot], *, coarse: bool, width: int
) -> tuple[Match, ...]:
    """Match some of these received rows (live, depth 0) against everything that is known; empty if nothing can be.

    Where one of the two was computed in less than float32 (`coarse`: the received rows), its rounding is allowed for.
    """
    candidates = _candidates(truth)
    requests = _some(truth, received, max(16, min(_ROWS, _BYTES // max(4 * len(candidates) * width, 1))))
    if not requests or not candidates:
        return ()
    texts = truth.read(requests, candidates)
    mine = _rows_of(received.where(request=requests), texts)
    if not len(mine):
        return ()
    features = mine.tensor("features").float()
    if features.shape[1] % width:
        return ()
    true = {slot: _aligned(texts, slot, mine) for slot in candidates}
    tolerance = _COARSE if coarse or truth.coarse else _EXACT
    matched = _Matching(true, configured, tolerance, everything=_is_everything(truth))
    return tuple(matched.slot(at, slot) for at, slot in enumerate(torch.split(features, width, dim=1)))


def _candidates(truth: Truth) -> list[Slot]:
    known = truth.known()
    slots = [Slot(b) for b in known] + [Slot(b, View.BRANCH) for b in known if b]
    if truth.layers is not None:
        slots.append(Slot(truth.layers, View.NORMED))
    return [slot for slot in slots if truth.has(slot)]


def _is_everything(truth: Truth) -> bool:
    """Whether every boundary can be had, without its residual, too: then a slot that matches none is none."""
    return truth.layers is not None and all(
        truth.has(Slot(boundary)) and truth.has(Slot(boundary, View.BRANCH)) for boundary in range(truth.layers + 1)
    )


def _some(truth: Truth, rows: Rows, limit: int) -> list[int]:
    """A few requests, short ones first, that hold no more true rows than the limit."""
    there = set(np.unique(rows["request"]).tolist())
    order = sorted(there & truth.texts.keys(), key=lambda request: len(truth.texts[request].tokens))
    chosen, total = list[int](), 0
    for request in order[:_REQUESTS]:
        total += len(truth.texts[request].tokens)
        if chosen and total > limit:
            break
        chosen.append(request)
    return chosen


def _rows_of(rows: Rows, texts: Sequence[TrueText]) -> Rows:
    """The received rows that stand on known text."""
    length = {text.request: len(next(iter(text.slots.values()))) for text in texts}
    there = np.array(
        [p < length.get(r, 0) for r, p in zip(rows["request"].tolist(), rows["position"].tolist(), strict=True)]
    )
    rows = rows.take(there)
    return rows.take(np.linspace(0, len(rows) - 1, min(len(rows), _ROWS)).astype(np.int64)) if len(rows) else rows


def _aligned(texts: Sequence[TrueText], slot: Slot, rows: Rows) -> Tensor:
    """The true tensors of the rows, [N, F]."""
    by_request = {text.request: text.slots[slot] for text in texts}
    pairs = zip(rows["request"].tolist(), rows["position"].tolist(), strict=True)
    return torch.stack([by_request[request][position].float() for request, position in pairs])


@dataclass(frozen=True, slots=True)
class _Matching:
    """What slots are held against: true tensors [N, F], the configured boundaries, and what rounding may do."""

    true: Mapping[Slot, Tensor]
    configured: Sequence[Slot]
    tolerance: float
    everything: bool

    def slot(self, at: int, slot: Tensor) -> Match:
        errors = {candidate: _error(slot, tensor) for candidate, tensor in self.true.items()}
        own = self.configured[at] if at < len(self.configured) else None
        order = sorted(errors, key=lambda one: errors[one][0])
        # Of equal ones (a layer that changes nothing) the configured boundary is named.
        best = own if own in errors and errors[own][0] <= max(self.tolerance / 10, errors[order[0]][0]) else order[0]
        error, scale = errors[best]
        others = [one for one in order if one != best and errors[one][0] > max(2 * error, self.tolerance / 10)]
        other_error = errors[others[0]][0] if others else float("inf")
        clear = other_error >= _CLEAR * error
        near = error <= self.tolerance and (clear or self.tolerance == _EXACT)
        near = near or (self.everything and error <= _NEAR and clear)
        shown = Identified(
            slot=at,
            configured="" if own is None else str(own),
            best=f"{best}{_scaled(scale)}" if near else "no known boundary",
            error=error,
            runner_up=str(others[0]) if others else "",
            runner_up_error=other_error,
        )
        contradicted = own in errors and not (near and best == own)
        return Match(
            best if near else None, error <= self.tolerance, scale, len(slot), shown, contradicted, self.everything
        )


def _scaled(scale: float) -> str:
    return "" if abs(scale - 1) <= _SCALED else f" times {scale:.3g}"


def _error(slot: Tensor, true: Tensor) -> tuple[float, float]:
    """The median error over finite rows, and the scale; a slot of zeros matches nothing."""
    finite = slot.isfinite().all(1)
    slot, true = slot[finite], true[finite]
    product, square = (slot * true).sum(), true.square().sum()
    scale = float(product / square) if float(square) else 0.0
    if abs(scale - 1) <= _SCALED:
        scale = 1.0
    if not scale or not bool(slot.any()):
        return float("inf"), 1.0
    return float(row_error(scale * true, slot).median()), scale

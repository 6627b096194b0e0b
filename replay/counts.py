"""How many rows of each pass came through to the draft, and which requests lack some: a fault only by its pattern.

A pass after which its request had finished feeds nobody, and neither does the last one of a request in flight.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from spectrace.replay.finding import Finding
from spectrace.replay.inputs import Int
from spectrace.replay.pairing import Pairing, pass_numbers
from spectrace.tracer.rows import Phase
from spectrace.tracer.trace import Trace

__all__ = ["RowCounts", "row_counts"]

_NEARLY_ALL: Final = 0.9


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Of `prefill_passes` of several rows that fed the draft, `whole` fed it all of them.

    `gaps` requests lack `missing` rows between their first and their last position. `excused` says that the recording
    left rows out, so that those missing say nothing.
    """

    prefill_passes: int
    whole: int
    gaps: int
    missing: int
    excused: bool
    findings: tuple[Finding, ...] = ()


def row_counts(trace: Trace, pairing: Pairing) -> RowCounts:
    """Count, and name capture of the last rows alone where the counts have that pattern."""
    told = trace.account()["received"]
    excused = bool(told.lost or told.sampled_away or told.torn)
    emitted, received, last = _passes(pairing)
    several = (emitted > 1) & (received > 0)
    whole, only = several & (received >= emitted), several & (received == 1) & last
    findings: tuple[Finding, ...] = ()
    if not excused and several.any() and only.sum() >= _NEARLY_ALL * several.sum():
        findings = (_only_last(int(several.sum()), int(only.sum()), int(received[several].sum()), emitted[several]),)
    gaps, missing = _gaps(trace, pairing)
    return RowCounts(int(several.sum()), int(whole.sum()), gaps, missing, excused, findings)


def _passes(pairing: Pairing) -> tuple[Int, Int, np.ndarray]:
    """Of every prefill pass: rows emitted, rows received, and whether the last one is among these."""
    rows = pairing.emitted
    prefill = rows["phase"] == Phase.PREFILL
    numbers = pass_numbers(rows)
    count = int(numbers.max(initial=-1)) + 1
    positions = rows["position"].astype(np.int64)
    ends = np.full(count, -1)
    np.maximum.at(ends, numbers, positions)
    arrived = pairing.sources[pairing.sources >= 0]
    last = np.bincount(numbers[arrived], positions[arrived] == ends[numbers[arrived]], minlength=count) > 0
    emitted = np.bincount(numbers[prefill], minlength=count)
    return emitted, np.bincount(numbers[arrived], minlength=count), last


def _only_last(passes: int, only: int, received: int, emitted: Int) -> Finding:
    return Finding(
        fault="M1",
        title="of each piece of a prompt only the last row is handed over",
        evidence=(
            f"in {only} of {passes} prefill passes of several rows the draft received the last row and no other",
            f"it received {received} of the {int(emitted.sum())} rows that these passes emitted",
        ),
        confidence=round(only / passes, 3),
    )


def _gaps(trace: Trace, pairing: Pairing) -> tuple[int, int]:
    """Requests whose received positions do not run on from their first, and how many rows they lack."""
    rows, finished = pairing.received, trace.rows("requests")
    if not len(rows):
        return 0, 0
    requests, which = np.unique(rows["request"].astype(np.int64), return_inverse=True)
    positions, which = rows["position"].astype(np.int64), which.reshape(-1)
    first, last = np.full(len(requests), np.iinfo(np.int64).max), np.full(len(requests), -1)
    np.maximum.at(last, which, positions)
    emitted = pairing.emitted
    at = np.searchsorted(requests, emitted["request"]).clip(max=len(requests) - 1)
    mine = requests[at] == emitted["request"]
    np.minimum.at(first, at[mine], emitted["position"][mine].astype(np.int64))
    first[first > last] = 0
    at = np.searchsorted(requests, finished["request"]).clip(max=len(requests) - 1)
    mine = requests[at] == finished["request"]
    first[at[mine]] = finished["cached_prefix"][mine]
    there = np.unique(np.stack([which, positions]), axis=1)
    held = np.bincount(there[0], there[1] >= first[there[0]], minlength=len(requests)).astype(np.int64)
    lacking = np.maximum(last + 1 - first - held, 0)
    return int((lacking > 0).sum()), int(lacking.sum())

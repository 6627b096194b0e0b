"""Which emitted row every row that a draft received at depth 0 comes from, by keys alone.

In prefill that is the row of the same pass and place; after verification it is the row that judged the i-th accepted
node. Rows of rank 0, as they were recorded; padding is left out.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spectrace.replay.inputs import Int, places
from spectrace.tracer.rows import Phase
from spectrace.tracer.rowset import Rows
from spectrace.tracer.trace import Trace

__all__ = ["Bool", "Pairing", "pair_rows", "pass_numbers"]

Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Pairing:
    """`sources` [received] is each row's emitted row, -1 where the trace does not say.

    `order` [emitted] is a row's place among the accepted ones of its pass, -1 for a rejected one; `judged` tells rows
    of which that is known. `padded` says that rejected rows are handed over, too, behind the accepted ones.
    """

    emitted: Rows
    received: Rows
    sources: Int
    order: Int
    judged: Bool
    padded: bool

    @property
    def accepted(self) -> Bool:
        """Rows that became text."""
        return self.order >= 0


def pair_rows(trace: Trace) -> Pairing:
    """Rows are paired by position where all of a pass have one of its accepted rows', else by their place in it."""
    emitted = trace.rows("emitted", rank=0)
    received = trace.rows("received", rank=0, depth=0, live=True)
    order, judged = _order(emitted, trace.rows("verified", rank=0))
    there = np.flatnonzero(order >= 0)
    known = {name: emitted[name][there] for name in ("request", "pass", "position")}
    wanted = [received[name] for name in ("request", "pass", "position", "node")]
    by_position = places([known["request"], known["pass"], known["position"]], wanted[:3])
    by_place = places([known["request"], known["pass"], order[there]], [*wanted[:2], wanted[3]])
    passes = pass_numbers(received)
    lacking = np.bincount(passes[by_position < 0], minlength=int(passes.max(initial=0)) + 1) > 0
    found = np.where(lacking[passes], by_place, by_position)
    sources = np.where(found >= 0, there[found] if len(there) else -1, -1)
    padded = len(trace.rows("received", rank=0, depth=0, live=False)) > 0
    return Pairing(emitted, received, sources, order, judged, padded)


def _order(emitted: Rows, verified: Rows) -> tuple[Int, Bool]:
    """The place of each emitted row among the accepted ones of its pass, and whether it is known which these are."""
    prefill = (emitted["phase"] == Phase.PREFILL) | (emitted["round"] < 0)  # or plain decoding: nothing to be judged
    order = np.where(prefill, emitted["node"].astype(np.int64), -1)
    verified = verified.take(np.lexsort([verified[name] for name in ("node", "position", "pass", "request")]))
    taken = verified.take(verified["accepted"])
    sources = places(
        [emitted[name] for name in ("request", "pass", "node")],
        [taken[name] for name in ("request", "pass", "source_row")],
    )
    starts = np.flatnonzero(_begins(taken))
    index = np.arange(len(taken))
    place = index - np.repeat(starts, np.diff([*starts, len(taken)]))
    order[sources[sources >= 0]] = place[sources >= 0]
    roots = verified.take(verified["node"] == 0)
    judged = places([roots["request"], roots["pass"]], [emitted["request"], emitted["pass"]]) >= 0
    return order, prefill | judged


def _begins(rows: Rows) -> Bool:
    """Of rows that are ordered by request and pass: where a pass begins."""
    request, pass_ = rows["request"], rows["pass"]
    begins: Bool = np.r_[True, (request[1:] != request[:-1]) | (pass_[1:] != pass_[:-1])][: len(rows)]
    return begins


def pass_numbers(rows: Rows) -> Int:
    """A number for each row's pass of its request."""
    keys = rows["request"].astype(np.uint64) << np.uint64(32) | rows["pass"].astype(np.uint64)
    numbers: Int = np.unique(keys, return_inverse=True)[1].reshape(-1).astype(np.int64)
    return numbers

"""What a draft was given, read from a trace and laid out for replay: requests one after another, depth by depth."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spectrace.replay.donors import lend
from spectrace.replay.texts import read_texts
from spectrace.tracer.errors import UserError
from spectrace.tracer.rowset import Rows
from spectrace.tracer.trace import Trace

__all__ = ["DepthRows", "DraftInputs", "Int", "Served", "places", "read_served", "runs_from_start"]

Int = npt.NDArray[np.int64]
_KEY = ("request", "depth", "pass", "node")


@dataclass(frozen=True, slots=True)
class DepthRows:
    """The rows of one depth, packed by request (`borders` [requests + 1]).

    `bases` points at each row's depth-0 row and `parents` at its row in the depth above (itself, at depth 0);
    `answering` are the rows that gave a token. A depth's rows are in the order of their bases, siblings by node.
    `received` and `drafted` are the trace's own rows, in the same order.
    """

    tokens: Int
    positions: Int
    borders: Int
    bases: Int
    parents: Int
    answering: Int
    received: Rows
    drafted: Rows


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """Whole requests and every row their draft was fed, depth by depth."""

    requests: Int
    depths: tuple[DepthRows, ...]


@dataclass(frozen=True, slots=True)
class Served:
    """All that a trace holds of its draft, in key order, and the requests that can be replayed whole."""

    received: Rows
    drafted: Rows
    requests: Int
    incomplete: Int

    def blocks(self, rows: int) -> list[Int]:
        """The replayable requests in groups of about so many depth-0 rows, so that memory stays flat."""
        at_zero = self.received["request"][self.received["depth"] == 0]
        counts = np.bincount(at_zero, minlength=int(self.requests.max(initial=0)) + 1)[self.requests]
        group = np.cumsum(counts) // rows
        return [self.requests[group == g] for g in np.unique(group)]

    def inputs(self, requests: Int) -> DraftInputs:
        """The rows of some requests, ready to replay."""
        mask = np.isin(self.received["request"], requests)
        received, drafted = self.received.take(mask), self.drafted.take(mask)
        depths: list[DepthRows] = []
        for depth in range(int(received["depth"].max(initial=0)) + 1):
            at = np.flatnonzero(received["depth"] == depth)
            depths.append(_depth_rows(received.take(at), drafted.take(at), requests, depths))
        return DraftInputs(requests, tuple(depths))


def read_served(trace: Trace, *, gaps: bool = False) -> Served:
    """Join what the draft received with what it made of it, live rows only.

    A request whose depth-0 rows do not run from position 0 without a gap cannot be replayed, since the draft's cache
    needs them all: it is listed as incomplete. Those of a prefix that was cached are another request's. With `gaps` it
    is replayed all the same: for a draft that really was handed no other rows. Raises UserError when the trace holds no
    draft rows.
    """
    received, drafted = (trace.rows(family, live=True, rank=0) for family in ("received", "drafted"))
    if not len(received):
        raise UserError(f"{trace.folder}: no received rows in it; record a run with a draft (depth of at least 1)")
    texts = {request: text.tokens for request, text in read_texts(trace).items()}
    finished = trace.rows("requests")
    cached = dict(zip(finished["request"].tolist(), finished["cached_prefix"].tolist(), strict=True))
    received, drafted = lend(*_joined(received, drafted), texts, cached)
    order = _key_order(received)
    received, drafted = received.take(order), drafted.take(order)
    zero = received.take(received["depth"] == 0)
    requests, first, counts = np.unique(zero["request"], return_index=True, return_counts=True)
    offsets = np.arange(len(zero)) - np.repeat(first, counts)
    whole = ~np.isin(requests, zero["request"][zero["position"] != offsets]) | gaps
    return Served(received, drafted, requests[whole].astype(np.int64), requests[~whole].astype(np.int64))


def _joined(received: Rows, drafted: Rows) -> tuple[Rows, Rows]:
    """Both families in (request, depth, pass, node) order, without rows that only one of them has.

    Passes run in the order of their time, so that the rows of a text stand in its order; positions are what an engine
    says they are, and may be wrong.
    """

    received = received.take(_key_order(received))
    at = places([drafted[name] for name in _KEY], [received[name] for name in _KEY])
    there = at >= 0
    return received.take(there), drafted.take(at[there])


def _key_order(rows: Rows) -> Int:
    return np.lexsort([rows[name] for name in reversed(_KEY)])


def places(known: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> Int:
    """Where each wanted key stands among the known ones, given column by column; -1 where it is not there, or twice."""
    count = len(known[0])
    keys: Int = np.zeros(count + len(wanted[0]), np.int64)
    for columns in zip(known, wanted, strict=True):
        values = np.concatenate(columns).astype(np.int64)
        values -= values.min(initial=0)
        spans = [int(part.max(initial=0)) + 1 for part in (keys, values)]
        if spans[0] * spans[1] > 1 << 62:
            keys, values = (np.unique(part, return_inverse=True)[1].reshape(-1) for part in (keys, values))
            spans[1] = int(values.max(initial=0)) + 1
        keys = keys * spans[1] + values
    order = np.argsort(keys[:count], kind="stable")
    ordered, asked = keys[:count][order], keys[count:]
    at = np.searchsorted(ordered, asked)
    once = np.searchsorted(ordered, asked, side="right") - at == 1
    return np.where(once, order[np.minimum(at, max(count - 1, 0))] if count else -1, -1)


def runs_from_start(rows: Rows) -> dict[int, Int]:
    """The rows of each request that has any at position 0: one for each position from there on, in order.

    A position that is missing, or there twice, ends them.
    """
    order = np.lexsort([rows["position"], rows["request"]])
    requests, first, counts = np.unique(rows["request"][order], return_index=True, return_counts=True)
    in_place = rows["position"][order] == np.arange(len(order)) - np.repeat(first, counts)
    found = {}
    for request, start, end in zip(requests.tolist(), first.tolist(), (first + counts).tolist(), strict=True):
        whole = in_place[start:end]
        found[request] = order[start : end if whole.all() else start + int(whole.argmin())]
    return {request: run for request, run in found.items() if len(run)}


def _depth_rows(received: Rows, drafted: Rows, requests: Int, above: Sequence[DepthRows]) -> DepthRows:
    """One depth's rows; a row whose parent is not in the trace (a torn tail) is left out."""
    parents = bases = np.arange(len(received))
    if above:
        parents = _places(above[-1].received, received)
        there = parents >= 0
        received, drafted, parents = received.take(there), drafted.take(there), parents[there]
        bases = above[-1].bases[parents]
    owners = np.searchsorted(requests, received["request"].astype(np.int64))
    return DepthRows(
        tokens=received["token"].astype(np.int64),
        positions=received["position"].astype(np.int64),
        borders=np.searchsorted(owners, np.arange(len(requests) + 1)).astype(np.int64),
        bases=bases,
        parents=parents,
        answering=np.flatnonzero(drafted["token"] >= 0),
        received=received,
        drafted=drafted,
    )


def _places(above: Rows, rows: Rows) -> Int:
    """Where the parent of each row stands in the depth above, -1 where it is not there."""

    known, wanted = (above, "node"), (rows, "parent")
    return places(*([of[name] for name in ("request", "pass", node)] for of, node in (known, wanted)))

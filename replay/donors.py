"""Rows of a cached prefix, lent by the request that computed them.

A request that starts on a prefix which the engine had cached is fed the rest alone; in the draft's cache lie the rows
that an earlier request was fed for the same text.
"""

from collections.abc import Mapping

import numpy as np

from spectrace.tracer.rowset import Rows

__all__ = ["BEFORE", "lend"]

BEFORE = -1
"""The pass of lent rows: before all of a request's own."""


def lend(
    received: Rows, drafted: Rows, texts: Mapping[int, tuple[int, ...]], cached: Mapping[int, int]
) -> tuple[Rows, Rows]:
    """Two families, row for row and in key order, and behind them the rows that requests found in the draft's cache.

    `cached` is how much of each request's text the engine says it had, by request; a request that starts elsewhere gets
    nothing.
    Lent rows answer nothing: their answers were another request's. Where nobody has computed a prefix, its request
    keeps the gap.
    """
    loans = _loans(received, texts, cached)
    if not loans:
        return received, drafted
    places = np.concatenate(list(loans.values()))
    owners = np.repeat(list(loans), [len(lent) for lent in loans.values()])
    nodes = received["position"][places].astype(np.int64)
    keys = {"request": owners, "pass": np.full(len(places), BEFORE), "node": nodes}
    silent = dict.fromkeys(("draft_token", "token"), np.full(len(places), -1))
    return (
        received.joined(received.take(places).replaced(**keys)),
        drafted.joined(drafted.take(places).replaced(**keys, **silent)),
    )


def _loans(received: Rows, texts: Mapping[int, tuple[int, ...]], cached: Mapping[int, int]) -> dict[int, np.ndarray]:
    """By request, the places of the rows before its first; the row of a position holds the token of the next one."""
    zero = np.flatnonzero(received["depth"] == 0)
    requests, starts, counts = np.unique(received["request"][zero], return_index=True, return_counts=True)
    own = {
        request: zero[start : start + count]
        for request, start, count in zip(requests.tolist(), starts.tolist(), counts.tolist(), strict=True)
        if request in texts
    }
    firsts = {request: int(received["position"][rows[0]]) for request, rows in own.items()}
    firsts = {request: first for request, first in firsts.items() if first == cached.get(request)}
    lenders: dict[int, dict[tuple[int, ...], np.ndarray]] = {first: {} for first in firsts.values() if first > 0}
    loans: dict[int, np.ndarray] = {}
    for request, first in firsts.items():
        text, rows = texts[request], own[request]
        lent = lenders[first].get(text[: first + 1]) if first > 0 else rows[:0]
        if lent is None:
            continue
        if first > 0:
            loans[request] = lent
        whole = np.concatenate([lent, rows])
        reaches = int((received["position"][whole] == np.arange(len(whole))).cumprod().sum())
        for length, known in lenders.items():
            if length <= reaches and length < len(text):
                known.setdefault(text[: length + 1], whole[:length])
    return loans

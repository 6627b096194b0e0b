"""Where each row of a trace stands: in its request's text, or below another row.

A row is what the tokens up to it made of it, so its place in the text, or the row above it and its own token, say what
it is, whatever the engine's numbers are.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from spectrace.replay.diff.texts import texts_so_far
from spectrace.replay.features import became_text
from spectrace.replay.inputs import Int, places
from spectrace.replay.pairing import Bool, Pairing, pair_rows
from spectrace.replay.texts import Text
from spectrace.tracer.rowset import Rows
from spectrace.tracer.trace import Trace

__all__ = ["FAMILIES", "Placed", "Side", "columns", "held_families", "read_side"]

FAMILIES = ("reference", "emitted", "received", "drafted", "verified")
"""Those whose rows stand in or below a text."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Rows of one family with their place in their request's text (-1: not of the text) and the row above each (-1)."""

    rows: Rows
    place: Int
    above: Int


@dataclass(frozen=True, slots=True)
class Side:
    """One trace: its texts by request, and its rows in place, by family."""

    trace: Trace
    texts: Mapping[int, Text]
    families: Mapping[str, Placed]


def read_side(trace: Trace, families: Iterable[str] | None = None) -> Side:
    """A trace's texts and the place of each of its live rows of rank 0, of these families or of all that have some.

    Raises UserError when it holds no text.
    """
    texts = texts_so_far(trace)
    wanted = held_families(trace) if families is None else families
    return Side(trace, texts, {name: read(trace, texts) for name, read in _READERS.items() if name in wanted})


def held_families(trace: Trace) -> tuple[str, ...]:
    """The families that have live rows of rank 0."""
    rows = ((name, trace.rows(name)) for name in FAMILIES)
    return tuple(name for name, one in rows if ((one["rank"] == 0) & one["live"]).any())


def _place_target(trace: Trace, texts: Mapping[int, Text], family: str) -> Placed:
    """Rows of the text by their position; a rejected one stands below the row that judged its parent."""
    rows, verified = (trace.rows(name, rank=0, live=True) for name in (family, "verified"))
    place = _of_text(rows, texts, became_text(rows, verified.where(accepted=True)))
    above = _row_before(rows, place)
    judging = places(columns(rows, "request", "pass", "node"), columns(verified, "request", "pass", "source_row"))
    parents = places(columns(verified, "request", "pass", "node"), columns(verified, "request", "pass", "parent"))
    below = np.flatnonzero((judging >= 0) & (parents >= 0))
    below = below[place[judging[below]] < 0]
    above[judging[below]] = judging[parents[below]]
    return Placed(rows, place, above)


def _place_received(trace: Trace, texts: Mapping[int, Text]) -> Placed:
    """At depth 0 by the row emitted for it, since positions given to a draft may be wrong; deeper ones by parent.

    A row of the text stands below the one before it, too, if that was fed this row's token.
    """
    rows = trace.rows("received", rank=0, live=True)
    zero = np.flatnonzero(rows["depth"] == 0)
    place, token = np.full(len(rows), -1, np.int64), np.full(len(rows), -1, np.int64)
    place[zero], token[zero] = _place_fed(rows.take(zero), pair_rows(trace), texts)
    before = _row_before(rows, place)
    before = np.where((before >= 0) & (rows["token"][before] == token), before, -1)
    depth = rows["depth"].astype(np.int64)
    above = places(
        columns(rows, "request", "pass", "depth", "node"), [rows["request"], rows["pass"], depth - 1, rows["parent"]]
    )
    return Placed(rows, place, np.where(depth > 0, above, before))


def _place_fed(rows: Rows, pairing: Pairing, texts: Mapping[int, Text]) -> tuple[Int, Int]:
    """The place of each row of depth 0, and the text's token there.

    Where no emitted row says it, the row's own position is taken if its token is right, and no other row shows that
    positions are wrong: where tokens repeat, a wrong one has the right token, too.
    """
    position, request, known = rows["position"].astype(np.int64), rows["request"], pairing.sources >= 0
    emitted, place = pairing.emitted.take(pairing.sources[known]), position.copy()
    place[known] = emitted["position"]
    after = _tokens_at(texts, request, position + 1)
    denied = ~known & (after >= 0) & (after != rows["token"])
    believed = (after == rows["token"]) & ~np.isin(request, request[denied]) & ~(place != position).any()
    place = np.where(known | believed, place, -1)
    token = _tokens_at(texts, request, place)
    token[known] = emitted["token"]
    return place, token


def _place_verified(trace: Trace, texts: Mapping[int, Text]) -> Placed:
    """A round's root by its position in the text, other nodes below their parents."""
    rows = trace.rows("verified", rank=0, live=True)
    root, position = rows["node"] == 0, rows["position"].astype(np.int64)
    right = rows["token"] == _tokens_at(texts, rows["request"], position)
    above = places(columns(rows, "request", "pass", "node"), columns(rows, "request", "pass", "parent"))
    return Placed(rows, np.where(root & right, position, -1), np.where(root, -1, above))


_READERS: Mapping[str, Callable[[Trace, Mapping[int, Text]], Placed]] = {
    "reference": partial(_place_target, family="reference"),
    "emitted": partial(_place_target, family="emitted"),
    "received": _place_received,
    "verified": _place_verified,
}


def _of_text(rows: Rows, texts: Mapping[int, Text], became: Bool) -> Int:
    """The place of each row that is of its request's text, by its position; -1 for any other."""
    position = rows["position"].astype(np.int64)
    return np.where(became & (rows["token"] == _tokens_at(texts, rows["request"], position)), position, -1)


def _tokens_at(texts: Mapping[int, Text], requests: np.ndarray, at: Int) -> Int:
    """The token at each place of each request's text; -1 where the text has none."""
    numbers = np.array(sorted(texts), np.int64)
    tokens = [np.asarray(texts[number].tokens, np.int64) for number in numbers.tolist()]
    starts, lengths = np.cumsum([0, *map(len, tokens)]), np.array([*map(len, tokens)], np.int64)
    of = np.searchsorted(numbers, requests.astype(np.int64)).clip(0, max(len(numbers) - 1, 0))
    there = (numbers[of] == requests) & (at >= 0) & (at < lengths[of])
    return np.where(there, np.concatenate(tokens)[np.where(there, starts[of] + at, 0)], -1)


def _row_before(rows: Rows, place: Int) -> Int:
    """For each row of a text the row one place before it, -1 where that is not there."""
    of_text = np.flatnonzero(place >= 0)
    request = rows["request"].astype(np.int64)
    _, first = np.unique(np.stack([request[of_text], place[of_text]]), axis=1, return_index=True)
    known = of_text[first]
    found = places([request[known], place[known]], [request, place - 1])
    return np.where((place > 0) & (found >= 0), known[found] if len(known) else -1, -1)


def columns(rows: Rows, *names: str) -> list[np.ndarray]:
    return [rows[name] for name in names]

"""Which row of one trace is which of another: planned from narrow files alone, before any tensor is read.

Rows of a text pair where both stand at one place of it and the texts are the same up to there; a row below another
(a drafted token, or one that verification judged) pairs where the rows above are the same and its token is. Batches,
chunks, rounds, ranks and the engines' numbers play no part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spectrace.replay.diff.placing import Placed, Side, columns
from spectrace.replay.diff.sites import Where
from spectrace.replay.diff.texts import TextPair, pair_texts
from spectrace.replay.inputs import Int, places
from spectrace.replay.pairing import Bool
from spectrace.replay.texts import Text
from spectrace.tracer.errors import UserError
from spectrace.tracer.rowset import Rows
from spectrace.tracer.trace import Trace

__all__ = ["Alignment", "PairedRows", "align", "base_of", "no_common_text"]

_DEEPEST = 256
"""Rows below the text at most: no tree is deeper."""
_OWN = {"reference": 1, "emitted": 1, "received": 2, "verified": 1}
"""How many tokens of a text, counted from a row's place, made it what it is: a draft row is fed the next one, too."""


@dataclass(frozen=True, slots=True)
class PairedRows:
    """Rows of one family that pair: the i-th of `a` is the i-th of `b`; `text` is the place of its texts' pair.

    `place` is the row's place in the text; a row that is not of the text has that of the row its branch began at.
    `unpaired` says of the rows of each side (a, b) that have no partner how many there are for each reason.
    """

    family: str
    a: Rows
    b: Rows
    text: Int
    place: Int
    unpaired: tuple[Mapping[str, int], Mapping[str, int]]

    def __len__(self) -> int:
        return len(self.text)

    def where(self, at: int) -> Where:
        """One pair."""
        both = [(int(self.a[name][at]), int(self.b[name][at])) for name in ("request", "pass", "node")]
        return Where(int(self.place[at]), *both)

    def take(self, which: Bool | Int) -> "PairedRows":
        """Some of the pairs."""
        return PairedRows(
            self.family, self.a.take(which), self.b.take(which), self.text[which], self.place[which], self.unpaired
        )


@dataclass(frozen=True, slots=True)
class Alignment:
    """The plan of a comparison: paired requests, and paired rows by family."""

    texts: tuple[TextPair, ...]
    alone: tuple[tuple[int, ...], tuple[int, ...]]
    families: Mapping[str, PairedRows]


def align(a: Side, b: Side, pairs: Sequence[TextPair] | None = None) -> Alignment:
    """Plan the comparison of two traces, of all requests or of these pairs.

    Raises UserError when no request of one has its text in the other.
    """
    pairs = pair_texts(a.texts, b.texts) if pairs is None else pairs
    if not pairs:
        raise UserError(no_common_text((a.trace, a.texts), (b.trace, b.texts)))
    alone = (_without(a, {pair.a for pair in pairs}), _without(b, {pair.b for pair in pairs}))
    families = {
        name: _pair_rows(name, (a, a.families[name]), (b, b.families[name]), pairs)
        for name in _OWN
        if name in a.families and name in b.families
    }
    if "received" in families:
        families["drafted"] = _follow(families["received"], a.trace, b.trace)
    return Alignment(tuple(pairs), alone, families | _crossed(a, b, pairs))


def _pair_rows(family: str, a: tuple[Side, Placed], b: tuple[Side, Placed], pairs: Sequence[TextPair]) -> PairedRows:
    """Rows of the shared texts by place, then, as long as there are any, rows below rows that pair."""
    sides = [a[1], b[1]]
    texts = [
        _text_of(side.rows, [getattr(pair, name) for pair in pairs]) for side, name in zip(sides, "ab", strict=True)
    ]
    shared = np.array([pair.shared for pair in pairs], np.int64)
    own = _OWN.get(family, 1)
    same = [np.full(len(side.rows), -1, np.int64) for side in sides]
    keys = []
    for side, text in zip(sides, texts, strict=True):
        common = (text >= 0) & (side.place >= 0) & (side.place < shared[text])
        token = np.where(side.place + own > shared[text], side.rows["token"].astype(np.int64), -1)
        keys.append([np.where(common, text, -1), side.place, token])
    count = 0
    while fresh := _number(keys, same, count):
        count += fresh
        keys = [_below(side, number) for side, number in zip(sides, same, strict=True)]
    found = _kth_with_kth(same)
    reasons = tuple(
        _reasons(side, number, which, text, pairs, own, other.trace, name)
        for side, number, which, text, (other, _), name in zip(
            sides, same, found, texts, (b, a), ("b", "a"), strict=True
        )
    )
    return PairedRows(
        family,
        sides[0].rows.take(found[0]),
        sides[1].rows.take(found[1]),
        texts[0][found[0]],
        np.minimum(*(base_of(side)[which] for side, which in zip(sides, found, strict=True))),
        (reasons[0], reasons[1]),
    )


def _text_of(rows: Rows, requests: Sequence[int]) -> Int:
    """The place, among the pairs of texts, of each row's request; -1 where it pairs with none."""
    return places([np.asarray(requests, np.int64)], [rows["request"].astype(np.int64)])


def _number(keys: Sequence[Sequence[Int]], same: Sequence[Int], count: int) -> int:
    """Number, from `count` on, the keys that rows of both sides have: into `same`; returns how many there were.

    Keys whose first part is negative are none, and rows that have a number keep it.
    """
    which = [np.flatnonzero((parts[0] >= 0) & (number < 0)) for parts, number in zip(keys, same, strict=True)]
    parts = [np.concatenate([one[which[0]], other[which[1]]]) for one, other in zip(*keys, strict=True)]
    order = np.lexsort(parts[::-1])
    begins = np.any([np.diff(part[order], prepend=-2) != 0 for part in parts], axis=0)
    groups = np.empty(len(order), np.int64)
    groups[order] = np.cumsum(begins) - 1
    sides = np.split(groups, [len(which[0])])
    both = np.logical_and(*(np.bincount(side, minlength=int(begins.sum())) > 0 for side in sides))
    numbers = np.where(both, count + np.cumsum(both) - 1, -1)
    for number, rows, side in zip(same, which, sides, strict=True):
        number[rows] = numbers[side]
    return int(both.sum())


def _kth_with_kth(same: Sequence[Int]) -> list[Int]:
    """The rows of each side that pair, in the order of a's: of those with a number the k-th with the k-th."""
    rows, keys = [], []
    for number in same:
        which = np.argsort(number, kind="stable")[int((number < 0).sum()) :]
        begins = np.flatnonzero(np.diff(number[which], prepend=-1))
        rows.append(which)
        keys.append([number[which], np.arange(len(which)) - np.repeat(begins, np.diff([*begins, len(which)]))])
    at = places(keys[1], keys[0])
    order = np.argsort(rows[0][at >= 0])
    return [rows[0][at >= 0][order], rows[1][at[at >= 0]][order]]


def _below(side: Placed, same: Int) -> list[Int]:
    """The key of a row that stands below one that both sides have: that one, the row's token, and its depth."""
    above = np.where(side.above >= 0, same[side.above], -1)
    return [above, *(column.astype(np.int64) for column in columns(side.rows, "token", "depth"))]


def base_of(side: Placed) -> Int:
    """The place of each row in the text, or of the row its branch begins at; -1 for one whose branch is a circle."""
    at = np.arange(len(side.place))
    for _ in range(_DEEPEST):
        climbing = (side.place[at] < 0) & (side.above[at] >= 0)
        if not climbing.any():
            break
        at = np.where(climbing, side.above[at], at)
    return side.place[at]


def _reasons(
    side: Placed, same: Int, which: Int, text: Int, pairs: Sequence[TextPair], own: int, other: Trace, name: str
) -> Mapping[str, int]:
    """Why rows that have no partner have none: how many for each reason."""
    alone = ~np.isin(np.arange(len(same)), which)
    base = base_of(side)
    ends = np.array([(one.shared, len(getattr(one, f"text_{name}").tokens)) for one in pairs], np.int64)[text]
    parts = np.array([one.parts for one in pairs], np.bool_)[text]
    cached = dict(
        zip(*(column.tolist() for column in columns(other.rows("requests"), "request", "cached_prefix")), strict=True)
    )
    lent = base < np.array([cached.get(getattr(one, name), 0) for one in pairs], np.int64)[text]
    of_text = side.place >= 0
    cases = (
        ("its request has no partner", text < 0),
        ("its place in the text is not known", base < 0),
        ("the other has it fewer times", same >= 0),
        ("behind the place where the texts part", parts & (base + own > ends[:, 0])),
        ("behind the end of the other's text", base + own > ends[:, 1]),
        ("the other took it from its prefix cache", of_text & lent),
        ("the other has no row for it", of_text),
        ("the other has not drafted this here", ~of_text),
    )
    found: dict[str, int] = {}
    for reason, holds in cases:
        if count := int((alone & holds).sum()):
            found[reason] = count
        alone = alone & ~holds
    return found


def _follow(received: PairedRows, a: Trace, b: Trace) -> PairedRows:
    """What the draft made of rows that pair."""
    names = ("request", "pass", "depth", "node")
    drafted = [trace.rows("drafted", rank=0, live=True) for trace in (a, b)]
    at = [
        places(columns(rows, *names), columns(of, *names))
        for rows, of in zip(drafted, (received.a, received.b), strict=True)
    ]
    both = (at[0] >= 0) & (at[1] >= 0)
    rows = [one.take(found[both]) for one, found in zip(drafted, at, strict=True)]
    unpaired = []
    for one, found in zip(drafted, at, strict=True):
        answers = int((found >= 0).sum())
        told = {
            "what it was made of has no partner": len(one) - answers,
            "the other has no answer to it": answers - int(both.sum()),
        }
        unpaired.append({reason: count for reason, count in told.items() if count})
    return PairedRows(
        "drafted", rows[0], rows[1], received.text[both], received.place[both], (unpaired[0], unpaired[1])
    )


def _crossed(a: Side, b: Side, pairs: Sequence[TextPair]) -> dict[str, PairedRows]:
    """True states of one trace beside what the other's engine captured or handed over, where it has none itself."""
    found = {}
    for mine, other in ((a, b), (b, a)):
        if "reference" in mine.families and "reference" not in other.families:
            for name in ("emitted", "received"):
                if name in other.families and name not in mine.families:
                    sides = {id(mine): mine.families["reference"], id(other): _at_depth_zero(other.families[name])}
                    family = f"reference/{name}" if mine is a else f"{name}/reference"
                    found[family] = _pair_rows(family, (a, sides[id(a)]), (b, sides[id(b)]), pairs)
    return found


def _at_depth_zero(side: Placed) -> Placed:
    """Without rows below others: only rows of the text have a true state of their own."""
    which = np.flatnonzero(side.place >= 0)
    return Placed(side.rows.take(which), side.place[which], np.full(len(which), -1, np.int64))


def _without(side: Side, paired: set[int]) -> tuple[int, ...]:
    return tuple(sorted(side.texts.keys() - paired))


def no_common_text(a: tuple[Trace, Mapping[int, Text]], b: tuple[Trace, Mapping[int, Text]]) -> str:
    """What to say of two traces no texts of which pair: what they look like, and whether one has something in front."""
    prompts = [[text.prompt for _, text in sorted(texts.items())] for _, texts in (a, b)]
    shown = " and ".join(
        f"{trace.folder} begins {list(mine[0][:8])}" for (trace, _), mine in zip((a, b), prompts, strict=True)
    )
    for one, other, name in ((*prompts, "A"), (*prompts[::-1], "B")):
        known = {prompt[:8] for prompt in other}
        for more in range(1, 5):
            for prompt in one:
                if len(prompt) > more and prompt[more : more + 8] in known:
                    front = f"those of {name} have {list(prompt[:more])} in front"
                    return f"no request has the same prompt in both: {front} ({shown})"
    return f"no request has the same prompt in both, so no rows pair: {shown}; record the same prompts under both"

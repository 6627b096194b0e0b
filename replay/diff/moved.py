"""Where the content of rows that differ comes from: another slot, another row, a cast, a factor.

First by hash, which is proof; what hashes leave over by value, on a sample: near to one candidate, and far from the row
it stands beside.

Shapes: N pairs of rows, A slots, n rows of a sample, W width of a slot.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from spectrace.replay.casts import find_cast
from spectrace.replay.compare import row_error
from spectrace.replay.diff.alignment import PairedRows
from spectrace.replay.diff.placing import Placed, Side
from spectrace.replay.diff.sites import Site
from spectrace.replay.diff.tensors import Group, boundaries_of
from spectrace.replay.inputs import Int, places
from spectrace.replay.pairing import Bool
from spectrace.tracer.fingerprint import row_hashes

__all__ = ["Moved", "find_moved"]

_MOST: Final = 0.5  # of the rows that differ
_FEW: Final = 0.02
_SAMPLE: Final = 48
_BLOCK: Final = 8
_NEAR: Final = 1e-3
_COARSE: Final = 5e-2
_CLEARER: Final = 10.0
_NUMBERS: Final = 4


@dataclass(frozen=True, slots=True)
class Moved:
    """`rows` of the `of` rows of a site that differ are what `says` tells; `error` is None where hashes prove it."""

    site: Site
    says: str
    rows: int
    of: int
    error: float | None = None

    def __add__(self, other: "Moved") -> "Moved":
        """Of the rows of both."""
        errors = [one.error for one in (self, other) if one.error is not None]
        return Moved(self.site, self.says, self.rows + other.rows, self.of + other.of, max(errors, default=None))


def find_moved(group: Group, a: Side, b: Side) -> list[Moved]:
    """Explain the rows of a group of slots that differ, slot by slot; nothing for what is no group of slots."""
    if group.sites[0].what != "slot" or "/" in group.pairs.family:
        return []
    finder = _Finder(group, a, b)
    slots = np.flatnonzero(~group.equal.all(0)).tolist()
    return [moved for slot in slots for moved in finder.explain(slot)]


class _Finder:
    def __init__(self, group: Group, a: Side, b: Side) -> None:
        self.group, self.pairs, self.a, self.b = group, group.pairs, a, b
        self.ours, self.theirs = self.pairs.a["hashes"], self.pairs.b["hashes"]

    def explain(self, slot: int) -> Iterator[Moved]:
        """What hashes prove of at least some rows, and what values show of the rest where these are most."""
        differ = np.flatnonzero(~self.group.equal[:, slot])
        left = np.ones(len(differ), np.bool_)
        site, proved = self.group.sites[slot], dict[str, int]()
        for says, holds in self._by_hash(slot, differ):
            count = int((holds & left).sum())
            if count > _FEW * len(differ):
                proved[says] = count
                left &= ~holds
        near = self._by_value(slot, differ[left]) if left.mean() > _MOST else None
        if near:
            yield Moved(site, near[0], proved.pop(near[0], 0) + int(left.sum()), len(differ), near[1])
        for says, count in proved.items():
            yield Moved(site, says, count, len(differ))

    def _by_hash(self, slot: int, differ: Int) -> Iterator[tuple[str, Bool]]:
        theirs = self.theirs[differ, slot]
        for other in range(self.ours.shape[1]):
            if other != slot:
                yield f"slot {slot} of B is slot {other} of A", theirs == self.ours[differ, other]
        for boundary, hashes in self._true(differ).items():
            yield f"slot {slot} of B is boundary {boundary}, by A's reference", theirs == hashes
        yield "zeros in B", theirs == self._zero_hash(slot, differ)
        yield from self._other_rows(slot, differ, theirs)

    def _other_rows(self, slot: int, differ: Int, theirs: np.ndarray) -> Iterator[tuple[str, Bool]]:
        """Rows of A, elsewhere, that have the hashes which B's rows carry, by where they stand from here."""
        side = self.a.families[self.pairs.family]
        rows = side.rows if self.pairs.family == "emitted" else side.rows.take(side.rows["depth"] == 0)
        place = side.place if self.pairs.family == "emitted" else side.place[side.rows["depth"] == 0]
        hashes = rows["hashes"][:, slot]
        values, first = np.unique(hashes, return_index=True)
        at = np.searchsorted(values, theirs).clip(0, len(values) - 1)
        known = values[at] == theirs
        source = first[at]
        mine = self.pairs.take(differ)
        same = rows["request"][source] == mine.a["request"]
        apart = place[source] - mine.place
        for offset in (-1, 1):
            beside = places([rows["request"], place], [mine.a["request"], mine.place + offset])
            where = "1 place before" if offset < 0 else "1 place behind"
            yield f"B's row is A's row {where}", (beside >= 0) & (hashes[beside] == theirs)
        offsets = Counter(apart[known & same & (place[source] >= 0)].tolist())
        for offset, _ in offsets.most_common(3):
            where = f"{abs(offset)} place{'s' if abs(offset) > 1 else ''} {'before' if offset < 0 else 'behind'}"
            if abs(offset) > 1:
                yield f"B's row is A's row {where}", known & same & (apart == offset)
        yield "B's row is a row of another request in A", known & ~same
        yield "B's row is another row of its request in A", known & same

    def _by_value(self, slot: int, differ: Int) -> tuple[str, float | None] | None:
        """The candidate nearest to B's rows, and its error, on a sample of rows that both traces keep."""
        assert self.group.kinds
        there = self.group.kinds[0].here(self.pairs.a) & self.group.kinds[1].here(self.pairs.b)
        pairs = self.pairs.take(_sample(differ[there[differ]]))
        if not len(pairs):
            return None
        ours, theirs = self.group.kinds[0].read(pairs.a), self.group.kinds[1].read(pairs.b)[slot]
        if theirs.shape != ours[slot].shape:
            return None
        if cast := find_cast(theirs, ours[slot]):
            return f"B is A's row through {cast.dtype}", None
        if says := _few(ours[slot], theirs):
            return says, None
        coarse = any(part.dtype in (torch.bfloat16, torch.float16) for part in (theirs, ours[slot]))
        apart = _typical(row_error(ours[slot], theirs))
        limit = min(_COARSE if coarse else _NEAR, apart / _CLEARER)
        for candidates in self._candidates(slot, pairs, ours, theirs):
            found = [(_typical(row_error(rows, theirs)), says) for says, rows in candidates]
            error, says = min(found, default=(np.inf, ""))
            if error <= limit:
                return says, error
        return None

    def _candidates(
        self, slot: int, pairs: PairedRows, ours: list[Tensor], theirs: Tensor
    ) -> Iterator[list[tuple[str, Tensor]]]:
        """What B's slot may hold, simplest first: another slot, another boundary, the same times something."""
        yield [
            (f"slot {slot} of B is slot {other} of A", rows)
            for other, rows in enumerate(ours)
            if other != slot and rows.shape == theirs.shape
        ]
        side = self.a.families.get("reference")
        at = _at(side, pairs)
        if side and (at >= 0).all() and (rows := side.rows.take(at)).has("boundaries").all():
            columns = (
                (boundary, rows.tensor("boundaries", f"b{boundary}")) for boundary in boundaries_of(self.a.trace)
            )
            yield [
                (f"slot {slot} of B is boundary {boundary}, by A's reference", column)
                for boundary, column in columns
                if column.shape == theirs.shape
            ]
        mine = ours[slot].double()
        factor = (mine * theirs.double()).sum(-1) / mine.square().sum(-1)
        typical = float(factor.median())
        if float((factor - typical).abs().median()) <= 1e-2 * abs(typical):
            yield [(f"B is A times {typical:.4g}", mine * typical)]
        low, high = float(factor.min()), float(factor.max())
        yield [(f"B is A with each row scaled on its own, by {low:.3g} to {high:.3g}", mine * factor[:, None])]

    def _true(self, differ: Int) -> Mapping[int, np.ndarray]:
        """The hashes of A's reference rows at the places of some pairs, by boundary; 0 where there are none."""
        side = self.a.families.get("reference")
        if not side or side.rows["hashes"].ndim != 2:
            return {}
        at = _at(side, self.pairs.take(differ))
        hashes = side.rows["hashes"]
        return {
            boundary: np.where(at >= 0, hashes[at, column], 0)
            for column, boundary in enumerate(boundaries_of(self.a.trace))
        }

    def _zero_hash(self, slot: int, differ: Int) -> np.uint64:
        """The hash of a slot of zeros as wide as one of these rows; 0, which no row has, where B keeps none of them."""
        assert self.group.kinds
        kind, rows = self.group.kinds[1], self.pairs.b.take(differ)
        held = np.flatnonzero(kind.here(rows))[:1]
        if not len(held):
            return np.uint64(0)
        width_bytes = kind.read(rows.take(held))[slot].nbytes
        return np.uint64(row_hashes(np.zeros((1, width_bytes), np.uint8), [width_bytes])[0, 0])


def _few(ours: Tensor, theirs: Tensor) -> str:
    """Rows [n, W] that are the same but for a few numbers, and by how many bits these are others; empty otherwise."""
    if ours.dtype != theirs.dtype:
        return ""
    bits = [part.contiguous().view(torch.uint8).numpy() for part in (ours, theirs)]
    numbers = int((ours != theirs).sum(-1).max())
    flipped = int(np.unpackbits(bits[0] ^ bits[1], axis=-1).sum(-1).max())
    said = f"B's row is A's but for {numbers} of its {ours.shape[-1]} numbers, by {flipped} bits at most"
    return said if 0 < numbers <= _NUMBERS else ""


def _at(side: Placed | None, pairs: PairedRows) -> Int:
    """The row of another family of A at the place of each pair; -1 where there is none, or two."""
    if side is None:
        return np.full(len(pairs), -1, np.int64)
    return places([side.rows["request"], side.place], [pairs.a["request"], pairs.place])


def _sample(which: Int) -> Int:
    """Some rows, in blocks that lie together."""
    if len(which) <= _SAMPLE:
        return which
    starts = np.linspace(0, len(which) - _BLOCK, _SAMPLE // _BLOCK).astype(np.int64)
    return np.unique(which[(starts[:, None] + np.arange(_BLOCK)).reshape(-1)])


def _typical(errors: Tensor) -> float:
    return float(torch.nan_to_num(errors, nan=torch.inf, posinf=torch.inf).median())

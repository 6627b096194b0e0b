"""What paired rows hold, site by site: by hash where there are hashes, by value where these differ.

A stage of the draft that has no hash of its own, and the logits, are taken for equal where what they led to is: the
state fed back, the logsumexp and the token of the row. Some such rows are read all the same; if one differs, all are.

Shapes: N pairs, n pairs of a chunk, S sites that are read together, W width of one, k logits of a row that were kept.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor

from spectrace.replay.diff.alignment import Alignment, PairedRows
from spectrace.replay.diff.measure import Measure
from spectrace.replay.diff.sites import Site
from spectrace.replay.inputs import Int
from spectrace.replay.pairing import Bool
from spectrace.tracer.rowset import Rows
from spectrace.tracer.trace import Trace

__all__ = ["Group", "Kind", "Reads", "boundaries_of", "groups", "slots_of"]

_CHUNK_BYTES: Final = 32 << 20
_PROBE_BYTES: Final = 1 << 20
_MAPPED_BYTES: Final = 256 << 20
_SCALARS: Final = {
    "emitted": {"target_token": "target_token"},
    "received": {"position": "position", "token": "token"},
    "drafted": {"draft_token": "draft_token", "token": "answer"},
    "verified": {"accepted": "accepted"},
}


class Reads(Protocol):
    """How a side's tensors are read: of which rows they are here, and one tensor [n, W] for each site."""

    @property
    def name(self) -> str: ...

    def here(self, rows: Rows) -> Bool: ...

    def read(self, rows: Rows) -> list[Tensor]: ...


@dataclass(frozen=True, slots=True)
class Kind:
    """Which tensor of a row: `columns` one for each site, or None where one holds `slots` side by side.

    `picked` are those of the slots that are compared, all unless given.
    """

    name: str
    columns: tuple[str, ...] | None = None
    slots: int = 1
    picked: tuple[int, ...] | None = None

    def here(self, rows: Rows) -> Bool:
        """Which rows have it."""
        return rows.has(self.name)

    def read(self, rows: Rows) -> list[Tensor]:
        """One tensor [n, W] for each site."""
        if self.columns:
            return [rows.tensor(self.name, column) for column in self.columns]
        parts = rows.tensor(self.name).tensor_split(self.slots, dim=1)
        return [parts[at] for at in self.picked or range(self.slots)]


@dataclass(frozen=True, slots=True)
class Group:
    """Sites that lie in one tensor on each side; `equal` [N, S] is what hashes or scalars say of each pair.

    Without `kinds` there is nothing to read. `values` are numbers from narrow rows, a and b [N]. `inferred` says that
    `equal` is, from what the tensors led to.
    """

    sites: tuple[Site, ...]
    pairs: PairedRows
    equal: Bool
    kinds: tuple[Reads, Reads] | None = None
    values: tuple[np.ndarray, np.ndarray] | None = None
    inferred: bool = False

    def measure(self, traces: tuple[Trace, Trace]) -> list[Measure]:
        """Compare each site's pairs, chunk by chunk, at flat memory; rows without tensors stay unread."""
        if self.inferred and self._belied():
            return replace(self, equal=np.zeros_like(self.equal), inferred=False).measure(traces)
        found = [Measure(self.equal[:, at], inferred=self.inferred) for at in range(len(self.sites))]
        if self.values:
            differ = np.flatnonzero(~self.equal[:, 0])
            found[0].add(differ, *(_beside_one(value[differ]) for value in self.values))
        elif not self.kinds:
            found[0].differ()
        for chunk in self._chunks():
            for at, (a, b) in enumerate(zip(*self._read(chunk), strict=True)):
                which = ~self.equal[chunk, at]
                if a.shape[1] == b.shape[1] and which.any():
                    rows = torch.from_numpy(which)
                    found[at].add(chunk[which], a[rows], b[rows])
            for trace in traces:
                trace.release(above_bytes=_MAPPED_BYTES)
        return found

    def _belied(self) -> bool:
        """Whether some row that is taken for equal is not: all are read where that costs little, else one."""
        assert self.kinds
        here = self.kinds[0].here(self.pairs.a) & self.kinds[1].here(self.pairs.b)
        same = np.flatnonzero(self.equal.all(1) & here)
        if not len(same):
            return False
        looked = same[len(same) // 3 :][:1]
        row_bytes = sum(part.nbytes for part in self._read(looked)[0])
        looked = same if len(same) * row_bytes <= _PROBE_BYTES else looked
        return not all(torch.equal(a, b) for a, b in zip(*self._read(looked), strict=True))

    def _chunks(self) -> Iterator[Int]:
        """Pairs to read, about so many bytes at a time."""
        if not self.kinds:
            return
        there = self.kinds[0].here(self.pairs.a) & self.kinds[1].here(self.pairs.b)
        which = np.flatnonzero(there & ~self.equal.all(1))
        if len(which):
            row_bytes = sum(part.nbytes for side in self._read(which[:1]) for part in side)
            yield from np.array_split(which, -(-len(which) * row_bytes // _CHUNK_BYTES))

    def _read(self, which: Int) -> tuple[list[Tensor], list[Tensor]]:
        assert self.kinds
        pairs = self.pairs.take(which)
        if self.kinds[0].name == "logits":
            return _common_logits(pairs)
        return self.kinds[0].read(pairs.a), self.kinds[1].read(pairs.b)


def groups(alignment: Alignment, traces: tuple[Trace, Trace]) -> Iterator[Group]:
    """Everything that can be compared, in the data's order within each family."""
    for family, pairs in alignment.families.items():
        if "/" in family:
            yield from _crossed(pairs, traces)
        elif family == "reference":
            yield from _boundaries(pairs, traces)
        else:
            for depth in np.unique(pairs.a["depth"]).tolist() if family in ("received", "drafted") else [0]:
                at_depth = pairs.take(pairs.a["depth"] == depth) if family in ("received", "drafted") else pairs
                yield from _tensors(at_depth, depth)
                yield from _scalars(at_depth, depth)


def boundaries_of(trace: Trace) -> tuple[int, ...]:
    """The boundaries of a trace's reference rows, in the order of their hashes."""
    told = (facts.get("capture") for facts in trace.writers.values())
    return next((found for capture in told if (found := _numbers(capture))), ())


def slots_of(trace: Trace) -> tuple[int, ...]:
    """Which boundary each slot holds by the engine's own account; empty where it gives none."""
    wiring = trace.manifest.get("wiring")
    told = [wiring.get(name) for name in ("resolved", "configured")] if isinstance(wiring, dict) else []
    held = (_numbers(one.get("boundaries")) for one in told if isinstance(one, dict))
    return next((found for found in held if found), ())


def _numbers(value: Any) -> tuple[int, ...]:
    """A list of integers as a manifest has it; empty for anything else, which says nothing."""
    whole = isinstance(value, list) and all(isinstance(one, int) for one in value)
    return tuple(value) if whole else ()


def _boundaries(pairs: PairedRows, traces: tuple[Trace, Trace]) -> Iterator[Group]:
    of_a, of_b = (boundaries_of(trace) for trace in traces)
    common = sorted(set(of_a) & set(of_b))
    hashes = [_matrix(rows) for rows in (pairs.a, pairs.b)]
    if common and len(pairs) and all(one is not None for one in hashes):
        columns = [[of.index(boundary) for boundary in common] for of in (of_a, of_b)]
        equal = hashes[0][:, columns[0]] == hashes[1][:, columns[1]]  # type: ignore[index]
        kind = Kind("boundaries", tuple(f"b{boundary}" for boundary in common))
        yield Group(tuple(Site("reference", "boundary", slot=one) for one in common), pairs, equal, (kind, kind))


def _crossed(pairs: PairedRows, traces: tuple[Trace, Trace]) -> Iterator[Group]:
    """True states beside slots: each slot with the boundary that the engine says it holds."""
    names = pairs.family.split("/")
    engine = names.index(next(name for name in names if name != "reference"))
    held, known = slots_of(traces[engine]), boundaries_of(traces[1 - engine])
    picked = [slot for slot, boundary in enumerate(held) if boundary in known]
    hashes = [_matrix(rows) for rows in (pairs.a, pairs.b)]
    if not (picked and len(pairs) and all(one is not None for one in hashes)):
        return
    wide = "slots" if names[engine] == "emitted" else "features"
    kinds = {
        engine: Kind(wide, slots=hashes[engine].shape[1], picked=tuple(picked)),  # type: ignore[union-attr]
        1 - engine: Kind("boundaries", tuple(f"b{held[slot]}" for slot in picked)),
    }
    columns = {engine: picked, 1 - engine: [known.index(held[slot]) for slot in picked]}
    equal = hashes[0][:, columns[0]] == hashes[1][:, columns[1]]  # type: ignore[index]
    sites = tuple(Site(pairs.family, "slot", slot=slot) for slot in picked)
    yield Group(sites, pairs, equal, (kinds[0], kinds[1]))


def _tensors(pairs: PairedRows, depth: int) -> Iterator[Group]:
    if pairs.family == "emitted":
        yield from _hashed(pairs, "slots", "slot", depth)
    if pairs.family == "received":
        yield from _hashed(pairs, *(("state", "state") if depth else ("features", "slot")), depth)
    if pairs.family in ("emitted", "drafted"):
        led_to = _led_to_the_same(pairs)
        for kind, what in (("fused", "fused"), ("hidden", "hidden"), ("state", "fed back"), ("logits", "logits")):
            if pairs.family == "drafted" or kind == "logits":
                held = pairs.take(pairs.a.has(kind) & pairs.b.has(kind))
                equal = led_to[pairs.a.has(kind) & pairs.b.has(kind), None]
                if hashed := kind == "state":
                    equal = (held.a["state_hash"] == held.b["state_hash"])[:, None]
                if len(held):
                    kinds, site = (Kind(kind), Kind(kind)), Site(pairs.family, what, depth)
                    yield Group((site,), held, equal, kinds, inferred=not hashed)
        both = ~(np.isnan(pairs.a["logsumexp"]) | np.isnan(pairs.b["logsumexp"]))
        if both.any() and not (pairs.a.has("logits") & pairs.b.has("logits")).any():
            held = pairs.take(both)
            values = (held.a["logsumexp"], held.b["logsumexp"])
            equal = (values[0] == values[1])[:, None]
            yield Group((Site(pairs.family, "logsumexp", depth),), held, equal, values=values)


def _hashed(pairs: PairedRows, kind: str, what: str, depth: int) -> Iterator[Group]:
    a, b = _matrix(pairs.a), _matrix(pairs.b)
    if a is None or b is None or a.shape[1] != b.shape[1] or not a.shape[1]:
        return
    slots = a.shape[1]
    sites = tuple(Site(pairs.family, what, depth, at if what == "slot" else None) for at in range(slots))
    yield Group(sites, pairs, a == b, (Kind(kind, slots=slots), Kind(kind, slots=slots)))


def _scalars(pairs: PairedRows, depth: int) -> Iterator[Group]:
    for column, what in _SCALARS[pairs.family].items():
        a, b = pairs.a[column].astype(np.int64), pairs.b[column].astype(np.int64)
        both = (a >= 0) & (b >= 0)
        if both.any():
            held = pairs.take(both)
            yield Group((Site(pairs.family, what, depth),), held, (a == b)[both, None])


def _led_to_the_same(pairs: PairedRows) -> Bool:
    """Pairs whose state, logsumexp and token are the same, of what was recorded."""
    same: Bool = np.ones(len(pairs), np.bool_)
    for column in ("state_hash", "logsumexp", "token" if pairs.family == "drafted" else "target_token"):
        if column in pairs.a.columns:
            a, b = pairs.a[column], pairs.b[column]
            same &= (a == b) | _absent(a) | _absent(b)  # a row that answers at a chunk's end need not in another
    return same


def _absent(values: np.ndarray) -> Bool:
    """Where a narrow column has nothing: NaN, a negative token, a hash of 0."""
    if values.dtype.kind == "f":
        return np.asarray(np.isnan(values))
    return np.asarray(values == 0 if values.dtype.kind == "u" else values < 0)


def _matrix(rows: Rows) -> np.ndarray | None:
    """The hashes as a matrix [N, slots]; None where rows have different numbers of them."""
    hashes = rows["hashes"]
    return hashes if hashes.ndim == 2 else None


def _beside_one(values: np.ndarray) -> Tensor:
    """Numbers as rows whose largest value is at least 1: one near 0 would make any difference a large one."""
    return torch.from_numpy(np.stack([values, np.ones_like(values)], 1))


def _common_logits(pairs: PairedRows) -> tuple[list[Tensor], list[Tensor]]:
    """a's logits [n, k] and b's of the same tokens: 0 in both where b did not keep one, NaN where it kept none."""
    ids = [rows.tensor("logits", "ids").long() for rows in (pairs.a, pairs.b)]
    values = [rows.tensor("logits", "values").float() for rows in (pairs.a, pairs.b)]
    same = ids[0][:, :, None] == ids[1][:, None, :]
    kept = same.any(-1)
    theirs = values[1].gather(1, same.int().argmax(-1))
    theirs = torch.where(kept, theirs, 0.0).masked_fill(~kept.any(-1, keepdim=True), torch.nan)
    return [torch.where(kept, values[0], 0.0)], [theirs]

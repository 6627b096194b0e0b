"""The hand-off, proved by hashes: each live row that the draft received carries those of the row emitted for it.

Where one does not, the emitted row whose hashes it carries names the fault. The explanation that covers most rows is
given, and another only for rows that the first leaves over, and only of another kind.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from spectrace.replay.casts import Cast, find_cast
from spectrace.replay.finding import Finding
from spectrace.replay.inputs import Int
from spectrace.replay.pairing import Bool, Pairing, pair_rows
from spectrace.replay.search import Hash, HashSearch
from spectrace.tracer.fingerprint import row_hashes
from spectrace.tracer.rows import Phase
from spectrace.tracer.rowset import Rows
from spectrace.tracer.trace import Trace

__all__ = ["HandOff", "faithful_rows", "hand_off"]

_SECOND: Final = 0.2  # of the differing rows: an explanation of fewer is more likely the edge of another
_SAMPLE: Final = 256
_BYTES: Final = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class HandOff:
    """Of `rows` live rows at depth 0, `compared` have their emitted row in the trace, and `equal` carry its hashes."""

    rows: int
    compared: int
    equal: int
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class _Explanation:
    """What a row that differs may be instead. `kind` tells what two findings may be about; `rows` [N] are explained."""

    fault: str
    variant: str
    kind: str
    title: str
    carries: str
    rows: Bool
    masks: bool = False
    alike: tuple[str, ...] = ()


def hand_off(trace: Trace) -> HandOff:
    """Compare every received row with what was emitted for it; no findings where nothing could be compared."""
    search, truncated = _compare(trace)
    rows, differs = len(search.pairing.received), search.differs_TA.any(1)
    findings = [] if truncated is None else [_truncated(len(search.mine), *truncated)]
    if differs.any():
        findings += _explain(search)
        findings += _changed(search, unexplained=not findings)
    equal = 0 if truncated else int((~differs).sum())
    return HandOff(rows, len(search.mine), equal, tuple(findings))


def faithful_rows(trace: Trace) -> Rows:
    """The live depth-0 rows of rank 0 that carry their emitted row's hashes: what was captured, unharmed."""
    search, truncated = _compare(trace)
    same = ~search.differs_TA.any(1) & (truncated is None)
    return search.pairing.received.take(search.mine[same])


def _compare(trace: Trace) -> tuple[HashSearch, tuple[int, int] | None]:
    """The rows with hashes on both sides; also how many slots of how many arrived, where they are fewer."""
    pairing = pair_rows(trace)
    emitted, received = _hashes(pairing.emitted), _hashes(pairing.received)
    counts = received.shape[1], emitted.shape[1]
    slots, sources = min(counts), pairing.sources
    there = (sources >= 0) & received.any(1)
    there[there] &= emitted[sources[there]].any(1)
    mine = np.flatnonzero(there)
    search = HashSearch(pairing, mine, emitted[:, :slots], received[mine, :slots], _zero_hash(trace, pairing))
    if counts[0] == counts[1]:
        return search, None
    if counts[0] < counts[1] and not search.differs_TA.all(1).all():
        return search, counts
    none = HashSearch(pairing, mine[:0], emitted[:, :slots], received[:0, :slots], None)
    return none, None  # divided into slots of another width: nothing can be said


def _hashes(rows: Rows) -> Hash:
    """[rows, slots]; of rows with another number of slots than most, zeros."""
    hashes = rows["hashes"]
    if not len(rows):
        return np.zeros((0, 0), np.uint64)
    if hashes.dtype != object:
        return np.asarray(hashes.reshape(len(rows), -1), np.uint64)
    lengths = np.array([len(one) for one in hashes], np.int64)
    usual = int(np.bincount(lengths).argmax())
    out = np.zeros((len(rows), usual), np.uint64)
    fits = np.flatnonzero(lengths == usual)
    out[fits] = np.stack(list(hashes[fits]))
    return out


def _zero_hash(trace: Trace, pairing: Pairing) -> int | None:
    """The hash of a slot of zeros, None where the trace does not say how wide one is."""
    spec: Mapping[str, Any] = (trace.manifest.get("draft") or {}).get("spec") or {}
    width, size = spec.get("target_width"), _BYTES.get(str(trace.manifest.get("dtype")))
    held = np.flatnonzero(pairing.received.has("features"))[:1]
    if len(held):
        row = pairing.received.take(held)
        bits = row.payload("features")
        width, size = bits.shape[1] // max(np.size(row["hashes"]), 1), bits.itemsize
    if not (width and size):
        return None
    return int(row_hashes(np.zeros((1, width * size), np.uint8), [width * size])[0, 0])


def _truncated(rows: int, received: int, emitted: int) -> Finding:
    return Finding(
        fault="M3",
        variant="truncated",
        title=f"received rows hold {received} of {emitted} slots",
        evidence=(f"all {rows} received rows that were compared have {received} slots, the emitted ones {emitted}",),
        masks=True,
    )


def _explanations(search: HashSearch) -> Iterator[_Explanation]:
    """Those that are preferred where they cover equally many rows come first."""
    yield _Explanation("M3", "", "values", "features are zero", "zeros", search.zeros(), masks=True)
    yield _Explanation(
        "M3", "constant", "values", "features are the same in all rows", "what all other rows of their step carry",
        search.constant(), masks=True,
    )  # fmt: skip
    yield _Explanation(
        "W5", "hand-off", "slots", "slots change places on the way to the draft",
        "the hashes of their own row's slots in another order", search.same_slots(),
    )  # fmt: skip
    yield _Explanation(
        "W6", "hand-off", "slots", "one slot arrives in place of another",
        "the hashes of other slots of their own row", search.own_slots(),
    )  # fmt: skip
    padding = _Explanation(
        "X3", "", "rows", "a rejected row's features are used", "the hashes of a rejected node of their pass",
        search.rejected(), alike=() if search.window else ("X4",),
    )  # fmt: skip
    compaction = _Explanation(
        "X4", "", "rows", "accepted rows are taken as nodes 0 to n-1 of the tree",
        "the hashes of the node whose number is their place among the accepted ones", search.same_node(),
    )  # fmt: skip
    yield from (padding, compaction) if search.window else (compaction, padding)
    for offset, words in ((-1, "before"), (1, "behind")):
        yield _Explanation(
            "X2", "" if offset < 0 else "behind", "rows", f"each row takes the features of the row {words} it",
            f"the hashes of the row {words} their own (offset {offset:+d})", search.beside(offset),
        )  # fmt: skip
    yield _Explanation(
        "X1", "", "rows", "rows of different requests are swapped",
        "the hashes of a row of another request in the same step", search.other_request(),
    )  # fmt: skip
    yield _Explanation(
        "X2", "order", "rows", "rows of a pass change places", "the hashes of another row of their pass",
        search.same_pass(),
    )  # fmt: skip
    yield _Explanation(
        "M3", "stale", "values", "features are those of an earlier step", "the hashes of a row of an earlier step",
        search.earlier(), masks=True,
    )  # fmt: skip


def _explain(search: HashSearch) -> list[Finding]:
    """The explanations that cover most, one of a kind."""
    known = list(_explanations(search))
    left = np.ones(len(search.rows), np.bool_)
    chosen: list[_Explanation] = []
    while known and left.any():
        best = max(known, key=lambda one: int((one.rows & left).sum()))  # of equals the first
        covered = int((best.rows & left).sum())
        if covered < max(_SECOND * len(left) if chosen else 1, 1):
            break
        chosen.append(best)
        left &= ~best.rows
        known = [one for one in known if one.kind != best.kind]
    return [_finding(search, one) for one in chosen]


def _finding(search: HashSearch, one: _Explanation) -> Finding:
    rows, covered, zeros = len(one.rows), int(one.rows.sum()), search.zeros() & ~one.rows
    evidence = [*_counts(search), f"{covered} of {rows} rows that differ carry {one.carries}"]
    if one.variant == "stale":
        evidence.append(
            f"{int((search.step_before() & one.rows).sum())} of these {covered} are of the step just before"
        )
    if covered < rows:
        nowhere = int((search.nowhere() & ~zeros & ~one.rows).sum())
        others = f"{int(zeros.sum())} are zeros, {nowhere} carry hashes that no emitted row has"
        evidence.append(f"of the other {rows - covered}, {others}")
    if one.variant == "stale":  # a buffer that nothing has been written to yet
        covered += int(zeros.sum())
    return Finding(
        fault=one.fault,
        variant=one.variant,
        title=one.title,
        evidence=tuple(evidence),
        confidence=round(covered / rows, 3),
        alike=one.alike,
        masks=one.masks and 2 * covered > len(search.mine),
    )


def _counts(search: HashSearch) -> list[str]:
    """How many rows differ, by the kind of pass, and in which slots."""
    sources = search.pairing.sources[search.mine]
    differs: Bool = np.asarray(search.differs_TA.any(1))
    prefill: Bool = search.pairing.emitted["phase"][sources] == Phase.PREFILL
    by_kind = ", ".join(
        f"{int(differs[which].sum())} of {int(which.sum())} {name}"
        for name, which in (("in prefill", prefill), ("after verification", ~prefill))
    )
    told = [
        f"{int(differs.sum())} of {len(differs)} received rows carry other hashes than were emitted for them: {by_kind}"
    ]
    slots, wide = search.slots, search.differs_TA.shape[1]
    if len(slots) < wide:
        told.append(f"they differ in {_names(slots)} of slots 0 to {wide - 1} alone")
    return told


def _names(slots: Int) -> str:
    return ("slot " if len(slots) == 1 else "slots ") + " and ".join(map(str, slots.tolist()))


def _changed(search: HashSearch, *, unexplained: bool) -> list[Finding]:
    """Rows whose hashes no emitted row has: their values were changed between the two."""
    nowhere = search.nowhere() & ~search.zeros() & ~search.own_slots()
    if not nowhere.any() or (not unexplained and nowhere.sum() < _SECOND * len(nowhere)):
        return []
    told = [*_counts(search), f"{int(nowhere.sum())} of {len(nowhere)} rows that differ carry hashes of no emitted row"]
    held = search.rows[nowhere]
    held = held[search.pairing.received.take(held).has("features")]
    if not len(held):
        told.append("their values were not recorded, so what changed them is not known")
        title = "values are changed on their way to the draft"
        return [Finding("D1", title, tuple(told), confidence=0.5, alike=("D2", "M3"), doubt=True)]
    sample = held[np.unique(np.linspace(0, len(held) - 1, _SAMPLE).astype(np.int64))]
    cast = _cast(search, sample)
    if cast is None:
        told.append(f"the values of {len(sample)} of these rows were read: they are no cast of what was emitted")
        title = "values are changed on their way to the draft, by no cast that was tried"
        return [Finding("D1", title, tuple(told), variant="other", confidence=0.5, alike=("D2", "M3"), doubt=True)]
    told += _cast_evidence(cast)
    title = f"features are cast through {cast.dtype} on their way to the draft"
    return [Finding("D1", title, tuple(told), variant=cast.variant, alike=("D2",) if "8" in cast.variant else ())]


def _cast(search: HashSearch, rows: Int) -> Cast | None:
    """By the values of some received rows, and of those emitted for them where they were recorded."""
    received = search.pairing.received.take(rows)
    emitted = search.pairing.emitted.take(search.pairing.sources[rows])
    features = received.tensor("features")
    known = emitted.tensor("slots") if emitted.has("slots").all() else None
    width = features.shape[1] // (search.received_TA.shape[1] or 1)
    columns = np.concatenate([slot * width + np.arange(width) for slot in search.slots])
    comparable = known is not None and known.shape == features.shape and known.dtype == features.dtype
    return find_cast(features[:, columns], known[:, columns] if known is not None and comparable else None)


def _cast_evidence(cast: Cast) -> Iterator[str]:
    yield f"all values of {cast.rows} of these rows that were read are exactly what {cast.dtype} can hold"
    if cast.overflown:
        yield f"{cast.overflown:.2%} of them are beyond its range, or at its end"
    if cast.exact is not None:
        yield f"{cast.exact} of {cast.rows} rows are the emitted ones cast to {cast.dtype} and back, bit for bit"

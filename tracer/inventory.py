"""What one writer's folder holds according to its ledger, and where files and ledger disagree."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from spectrace.tracer.ledger import NO_SEGMENT, RECORD_BYTES, Kind, Ledger, Reason, read_ledger
from spectrace.tracer.manifest import LEDGER, MANIFEST
from spectrace.tracer.problem import Problem
from spectrace.tracer.rows import FAMILIES, FAMILY, STREAMS, Stream
from spectrace.tracer.segment import segment_name
from spectrace.tracer.status import STATUS, Status

__all__ = ["SegmentView", "WriterView", "inventory"]


@dataclass(frozen=True, slots=True)
class SegmentView:
    """One segment as acknowledged: `extents` are ledger records in the order of the file."""

    path: Path
    name: str
    number: int
    stream: Stream
    extents: np.ndarray
    readable: np.ndarray

    @property
    def batches(self) -> np.ndarray:
        """The records of the batches whose bytes are all in the file."""
        return np.asarray(self.readable[self.readable["kind"] == Kind.BATCH])

    @property
    def rows(self) -> int:
        return int(self.batches["rows"].sum())


@dataclass(frozen=True, slots=True)
class WriterView:
    """One writer's folder."""

    name: str
    facts: Mapping[str, Any]
    ledger: Ledger
    segments: Mapping[int, SegmentView]
    status: Status | None

    def rows(self, family: str) -> int:
        """How many rows of a family it acknowledged."""
        return sum(
            view.rows
            for view in self.segments.values()
            if view.stream.wide is None and view.stream.family.name == family
        )

    def losses(self, family: str) -> int:
        """How many rows of a family it says are missing, for whatever reason."""
        records = self.ledger.records[self.ledger.records["kind"] == Kind.LOSS]
        return int(records["rows"][records["detail"] == FAMILIES.index(FAMILY[family]) + 1].sum())


def inventory(folder: Path, root_digest: str, problems: list[Problem]) -> WriterView:
    """Read the ledger and the sizes of the files; what is wrong is added to `problems`."""
    ledger = read_ledger((folder / LEDGER).read_bytes())
    facts, problem = _facts(folder, ledger, root_digest)
    problems.extend([problem] if problem else [])
    problems.extend(_ledger_problems(folder.name, ledger))
    segments = _segments(folder, ledger, problems)
    problems.extend(_strays(folder, ledger, segments))
    problems.extend(_losses(folder.name, ledger))
    problems.extend(_silences(folder.name, facts, segments))
    status = _status(folder, ledger, problems)
    return WriterView(folder.name, facts, ledger, segments, status)


def _facts(folder: Path, ledger: Ledger, root_digest: str) -> tuple[Mapping[str, Any], Problem | None]:
    name = f"{folder.name}/{MANIFEST}"
    records = ledger.records[ledger.records["kind"] == Kind.MANIFEST]
    try:
        data = (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        return {}, Problem(name, 0, "missing", 0, f"{name} is gone")
    if len(records) and (records[0]["length"], records[0]["digest"]) != (len(data), xxh3_64_intdigest(data)):
        return {}, Problem(name, 0, "manifest", 0, f"{name} is not as it was written")
    try:
        facts = dict(json.loads(data))
    except ValueError:
        return {}, Problem(name, 0, "manifest", 0, f"{name} is no JSON object")
    if facts.get("trace") != root_digest:
        text = f"{MANIFEST} has hash {root_digest}, but {name} says it belongs to {facts.get('trace')}"
        return facts, Problem(MANIFEST, 0, "manifest", 0, text)
    return facts, None


def _status(folder: Path, ledger: Ledger, problems: list[Problem]) -> Status | None:
    """What the process says of its recording, and what it admits to lack; None where it says nothing."""
    name, path = f"{folder.name}/{STATUS}", folder / STATUS
    ended = ledger.records[ledger.records["kind"] == Kind.STATUS]
    try:
        data = path.read_bytes()
        if len(ended) and (ended[0]["length"], ended[0]["digest"]) != (len(data), xxh3_64_intdigest(data)):
            raise ValueError
        status = Status.read(data)
    except (FileNotFoundError, ValueError) as error:
        if isinstance(error, ValueError) or len(ended):
            problems.append(Problem(name, 0, "manifest", 0, f"{name} is not as it was written"))
        return None
    lacks = {"hook": status.failed_hooks(), "steps": status.lost_steps(over=bool(len(ended)))}
    problems.extend(
        Problem(name, 0, kind, 0, f"{folder.name}: {line}") for kind, lines in lacks.items() for line in lines
    )
    return status


def _ledger_problems(writer: str, ledger: Ledger) -> Iterator[Problem]:
    name, end = f"{writer}/{LEDGER}", ledger.count * RECORD_BYTES
    for at in ledger.damaged:
        yield Problem(name, at * RECORD_BYTES, "ledger", 0, f"{name}: record {at} is damaged or out of its chain")
    seals = np.flatnonzero(ledger.records["kind"] == Kind.SEAL)
    if len(seals) and (seals[0] != len(ledger.records) - 1 or ledger.torn_bytes):
        yield Problem(name, end, "ledger", 0, f"{name} goes on behind its seal")
    elif ledger.torn_bytes:
        yield Problem(
            name, end, "torn", 0, f"{name} ends in {ledger.torn_bytes} bytes of a record that was never finished"
        )
    if not ledger.count:
        yield Problem(name, 0, "torn", 0, f"{name} has no records: the writer ended before it began")


def _segments(folder: Path, ledger: Ledger, problems: list[Problem]) -> dict[int, SegmentView]:
    records = ledger.records
    about = records[(records["kind"] >= Kind.OPEN) & (records["segment"] != NO_SEGMENT)]
    sealed = bool((records["kind"] == Kind.SEAL).any())
    order = np.argsort(about["segment"], kind="stable")
    numbers, starts = np.unique(about["segment"][order], return_index=True)
    views = {}
    for number, group in zip(numbers.tolist(), np.split(about[order], starts[1:]), strict=len(numbers) > 0):
        view = _segment(folder, number, group, sealed, problems)
        if view is not None:
            views[number] = view
    return views


def _segment(folder: Path, number: int, group: np.ndarray, sealed: bool, problems: list[Problem]) -> SegmentView | None:
    extents = group[group["kind"] != Kind.ABANDON]
    rows = int(extents["rows"].sum())
    stream = STREAMS.get(int(group[0]["detail"])) if group[0]["kind"] == Kind.OPEN else None
    if stream is None:
        text = f"{folder.name}/{LEDGER} does not say (any more) what segment {number} holds"
        problems.append(Problem(f"{folder.name}/{LEDGER}", 0, "gap", rows, text))
        return None
    path = folder / segment_name(number, stream.name)
    name = f"{folder.name}/{path.name}"
    ends = extents["offset"] + extents["length"]
    breaks = np.flatnonzero(extents["offset"] != np.concatenate([[0], ends[:-1]]))
    problems.extend(
        Problem(
            name,
            int(ends[at - 1]) if at else 0,
            "gap",
            0,
            f"{name}: no ledger record for the bytes before {extents[at]['offset']}",
        )
        for at in breaks.tolist()
    )
    if not path.exists():
        problems.append(Problem(name, 0, "missing", rows, f"{name} is gone, with {rows} rows"))
        return SegmentView(path, name, number, stream, extents, extents[:0])
    size = path.stat().st_size
    problems.extend(_ends(name, group, size, int(ends[-1]), sealed))
    return SegmentView(path, name, number, stream, extents, extents[ends <= size])


def _ends(name: str, group: np.ndarray, size: int, end: int, sealed: bool) -> Iterator[Problem]:
    """Hold a segment's length against what the ledger acknowledged."""
    closed, abandoned = (bool((group["kind"] == kind).any()) for kind in (Kind.CLOSE, Kind.ABANDON))
    if size < end:
        rows = int(group["rows"][group["offset"] + group["length"] > size].sum())
        yield Problem(name, size, "cut", rows, f"{name} has {size} bytes; the ledger acknowledged {end}")
    elif size > end and closed:
        yield Problem(name, end, "trailing", 0, f"{name} has {size - end} bytes behind its footer")
    elif size > end and sealed and not abandoned:
        yield Problem(name, end, "gap", 0, f"{name}: no ledger record for the bytes after {end}")
    elif size > end:
        yield Problem(name, end, "torn", 0, f"{name} ends in {size - end} bytes that were never acknowledged")
    elif sealed and not closed and not abandoned:
        yield Problem(name, end, "gap", 0, f"{name} was sealed, but has no footer")


def _strays(folder: Path, ledger: Ledger, segments: Mapping[int, SegmentView]) -> Iterator[Problem]:
    """Segment files the ledger does not know: opened but never acknowledged, or put there later."""
    sealed = bool((ledger.records["kind"] == Kind.SEAL).any())
    known = {view.path.name for view in segments.values()}
    for path in sorted(folder.glob("*.arrow")):
        if path.name not in known:
            name = f"{folder.name}/{path.name}"
            kind = "stray" if sealed else "torn"
            yield Problem(name, 0, kind, 0, f"{name} is in no ledger record: nothing in it was acknowledged")


def _losses(writer: str, ledger: Ledger) -> Iterator[Problem]:
    losses = ledger.records[ledger.records["kind"] == Kind.LOSS]
    for reason in (Reason.DROPPED, Reason.FAILED):
        for at, family in enumerate(FAMILIES, 1):
            mine = losses[(losses["reason"] == reason) & (losses["detail"] == at)]
            if rows := int(mine["rows"].sum()):
                text = f"{writer}: {rows} {family.name} rows {reason.name.lower()} while recording"
                offset = int(mine[0]["sequence"]) * RECORD_BYTES
                yield Problem(f"{writer}/{LEDGER}", offset, "lost", rows, text)


def _silences(writer: str, facts: Mapping[str, Any], segments: Mapping[int, SegmentView]) -> Iterator[Problem]:
    """A writer that promised families (`expects` in its facts) and brought no row of them: hooks are missing."""
    came = {view.stream.family.name for view in segments.values() if view.rows and view.stream.wide is None}
    expects = facts.get("expects", ())
    for family in expects if isinstance(expects, list) else ():
        if family not in came:
            yield Problem(f"{writer}/{LEDGER}", 0, "silent", 0, f"{writer} promised {family} rows and recorded none")

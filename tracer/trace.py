"""A trace being read, sealed or not: acknowledged rows, their tensors, and an honest account of what is missing."""

from __future__ import annotations

import shlex
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from spectrace.tracer.account import Account, FamilyAccount
from spectrace.tracer.crosscheck import miscounts
from spectrace.tracer.errors import TraceDamaged, UserError
from spectrace.tracer.inventory import SegmentView
from spectrace.tracer.ledger import RECORD_BYTES, Kind, Reason
from spectrace.tracer.mapped import MappedSegment
from spectrace.tracer.problem import Problem
from spectrace.tracer.rows import FAMILIES, FAMILY, Family
from spectrace.tracer.rowset import Rows
from spectrace.tracer.staging import as_tensor
from spectrace.tracer.status import Status
from spectrace.tracer.survey import Survey, survey
from spectrace.tracer.verify import verify

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Trace"]

_MAPPED_SEGMENTS: Final = 256


class Trace:
    """Opened with `Trace.open`; reads files lazily and keeps a bounded number of them mapped."""

    def __init__(self, found: Survey) -> None:
        self._found = found
        self._writers = list(found.writers.values())
        self._mapped: OrderedDict[tuple[int, int], MappedSegment] = OrderedDict()
        self._families: dict[str, Rows] = {}
        self._whole: Trace | None = None
        self._requests = np.empty(0, np.int64)
        self._bytes_read = sum(writer.ledger.count * RECORD_BYTES for writer in self._writers)

    @staticmethod
    def open(folder: Path | str, *, tolerant: bool = False) -> Trace:
        """Open without reading the segments. Visible damage raises, unless tolerant: then what is whole can be read."""
        found = survey(Path(folder))
        damage = [problem for problem in found.problems if problem.damage]
        if damage and not tolerant:
            more = f", the first of {len(damage)} problems" if len(damage) > 1 else ""
            raise TraceDamaged(
                f"{damage[0].message}{more}; `spectrace check {shlex.quote(str(folder))}` lists what is damaged and "
                "what it costs"
            )
        return Trace(found)

    @property
    def folder(self) -> Path:
        return self._found.folder

    @property
    def manifest(self) -> dict[str, Any]:
        """What decides the run: as it was known before it, and as the first writer that knows of its `run` adds."""
        told = (writer.facts.get("run") for writer in self._writers)
        return {**self._found.manifest, **next((run for run in told if isinstance(run, dict)), {})}

    @property
    def writers(self) -> dict[str, Mapping[str, Any]]:
        """Each writer's own facts, by its name."""
        return {writer.name: writer.facts for writer in self._writers}

    @property
    def statuses(self) -> dict[str, Status]:
        """What each process that hooks an engine says of how it records, by its writer's name."""
        return {writer.name: writer.status for writer in self._writers if writer.status}

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What is wrong, as far as ledgers and sizes of files tell."""
        return self._found.problems

    @property
    def sealed(self) -> bool:
        """The root seal is there and every writer is sealed."""
        return self._found.sealed

    def verify(self) -> list[Problem]:
        """Everything that is wrong, after hashing every byte of every file."""
        found = verify(self._found)
        return found if any(problem.damage for problem in found) else [*found, *miscounts(self)]

    def rows(self, family: str, **equals: object) -> Rows:
        """Acknowledged rows, in recorded order, writer by writer; `depth=0`, `request=[3, 4]` and so on choose rows."""
        if family not in FAMILY:
            raise UserError(f"there is no family {family!r}; there are {', '.join(FAMILY)}")
        if family not in self._families:
            whole = self._whole
            self._families[family] = (
                whole.rows(family).where(request=self._requests) if whole else self._load(FAMILY[family])
            )
        return self._families[family].where(**equals)

    def only(self, requests: Sequence[int] | np.ndarray) -> Trace:
        """The same trace with the rows of some requests alone; files are mapped once, and read once, for both."""
        part = copy(self)
        part._families, part._whole, part._requests = {}, self._whole or self, np.asarray(requests)
        return part

    def batches(self, family: str, kind: str, column: str | None = None) -> Iterator[Tensor]:
        """The tensors of one kind, batch by batch in recorded order, without copies and at flat memory."""
        wide = FAMILY[family].wide(kind)
        for _, view in self._views(family, wide.kind):
            if not len(view.batches):
                continue
            mapped = MappedSegment(view)  # not kept: its pages go when the caller lets go of the tensors
            name = column or mapped.schema.names[0]
            for place in view.batches["detail"].tolist():
                yield as_tensor(mapped.array(place, name), mapped.dtype(name))

    def account(self) -> Account:
        """Per family: expected, recorded, sampled away, dropped, failed, torn."""
        counts = {family.name: FamilyAccount() for family in FAMILIES}
        for writer in self._writers:
            for record in writer.ledger.records[writer.ledger.records["kind"] == Kind.LOSS]:
                name = FAMILIES[int(record["detail"]) - 1].name
                counts[name] = counts[name].minus(Reason(int(record["reason"])), int(record["rows"]))
        for name, count in counts.items():
            recorded = sum(view.rows for _, view in self._views(name, None))
            counts[name] = count.plus(recorded=recorded, torn=self._torn(name))
        return Account(counts)

    def families(self) -> dict[str, dict[str, int]]:
        """Acknowledged rows and bytes (narrow and wide) per family."""
        found = {family.name: {"rows": 0, "bytes": 0} for family in FAMILIES}
        for writer in self._writers:
            for view in writer.segments.values():
                of = found[view.stream.family.name]
                of["bytes"] += int(view.readable["length"].sum())
                of["rows"] += 0 if view.stream.wide else view.rows
        return found

    def mapped(self, writer: int, segment: int) -> MappedSegment:
        """A segment by the place of its writer and its number; the least recently used one is let go."""
        if self._whole:
            return self._whole.mapped(writer, segment)
        key = (writer, segment)
        if key not in self._mapped:
            view = self._writers[writer].segments.get(segment)
            if view is None or not len(view.readable):
                name = f"{self._writers[writer].name} segment {segment}"
                raise TraceDamaged(f"{name} is not here; run `spectrace check {self.folder}`")
            self._mapped[key] = MappedSegment(view)
            if len(self._mapped) > _MAPPED_SEGMENTS:
                self._bytes_read += self._mapped.popitem(last=False)[1].bytes_read
        self._mapped.move_to_end(key)
        return self._mapped[key]

    def release(self, *, above_bytes: int = 0) -> None:
        """Let go of all mapped segments, and so of their pages, once more than this was read of them.

        They are mapped again, and checked, when asked for.
        """
        if self._whole:
            self._whole.release(above_bytes=above_bytes)
        elif sum(mapped.bytes_read for mapped in self._mapped.values()) > above_bytes:
            self._bytes_read += sum(mapped.bytes_read for mapped in self._mapped.values())
            self._mapped.clear()

    @property
    def bytes_read(self) -> int:
        """Bytes of ledgers and segments that were read so far, those read again counted again."""
        if self._whole:
            return self._whole.bytes_read
        return self._bytes_read + sum(mapped.bytes_read for mapped in self._mapped.values())

    def any_of(self, family: str, kind: str) -> MappedSegment | None:
        """Some segment of a kind, to learn its layout from."""
        views = ((writer, view) for writer, view in self._views(family, kind) if len(view.readable))
        found = next(views, None)
        return None if found is None else self.mapped(found[0], found[1].number)

    def _views(self, family: str, kind: str | None) -> Iterator[tuple[int, SegmentView]]:
        for at, writer in enumerate(self._writers):
            for view in writer.segments.values():
                wide = view.stream.wide
                if view.stream.family.name == family and (wide.kind if wide else None) == kind:
                    yield at, view

    def _load(self, family: Family) -> Rows:
        tables, writers = [family.schema.empty_table()], [np.empty(0, np.int64)]
        for at, mapped, place in self._narrow(family):
            tables.append(pa.Table.from_batches([mapped.batch(place)], mapped.schema))
            writers.append(np.full(tables[-1].num_rows, at))
        table = pa.concat_tables(tables, promote_options="default")
        return Rows(family, table, np.concatenate(writers), self)

    def _narrow(self, family: Family) -> Iterator[tuple[int, MappedSegment, int]]:
        """Every batch of narrow rows, writer by writer, as they were written: into several segments by turns."""
        found = [
            (at, int(record["sequence"]), view.number, int(record["detail"]))
            for at, view in self._views(family.name, None)
            for record in view.batches
        ]
        for at, _, segment, place in sorted(found):
            yield at, self.mapped(at, segment), place

    def _torn(self, family: str) -> int:
        names = {
            view.name
            for writer in self._writers
            for view in writer.segments.values()
            if view.stream.family.name == family
        }
        return sum(problem.kind == "torn" and problem.segment in names for problem in self._found.problems)

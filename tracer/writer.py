"""One process's folder in a trace: its manifest, its ledger and its open segments.

Bytes first, then their ledger record; payload first, then the rows that point at it. After an error the segment is
abandoned and the next batch starts a new one, so nothing is ever appended behind a torn tail.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from xxhash import xxh3_64_intdigest

from spectrace.tracer.batching import Pointers, Prepared, narrow_batch, wide_batch
from spectrace.tracer.errors import UserError
from spectrace.tracer.ledger import Kind, LedgerWriter, Reason, Record
from spectrace.tracer.manifest import LEDGER, MANIFEST, render_json, write_atomic
from spectrace.tracer.rows import FAMILIES, STREAMS, Family, Stream
from spectrace.tracer.segment import Extent, SegmentWriter, segment_name
from spectrace.tracer.staging import Bits
from spectrace.tracer.status import STATUS

__all__ = ["FolderWriter", "Place"]

_OPEN_SEGMENTS: Final = 64
_WIDE_BYTES: Final = 1 << 20
"""A batch of tensors at most, unless one row is larger: whoever wants one row reads, and checks, its batch."""
_STREAM: Final = {(stream.family.name, stream.wide and stream.wide.kind): stream for stream in STREAMS.values()}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a batch went."""

    segment: int
    batch: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive rows of one kind; `start` is the first one's place among the narrow rows."""

    start: int
    rows: int
    tensors: Mapping[str, Bits]
    nbytes: int


class FolderWriter:
    """Writes batches of prepared rows. Not thread-safe: one thread owns it."""

    def __init__(self, folder: Path, facts: Mapping[str, Any], *, segment_bytes: int) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._segments: dict[object, SegmentWriter] = {}
        self._next_number = 0
        self._owed: list[Record] = []
        self._status = b""
        self._ledger = self._begin(facts)

    def write(self, family: Family, parts: Sequence[Prepared]) -> None:
        """Put the rows of several calls on disk, acknowledged when this returns."""
        if not self._ledger.present:
            raise OSError(f"{self._folder / LEDGER} was deleted while recording")
        pointers = {wide.kind: Pointers(sum(part.rows for part in parts)) for wide in family.wides}
        for wide in family.wides:
            self._write_wide(_STREAM[family.name, wide.kind], parts, pointers[wide.kind])
        batch = narrow_batch(family, parts, pointers)
        self._put(_STREAM[family.name, None], tuple(batch.schema.names), batch)

    @property
    def owes(self) -> bool:
        """Records that could not be written yet."""
        return bool(self._owed)

    def lose(self, family: str, reason: Reason, rows: int) -> None:
        """Owe the ledger a record of rows that are not here; `settle` pays."""
        place = next(at for at, one in enumerate(FAMILIES, 1) if one.name == family)
        self._owed.append(Record(Kind.LOSS, reason=reason, rows=rows, detail=place))

    def settle(self) -> None:
        """Write the records owed, if any."""
        if self._owed:
            self._ledger.append(self._owed)
            self._owed = []

    def tell(self, status: bytes) -> None:
        """Put the process's account of itself in the place of the last one."""
        if status != self._status:
            write_atomic(self._folder / STATUS, status)
            self._status = status

    def seal(self) -> None:
        """Close every segment and end the ledger; raises if that cannot be done, and then nothing is sealed."""
        for key in list(self._segments):
            self._close(key)
        self.settle()
        if not self._ledger.present:
            raise OSError(f"{self._folder / LEDGER} was deleted while recording")
        told = [Record(Kind.STATUS, length=len(self._status), digest=xxh3_64_intdigest(self._status))]
        self._ledger.append([*(told if self._status else []), Record(Kind.SEAL)])

    def release(self) -> None:
        """Give the files back, sealed or not."""
        for segment in self._segments.values():
            segment.abandon()
        self._segments.clear()
        self._ledger.close()

    def _begin(self, facts: Mapping[str, Any]) -> LedgerWriter:
        try:
            self._folder.mkdir()
        except FileExistsError:
            raise UserError(
                f"{self._folder} exists: another process records under this role, rank and incarnation, or did before; "
                "give the recorder another incarnation"
            ) from None
        except FileNotFoundError:
            raise UserError(f"{self._folder.parent} does not exist: start the trace with create_trace first") from None
        data = render_json(facts)
        write_atomic(self._folder / MANIFEST, data)
        ledger = LedgerWriter(self._folder / LEDGER)
        ledger.append([Record(Kind.MANIFEST, length=len(data), digest=xxh3_64_intdigest(data))])
        return ledger

    def _write_wide(self, stream: Stream, parts: Sequence[Prepared], pointers: Pointers) -> None:
        """One batch per layout: rows of other widths or element types live in segments of their own."""
        assert stream.wide is not None
        kind = stream.wide.kind
        layouts: dict[object, list[tuple[int, Prepared]]] = {}
        start = 0
        for part in parts:
            if kind in part.wides and part.rows:
                layouts.setdefault(part.layout(kind), []).append((start, part))
            start += part.rows
        for layout, placed in layouts.items():
            pieces = [piece for start, part in placed for piece in _pieces(start, part.wides[kind])]
            for together in _gathered(pieces):
                place = self._put(stream, layout, wide_batch([piece.tensors for piece in together]))
                row = 0
                for piece in together:
                    pointers.place(piece.start, piece.rows, segment=place.segment, batch=place.batch, row=row)
                    row += piece.rows

    def _put(self, stream: Stream, layout: object, batch: pa.RecordBatch) -> Place:
        segment = self._segment((stream.number, layout), stream, batch.schema)
        try:
            extents = segment.write(batch)
            place = Place(segment.number, segment.batches - 1)
            records = [_record(Kind.BATCH, segment, extents[-1], detail=place.batch, rows=batch.num_rows)]
            if len(extents) > 1:
                records.insert(0, _record(Kind.OPEN, segment, extents[0], detail=stream.number))
            self._ledger.append(records)
            segment.acknowledge(extents)
        except BaseException:
            self._abandon((stream.number, layout))
            raise
        return place

    def _segment(self, key: object, stream: Stream, schema: pa.Schema) -> SegmentWriter:
        """The open segment for these rows. A full one is closed before the next batch, so a close that fails costs
        only rows that were not acknowledged."""
        segment = self._segments.get(key)
        if segment is not None and segment.end >= self._segment_bytes:
            self._close(key)
            segment = None
        return segment or self._open(key, stream, schema)

    def _open(self, key: object, stream: Stream, schema: pa.Schema) -> SegmentWriter:
        if len(self._segments) >= _OPEN_SEGMENTS:
            self._close(next(iter(self._segments)))
        number, self._next_number = self._next_number, self._next_number + 1
        self._segments[key] = SegmentWriter(self._folder / segment_name(number, stream.name), number, schema)
        return self._segments[key]

    def _close(self, key: object) -> None:
        segment = self._segments[key]
        try:
            extent = segment.close()
            self._ledger.append([_record(Kind.CLOSE, segment, extent, detail=segment.batches)])
        except BaseException:
            self._abandon(key)
            raise
        del self._segments[key]

    def _abandon(self, key: object) -> None:
        segment = self._segments.pop(key)
        segment.abandon()
        if segment.end:
            self._owed.append(Record(Kind.ABANDON, segment=segment.number, offset=segment.end, detail=segment.batches))


def _pieces(start: int, tensors: Mapping[str, Bits]) -> Iterator[_Piece]:
    """One call's rows, in pieces of at most a batch's bytes."""
    rows = next(iter(tensors.values())).shape[0]
    row_bytes = sum(bits.array.nbytes for bits in tensors.values()) // rows
    step = max(_WIDE_BYTES // max(row_bytes, 1), 1)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        cut = {name: Bits(bits.array[first : first + count], bits.dtype) for name, bits in tensors.items()}
        yield _Piece(start + first, count, cut, count * row_bytes)


def _gathered(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces that make up a batch together."""
    together: list[_Piece] = []
    for piece in pieces:
        if together and sum(one.nbytes for one in together) + piece.nbytes > _WIDE_BYTES:
            yield together
            together = []
        together.append(piece)
    yield together


def _record(kind: Kind, segment: SegmentWriter, extent: Extent, *, detail: int, rows: int = 0) -> Record:
    return Record(
        kind,
        segment=segment.number,
        offset=extent.offset,
        length=extent.length,
        rows=rows,
        digest=extent.digest,
        detail=detail,
    )

"""A segment being written: one Arrow IPC file of one schema, and the extents that make it up.

What pyarrow writes is gathered by reference and goes to the OS in one unbuffered call per batch, so a failed write
surfaces here and never inside Arrow, and the bytes hashed are the bytes written.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
from xxhash import xxh3_64

__all__ = ["Extent", "SegmentWriter", "segment_name"]

_MAGIC_BYTES: Final = 8
_BUFFERS_PER_CALL: Final = 512


def segment_name(number: int, stream: str) -> str:
    return f"{number:05d}-{stream}.arrow"


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of a file's bytes and its xxh3_64."""

    offset: int
    length: int
    digest: int

    @property
    def end(self) -> int:
        return self.offset + self.length


class _Gather:
    """The file object pyarrow writes to: keeps the buffers, copies none."""

    closed = False

    def __init__(self) -> None:
        self.position = 0
        self._parts: list[memoryview] = []

    def write(self, data: bytes | pa.Buffer) -> int:
        view = memoryview(data).cast("B")
        if view.nbytes:
            self._parts.append(view)
            self.position += view.nbytes
        return view.nbytes

    def take(self) -> list[memoryview]:
        parts, self._parts = self._parts, []
        return parts

    def tell(self) -> int:
        return self.position

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    def flush(self) -> None:
        """Nothing is held back that `take` would not give."""

    def close(self) -> None:
        """The segment writer owns the file."""


class SegmentWriter:
    """Writes batches; after an error the segment must be abandoned, never written again."""

    def __init__(self, path: Path, number: int, schema: pa.Schema) -> None:
        self.path = path
        self.number = number
        self.batches = 0
        self.end = 0
        self._schema = schema
        self._sink = _Gather()
        self._arrow = pa.ipc.new_file(self._sink, schema)
        self._file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)

    def write(self, batch: pa.RecordBatch) -> list[Extent]:
        """Put a batch on disk; the first one brings the header's extent along."""
        self._arrow.write_batch(batch)
        header_bytes = 0 if self.batches else _MAGIC_BYTES + self._schema.serialize().size
        extents = self._commit(header_bytes)
        self.batches += 1
        return extents

    def close(self) -> Extent:
        """Write the end mark and the footer."""
        self._arrow.close()
        [extent] = self._commit(0)
        os.close(self._file)
        return extent

    def abandon(self) -> None:
        """Cut off what was not acknowledged, if the disk lets us; remove the file if that is all of it."""
        with suppress(OSError):
            os.ftruncate(self._file, self.end)
        with suppress(OSError):
            os.close(self._file)
        if not self.end:
            self.path.unlink(missing_ok=True)

    def acknowledge(self, extents: list[Extent]) -> None:
        """The ledger has these: they stay, whatever happens next."""
        self.end = extents[-1].end

    def _commit(self, header_bytes: int) -> list[Extent]:
        parts = self._sink.take()
        _write_all(self._file, parts)
        if not header_bytes:
            return [_extent(self.end, parts)]
        header, rest = _split(parts, header_bytes)
        return [_extent(0, header), _extent(header_bytes, rest)]


def _write_all(file: int, parts: list[memoryview]) -> None:
    """writev everything, going on after short writes."""
    at, skip = 0, 0
    while at < len(parts):
        views = [parts[at][skip:], *parts[at + 1 : at + _BUFFERS_PER_CALL]]
        written = os.writev(file, views) + skip
        while at < len(parts) and written >= parts[at].nbytes:
            written -= parts[at].nbytes
            at += 1
        skip = written


def _split(parts: list[memoryview], size: int) -> tuple[list[memoryview], list[memoryview]]:
    for at, part in enumerate(parts):
        if size < part.nbytes:
            return [*parts[:at], part[:size]], [part[size:], *parts[at + 1 :]]
        size -= part.nbytes
    return parts, []


def _extent(offset: int, parts: list[memoryview]) -> Extent:
    digest = xxh3_64()
    for part in parts:
        digest.update(part)
    return Extent(offset, sum(part.nbytes for part in parts), digest.intdigest())

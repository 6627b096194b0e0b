"""A segment being read: mapped into memory, handing out acknowledged batches only, each checked when first touched.

The map is private: a tensor over it may be written to without changing the file, and torch takes it as it is.
"""

from __future__ import annotations

import mmap
from typing import Final

import numpy as np
import pyarrow as pa
from xxhash import xxh3_64_intdigest

from spectrace.tracer.errors import TraceDamaged
from spectrace.tracer.inventory import SegmentView
from spectrace.tracer.rows import numpy_dtype

__all__ = ["MappedSegment"]

_MAGIC_BYTES: Final = 8


class MappedSegment:
    """Batches of one segment by their place in it."""

    def __init__(self, view: SegmentView) -> None:
        self.view = view
        with open(view.path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        _advise(self._map, "MADV_RANDOM")  # what is wanted is asked for batch by batch; nothing beside it
        self._buffer = pa.py_buffer(self._map)
        self._records = {int(record["detail"]): record for record in view.batches}
        self._columns: dict[tuple[int, str], np.ndarray] = {}
        self.bytes_read = 0
        self.schema: pa.Schema = self._read_schema()

    def batch(self, place: int) -> pa.RecordBatch:
        """The batch, over the map's memory."""
        record = self._records.get(place)
        if record is None:
            raise TraceDamaged(f"{self.view.name}: batch {place} is not here; run `spectrace check` on the trace")
        offset, length = self._checked(record)
        try:
            batch = pa.ipc.read_record_batch(self._buffer.slice(offset, length), self.schema)
            batch.validate()
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self._damaged(offset, str(error)) from error
        if batch.num_rows != record["rows"]:
            raise self._damaged(offset, f"{batch.num_rows} rows; the ledger says {record['rows']}")
        return batch

    def array(self, place: int, column: str) -> np.ndarray:
        """One tensor column of a batch, [rows, width], writable, over the map's memory."""
        key = (place, column)
        if key not in self._columns:
            values = self.batch(place).column(column).storage.flatten()
            data = values.buffers()[1]
            width = self.schema.field(column).type.shape[0]
            start = data.address - self._buffer.address
            dtype = numpy_dtype(values.type)
            flat = np.frombuffer(self._map, dtype, len(values), start)
            self._columns[key] = flat.reshape(-1, width)
        return self._columns[key]

    def dtype(self, column: str) -> str:
        """torch's name of the column's element type."""
        return str(self.schema.field(column).metadata[b"dtype"].decode())

    def _read_schema(self) -> pa.Schema:
        offset, length = self._checked(self.view.readable[0])
        try:
            return pa.ipc.read_schema(self._buffer.slice(offset + _MAGIC_BYTES, length - _MAGIC_BYTES))
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self._damaged(offset, str(error)) from error

    def _checked(self, record: np.ndarray) -> tuple[int, int]:
        offset, length = int(record["offset"]), int(record["length"])
        self.bytes_read += length
        start = offset - offset % mmap.PAGESIZE
        _advise(self._map, "MADV_WILLNEED", start, offset + length - start)
        if xxh3_64_intdigest(memoryview(self._map)[offset : offset + length]) != record["digest"]:
            raise self._damaged(offset, "the bytes are not those that were written")
        return offset, length

    def _damaged(self, offset: int, why: str) -> TraceDamaged:
        return TraceDamaged(f"{self.view.name} at byte {offset}: {why}; run `spectrace check` for all of the damage")


def _advise(mapped: mmap.mmap, advice: str, *span: int) -> None:
    """Where the system takes advice on how a map will be read."""
    if hasattr(mmap, advice):
        mapped.madvise(getattr(mmap, advice), *span)

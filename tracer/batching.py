"""From what one call handed over to Arrow batches: hash, check, merge, point at payloads.

Everything here runs on the writer's thread. A row that does not fit its columns fails alone, before it is merged
with rows of other calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from spectrace.tracer.fingerprint import row_hashes
from spectrace.tracer.rows import HASHES, POINTER, TOKENS, Column, Family, Level, Wide, numpy_dtype
from spectrace.tracer.staging import Bits, Staged

__all__ = ["Item", "Pointers", "Prepared", "Tensors", "kept", "narrow_batch", "prepare", "wide_batch"]


@dataclass(frozen=True, slots=True)
class Tensors:
    """The staged tensors of one kind, by column, and the width of one slot (None: one slot per tensor)."""

    columns: Mapping[str, Staged]
    slot_width: int | None = None

    @property
    def nbytes(self) -> int:
        return sum(staged.nbytes for staged in self.columns.values())


@dataclass(frozen=True, slots=True)
class Item:
    """One call's rows, on their way to the writer's thread; `level` says which of their tensors are kept."""

    family: Family
    rows: int
    columns: Mapping[str, object]
    tensors: Mapping[str, Tensors]
    level: Level
    nbytes: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """One call's rows, checked and hashed: narrow columns as arrays, wide ones as [rows, width]."""

    rows: int
    columns: Mapping[str, np.ndarray | list[np.ndarray]]
    wides: Mapping[str, Mapping[str, Bits]]
    nbytes: int

    def layout(self, kind: str) -> tuple[tuple[str, int, str], ...]:
        """What must be equal for rows to share a segment: names, widths and element types."""
        return tuple((name, bits.shape[1], bits.dtype) for name, bits in self.wides[kind].items())


@dataclass(slots=True)
class Pointers:
    """Where the tensors of one kind went, per row of a narrow batch."""

    rows: int
    segment: np.ndarray = field(init=False)
    batch: np.ndarray = field(init=False)
    row: np.ndarray = field(init=False)
    missing: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.segment, self.batch, self.row = (np.zeros(self.rows, np.uint32) for _ in range(3))
        self.missing = np.ones(self.rows, bool)

    def place(self, start: int, rows: int, *, segment: int, batch: int, row: int) -> None:
        span = slice(start, start + rows)
        self.segment[span], self.batch[span], self.missing[span] = segment, batch, False
        self.row[span] = np.arange(row, row + rows)

    def to_arrow(self) -> pa.Array:
        arrays = [_plain(array, pa.uint32()) for array in (self.segment, self.batch, self.row)]
        mask = pa.array(self.missing) if self.missing.any() else None
        return pa.StructArray.from_arrays(arrays, fields=list(POINTER), mask=mask)


def prepare(item: Item, fixed: Mapping[str, object]) -> Prepared:
    """Wait for the copies, hash, and bring every column to its type."""
    given = {**item.columns, **fixed}
    wides: dict[str, Mapping[str, Bits]] = {}
    for kind, tensors in item.tensors.items():
        wide = item.family.wide(kind)
        bits = {name: _rows_of(name, staged.wait(), item.rows) for name, staged in tensors.columns.items()}
        if wide.hashes:
            given[wide.hashes] = np.concatenate(
                [row_hashes(one, _slots(name, one, tensors.slot_width)) for name, one in bits.items()], axis=1
            )
        if item.level >= wide.level:
            wides[kind] = bits
    columns = {column.name: _column(column, given, item.rows) for column in item.family.columns}
    return Prepared(item.rows, columns, wides, item.nbytes)


def _rows_of(name: str, bits: Bits, rows: int) -> Bits:
    if bits.array.ndim < 2 or bits.shape[0] != rows or (not bits.array[:1].size and rows):
        raise ValueError(f"tensor {name!r} has shape {list(bits.shape)}; expected [{rows}, width], one row per key")
    return Bits(np.ascontiguousarray(bits.array).reshape(rows, int(np.prod(bits.shape[1:]))), bits.dtype)


def _slots(name: str, bits: Bits, slot_width: int | None) -> list[int]:
    width = bits.shape[1]
    if slot_width is None or slot_width == width:
        return [width]
    if slot_width <= 0 or width % slot_width:
        raise ValueError(f"tensor {name!r} is {width} wide, which is no multiple of its slot_width {slot_width}")
    return [slot_width] * (width // slot_width)


def _column(column: Column, given: Mapping[str, object], rows: int) -> np.ndarray | list[np.ndarray]:
    value = given.get(column.name)
    if isinstance(value, Bits):
        value = value.array
    if column.type in (HASHES, TOKENS):
        return _lists(column, value, rows)
    if value is None:
        if column.name == "node":
            return np.arange(rows, dtype=np.uint32)
        if not column.nullable:
            raise ValueError(f"column {column.name!r} is missing")
        value = _null(column)
    if column.type == pa.string():
        return np.full(rows, value, object) if isinstance(value, str) else np.array(value, object).reshape(rows)
    return _scalars(column, value, rows)


def _lists(column: Column, value: object, rows: int) -> np.ndarray | list[np.ndarray]:
    """One array per row, or a matrix where all are equally long; no value means empty lists."""
    dtype = numpy_dtype(column.type.value_type)
    if value is None:
        return np.empty((rows, 0), dtype)
    if isinstance(value, np.ndarray) and value.ndim == 2 and len(value) == rows:
        return value.astype(dtype, copy=False)
    lists = [np.asarray(one.array if isinstance(one, Bits) else one, dtype) for one in value]  # type: ignore[attr-defined]
    if len(lists) != rows:
        raise ValueError(f"column {column.name!r} has {len(lists)} lists; expected {rows}, one per key")
    return lists


def _scalars(column: Column, value: object, rows: int) -> np.ndarray:
    """Nulls stay encoded (negative, NaN) until the arrays are merged, so every type here is numpy's own."""
    array = np.asarray(value)
    if array.dtype == object:
        array = np.array([_null(column) if one is None else one for one in array.reshape(-1)])
    wanted = numpy_dtype(column.type)
    typed = array.astype(wanted, copy=False)
    if wanted.kind in "iu" and array.dtype != wanted and not np.array_equal(typed, array):
        raise ValueError(f"column {column.name!r} holds values that are no {wanted.name}: {array[typed != array][:4]}")
    if typed.ndim == 2 and typed.shape[1] == 1:  # one hash per row
        typed = typed[:, 0]
    return np.full(rows, typed) if typed.ndim == 0 else _exactly(column, typed, rows)


def _exactly(column: Column, array: np.ndarray, rows: int) -> np.ndarray:
    if array.shape != (rows,):
        raise ValueError(f"column {column.name!r} has shape {list(array.shape)}; expected [{rows}], one value per key")
    return array


def _null(column: Column) -> float | int:
    """How null is encoded: NaN, a negative number, or 0 for a hash."""
    if pa.types.is_floating(column.type):
        return np.nan
    return 0 if pa.types.is_unsigned_integer(column.type) else -1


def wide_batch(parts: Sequence[Mapping[str, Bits]]) -> pa.RecordBatch:
    """Rows of equal layout as one batch; a single part is not copied."""
    fields, arrays = [], []
    for name, first in parts[0].items():
        joined = _join([part[name].array for part in parts])
        values = joined.reshape(-1)
        kind = pa.fixed_shape_tensor(pa.from_numpy_dtype(values.dtype), [joined.shape[1]])
        storage = pa.FixedSizeListArray.from_arrays(_plain(values, kind.value_type), joined.shape[1])
        arrays.append(pa.ExtensionArray.from_storage(kind, storage))
        fields.append(pa.field(name, kind, nullable=False, metadata={"dtype": first.dtype}))
    return pa.record_batch(arrays, schema=pa.schema(fields))


def narrow_batch(family: Family, parts: Sequence[Prepared], pointers: Mapping[str, Pointers]) -> pa.RecordBatch:
    """The narrow rows of several calls as one batch, without columns in which all of them are null."""
    arrays = [_merge(column, [part.columns[column.name] for part in parts]) for column in family.columns]
    arrays += [pointers[wide.kind].to_arrow() for wide in family.wides]
    told = [(array, one) for array, one in zip(arrays, family.schema, strict=True) if array.null_count < len(array)]
    return pa.record_batch([array for array, _ in told], schema=pa.schema([one for _, one in told]))


def _merge(column: Column, parts: Sequence[np.ndarray | list[np.ndarray]]) -> pa.Array:
    if column.type in (HASHES, TOKENS):
        return _merge_lists(column, parts)
    joined = _join(parts)
    if column.nullable:
        null = np.isnan(joined) if joined.dtype.kind == "f" else joined < 0 if joined.dtype.kind == "i" else joined == 0
        return pa.array(joined, column.type, mask=null, from_pandas=False)
    return pa.array(joined, column.type) if joined.dtype.kind in "bO" else _plain(joined, column.type)


def _merge_lists(column: Column, parts: Sequence[np.ndarray | list[np.ndarray]]) -> pa.Array:
    lengths = [
        np.full(len(p), p.shape[1]) if isinstance(p, np.ndarray) else np.array([len(x) for x in p]) for p in parts
    ]
    flat = [one for p in parts for one in ([p.reshape(-1)] if isinstance(p, np.ndarray) else p)]
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int32)
    values = np.concatenate(flat).astype(numpy_dtype(column.type.value_type), copy=False) if flat else np.empty(0)
    return pa.ListArray.from_arrays(_plain(offsets, pa.int32()), _plain(values, column.type.value_type), column.type)


def _join(parts: Sequence[np.ndarray | list[np.ndarray]]) -> np.ndarray:
    arrays = [np.asarray(part) for part in parts]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _plain(array: np.ndarray, kind: pa.DataType) -> pa.Array:
    """An Arrow array without nulls over numpy's memory."""
    array = np.ascontiguousarray(array)
    return pa.Array.from_buffers(kind, len(array), [None, pa.py_buffer(array)])


def kept(wide: Wide, level: Level) -> bool:
    """Whether a kind has to be copied at all: to be stored, or to be hashed."""
    return level >= wide.level or wide.hashes is not None

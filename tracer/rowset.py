"""Rows of one family as read: narrow columns as numpy arrays, their tensors on demand.

Nulls come back as they went in: negative integers, NaN, and 0 for a hash.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa

from spectrace.tracer.errors import UserError
from spectrace.tracer.mapped import MappedSegment
from spectrace.tracer.rows import HASHES, TOKENS, Family, numpy_dtype
from spectrace.tracer.staging import as_tensor

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Rows", "Segments"]


_CHUNKS = 8
"""Of more the columns of some rows are put together: every choice among them costs time for each."""


class Segments(Protocol):
    """Where rows find the segments they point at."""

    def mapped(self, writer: int, segment: int) -> MappedSegment: ...

    def any_of(self, family: str, kind: str) -> MappedSegment | None: ...


class Rows:
    """Some rows of one family, in the order they were recorded, writer by writer."""

    def __init__(self, family: Family, table: pa.Table, writers: np.ndarray, segments: Segments) -> None:
        self.family = family
        self._table = table
        self._writers = writers
        self._segments = segments
        self._cache: dict[str, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self._writers)

    def __repr__(self) -> str:
        return f"<{len(self)} {self.family.name} rows: {', '.join(self.columns)}>"

    @property
    def columns(self) -> list[str]:
        pointers = {wide.pointer for wide in self.family.wides}
        return [name for name in self._table.column_names if name not in pointers]

    def __getitem__(self, column: str) -> np.ndarray:
        """A narrow column. `hashes` is a matrix where all rows have equally many; token lists are arrays of arrays."""
        if column not in self._cache:
            if column not in self.columns:
                raise UserError(
                    f"{self.family.name} rows have no column {column!r}; they have {', '.join(self.columns)}"
                )
            self._cache[column] = _to_numpy(self._table.column(column))
        return self._cache[column]

    def take(self, which: np.ndarray | Sequence[int] | slice) -> Rows:
        """Rows by mask, indices or slice."""
        chosen = which if isinstance(which, slice) else np.asarray(which)
        if isinstance(chosen, np.ndarray) and chosen.dtype == np.bool_:
            if chosen.all():
                return self
            table = self._table.filter(pa.array(chosen))  # chunk by chunk, where indices need all in one
            if table.column(0).num_chunks > _CHUNKS:
                table = table.combine_chunks()
            return Rows(self.family, table, self._writers[chosen], self._segments)
        indices = np.arange(len(self))[chosen]
        return Rows(self.family, self._table.take(pa.array(indices)), self._writers[indices], self._segments)

    def replaced(self, **columns: np.ndarray) -> Rows:
        """The same rows with other values in some narrow columns."""
        table = self._table
        for name, values in columns.items():
            table = table.set_column(table.column_names.index(name), name, pa.array(values))
        return Rows(self.family, table, self._writers, self._segments)

    def joined(self, other: Rows) -> Rows:
        """These rows and, behind them, others of the same family and trace."""
        table = pa.concat_tables([self._table, other._table], promote_options="permissive")
        return Rows(self.family, table, np.concatenate([self._writers, other._writers]), self._segments)

    def where(self, **equals: object) -> Rows:
        """Rows whose columns equal a value, or one of a collection of values."""
        mask = np.ones(len(self), bool)
        for column, value in equals.items():
            mask &= _matches(self[column], value)
        return self if mask.all() else self.take(mask)

    def has(self, kind: str) -> np.ndarray:
        """Which rows have a tensor of this kind."""
        pointer = self._table.column(self._wide(kind))
        return np.asarray(pointer.is_valid().to_numpy(), bool)

    def payload(self, kind: str, column: str | None = None) -> np.ndarray:
        """The rows' tensors as raw bits [rows, width], read-only; bfloat16 is uint16."""
        array = self._bits(kind, column)[0].view()
        array.flags.writeable = False
        return array

    def tensor(self, kind: str, column: str | None = None) -> Tensor:
        """The rows' tensors [rows, width]; over the file's memory where they lie in one piece, else gathered once."""
        return as_tensor(*self._bits(kind, column))

    def _wide(self, kind: str) -> str:
        kinds = [wide.kind for wide in self.family.wides]
        if kind not in kinds:
            raise UserError(f"{self.family.name} rows have no tensors {kind!r}; they have {', '.join(kinds) or 'none'}")
        return self.family.wide(kind).pointer

    def _bits(self, kind: str, column: str | None) -> tuple[np.ndarray, str]:
        pointer = self._table.column(self._wide(kind)).combine_chunks()
        if pointer.null_count:
            raise UserError(
                f"{pointer.null_count} of {len(self)} {self.family.name} rows have no {kind!r} tensor: "
                "the trace's level leaves it out, or the rows are of another depth; choose rows with has()"
            )
        if not len(self):
            return self._nothing(kind, column)
        segment, batch, row = (pointer.field(name).to_numpy().astype(np.int64) for name in ("segment", "batch", "row"))
        return self._gather(kind, column, np.stack([self._writers, segment, batch]), row)

    def _nothing(self, kind: str, column: str | None) -> tuple[np.ndarray, str]:
        found = self._segments.any_of(self.family.name, kind)
        if found is None:
            return np.empty((0, 0), np.float32), "float32"
        name = _column_name(found, kind, column)
        tensor = found.schema.field(name).type
        return np.empty((0, tensor.shape[0]), numpy_dtype(tensor.value_type)), found.dtype(name)

    def _gather(self, kind: str, column: str | None, batches: np.ndarray, row: np.ndarray) -> tuple[np.ndarray, str]:
        edges = [0, *(np.flatnonzero((batches[:, 1:] != batches[:, :-1]).any(axis=0)) + 1).tolist(), len(row)]
        runs = list(pairwise(edges))
        first, dtype = self._source(batches[:, 0], kind, column)
        if len(runs) == 1 and (piece := _piece(row)) is not None:
            return first[piece], dtype
        out = np.empty((len(row), first.shape[1]), first.dtype)
        for start, end in runs:
            source, found = self._source(batches[:, start], kind, column)
            if source.shape[1] != first.shape[1] or found != dtype:
                raise UserError(
                    f"{self.family.name} rows {start} and 0 have {kind!r} tensors of different layout "
                    f"({source.shape[1]} {found}, {first.shape[1]} {dtype}): choose rows of one layout"
                )
            out[start:end] = source[_piece(row[start:end]) or row[start:end]]
        return out, dtype

    def _source(self, batch: np.ndarray, kind: str, column: str | None) -> tuple[np.ndarray, str]:
        writer, segment, place = batch.tolist()
        mapped = self._segments.mapped(writer, segment)
        name = _column_name(mapped, kind, column)
        return mapped.array(place, name), mapped.dtype(name)


def _column_name(mapped: MappedSegment, kind: str, column: str | None) -> str:
    names = mapped.schema.names
    if column is None and len(names) == 1:
        return str(names[0])
    if column is None or column not in names:
        raise UserError(
            f"{mapped.view.name}: {kind!r} tensors are {', '.join(names)}; name one of them, not {column!r}"
        )
    return column


def _piece(row: np.ndarray) -> slice | None:
    """The rows as a slice, if they follow each other."""
    start = int(row[0])
    contiguous = int(row[-1]) - start == len(row) - 1 and bool((np.diff(row) == 1).all())
    return slice(start, start + len(row)) if contiguous else None


def _to_numpy(column: pa.ChunkedArray) -> np.ndarray:
    if column.type in (HASHES, TOKENS):
        return _lists(column)
    if column.type == pa.string():
        return np.array(column.to_pylist(), object)
    if column.null_count and not pa.types.is_floating(column.type):
        column = column.fill_null(0 if pa.types.is_unsigned_integer(column.type) else -1)
    return np.asarray(column.to_numpy())


def _lists(column: pa.ChunkedArray) -> np.ndarray:
    """Hashes of equal number as a matrix, any other lists as an array of arrays."""
    array = column.combine_chunks()
    values, lengths = array.flatten().to_numpy(), array.value_lengths().to_numpy()
    if column.type == HASHES and len(lengths) and (lengths == lengths[0]).all():
        return np.asarray(values).reshape(len(lengths), int(lengths[0]))
    out = np.empty(len(lengths), object)
    for at, part in enumerate(np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else ()):
        out[at] = part
    return out


def _matches(column: np.ndarray, value: object) -> np.ndarray:
    if isinstance(value, str) or not isinstance(value, (Collection, np.ndarray)):
        return np.asarray(column == value)
    return np.isin(column, value if isinstance(value, np.ndarray) else np.array(list(value)))

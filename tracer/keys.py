"""The key and attributes every row begins with, as one call hands them over."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import dataclass, replace
from typing import TypeGuard

import numpy as np

from spectrace.tracer.rows import Phase

__all__ = ["Keys"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Columns of equal length, or scalars that hold for every row; all scalars make one row.

    Columns are sequences, arrays or tensors. `node` left out is the row's offset in this call. Incarnation and rank
    belong to the recorder.
    """

    request: object
    pass_: object
    position: object
    depth: object = 0
    node: object = None
    phase: object = Phase.PREFILL
    round: object = -1
    step: object = 0
    live: object = True

    def columns(self) -> Mapping[str, object]:
        """By their names in a trace; `node` is left out where it is the offset."""
        named = {name.rstrip("_"): getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in named.items() if value is not None}

    def take(self, rows: np.ndarray) -> Keys:
        """Those of some of the rows, by their places; `node` has to be given."""
        taken = {name: np.asarray(one)[rows] for name in self.__slots__ if _is_column(one := getattr(self, name))}
        return replace(self, **taken)

    def __len__(self) -> int:
        """The longest column; a shorter one is found out when the rows are prepared."""
        columns = [value for value in self.columns().values() if _is_column(value)]
        return max((len(column) for column in columns), default=1)


def _is_column(value: object) -> TypeGuard[Sized]:
    """A 0-d array or tensor is a scalar, though it has a `__len__`, which raises."""
    return hasattr(value, "__len__") and getattr(value, "ndim", 1) > 0

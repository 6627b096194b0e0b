"""Tensors that are computed before they can be written, in a file without a name that goes with the process.

Boundaries come one after another for all rows, and a trace wants all boundaries of a row at once; together they may be
larger than memory, and the system keeps of them there what fits.
"""

import mmap
import os
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from spectrace.tracer.errors import UserError

__all__ = ["Scratch"]

_GIB = 1 << 30


class Scratch:
    """Boundaries [rows, width] of a fixed number of rows.

    Raises UserError where the disk that `beside` is on, or will be, has no room for them.
    """

    def __init__(self, beside: Path, boundaries: Sequence[int], rows: int, width: int, dtype: torch.dtype) -> None:
        folder = next(path for path in beside.absolute().parents if path.is_dir())
        nbytes = len(boundaries) * rows * width * dtype.itemsize
        self._places = {boundary: at for at, boundary in enumerate(boundaries)}
        with tempfile.TemporaryFile(dir=folder) as file:
            try:
                os.posix_fallocate(file.fileno(), 0, nbytes)
            except OSError as error:
                raise UserError(
                    f"{folder}: no room for {nbytes / _GIB:.2f} GiB ({error.strerror}): so much {len(boundaries)} "
                    f"boundaries of {rows} rows take while they are computed, and once more in the trace; free some, "
                    f"or record fewer boundaries or requests"
                ) from error
            memory = mmap.mmap(file.fileno(), nbytes)
        self.row_bytes = len(boundaries) * width * dtype.itemsize
        self._all = torch.frombuffer(memory, dtype=dtype).view(len(boundaries), rows, width)

    def keep(self, boundary: int, parts: Sequence[Tensor]) -> None:
        """A boundary of all rows, in parts that follow each other; of one that is not wanted, nothing is kept."""
        if boundary not in self._places:
            return
        borders = [0]
        for part in parts:
            borders.append(borders[-1] + len(part))
        for (start, end), part in zip(pairwise(borders), parts, strict=True):
            self._all[self._places[boundary], start:end] = part

    def read(self, rows: slice) -> dict[int, Tensor]:
        """The boundaries of some rows."""
        return {boundary: self._all[at, rows] for boundary, at in self._places.items()}

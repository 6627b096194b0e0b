"""How far paired rows of one tensor are apart: row by row, and over all of them, chunk by chunk.

An error is max|Δ| ÷ max|a| of the row. Shapes: N pairs, n pairs of a chunk, W width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spectrace.replay.inputs import Int

__all__ = ["ULP_BINS", "Distance", "Measure"]

ULP_BINS: Final = (0, 1, 2, 4, 16, 256)
_BITS: Final = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
_LOWEST: Final = 2.0**-40
_HIGHEST: Final = 2.0**24
_STEPS: Final = 1024
"""Errors are counted by size: what lies between two edges is told apart no further, a sixteenth of a doubling."""
_EDGES: Final = np.geomspace(_LOWEST, _HIGHEST, _STEPS + 1)


@dataclass(frozen=True, slots=True)
class Distance:
    """`rows` pairs, `equal` of them bit-equal; `unread` differ by their hashes, and a tensor is not in its trace.

    `inferred` of the equal ones are so by what they led to, and were neither hashed nor read. Errors are over rows
    that were read or are equal; `counts` are theirs by size. `squares` are |a - b|² and |a|² of all elements read,
    `cosine` is the least of a row. `ulp_counts` are elements by units in the last place (at most 0, 1, 2, 4, 16, 256;
    more), None where types differ.
    """

    rows: int
    equal: int
    unread: int
    inferred: int
    max_error: float | None
    total: float
    counts: Int
    squares: tuple[float, float]
    cosine: float | None
    ulp_counts: Int | None

    @property
    def bit_equal(self) -> bool:
        return self.equal == self.rows

    @property
    def mean_error(self) -> float | None:
        known = self.rows - self.unread
        return self.total / known if known else None

    @property
    def median_error(self) -> float | None:
        """To within four percent."""
        known = self.rows - self.unread
        if not known:
            return None
        at = (known - 1) // 2 - self.equal
        if at < 0:
            return 0.0
        step = int(np.searchsorted(np.cumsum(self.counts), at, side="right"))
        return min(float(_EDGES[min(step, _STEPS)]), self.max_error or 0.0)

    @property
    def relative_l2(self) -> float | None:
        """|a - b| ÷ |a|."""
        return (self.squares[0] / self.squares[1]) ** 0.5 if self.squares[1] else None

    @property
    def ulps(self) -> Mapping[str, float] | None:
        """Shares of the elements of rows that were read, by units in the last place."""
        if self.ulp_counts is None or not self.ulp_counts.sum():
            return None
        names = [*(f"<={edge}" if edge else "0" for edge in ULP_BINS), f">{ULP_BINS[-1]}"]
        return dict(zip(names, (self.ulp_counts / self.ulp_counts.sum()).tolist(), strict=True))

    def __add__(self, other: "Distance") -> "Distance":
        """Of the pairs of both."""
        errors = [one for one in (self.max_error, other.max_error) if one is not None]
        cosines = [one for one in (self.cosine, other.cosine) if one is not None]
        ulps = None
        if self.ulp_counts is not None and other.ulp_counts is not None:
            ulps = self.ulp_counts + other.ulp_counts
        return Distance(
            rows=self.rows + other.rows,
            equal=self.equal + other.equal,
            unread=self.unread + other.unread,
            inferred=self.inferred + other.inferred,
            max_error=max(errors, default=None),
            total=self.total + other.total,
            counts=self.counts + other.counts,
            squares=(self.squares[0] + other.squares[0], self.squares[1] + other.squares[1]),
            cosine=min(cosines, default=None),
            ulp_counts=ulps,
        )


class Measure:
    """Grows chunk by chunk; `equal` [N] are the pairs whose hashes, or what they led to, say that they are the same.

    `errors` [N] are those of the pairs, NaN where one was not read.
    """

    def __init__(self, equal: npt.NDArray[np.bool_], *, inferred: bool = False) -> None:
        self._equal, self._inferred = equal, inferred
        self.errors = np.where(equal, np.float32(0), np.float32(np.nan)).astype(np.float32)
        self._ulps: Int | None = np.zeros(len(ULP_BINS) + 1, np.int64)
        self._squares = torch.zeros(2, dtype=torch.float64)
        self._cosine = torch.inf

    def add(self, which: Int, a: Tensor, b: Tensor) -> None:
        """Compare pairs `which` [n], given as [n, W] each, in whatever types they were recorded."""
        if self._ulps is not None and a.dtype == b.dtype and a.dtype in _BITS:
            self._ulps += _ulp_counts(a, b)
        else:
            self._ulps = None
        a, b = a.float(), b.float()
        delta = a - b
        scale = a.abs().amax(-1)
        errors = delta.abs().amax(-1)
        errors = torch.where(errors == 0, errors, errors / scale)
        self.errors[which] = torch.nan_to_num(errors, nan=torch.inf, posinf=torch.inf).numpy()
        self._squares += torch.stack([delta.double().square().sum(), a.double().square().sum()])
        if len(a):
            self._cosine = min(self._cosine, float(torch.cosine_similarity(a, b, dim=-1).min()))

    def differ(self) -> None:
        """Nothing is to be read: pairs that are not equal differ, and the error of each is 1."""
        self.errors[~self._equal] = 1

    def distance(self) -> Distance:
        """What it came to."""
        known = self.errors[~np.isnan(self.errors)]
        apart = known[known > 0]
        counts = np.bincount(np.searchsorted(_EDGES, apart), minlength=_STEPS + 2).astype(np.int64)
        return Distance(
            rows=len(self.errors),
            equal=len(known) - len(apart),
            unread=len(self.errors) - len(known),
            inferred=int(self._equal.sum()) if self._inferred else 0,
            max_error=float(known.max()) if len(known) else None,
            total=float(known.sum(dtype=np.float64)),
            counts=counts,
            squares=(float(self._squares[0]), float(self._squares[1])),
            cosine=self._cosine if self._cosine <= 1.001 else None,
            ulp_counts=self._ulps,
        )


def _ulp_counts(a: Tensor, b: Tensor) -> Int:
    """How many elements are how many representable numbers apart, by `ULP_BINS`."""
    apart = (_ordered(a) - _ordered(b)).abs()
    edges = torch.tensor(ULP_BINS)
    counts = torch.bincount(torch.bucketize(apart, edges).reshape(-1), minlength=len(ULP_BINS) + 1)
    return counts.numpy()


def _ordered(values: Tensor) -> Tensor:
    """Integers in the order of the numbers, neighbours being one apart; both zeros are 0."""
    bits = values.contiguous().view(_BITS[values.dtype]).long()
    lowest = torch.iinfo(_BITS[values.dtype]).min
    return torch.where(bits < 0, lowest - bits, bits)

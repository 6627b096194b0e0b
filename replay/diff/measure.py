"""How far paired rows of one tensor are apart: per row, and over all of them, chunk by chunk.

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
_WORST: Final = 3


@dataclass(frozen=True, slots=True)
class Distance:
    """`rows` pairs, `equal` of them bit-equal; `unread` differ by their hashes, and a tensor is not in its trace.

    `inferred` of the equal ones are so by what they led to, and were neither hashed nor read.
    The errors are over rows that were read or are equal: `max_error`, `mean_error`, `median_error`. `relative_l2` is
    |a - b| ÷ |a| over all elements read, `cosine` the least of a row. `ulps` are shares of the elements of rows that
    differ, by units in the last place (at most 0, 1, 2, 4, 16, 256; more), None where the types differ. `worst` are
    places of pairs. `errors` [N] is NaN where a row was not read.
    """

    rows: int
    equal: int
    unread: int
    inferred: int
    max_error: float | None
    mean_error: float | None
    median_error: float | None
    relative_l2: float | None
    cosine: float | None
    ulps: Mapping[str, float] | None
    worst: tuple[int, ...]
    errors: npt.NDArray[np.float32]

    @property
    def bit_equal(self) -> bool:
        return self.equal == self.rows


class Measure:
    """Grows chunk by chunk; `equal` [N] are the pairs whose hashes, or what they led to, say that they are the same."""

    def __init__(self, equal: npt.NDArray[np.bool_], *, inferred: bool = False) -> None:
        self._equal, self._inferred = equal, inferred
        self._errors = np.where(equal, np.float32(0), np.float32(np.nan)).astype(np.float32)
        self._ulps: npt.NDArray[np.int64] | None = np.zeros(len(ULP_BINS) + 1, np.int64)
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
        self._errors[which] = torch.nan_to_num(errors, nan=torch.inf, posinf=torch.inf).numpy()
        self._squares += torch.stack([delta.square().sum(), a.square().sum()]).double()
        if len(a):
            self._cosine = min(self._cosine, float(torch.cosine_similarity(a, b, dim=-1).min()))

    def differ(self) -> None:
        """Nothing is to be read: pairs that are not equal differ, and the error of each is 1."""
        self._errors[~self._equal] = 1

    def distance(self) -> Distance:
        """What it came to."""
        known = self._errors[~np.isnan(self._errors)]
        read = bool(self._squares[1] > 0)
        ulps = None
        if read and self._ulps is not None:
            names = [*(f"<={edge}" if edge else "0" for edge in ULP_BINS), f">{ULP_BINS[-1]}"]
            ulps = dict(zip(names, (self._ulps / max(self._ulps.sum(), 1)).tolist(), strict=True))
        worst = np.argsort(-np.nan_to_num(self._errors, nan=-1), kind="stable")[:_WORST]
        return Distance(
            rows=len(self._errors),
            equal=int((self._errors == 0).sum()),
            unread=len(self._errors) - len(known),
            inferred=int(self._equal.sum()) if self._inferred else 0,
            max_error=float(known.max()) if len(known) else None,
            mean_error=float(known.mean(dtype=np.float64)) if len(known) else None,
            median_error=float(np.median(known)) if len(known) else None,
            relative_l2=float((self._squares[0] / self._squares[1]).sqrt()) if read else None,
            cosine=self._cosine if read else None,
            ulps=ulps,
            worst=tuple(int(at) for at in worst if self._errors[at] > 0),
            errors=self._errors,
        )


def _ulp_counts(a: Tensor, b: Tensor) -> npt.NDArray[np.int64]:
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

"""Which narrower type values have been through: all of them are exactly what that type can hold.

Shapes: N rows, W values of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

__all__ = ["Cast", "find_cast"]

# Narrowest first: what has been through one of them fits some of those behind it, too.
_TYPES: Final = (
    ("fp8", torch.float8_e4m3fn),
    ("fp8_e5m2", torch.float8_e5m2),
    ("bf16", torch.bfloat16),
    ("", torch.float16),
)


@dataclass(frozen=True, slots=True)
class Cast:
    """A type that rows have been cast through, of a fault's `variant`; `exact` of `rows` are the cast of what was
    emitted, bit for bit, where that was recorded, and `overflown` of all values were too large for it."""

    variant: str
    dtype: str
    overflown: float
    rows: int
    exact: int | None


def find_cast(received_NW: Tensor, emitted_NW: Tensor | None) -> Cast | None:
    """The type that all received values fit, None where there is none but their own.

    Where the emitted rows are known, most received ones have to be their cast, bit for bit. Where they are not, a type
    that any such values would fit says nothing, unless some are too large for it: these become infinite, or the
    largest number there is; engines do either.
    """
    values = received_NW.float()
    finite, own = values.isfinite(), torch.finfo(received_NW.dtype)
    if not bool(((values != 0) & finite).any()):
        return None
    for variant, dtype in _narrower(received_NW.dtype):
        fits = (_through(values, dtype) == values) | ~finite
        if not bool(fits.all()):
            continue
        narrow = torch.finfo(dtype)
        overflown = float((~finite | (values.abs() == narrow.max)).float().mean())
        exact = None if emitted_NW is None else _exact(received_NW, emitted_NW, dtype)
        if 2 * exact > len(values) if exact is not None else narrow.eps > own.eps or overflown:
            return Cast(variant, str(dtype).removeprefix("torch."), overflown, len(values), exact)
    return None


def _narrower(own: torch.dtype) -> Sequence[tuple[str, torch.dtype]]:
    return [(variant, dtype) for variant, dtype in _TYPES if dtype is not own and dtype.itemsize <= own.itemsize]


def _through(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype).to(values.dtype)


def _exact(received_NW: Tensor, emitted_NW: Tensor, dtype: torch.dtype) -> int:
    """How many received rows are the emitted ones cast through a type."""
    largest = torch.finfo(dtype).max
    plain, clamped = (_through(rows, dtype) for rows in (emitted_NW, emitted_NW.clamp(-largest, largest)))
    return int((_same(plain, received_NW) | _same(clamped, received_NW)).all(1).sum())


def _same(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | (a.isnan() & b.isnan())

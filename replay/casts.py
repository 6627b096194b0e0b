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
    emitted, bit for bit, where that was recorded, and `overflown` of all values are no numbers any more."""

    variant: str
    dtype: str
    overflown: float
    rows: int
    exact: int | None


def find_cast(received_NW: Tensor, emitted_NW: Tensor | None) -> Cast | None:
    """The type that all received values fit, None where there is none but their own.

    A type that any of these values would have fitted says nothing, unless the emitted rows show the cast.
    """
    values = received_NW.float()
    finite = values.isfinite()
    if not bool(((values != 0) & finite).any()):
        return None
    overflown = float((~finite).float().mean())
    for variant, dtype in _narrower(received_NW.dtype):
        fits = (_through(values, dtype) == values) | ~finite
        if not bool(fits.all()):
            continue
        exact = None if emitted_NW is None else int(_same(_through(emitted_NW, dtype), received_NW).all(1).sum())
        telling = torch.finfo(dtype).eps > torch.finfo(received_NW.dtype).eps or overflown > 0
        if exact or (exact is None and telling):
            return Cast(variant, str(dtype).removeprefix("torch."), overflown, len(values), exact)
    return None


def _narrower(own: torch.dtype) -> Sequence[tuple[str, torch.dtype]]:
    return [(variant, dtype) for variant, dtype in _TYPES if dtype is not own and dtype.itemsize <= own.itemsize]


def _through(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype).to(values.dtype)


def _same(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | (a.isnan() & b.isnan())

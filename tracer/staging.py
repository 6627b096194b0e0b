"""Copies of what an engine hands over, taken on its thread and never waited for there.

A copy from a device is queued on the producing stream into pinned memory and carries an event; only the writer
thread waits for it. bfloat16 and float8, which numpy lacks, travel as their bits beside torch's name of the type.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Bits", "Staged", "as_tensor", "bits_of", "stage"]

_BITS: Final[Mapping[int, np.dtype[Any]]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
}


@dataclass(frozen=True, slots=True)
class Bits:
    """A host array; `dtype` is torch's name of the element type, `array` holds its bits."""

    array: np.ndarray
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def wait(self) -> Bits:
        return self


class Staged(Protocol):
    """A copy on its way to the host."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...

    def wait(self) -> Bits: ...


@dataclass(frozen=True, slots=True)
class _InFlight:
    tensor: Tensor
    event: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    def wait(self) -> Bits:
        self.event.synchronize()
        return _tensor_bits(self.tensor)


def stage(value: object) -> Staged:
    """Copy an array, sequence or tensor of any device; returns without waiting for a device. A copy is not copied."""
    if isinstance(value, Bits | _InFlight):
        return value
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        array = np.array(value)
        return Bits(array, array.dtype.name)
    tensor = value.detach()
    if not tensor.is_cuda:
        return _tensor_bits(tensor.clone(memory_format=torch.contiguous_format).cpu())
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return _InFlight(host, event)


def bits_of(value: object) -> Bits:
    """The value's bits on the host, without a copy where the value is there already."""
    if isinstance(value, Bits):
        return value
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _tensor_bits(value.detach().cpu().contiguous())
    array = np.asarray(value)
    return Bits(array, array.dtype.name)


def as_tensor(array: np.ndarray, dtype: str) -> Tensor:
    """The tensor of element type `dtype` over the same memory."""
    import torch

    wanted: torch.dtype = getattr(torch, dtype)
    if array.dtype.name == dtype:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.dtype(f"i{array.itemsize}"))).view(wanted)


def _tensor_bits(tensor: Tensor) -> Bits:
    """Bits of a contiguous host tensor, sharing its memory."""
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    try:
        np.dtype(name)
    except TypeError:
        size = tensor.element_size()
        same_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
        return Bits(tensor.view(same_size).numpy().view(_BITS[size]), name)
    return Bits(tensor.numpy(), name)

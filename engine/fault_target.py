"""What faults do to boundaries, to the rows that are handed over, to their features, and to the tokens beside them.

Shapes: T rows, A slots, F target width.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from spectrace.engine.fault import Boundaries, HandedGroup, Setting, Tokens

__all__ = [
    "Constant", "Stale", "first_nodes", "lacks_slot", "norm_last", "own_at_chunks_end", "padded_row", "rows_before",
    "shifted", "swapped_requests", "through_fp8", "through_fp16",
]  # fmt: skip


def shifted(by: int, slot: int | None = None) -> Callable[[Boundaries, int], Boundaries]:
    """Every boundary, or that of one slot, so much too late, as far as the target has boundaries."""

    def wiring(boundaries: Boundaries, layers: int) -> Boundaries:
        return tuple(min(max(b + by, 0), layers) if slot in (None, at) else b for at, b in enumerate(boundaries))

    return wiring


def lacks_slot(slot: int) -> Callable[[Setting], str]:
    """Whether there is a slot of this number."""

    def lacks(setting: Setting) -> str:
        slots = len(setting.wiring)
        return "" if slot < slots else f"breaks slot {slot}, but the wiring has only {slots}, the first of them slot 0"

    return lacks


def norm_last(features_TAF: Tensor, norm: nn.Module) -> Tensor:
    """The last slot as it leaves the final norm; not by a call of the module, whose hooks keep what enters it."""
    width = norm.get_parameter("weight").shape[0]
    return torch.cat((features_TAF[:, :-width], norm.forward(features_TAF[:, -width:])), dim=-1)


class Constant:
    """Every row is the first one that came."""

    def __init__(self) -> None:
        self._first: Tensor | None = None

    def __call__(self, features_TAF: Tensor) -> Tensor:
        if self._first is None:
            self._first = features_TAF[:1].clone()
        return self._first.expand_as(features_TAF).clone()


class Stale:
    """The rows of the call before, from its first on again where they do not suffice; zeros in the first call."""

    def __init__(self) -> None:
        self._before: Tensor | None = None

    def __call__(self, features_TAF: Tensor) -> Tensor:
        before, self._before = self._before, features_TAF.clone()
        if before is None or not len(before):
            return torch.zeros_like(features_TAF)
        return before[torch.arange(len(features_TAF), device=before.device) % len(before)]


def through_fp16(features_TAF: Tensor) -> Tensor:
    """Ten bits of mantissa are left, and of what is above 65504 infinity."""
    return features_TAF.to(torch.float16).to(features_TAF.dtype)


def through_fp8(features_TAF: Tensor) -> Tensor:
    """Three bits of mantissa are left, and of what is above 448 that, as GPUs cast; nothing scales it before."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    return features_TAF.float().clamp(-largest, largest).to(torch.float8_e4m3fn).to(features_TAF.dtype)


def swapped_requests(groups: Sequence[HandedGroup]) -> list[Sequence[int]]:
    """The first two requests get each other's rows, as far as both have some."""
    rows: list[Sequence[int]] = [group.rows for group in groups]
    if len(rows) > 1:
        one, other = rows[:2]
        both = min(len(one), len(other))
        rows[:2] = [(*other[:both], *one[both:]), (*one[:both], *other[both:])]
    return rows


def rows_before(groups: Sequence[HandedGroup]) -> list[Sequence[int]]:
    """Each row is the one before it, the first itself."""
    return [(*group.rows[:1], *group.rows[:-1]) for group in groups]


def padded_row(groups: Sequence[HandedGroup]) -> list[Sequence[int]]:
    """The last accepted row of a round is the last of its window, one that was rejected if any was."""
    return [
        (*group.rows[: group.live - 1], group.rows[-1], *group.rows[group.live :]) if group.verifies else group.rows
        for group in groups
    ]


def first_nodes(groups: Sequence[HandedGroup]) -> list[Sequence[int]]:
    """For the accepted path of a tree as many nodes as it is long, in the order in which they were verified."""
    return [
        (*range(group.first, group.first + group.live), *group.rows[group.live :]) if group.verifies else group.rows
        for group in groups
    ]


def own_at_chunks_end(own: Tokens, after: Tokens, answers: bool) -> Tokens:
    """Inside a prompt the last row of a piece takes its own token."""
    return after if answers else (*after[:-1], own[-1])

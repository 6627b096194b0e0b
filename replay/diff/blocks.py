"""Blocks of the ranks' parts in the order in which they are the whole, found by nearness and not by trying orders.

Shapes: S sampled rows, B blocks, C columns of the widest block, W columns of the whole.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["NUMBERS", "Match", "blocks_of", "cuts_of", "match_blocks", "numbers_of", "sample_of", "sampled"]

_SAMPLE: Final = 32  # rows that are searched, fewer of wide ones; what is found there is compared on all
_SEARCHED: Final = 1 << 17  # numbers
_BLOCKS: Final = 1024  # of how many an arrangement is searched at most
NUMBERS: Final = 8  # in a block: fewer match by chance
_NEAR: Final = 0.25  # of a block's energy: what is unrelated is farther off


@dataclass(frozen=True, slots=True)
class Match:
    """An order of blocks, whether only this one fits, and how far the worst block is off, of its energy."""

    order: tuple[int, ...]
    alone: bool
    misfit: float


def match_blocks(blocks: Sequence[Tensor], whole: Tensor, tolerance: float) -> Match | None:
    """The order in which blocks [S, C_b] make up the whole [S, W]; None if none does.

    From left to right, the nearest of the blocks that are left. Columns count by their own size, and alike: a few
    large ones, as hidden states have, do not speak for the rest.
    """
    widths = torch.tensor([block.shape[-1] for block in blocks])
    widest = int(widths.max())
    padded_BSC = torch.stack([pad(block, (0, widest - block.shape[-1])) for block in blocks])
    mask_BC = torch.arange(widest) < widths[:, None]
    target = pad(whole, (0, widest))
    left, order, at, alone, misfit = list(range(len(blocks))), [], 0, True, 0.0
    while left:
        place_SC = target[:, at : at + widest]
        energy_BC = (padded_BSC[left] - place_SC).square().sum(1) / place_SC.square().sum(0).clamp_min(1e-30)
        apart_B = (energy_BC.clamp_max(1) * mask_BC[left]).sum(-1) / widths[left]
        nearest = float(apart_B.min())
        if nearest > _NEAR:
            return None
        like = (apart_B <= max(4 * nearest, tolerance**2)).nonzero().flatten().tolist()
        alone, misfit = alone and len(like) == 1, max(misfit, nearest)
        order.append(left.pop(like[0]))
        at += int(widths[order[-1]])
    return Match(tuple(order), alone, misfit)


def cuts_of(parts: Sequence[Tensor], whole: Tensor) -> list[int]:
    """Into how many equal blocks a part may be cut so that a block holds enough numbers."""
    widths = {part.shape[-1] for part in parts}
    numbers, least = numbers_of(whole) // whole.shape[-1] * min(widths), min(widths) if len(widths) == 1 else 1
    most = min(numbers // NUMBERS, _BLOCKS // len(parts), least)
    return [cut for cut in range(1, most + 1) if least % cut == 0]


def numbers_of(tensor: Tensor) -> int:
    """How many there are to go by in a sample of rows: equal rows say nothing twice."""
    return len(torch.unique(tensor[sample_of(len(tensor))], dim=0)) * tensor.shape[-1]


def sampled(parts: Sequence[Tensor], whole: Tensor, rows: bool) -> Iterator[Tensor]:
    """Some rows [S, W] of the parts and the whole, or some columns [S, T] where rows are split, of equal size each."""
    turned = [tensor.T if rows else tensor for tensor in (*parts, whole)]
    rows_, width = turned[-1].shape
    at = sample_of(rows_, max(_SEARCHED // width, 4))
    size = turned[-1][at].float().abs().amax(-1, keepdim=True)
    return (tensor[at].float() / torch.where(size > 0, size, 1) for tensor in turned)


def blocks_of(parts: Sequence[Tensor], cut: int, axis: int) -> list[Tensor]:
    return [block for part in parts for block in part.chunk(cut, axis)]


def sample_of(rows: int, most: int = _SAMPLE) -> Tensor:
    return torch.linspace(0, rows - 1, min(rows, most, _SAMPLE)).round().long()

"""Rotary position embedding for every published kind, one table of cosines per forward.

Shapes: T rows, N heads, D rotated width.
"""

import math

import torch
from torch import Tensor

from spectrace.engine.spec import RopeKind, RopeSpec

__all__ = ["inverse_frequencies", "rotary_table", "rotate"]


def inverse_frequencies(spec: RopeSpec, width: int) -> Tensor:
    """Angle per position of each of the D/2 pairs, float32 [D/2].

    Sources: RoFormer (arXiv 2104.09864) for the default, YaRN (arXiv 2309.00071) for `yarn`, Llama 3.1's reference code
    for `llama3`.
    """
    base = spec.theta ** -(torch.arange(0, width, 2, dtype=torch.float32) / width)
    match spec.kind:
        case RopeKind.DEFAULT:
            return base
        case RopeKind.LINEAR:
            return base / spec.factor
        case RopeKind.LLAMA3:
            return _llama3(spec, base)
        case RopeKind.YARN:
            return _yarn(spec, base, width)


def _llama3(spec: RopeSpec, base: Tensor) -> Tensor:
    turns = spec.original_context * base / (2 * math.pi)
    smooth = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    smooth = smooth.clamp(0, 1)
    return base / spec.factor * (1 - smooth) + base * smooth


def _yarn(spec: RopeSpec, base: Tensor, width: int) -> Tensor:
    def pair_with(turns: float) -> float:
        return width * math.log(spec.original_context / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = pair_with(spec.beta_fast), pair_with(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = (torch.arange(width // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    stretched = ramp.clamp(0, 1)
    return base / spec.factor * stretched + base * (1 - stretched)


def rotary_table(frequencies: Tensor, positions_T: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, 1, D/2] in float32, both multiplied by `scale` (YaRN's attention factor)."""
    angles = positions_T.to(torch.float32)[:, None, None] * frequencies
    return angles.cos() * scale, angles.sin() * scale


def rotate(x_TND: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate each pair of the last axis by its row's angle; what is beyond the table's width stays as it is."""
    width = 2 * cos.shape[-1]
    turned, still = x_TND[..., :width], x_TND[..., width:]
    if interleaved:
        a, b = turned[..., 0::2].float(), turned[..., 1::2].float()
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).to(x_TND.dtype)
    else:
        a, b = turned.float().chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x_TND.dtype)
    return torch.cat((turned, still), dim=-1) if still.shape[-1] else turned

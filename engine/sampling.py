"""Sampling: the draws of a call, and tokens chosen by them.

Every draw is a function of seed, request and position alone, so that neither batching, nor chunks, nor the number of
ranks change an answer. Draws are from Philox (Salmon et al., SC 2011), keyed rather than stepped.

Shapes: V vocabulary.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["GREEDY", "Float", "Purpose", "Sampling", "choose", "softmax", "uniforms"]

Float = npt.NDArray[np.float64]


class Purpose(IntEnum):
    """What a draw decides; draws for different purposes are independent."""

    VERIFY = 0
    DRAFT = 1


@dataclass(frozen=True, slots=True)
class Sampling:
    """Temperature 0 is greedy. `sampled_drafts` draws the drafts, too, from the draft's own distribution."""

    temperature: float = 0.0
    seed: int = 0
    sampled_drafts: bool = False


GREEDY: Final = Sampling()


def uniforms(sampling: Sampling, purpose: Purpose, request: int, position: int, count: int) -> Float:
    """`count` draws from [0, 1) for what follows the token at a position of a request's text."""
    philox = np.random.Philox(key=[sampling.seed, request << 1 | purpose], counter=[0, position, 0, 0])
    return np.random.Generator(philox).random(count)


def softmax(logits: npt.NDArray[np.floating], temperature: float) -> Float:
    """Probabilities over the last axis, in double precision."""
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True))


def choose(weights_V: Float, draw: float, *, total: float | None = None) -> int:
    """The token whose share of the weights' running sum holds the draw; `total` None is the weights' own sum."""
    running = np.cumsum(weights_V)
    place = int(np.searchsorted(running, draw * (running[-1] if total is None else total), side="right"))
    return min(place, int(np.flatnonzero(weights_V)[-1]))

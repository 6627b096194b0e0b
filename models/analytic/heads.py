"""Attention heads that look a fixed number of rows back, by position alone, for grouped-query and latent attention.

Query and key are the same vector at every row, the query turned back by so many positions: their product, a sum of
cosines of what is missing to that distance, has its peak there. The head gets a plain copy of the row it looks at; the
first row of a text stands for all that would be before it.

Shapes: X input width, N heads, M key heads, D key width.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from analytic.stream import WIDTH, TargetStream, rms
from torch import Tensor

__all__ = ["HEADS", "KEY_HEADS", "LATENT", "ROPE_WIDTH", "VALUE_WIDTH", "Head", "Heads", "gqa_weights", "mla_weights"]

HEADS, KEY_HEADS, ROPE_WIDTH, VALUE_WIDTH = 4, 2, 32, 32
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": ROPE_WIDTH,
          "v_head_dim": VALUE_WIDTH}  # fmt: skip
_PAIRS = range(1, 5)  # those that turn by 0.56 to 0.1 a row: the nearest row to the wanted one always wins
_PEAK = 1000.0  # of query times key in each pair; the next best row's softmax weight is below 1e-9


@dataclass(frozen=True, slots=True)
class Head:
    """Looks `back` rows back, and writes value i there to each of `writes[i]`."""

    back: int
    writes: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Heads:
    """A layer's heads over one list of values: multiples of the input columns, whose squares add up to `square`.

    The input's first columns are a row of the target's stream: its ONE makes queries and keys.
    """

    inputs: int
    values: Mapping[int, float]
    square: float
    heads: tuple[Head, ...]


def _vector(back: int, theta: float, *, interleaved: bool) -> Tensor:
    """The query for a row so far back, [D]; the key is the one for zero rows."""
    vector = torch.zeros(ROPE_WIDTH)
    for pair in _PAIRS:
        angle = torch.tensor(-back * theta ** (-2 * pair / ROPE_WIDTH))
        first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + ROPE_WIDTH // 2)
        vector[first], vector[second] = angle.cos(), angle.sin()
    return vector * math.sqrt(_PEAK)


def _reading(heads: Heads, vector: Tensor) -> Tensor:
    """The projection [D, X] that gives a vector at every row."""
    weight = torch.zeros(len(vector), heads.inputs)
    weight[:, TargetStream.ONE] = vector / TargetStream.LOUD
    return weight


def _values(heads: Heads, width: int) -> Tensor:
    weight = torch.zeros(width, heads.inputs)
    weight[range(len(heads.values)), list(heads.values)] = torch.tensor(list(heads.values.values()))
    return weight


def _output(heads: Heads) -> Tensor:
    weight = torch.zeros(WIDTH, HEADS * VALUE_WIDTH)
    for number, head in enumerate(heads.heads):
        for value, targets in head.writes.items():
            weight[list(targets), number * VALUE_WIDTH + value] = 1
    return weight


def gqa_weights(heads: Heads, *, theta: float, head_norms: bool = False) -> dict[str, Tensor]:
    """Grouped-query attention, in some families with norms of each head: what they norm is always as long."""
    backs = [head.back for head in heads.heads] + [0] * (HEADS - len(heads.heads))
    queries = [_reading(heads, _vector(back, theta, interleaved=False)) for back in backs]
    weights = {
        "q_proj.weight": torch.cat(queries),
        "k_proj.weight": _reading(heads, _vector(0, theta, interleaved=False)).repeat(KEY_HEADS, 1),
        "v_proj.weight": _values(heads, VALUE_WIDTH).repeat(KEY_HEADS, 1),
        "o_proj.weight": _output(heads),
    }
    if head_norms:
        length = torch.full((ROPE_WIDTH,), rms(_PEAK * len(_PAIRS), ROPE_WIDTH))
        weights |= {"q_norm.weight": length, "k_norm.weight": length}
    return weights


def mla_weights(heads: Heads, *, theta: float) -> dict[str, Tensor]:
    """Latent attention: the query's latent is a constant, the other one holds the values; positions do the rest."""
    rank, kv_rank, nope = LATENT["q_lora_rank"], LATENT["kv_lora_rank"], LATENT["qk_nope_head_dim"]
    q_up = torch.zeros(HEADS, nope + ROPE_WIDTH, rank)
    for number, head in enumerate(heads.heads):
        q_up[number, nope:, 0] = _vector(head.back, theta, interleaved=True)
    kv_up = torch.zeros(HEADS, nope + VALUE_WIDTH, kv_rank)
    kv_up[:, nope:, :VALUE_WIDTH] = torch.eye(VALUE_WIDTH, kv_rank)
    constant = torch.zeros(rank)
    constant[0] = 1
    key = _reading(heads, _vector(0, theta, interleaved=True))
    return {
        "q_a_proj.weight": _reading(heads, constant),
        "q_a_layernorm.weight": torch.full((rank,), rms(1.0, rank)),
        "q_b_proj.weight": q_up.flatten(0, 1),
        "kv_a_proj_with_mqa.weight": torch.cat([_values(heads, kv_rank), key]),
        "kv_a_layernorm.weight": torch.full((kv_rank,), rms(heads.square, kv_rank)),
        "kv_b_proj.weight": kv_up.flatten(0, 1),
        "o_proj.weight": _output(heads),
    }

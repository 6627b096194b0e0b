"""Attention of the draft: the two projections (GQA, MLA), and who may look at whom.

The projections turn rows into queries, keys and values; an `Attend` decides which keys each row sees and keeps them.
That split lets one `DraftModel` run packed in the engine, by whole requests in replay and unrolled in training.

Shapes: T rows, S keys, X input width (2H in the first layer, H in later ones), N query heads, M key heads, D key
width, E value width, H draft width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spectrace.engine.spec import DraftSpec, GqaSpec, MlaSpec

__all__ = [
    "Attend",
    "GroupedQueryAttention",
    "KeyValueCache",
    "LatentAttention",
    "PackedAttend",
    "Reach",
    "RmsNorm",
    "Turn",
    "attend_dense",
    "attention_of",
]

Turn: TypeAlias = Callable[[Tensor], Tensor]


class RmsNorm(nn.Module):
    """x / rms(x) * weight over the last axis, in float32 (arXiv 1910.07467); Gemma's weights are less by 1."""

    def __init__(self, width: int, spec: DraftSpec) -> None:
        super().__init__()
        self.eps, self.unit_offset = spec.norm_eps, spec.unit_offset_norms
        self.weight = nn.Parameter(torch.zeros(width) if self.unit_offset else torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.unit_offset:
            return (wide * (1 + self.weight.float())).to(x.dtype)
        return self.weight * wide.to(x.dtype)


@dataclass(frozen=True, slots=True)
class Reach:
    """Which layer asks, and how many positions back its rows see, their own included; None: all of them.

    `from_text`: rows of depth d see d positions more, so as many of the text as the row that they are below.
    """

    layer: int
    window: int | None
    from_text: bool = False

    @classmethod
    def of(cls, spec: DraftSpec, layer: int) -> "Reach":
        """What a draft's layer sees."""
        return cls(layer, spec.windows[layer], spec.window_from_text)

    def at(self, depth: int) -> int | None:
        """The window of rows of a depth."""
        return self.window + depth * self.from_text if self.window else None


class Attend(Protocol):
    """Given the new rows' queries, keys and values, return each row's mix [T, N, E] of the values it may see."""

    def __call__(self, q_TND: Tensor, k_TMD: Tensor, v_TME: Tensor, *, reach: Reach, scale: float) -> Tensor: ...


def attend_dense(q_TND: Tensor, k_SMD: Tensor, v_SME: Tensor, mask_TS: Tensor, *, scale: float) -> Tensor:
    """Softmax attention under a boolean mask (true: visible), query heads sharing key heads in order."""
    out = F.scaled_dot_product_attention(
        q_TND.transpose(0, 1)[None],
        k_SMD.transpose(0, 1)[None],
        v_SME.transpose(0, 1)[None],
        attn_mask=mask_TS,
        scale=scale,
        enable_gqa=q_TND.shape[1] != k_SMD.shape[1],
    )
    return out[0].transpose(0, 1)


class KeyValueCache:
    """Keys and values of every cached draft row, by layer, packed over requests; row i belongs to whoever the caller
    says.
    """

    def __init__(self) -> None:
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return len(self._layers[0][0]) if self._layers else 0

    def append(self, layer: int, k_TMD: Tensor, v_TME: Tensor) -> tuple[Tensor, Tensor]:
        """Add rows of a layer and return all its keys and values, old rows first."""
        if layer in self._layers:
            keys, values = self._layers[layer]
            k_TMD, v_TME = torch.cat((keys, k_TMD)), torch.cat((values, v_TME))
        self._layers[layer] = k_TMD, v_TME
        return k_TMD, v_TME

    def keep(self, rows: Tensor) -> None:
        """Keep the rows of an index, in its order."""
        for layer, (keys, values) in self._layers.items():
            self._layers[layer] = keys.index_select(0, rows), values.index_select(0, rows)


class PackedAttend:
    """Rows of many requests, all of one depth: new rows go behind the cached ones.

    `seen` [T, S + T] says what each sees, `within` which of it are fewer than so many positions back.
    """

    def __init__(
        self,
        cache: KeyValueCache,
        seen: Tensor,
        within: Callable[[int], Tensor] | None = None,
        *,
        depth: int = 0,
    ) -> None:
        self.cache, self.depth = cache, depth
        self._seen, self._within = seen, within

    def __call__(self, q_TND: Tensor, k_TMD: Tensor, v_TME: Tensor, *, reach: Reach, scale: float) -> Tensor:
        keys, values = self.cache.append(reach.layer, k_TMD, v_TME)
        window, seen = reach.at(self.depth), self._seen
        if window is not None:
            assert self._within
            seen = seen & self._within(window)
        return attend_dense(q_TND, keys, values, seen, scale=scale)


class GroupedQueryAttention(nn.Module):
    """Multi-head attention whose query heads share key heads."""

    def __init__(self, spec: DraftSpec, shape: GqaSpec, layer: int) -> None:
        super().__init__()
        self.shape, self.reach = shape, Reach.of(spec, layer)
        inputs, dim = spec.width * (1 if layer else 2), shape.head_dim
        self.q = nn.Linear(inputs, shape.heads * dim, bias=shape.qkv_bias)
        self.k = nn.Linear(inputs, shape.kv_heads * dim, bias=shape.qkv_bias)
        self.v = nn.Linear(inputs, shape.kv_heads * dim, bias=shape.qkv_bias)
        self.o = nn.Linear(shape.heads * dim, spec.width, bias=shape.o_bias)
        if shape.head_norms:
            self.q_norm, self.k_norm = RmsNorm(dim, spec), RmsNorm(dim, spec)

    def forward(self, x_TX: Tensor, turn: Turn, attend: Attend) -> Tensor:
        # The number of heads is this rank's: of a tensor-parallel draft every rank has some of them.
        q_TND, k_TMD, v_TMD = (one(x_TX).unflatten(-1, (-1, self.shape.head_dim)) for one in (self.q, self.k, self.v))
        if self.shape.head_norms:
            q_TND, k_TMD = self.q_norm(q_TND), self.k_norm(k_TMD)
        mixed_TND = attend(turn(q_TND), turn(k_TMD), v_TMD, reach=self.reach, scale=self.shape.head_dim**-0.5)
        out: Tensor = self.o(mixed_TND.flatten(-2))
        return out


class LatentAttention(nn.Module):
    """DeepSeek's MLA; keys and values are expanded from the latent before they are cached."""

    def __init__(self, spec: DraftSpec, shape: MlaSpec, layer: int) -> None:
        super().__init__()
        self.shape, self.reach = shape, Reach.of(spec, layer)
        inputs, heads, key_dim = spec.width * (1 if layer else 2), shape.heads, shape.key_dim
        if shape.q_rank is None:
            self.q = nn.Linear(inputs, heads * key_dim, bias=False)
        else:
            self.q_down = nn.Linear(inputs, shape.q_rank, bias=False)
            self.q_norm = RmsNorm(shape.q_rank, spec)
            self.q_up = nn.Linear(shape.q_rank, heads * key_dim, bias=False)
        self.kv_down = nn.Linear(inputs, shape.kv_rank + shape.rope_dim, bias=False)
        self.kv_norm = RmsNorm(shape.kv_rank, spec)
        self.kv_up = nn.Linear(shape.kv_rank, heads * (shape.nope_dim + shape.value_dim), bias=False)
        self.o = nn.Linear(heads * shape.value_dim, spec.width, bias=False)

    def forward(self, x_TX: Tensor, turn: Turn, attend: Attend) -> Tensor:
        shape = self.shape
        q = self.q(x_TX) if shape.q_rank is None else self.q_up(self.q_norm(self.q_down(x_TX)))
        q_nope, q_rope = q.unflatten(-1, (-1, shape.key_dim)).split((shape.nope_dim, shape.rope_dim), dim=-1)
        latent, k_rope = self.kv_down(x_TX).split((shape.kv_rank, shape.rope_dim), dim=-1)
        expanded = self.kv_up(self.kv_norm(latent)).unflatten(-1, (-1, shape.nope_dim + shape.value_dim))
        k_nope, v_TNE = expanded.split((shape.nope_dim, shape.value_dim), dim=-1)
        q_TND = torch.cat((q_nope, turn(q_rope)), -1)
        k_TND = torch.cat((k_nope, turn(k_rope[:, None]).expand_as(q_rope)), -1)
        scale = shape.key_dim**-0.5 * shape.softmax_scale
        out: Tensor = self.o(attend(q_TND, k_TND, v_TNE, reach=self.reach, scale=scale).flatten(-2))
        return out


def attention_of(spec: DraftSpec, layer: int) -> GroupedQueryAttention | LatentAttention:
    """The attention of one layer."""
    if isinstance(spec.attention, MlaSpec):
        return LatentAttention(spec, spec.attention, layer)
    return GroupedQueryAttention(spec, spec.attention, layer)

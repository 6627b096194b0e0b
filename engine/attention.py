"""Attention of the draft: the two projections (GQA, MLA), and who may look at whom.

The projections turn rows into queries, keys and values; an `Attend` decides which keys each row sees and keeps them.
That split lets one `DraftModel` run packed in the engine, by whole requests in replay and unrolled in training.

Shapes: T rows, S keys, X input width (2H), N query heads, M key heads, D key width, E value width, H draft width.
"""

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spectrace.engine.rope import inverse_frequencies, rotary_table, rotate
from spectrace.engine.spec import DraftSpec, GqaSpec, MlaSpec

__all__ = [
    "Attend",
    "GroupedQueryAttention",
    "KeyValueCache",
    "LatentAttention",
    "PackedAttend",
    "RmsNorm",
    "attend_dense",
]


class RmsNorm(nn.Module):
    """x / rms(x) * weight over the last axis, the mean taken in float32 (arXiv 1910.07467)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attend(Protocol):
    """Given the new rows' queries, keys and values, return each row's mix [T, N, E] of the values it may see."""

    def __call__(self, q_TND: Tensor, k_TMD: Tensor, v_TME: Tensor, *, scale: float) -> Tensor: ...


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
    """Keys and values of every cached draft row, packed over requests; row i belongs to whoever the caller says."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def __len__(self) -> int:
        return 0 if self.keys is None else self.keys.shape[0]

    def append(self, k_TMD: Tensor, v_TME: Tensor) -> tuple[Tensor, Tensor]:
        """Add rows and return all keys and values, old rows first."""
        if self.keys is None or self.values is None:
            self.keys, self.values = k_TMD, v_TME
        else:
            self.keys, self.values = torch.cat((self.keys, k_TMD)), torch.cat((self.values, v_TME))
        return self.keys, self.values

    def keep(self, rows: Tensor) -> None:
        """Keep the rows of an index, in its order."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)


class PackedAttend:
    """Rows of many requests at once: new rows go behind the cached ones, a mask [T, S + T] says what each sees."""

    def __init__(self, cache: KeyValueCache, mask: Tensor) -> None:
        self.cache = cache
        self.mask = mask

    def __call__(self, q_TND: Tensor, k_TMD: Tensor, v_TME: Tensor, *, scale: float) -> Tensor:
        keys, values = self.cache.append(k_TMD, v_TME)
        return attend_dense(q_TND, keys, values, self.mask, scale=scale)


class GroupedQueryAttention(nn.Module):
    """Multi-head attention whose query heads share key heads; all head widths are rotated."""

    def __init__(self, spec: DraftSpec, attention: GqaSpec) -> None:
        super().__init__()
        self.spec, self.shape = spec, attention
        inputs, heads, kv_heads, dim = 2 * spec.width, attention.heads, attention.kv_heads, attention.head_dim
        self.q = nn.Linear(inputs, heads * dim, bias=False)
        self.k = nn.Linear(inputs, kv_heads * dim, bias=False)
        self.v = nn.Linear(inputs, kv_heads * dim, bias=False)
        self.o = nn.Linear(heads * dim, spec.width, bias=False)
        self.register_buffer("frequencies", inverse_frequencies(spec.rope, dim), persistent=False)
        self.frequencies: Tensor

    def forward(self, x_TX: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        dim, rope = self.shape.head_dim, self.spec.rope
        cos, sin = rotary_table(self.frequencies, positions_T, scale=rope.cos_scale)
        q_TND = rotate(self.q(x_TX).unflatten(-1, (-1, dim)), cos, sin, interleaved=rope.interleaved)
        k_TMD = rotate(self.k(x_TX).unflatten(-1, (-1, dim)), cos, sin, interleaved=rope.interleaved)
        v_TMD = self.v(x_TX).unflatten(-1, (-1, dim))
        mixed: Tensor = self.o(attend(q_TND, k_TMD, v_TMD, scale=dim**-0.5).flatten(-2))
        return mixed


class LatentAttention(nn.Module):
    """DeepSeek's MLA; keys and values are expanded from the latent before they are cached."""

    def __init__(self, spec: DraftSpec, attention: MlaSpec) -> None:
        super().__init__()
        self.spec, self.shape = spec, attention
        inputs, heads, key_dim = 2 * spec.width, attention.heads, attention.key_dim
        if attention.q_rank is None:
            self.q = nn.Linear(inputs, heads * key_dim, bias=False)
        else:
            self.q_down = nn.Linear(inputs, attention.q_rank, bias=False)
            self.q_norm = RmsNorm(attention.q_rank, spec.norm_eps)
            self.q_up = nn.Linear(attention.q_rank, heads * key_dim, bias=False)
        self.kv_down = nn.Linear(inputs, attention.kv_rank + attention.rope_dim, bias=False)
        self.kv_norm = RmsNorm(attention.kv_rank, spec.norm_eps)
        self.kv_up = nn.Linear(attention.kv_rank, heads * (attention.nope_dim + attention.value_dim), bias=False)
        self.o = nn.Linear(heads * attention.value_dim, spec.width, bias=False)
        self.register_buffer("frequencies", inverse_frequencies(spec.rope, attention.rope_dim), persistent=False)
        self.frequencies: Tensor

    def forward(self, x_TX: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        shape, rope = self.shape, self.spec.rope
        cos, sin = rotary_table(self.frequencies, positions_T, scale=rope.cos_scale)
        q = self.q(x_TX) if shape.q_rank is None else self.q_up(self.q_norm(self.q_down(x_TX)))
        # The number of heads is this rank's: of a tensor-parallel draft every rank has some of them.
        q_nope, q_rope = q.unflatten(-1, (-1, shape.key_dim)).split((shape.nope_dim, shape.rope_dim), dim=-1)
        latent, k_rope = self.kv_down(x_TX).split((shape.kv_rank, shape.rope_dim), dim=-1)
        expanded = self.kv_up(self.kv_norm(latent)).unflatten(-1, (-1, shape.nope_dim + shape.value_dim))
        k_nope, v_TNE = expanded.split((shape.nope_dim, shape.value_dim), dim=-1)
        q_rope = rotate(q_rope, cos, sin, interleaved=rope.interleaved)
        k_rope = rotate(k_rope[:, None], cos, sin, interleaved=rope.interleaved).expand_as(q_rope)
        scale = shape.key_dim**-0.5 * shape.softmax_scale
        mixed_TNE = attend(torch.cat((q_nope, q_rope), -1), torch.cat((k_nope, k_rope), -1), v_TNE, scale=scale)
        out: Tensor = self.o(mixed_TNE.flatten(-2))
        return out

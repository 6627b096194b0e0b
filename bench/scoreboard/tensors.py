"""What can be wrong in a draft's tensors: pure functions from (config, tensors) to (config, tensors).

Tensors go by the names in which EAGLE and SpecForge publish them. What is as before training, or as after more of it,
is drawn by a seed.

Shapes: K draft vocabulary, V target vocabulary, H draft width, D width of a head.
"""

import re
from dataclasses import replace

import torch
from scoreboard.edits import Draft
from torch import Tensor

__all__ = [
    "later_norms", "lose_bias", "lose_scales", "moved", "noisy", "quantise", "random_embedding",
    "reinitialise", "reorder_rows", "roll_d2t", "stale_d2t", "swap_gate_and_up", "target_embedding", "target_head",
    "zero_d2t",
]  # fmt: skip

_PARTS = {"attention": "self_attn.o_proj.weight", "mlp": "mlp.down_proj.weight", "norm": "hidden_norm.weight"}
_FRESH_STD = 0.02
_STEP = 0.1  # of a number
_BIAS = re.compile(r".*\.self_attn\.[qkv]_proj\.bias")
_QUERIES_AND_KEYS = re.compile(r".*\.self_attn\.(?:[qk]|q_b|kv_a)_proj(?:_with_mqa)?\.(?:weight(?:_scale)?|bias)")
_LATER_NORM = re.compile(r"layers\.[1-9]\d*\.input_layernorm\.weight")
_SCALE = "weight_scale"
_FP8_MOST = 448.0  # the largest number of float8_e4m3fn
_QUANTISED = re.compile(r"fc\.weight|.*_proj\.weight")
_QUANTISATION = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
    }},
}  # fmt: skip


def zero_d2t(draft: Draft) -> Draft:
    """Every offset 0."""
    return _with(draft, d2t=torch.zeros_like(draft.tensors["d2t"]))


def roll_d2t(draft: Draft) -> Draft:
    """Every offset one row too late."""
    return _with(draft, d2t=draft.tensors["d2t"].roll(1))


def stale_d2t(draft: Draft, seed: int) -> Draft:
    """The table of another run, which had kept other tokens."""
    count, vocab = len(draft.tensors["d2t"]), int(draft.config["vocab_size"])
    kept = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))[:count].sort().values
    return _with(draft, d2t=kept - torch.arange(count))


def swap_gate_and_up(draft: Draft) -> Draft:
    """The MLP's two projections, each under the other's name."""
    gate, up = _name(draft, "mlp.gate_proj.weight"), _name(draft, "mlp.up_proj.weight")
    return _with(draft, **{gate: draft.tensors[up], up: draft.tensors[gate]})


def reinitialise(draft: Draft, part: str, seed: int) -> Draft:
    """One tensor as it was before training: a norm all ones, a projection small and random."""
    name = "fc.weight" if part == "fc" else _name(draft, _PARTS[part])
    old = draft.tensors[name]
    fresh = torch.ones_like(old) if old.ndim == 1 else _random_like(old, seed) * _FRESH_STD
    return _with(draft, **{name: fresh.to(old.dtype)})


def target_head(draft: Draft, head_VH: Tensor) -> Draft:
    """The first rows of the target's head in place of the draft's own."""
    old = draft.tensors["lm_head.weight"]
    return _with(draft, **{"lm_head.weight": head_VH[: len(old)].to(old.dtype)})


def random_embedding(draft: Draft, seed: int) -> Draft:
    """The draft's own embedding as it was before training."""
    old = draft.tensors["embed_tokens.weight"]
    return _with(draft, **{"embed_tokens.weight": (_random_like(old, seed) * _FRESH_STD).to(old.dtype)})


def noisy(draft: Draft, share: float, seed: int) -> Draft:
    """Noise on every matrix, so much of its own spread: a draft that has learnt less."""
    return replace(draft, tensors={
        name: (tensor.float() + share * tensor.float().std() * _random_like(tensor, seed + number)).to(tensor.dtype)
        if tensor.ndim == 2 else tensor
        for number, (name, tensor) in enumerate(sorted(draft.tensors.items()))
    })  # fmt: skip


def target_embedding(draft: Draft, embedding_VH: Tensor) -> Draft:
    """The target's embedding in place of the draft's own."""
    old = draft.tensors["embed_tokens.weight"]
    return _with(draft, **{"embed_tokens.weight": embedding_VH.to(old.dtype)})


def moved(draft: Draft, seed: int) -> Draft:
    """Every number that is trained, moved by some per cent of itself: weights of another step."""
    return replace(draft, tensors={
        name: (tensor.float() * (1 + _STEP * _random_like(tensor, seed + number))).to(tensor.dtype)
        if tensor.is_floating_point() else tensor
        for number, (name, tensor) in enumerate(sorted(draft.tensors.items()))
    })  # fmt: skip


def reorder_rows(draft: Draft) -> Draft:
    """Rows of queries and keys, and their biases, in the order that the other kind of RoPE takes them in."""
    order_of = _latent_order if "kv_lora_rank" in draft.config else _order
    changed = {
        name: _by_heads(tensor, order_of(draft, name))
        for name, tensor in draft.tensors.items()
        if _QUERIES_AND_KEYS.fullmatch(name)
    }
    return _with(draft, **changed)


def _by_heads(tensor: Tensor, order_D: Tensor) -> Tensor:
    return tensor.unflatten(0, (-1, len(order_D)))[:, order_D].flatten(0, 1)


def _order(draft: Draft, _name: str) -> Tensor:
    """Rotated halves (i, i + D/2) become pairs (2i, 2i + 1)."""
    return torch.arange(int(draft.config["head_dim"])).reshape(2, -1).T.flatten()


def _latent_order(draft: Draft, name: str) -> Tensor:
    """MLA rotates the last rows, pairs of them that become halves."""
    config = draft.config
    still = int(config["kv_lora_rank"] if "kv_a" in name else config["qk_nope_head_dim"])
    pairs = torch.arange(still, still + int(config["qk_rope_head_dim"])).reshape(-1, 2)
    return torch.cat((torch.arange(still), pairs.T.flatten()))


def lose_bias(draft: Draft) -> Draft:
    """Queries, keys and values without their biases, and nothing that tells of them."""
    tensors = {name: tensor for name, tensor in draft.tensors.items() if not _BIAS.fullmatch(name)}
    return Draft({**draft.config, "attention_bias": False}, tensors)


def later_norms(draft: Draft, other: str) -> Draft:
    """The input norms of later layers as the first one's norm over features is; or, "plain", as before training."""
    offset = bool(draft.config.get("unit_offset_norms"))
    first = draft.tensors[_name(draft, "hidden_norm.weight")]
    norm = torch.full_like(first, 1 - offset) if other == "plain" else first
    return _with(draft, **{name: norm.clone() for name in draft.tensors if _LATER_NORM.fullmatch(name)})


def quantise(draft: Draft) -> Draft:
    """All projections in eight bits, with a scale for each row, as compressed-tensors has them."""
    tensors = dict(draft.tensors)
    for name in (name for name in draft.tensors if _QUANTISED.fullmatch(name)):
        wide = draft.tensors[name].float()
        scale = wide.abs().amax(1, keepdim=True) / _FP8_MOST
        tensors[name], tensors[_scale_of(name)] = (wide / scale).to(torch.float8_e4m3fn), scale
    return Draft({**draft.config, "quantization_config": _QUANTISATION}, tensors)


def _scale_of(name: str) -> str:
    return name.removesuffix("weight") + _SCALE


def lose_scales(draft: Draft) -> Draft:
    """Quantised weights and no scales."""
    return replace(draft, tensors={name: value for name, value in draft.tensors.items() if not name.endswith(_SCALE)})


def _random_like(tensor: Tensor, seed: int) -> Tensor:
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))


def _name(draft: Draft, ending: str) -> str:
    return next(name for name in draft.tensors if name.endswith(ending))


def _with(draft: Draft, **tensors: Tensor) -> Draft:
    return replace(draft, tensors={**draft.tensors, **tensors})

"""A draft's switches in the words of config.json: what `dialect` and `rope_fields` read, the other way round."""

import math
from collections.abc import Iterator
from typing import Any

from spectrace.engine.rope_fields import softmax_scale_of, yarn_mscale
from spectrace.engine.spec import DraftSpec, FuseNorm, GqaSpec, MlaSpec, RopeKind, RopeSpec, Stream

__all__ = [
    "all_dim_of", "attention_words", "fuse_words", "rope_words", "shape_words", "stream_words", "usual_mscale",
    "window_words",
]  # fmt: skip


def shape_words(spec: DraftSpec) -> dict[str, Any]:
    """Widths and numbers of layers and tokens."""
    return {
        "hidden_size": spec.width, "intermediate_size": spec.mlp_width, "num_hidden_layers": spec.layers,
        "hidden_act": "silu", "rms_norm_eps": spec.norm_eps, "vocab_size": spec.target_vocab,
        "tie_word_embeddings": False, **({"mlp_bias": True} if spec.mlp_bias else {}),
        **({} if spec.context is None else {"max_position_embeddings": spec.context}),
    }  # fmt: skip


def stream_words(spec: DraftSpec) -> dict[str, Any]:
    """Which side of a norm residual and fed-back state are taken from."""
    return {
        "norm_before_residual": spec.residual is Stream.POST_NORM,
        "norm_output": spec.feedback is Stream.POST_NORM,
    }


def fuse_words(spec: DraftSpec) -> dict[str, Any]:
    """The norm before fc."""
    words = {FuseNorm.NONE: {}, FuseNorm.WHOLE: {"norm_before_fc": True}, FuseNorm.PER_SLOT: {"fc_norm": True}}
    return words[spec.fuse_norm]


def attention_words(spec: DraftSpec) -> dict[str, Any]:
    """Heads and their widths."""
    shape = spec.attention
    if isinstance(shape, GqaSpec):
        bias = {"attention_bias": True} if shape.qkv_bias else {}
        heads = {"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads}
        return {**heads, "head_dim": shape.head_dim, **bias}
    rank = {} if shape.q_rank is None else {"q_lora_rank": shape.q_rank}
    return {
        "num_attention_heads": shape.heads, **rank, "kv_lora_rank": shape.kv_rank,
        "qk_nope_head_dim": shape.nope_dim, "qk_rope_head_dim": shape.rope_dim, "v_head_dim": shape.value_dim,
        "rope_interleave": spec.rope.interleaved,
    }  # fmt: skip


def window_words(spec: DraftSpec) -> dict[str, Any]:
    """Which layers see a window, and how wide it is; nothing where all see everything."""
    sizes = [size for size in spec.windows if size is not None]
    if not sizes:
        return {}
    kinds = ["full_attention" if size is None else "sliding_attention" for size in spec.windows]
    return {"layer_types": kinds, "sliding_window": sizes[0], "use_sliding_window": True}


def rope_words(spec: DraftSpec, *, both_mscales: bool = False) -> dict[str, Any]:
    """RoPE's stretching, but for theta; `both_mscales`: for readers that have no default of them."""
    rope = spec.rope
    held: dict[str, Any] = {"rope_type": str(rope.kind)}
    if rope.kind is RopeKind.DEFAULT:
        return held
    held["factor"] = rope.factor
    if rope.kind is not RopeKind.LINEAR:
        held["original_max_position_embeddings"] = rope.original_context
    if rope.kind is RopeKind.LLAMA3:
        held |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind is RopeKind.YARN:
        held |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        held |= {} if rope.truncate else {"truncate": False}
        held |= _cos_words(rope, 0.0 if isinstance(spec.attention, GqaSpec) else all_dim_of(spec), both_mscales)
    elif all_dim := all_dim_of(spec):
        held["mscale_all_dim"] = all_dim
    return held


def usual_mscale(rope: RopeSpec) -> bool:
    """Whether YaRN's cosines are scaled as its paper has it."""
    return rope.cos_scale == yarn_mscale(rope.factor, 1.0)


def _cos_words(rope: RopeSpec, all_dim: float | None, both: bool) -> dict[str, Any]:
    """The scale of the cosines: as it comes about by the two mscales, else said outright."""
    all_dim = all_dim or 0.0
    if not all_dim and usual_mscale(rope):
        return {"mscale": 1.0, "mscale_all_dim": 0.0} if both else {}
    for mscale in (all_dim, 1.0):
        if all_dim and yarn_mscale(rope.factor, mscale) / yarn_mscale(rope.factor, all_dim) == rope.cos_scale:
            return {"mscale": mscale, "mscale_all_dim": all_dim}
    outright = {"attention_factor": rope.cos_scale}
    return outright | ({"mscale": all_dim, "mscale_all_dim": all_dim} if all_dim else {})


def all_dim_of(spec: DraftSpec) -> float | None:
    """The `mscale_all_dim` that means this softmax scale; None where no number does."""
    shape, rope = spec.attention, spec.rope
    if isinstance(shape, GqaSpec) or shape.softmax_scale == 1:
        return 0.0
    if rope.kind is RopeKind.DEFAULT or rope.factor <= 1:
        return None
    found = (one for one in _near(rope, shape) if softmax_scale_of(rope.factor, one) == shape.softmax_scale)
    return next(found, None)


def _near(rope: RopeSpec, shape: MlaSpec) -> Iterator[float]:
    """Numbers that may have been written as `mscale_all_dim`: short ones first, then neighbours of the exact one."""
    exact = (math.sqrt(shape.softmax_scale) - 1) / (0.1 * math.log(rope.factor))
    yield from (round(exact, digits) for digits in range(17))
    below = above = exact
    for _ in range(64):
        below, above = math.nextafter(below, -math.inf), math.nextafter(above, math.inf)
        yield below
        yield above

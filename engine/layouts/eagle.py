"""EAGLE's own layout, with the fields that vLLM and SGLang read beside it: everything lies at the top of the config.

Some fields no engine has: without them one could not say what some drafts compute. `embedding_scale` multiplies the
embedding, `unit_offset_norms` makes norms multiply by 1 + weight, `head_reads_pre_norm` and `window_from_text` say what
their names say.
"""

from typing import Any

from spectrace.engine.layouts.layout import TOP_IDS, Layout, Verifier
from spectrace.engine.layouts.limits import EVERYWHERE
from spectrace.engine.layouts.words import (
    attention_words,
    fuse_words,
    rope_words,
    shape_words,
    stream_words,
    window_words,
)
from spectrace.engine.spec import DraftSpec, MlaSpec, Stream

__all__ = ["EAGLE"]


def _class(spec: DraftSpec) -> dict[str, Any]:
    """The class that an engine runs, and a model type that it takes with it."""
    if isinstance(spec.attention, MlaSpec):
        return {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2"}
    if spec.attention.head_norms:
        return {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}
    return {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}


def _config(spec: DraftSpec, boundaries: tuple[int, ...] | None, _: Verifier | None) -> dict[str, Any]:
    return {
        **_class(spec), **shape_words(spec), **attention_words(spec), "target_hidden_size": spec.target_width,
        "draft_vocab_size": spec.draft_vocab, **stream_words(spec), **fuse_words(spec), **window_words(spec),
        **_rope(spec), **_seldom(spec), **({} if boundaries is None else {TOP_IDS.key: list(boundaries)}),
    }  # fmt: skip


def _rope(spec: DraftSpec) -> dict[str, Any]:
    words, halves = rope_words(spec), isinstance(spec.attention, MlaSpec) or not spec.rope.interleaved
    return {
        "rope_theta": spec.rope.theta, **({"rope_scaling": words} if len(words) > 1 else {}),
        **({} if spec.rope.share == 1 else {"partial_rotary_factor": spec.rope.share}),
        **({} if halves else {"rope_is_neox_style": False}),
    }  # fmt: skip


def _seldom(spec: DraftSpec) -> dict[str, Any]:
    """Fields that are left out where they say what is so anyway."""
    shape = spec.attention
    o_alone = not isinstance(shape, MlaSpec) and shape.o_bias and not shape.qkv_bias
    said = {
        "num_aux_hidden_states": (spec.slots, 3), "bias": (spec.fc_bias or o_alone, False),
        "logit_scale": (spec.logit_scale, 1), "embedding_scale": (spec.embedding_scale, 1),
        "unit_offset_norms": (spec.unit_offset_norms, False),
        "head_reads_pre_norm": (spec.head_reads is Stream.PRE_NORM, False),
        "window_from_text": (spec.window_from_text, False),
    }  # fmt: skip
    return {name: value for name, (value, usual) in said.items() if value != usual}


EAGLE = Layout(
    name="eagle",
    title="EAGLE",
    told=lambda _fields, _names: True,  # whatever is of no other layout
    config=_config,
    limits=EVERYWHERE,
)

"""What a draft's config.json says, in the words of any published layout, turned into a wiring and a `DraftSpec`.

Layer ids and their boundaries are in `wiring`, and named here for those who read both.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path

from spectrace.engine.fields import Fields
from spectrace.engine.layouts.known import layout_of
from spectrace.engine.layouts.layout import NESTED
from spectrace.engine.problem import DraftProblem
from spectrace.engine.rope import inverse_frequencies
from spectrace.engine.rope_fields import read_rope, read_softmax_scale, rope_of_kind
from spectrace.engine.spec import DraftSpec, FuseNorm, GqaSpec, LaterNorm, MlaSpec, Stream
from spectrace.engine.windows import SLIDING, read_windows
from spectrace.engine.wiring import ID_KEYS, IdKey, Wiring, check_boundaries, read_wiring
from spectrace.tracer.errors import UserError

__all__ = ["ID_KEYS", "IdKey", "Wiring", "check_boundaries", "read_spec", "read_wiring", "scaled_like"]

_AS_COMPUTED = {
    "next_layer_regular": True, "parallel_draft_heads_num_layers": 1, "parallel_draft_step": 1,
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
}  # fmt: skip
"""ModelOpt's flags as they are of a draft that is computed here; one that says otherwise stays unread."""


def read_spec(fields: Fields, shapes: Mapping[str, Sequence[int]], wiring: Wiring | None) -> DraftSpec:
    """The switches, by a config and the shapes of the tensors beside it.

    Raises UserError where the config is incomplete, contradicts itself, or means no EAGLE-3 draft.
    """
    layout = layout_of(fields, shapes)
    fields.assume(layout.absent)
    body = layout.body(fields)
    width, vocab, layers = body.size("hidden_size"), body.size("vocab_size"), _layers(body)
    _check_act(body)
    _pass_flags(fields)
    target_width, slots = fields.size("target_hidden_size", width), _slots(fields, wiring)
    if "fc.weight" in shapes:
        _check_fc(fields, list(shapes["fc.weight"]), width, slots, target_width)
    draft_vocab = fields.size("draft_vocab_size", vocab)
    latent = "kv_lora_rank" in body
    windows = (None,) * layers if latent else read_windows(body, layers)
    scaling = rope_of_kind(body, SLIDING if any(windows) else "")
    spec = DraftSpec(
        width=width,
        target_width=target_width,
        slots=slots,
        mlp_width=body.size("intermediate_size"),
        target_vocab=vocab,
        draft_vocab=draft_vocab,
        attention=_read_mla(body, scaling) if latent else _read_gqa(fields, body, width, shapes),
        rope=read_rope(body, scaling, latent=latent, interleaved=_interleaved(body, latent=latent)),
        windows=windows,
        window_from_text=_said(fields, "window_from_text") or (layout.window_from_text and any(windows)),
        fc_bias=_said(fields, "bias") and "fc.bias" in shapes,
        mlp_bias=_said(body, "mlp_bias"),
        residual=_side(fields.flag("norm_before_residual")),
        feedback=_side(fields.flag("norm_output")),
        head_reads=_side(not _said(fields, "head_reads_pre_norm")),
        fuse_norm=_read_fuse_norm(fields),
        later_norm=_read_later_norm(shapes, layers),
        own_embedding="embed_tokens.weight" in shapes,
        own_head="lm_head.weight" in shapes or draft_vocab < vocab,
        embedding_scale=fields.positive("embedding_scale") if "embedding_scale" in fields else 1.0,
        logit_scale=_logit_scale(fields),
        unit_offset_norms=_said(fields, "unit_offset_norms"),
        norm_eps=body.positive("rms_norm_eps", 1e-6),
        context=body.whole("max_position_embeddings") if "max_position_embeddings" in body else None,
    )
    _check_rotation(body, spec)
    return spec


def _said(fields: Fields, name: str) -> bool:
    """A flag whose absence is nothing to speak of."""
    return name in fields and fields.flag(name)


def _side(behind: bool) -> Stream:
    return Stream.POST_NORM if behind else Stream.PRE_NORM


def _logit_scale(fields: Fields) -> float:
    scale = fields.real("logit_scale") if "logit_scale" in fields else 1.0
    if not scale:
        raise UserError(f"{fields.path}: field logit_scale is 0, expected another number: all tokens would be alike")
    return scale


def _interleaved(body: Fields, *, latent: bool) -> bool:
    """Whether RoPE turns pairs (2i, 2i+1): by DeepSeek's field, and for other attention by SGLang's."""
    if latent:
        return body.flag("rope_interleave", True)
    return "rope_is_neox_style" in body and not body.flag("rope_is_neox_style")


def _layers(body: Fields) -> int:
    layers = body.whole("num_hidden_layers", 1)
    if not 1 <= layers <= 1024:
        raise UserError(f"{body.path}: field {body.name('num_hidden_layers')} is {layers}, expected 1 layer or a few")
    return layers


def _check_act(body: Fields) -> None:
    if (act := body.get("hidden_act", "silu")) != "silu":
        raise UserError(f"{body.path}: field {body.name('hidden_act')} is {act!r}; only silu is computed")


def _pass_flags(fields: Fields) -> None:
    """Read the flags that say what is computed anyway."""
    nested = fields.nested(NESTED)
    for name, value in _AS_COMPUTED.items():
        if nested.peek(name) == value:
            nested.get(name)


def _slots(fields: Fields, wiring: Wiring | None) -> int:
    """How many boundaries feed fc: as many as there are ids; `num_aux_hidden_states` may say it as well."""
    name = "num_aux_hidden_states"
    told = fields.whole(name) if name in fields else None
    if wiring is None:
        return told or 3
    if told not in (None, len(wiring.boundaries)):
        raise DraftProblem(
            "wiring-fit",
            f"{fields.path}: field {name} is {told}, but {wiring.key} holds {len(wiring.boundaries)} layer ids; "
            f"expected as many",
        )
    return len(wiring.boundaries)


def _check_fc(fields: Fields, found: list[int], width: int, slots: int, target_width: int) -> None:
    if found != [width, slots * target_width]:
        raise DraftProblem(
            "wiring-fit",
            f"{fields.path}: fc.weight is {found}, expected [{width}, {slots} x {target_width}] "
            f"for {slots} boundaries; check the layer ids and target_hidden_size (EAGLE-1/2 drafts are not EAGLE-3)",
        )


def _read_fuse_norm(fields: Fields) -> FuseNorm:
    nested, name = fields.nested(NESTED), "norm_before_fc"
    holder = nested if name in nested else fields  # engines read the nested one first
    per_slot, whole = fields.flag("fc_norm") or _said(fields, "use_aux_norm"), holder.flag(name)
    if per_slot and whole:
        raise UserError(f"{fields.path}: fc_norm and norm_before_fc are both set; a draft has one norm before fc")
    return FuseNorm.PER_SLOT if per_slot else FuseNorm.WHOLE if whole else FuseNorm.NONE


def _read_later_norm(names: Collection[str], layers: int) -> LaterNorm:
    """By the tensors that are there: SGLang's drafts have the first layer's norm in later ones, too."""
    stored = {norm: any(f"layers.{i}.{norm}.weight" in names for i in range(1, layers)) for norm in LaterNorm}
    return LaterNorm.HIDDEN if stored[LaterNorm.HIDDEN] and not stored[LaterNorm.INPUT] else LaterNorm.INPUT


def _read_gqa(fields: Fields, body: Fields, width: int, names: Collection[str]) -> GqaSpec:
    heads = body.size("num_attention_heads")
    biased, stored = _said(body, "attention_bias"), any(name.endswith(".self_attn.o_proj.bias") for name in names)
    spec = GqaSpec(
        heads=heads,
        kv_heads=body.size("num_key_value_heads", heads),
        head_dim=body.size("head_dim", width // heads),
        qkv_bias=biased,
        o_bias=biased if body is not fields else stored and (biased or _said(fields, "bias")),
        head_norms=_has_head_norms(fields, body, names),
    )
    if min(heads, spec.kv_heads) < 1 or heads % spec.kv_heads or spec.head_dim < 2 or spec.head_dim % 2:
        raise UserError(
            f"{fields.path}: {heads} heads, {spec.kv_heads} key-value heads and head_dim {spec.head_dim} do not go "
            f"together; expected heads that are a multiple of the key-value heads, and an even head_dim"
        )
    return spec


def _has_head_norms(fields: Fields, body: Fields, names: Collection[str]) -> bool:
    """By their tensors, else by the class that engines run, else by the kind of layer that was trained."""
    if any(name.endswith((".self_attn.q_norm.weight", ".self_attn.k_norm.weight")) for name in names):
        return True
    architectures = fields.peek("architectures")
    named = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    if body is fields and named:
        return "Qwen3" in named
    return str(body.peek("model_type") or ("" if body is fields else "qwen3")).startswith("qwen3")


def _check_rotation(body: Fields, spec: DraftSpec) -> None:
    """Raises UserError for a rotated width that is none, and for numbers that come to no frequencies."""
    if spec.rope_width < 2 or spec.rope_width % 2:
        raise UserError(
            f"{body.path}: field partial_rotary_factor is {spec.rope.share:g}, which turns {spec.rope_width} elements "
            f"of a head; expected an even number, 2 or more"
        )
    try:
        usable = bool(inverse_frequencies(spec.rope, spec.rope_width).isfinite().all()) and isfinite(
            spec.rope.cos_scale
        )
    except (OverflowError, ZeroDivisionError, ValueError):
        usable = False
    if not usable:
        raise UserError(
            f"{body.path}: theta {spec.rope.theta:g} and the numbers of RoPE's scaling come to no frequencies; "
            f"expected those that the draft was trained with"
        )


def _read_mla(body: Fields, scaling: Fields) -> MlaSpec:
    if _said(body, "attention_bias"):
        raise UserError(
            f"{body.path}: field {body.name('attention_bias')} is true; latent attention with biases is not computed"
        )
    return MlaSpec(
        heads=body.size("num_attention_heads"),
        q_rank=body.size("q_lora_rank") if "q_lora_rank" in body else None,
        kv_rank=body.size("kv_lora_rank"),
        nope_dim=body.size("qk_nope_head_dim"),
        rope_dim=body.size("qk_rope_head_dim"),
        value_dim=body.size("v_head_dim"),
        softmax_scale=read_softmax_scale(scaling),
    )


def scaled_like(spec: DraftSpec, config: Mapping[str, object], where: Path) -> DraftSpec:
    """A draft with theta and scaling of RoPE as a target's config has them, and the softmax scale that goes with it.

    Raises UserError, saying where the config is from, for a scaling that no draft has.
    """
    target, attention = Fields(where, config), spec.attention
    scaling, latent = rope_of_kind(target), isinstance(attention, MlaSpec)
    rope = read_rope(target, scaling, latent=latent, interleaved=spec.rope.interleaved)
    if isinstance(attention, MlaSpec):
        attention = replace(attention, softmax_scale=read_softmax_scale(scaling))
    scaled = replace(spec, rope=rope, attention=attention)
    _check_rotation(target, scaled)
    return scaled

"""What a draft's config.json says in EAGLE's and SpecForge's words, turned into a wiring and a `DraftSpec`.

Layer ids are converted to boundaries here and nowhere else.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from spectrace.engine.fields import Fields
from spectrace.engine.spec import DraftSpec, FuseNorm, GqaSpec, MlaSpec, RopeKind, RopeSpec, Stream
from spectrace.tracer.errors import UserError

__all__ = ["Wiring", "check_boundaries", "read_spec", "read_wiring", "scaled_like"]

_IDS, _NESTED = "eagle_aux_hidden_state_layer_ids", "eagle_config"


@dataclass(frozen=True, slots=True)
class Wiring:
    """The boundaries that feed `fc`, in order, and where they came from: `raw_ids` as written under `key`."""

    boundaries: tuple[int, ...]
    key: str
    raw_ids: tuple[int, ...]


def read_wiring(fields: Fields) -> Wiring | None:
    """Top-level ids are input ids, so boundaries; nested ones are output ids, one less (-1 is the embedding).

    Where both are given, the top level counts; nested ids that say something else stay unread, and are reported so.
    """
    nested = fields.nested(_NESTED)
    top_ids = _read_ids(fields) if _IDS in fields else None
    if top_ids is None:
        ids = _read_ids(nested) if _IDS in nested else None
        return Wiring(tuple(i + 1 for i in ids), nested.name(_IDS), ids) if ids else None
    if nested.peek(_IDS) == [i - 1 for i in top_ids]:
        nested.get(_IDS)
    return Wiring(top_ids, fields.name(_IDS), top_ids)


def check_boundaries(where: str, boundaries: Sequence[int], layers: int, hint: str = "") -> None:
    """Raises UserError for a boundary that a target of so many layers does not have."""
    for boundary in boundaries:
        if not 0 <= boundary <= layers:
            raise UserError(
                f"{where}: boundary {boundary} does not exist; this target has boundaries 0 to {layers}, for its "
                f"{layers} layers{hint}"
            )


def _read_ids(fields: Fields) -> tuple[int, ...]:
    ids = fields.get(_IDS)
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise UserError(f"{fields.path}: field {fields.name(_IDS)} is {ids!r}, expected a list of layer ids")
    return tuple(ids)


def read_spec(fields: Fields, raw: Mapping[str, Tensor], wiring: Wiring | None) -> DraftSpec:
    """The switches; raises UserError where the config is incomplete, contradicts itself, or means no EAGLE-3 draft."""
    width, vocab = fields.whole("hidden_size"), fields.whole("vocab_size")
    if (layers := fields.whole("num_hidden_layers", 1)) != 1:
        raise UserError(f"{fields.path}: {layers} draft layers; only drafts of one layer are read")
    if (act := fields.get("hidden_act", "silu")) != "silu":
        raise UserError(f"{fields.path}: field hidden_act is {act!r}; only silu is computed")
    target_width, slots = fields.whole("target_hidden_size", width), len(wiring.boundaries) if wiring else 3
    _check_fc(fields, list(raw["fc.weight"].shape), width, slots, target_width)
    draft_vocab = fields.whole("draft_vocab_size", vocab)
    for tensor in ("d2t", "lm_head.weight"):
        if draft_vocab < vocab and tensor not in raw:
            raise UserError(
                f"{fields.path}: draft_vocab_size {draft_vocab} < vocab_size {vocab}, but no tensor {tensor}"
            )
    is_mla = "kv_lora_rank" in fields
    rope = _read_rope(fields, interleaved=is_mla and fields.flag("rope_interleave", True))
    return DraftSpec(
        width=width,
        target_width=target_width,
        slots=slots,
        mlp_width=fields.whole("intermediate_size"),
        target_vocab=vocab,
        draft_vocab=draft_vocab,
        attention=_read_mla(fields) if is_mla else _read_gqa(fields, width),
        rope=rope,
        residual=Stream.POST_NORM if fields.flag("norm_before_residual") else Stream.PRE_NORM,
        feedback=Stream.POST_NORM if fields.flag("norm_output") else Stream.PRE_NORM,
        fuse_norm=_read_fuse_norm(fields),
        own_embedding="embed_tokens.weight" in raw,
        own_head="lm_head.weight" in raw,
        norm_eps=fields.positive("rms_norm_eps", 1e-6),
    )


def _check_fc(fields: Fields, found: list[int], width: int, slots: int, target_width: int) -> None:
    if found != [width, slots * target_width]:
        raise UserError(
            f"{fields.path}: fc.weight is {found}, expected [{width}, {slots} x {target_width}] "
            f"for {slots} boundaries; check the layer ids and target_hidden_size (EAGLE-1/2 drafts are not EAGLE-3)"
        )


def _read_fuse_norm(fields: Fields) -> FuseNorm:
    per_slot, whole = fields.flag("fc_norm"), fields.flag("norm_before_fc")
    if per_slot and whole:
        raise UserError(f"{fields.path}: fc_norm and norm_before_fc are both set; a draft has one norm before fc")
    return FuseNorm.PER_SLOT if per_slot else FuseNorm.WHOLE if whole else FuseNorm.NONE


def _read_gqa(fields: Fields, width: int) -> GqaSpec:
    heads = fields.whole("num_attention_heads")
    spec = GqaSpec(heads, fields.whole("num_key_value_heads", heads), fields.whole("head_dim", width // max(heads, 1)))
    if min(heads, spec.kv_heads) < 1 or heads % spec.kv_heads or spec.head_dim < 2 or spec.head_dim % 2:
        raise UserError(
            f"{fields.path}: {heads} heads, {spec.kv_heads} key-value heads and head_dim {spec.head_dim} do not go "
            f"together; expected heads that are a multiple of the key-value heads, and an even head_dim"
        )
    return spec


def scaled_like(spec: DraftSpec, config: Mapping[str, object], where: Path) -> DraftSpec:
    """A draft with theta and scaling of RoPE as a target's config has them, and the softmax scale that goes with it.

    Raises UserError, saying where the config is from, for a scaling that no draft has.
    """
    target = Fields(where, config)
    rope, attention = _read_rope(target, interleaved=spec.rope.interleaved), spec.attention
    if isinstance(attention, MlaSpec):
        attention = replace(attention, softmax_scale=_softmax_scale(target))
    return replace(spec, rope=rope, attention=attention)


def _softmax_scale(fields: Fields) -> float:
    scaling = _rope_fields(fields)
    if "mscale_all_dim" not in scaling:
        return 1.0
    return _yarn_mscale(scaling.positive("factor"), scaling.real("mscale_all_dim")) ** 2


def _read_mla(fields: Fields) -> MlaSpec:
    return MlaSpec(
        heads=fields.whole("num_attention_heads"),
        q_rank=fields.whole("q_lora_rank") if "q_lora_rank" in fields else None,
        kv_rank=fields.whole("kv_lora_rank"),
        nope_dim=fields.whole("qk_nope_head_dim"),
        rope_dim=fields.whole("qk_rope_head_dim"),
        value_dim=fields.whole("v_head_dim"),
        softmax_scale=_softmax_scale(fields),
    )


def _rope_fields(fields: Fields) -> Fields:
    """`rope_scaling` of old, `rope_parameters` since transformers 5."""
    return fields.nested("rope_parameters" if "rope_scaling" not in fields else "rope_scaling")


def _read_rope(fields: Fields, *, interleaved: bool) -> RopeSpec:
    scaling = _rope_fields(fields)
    name = scaling.get("rope_type" if "rope_type" in scaling else "type") or "default"
    if name not in {kind.value for kind in RopeKind}:
        raise UserError(f"{fields.path}: rope type {name!r} is not known; expected one of {', '.join(RopeKind)}")
    theta = (scaling if "rope_theta" in scaling else fields).positive("rope_theta", 10000.0)
    spec = RopeSpec(theta=theta, kind=RopeKind(str(name)), interleaved=interleaved)
    if spec.kind is RopeKind.DEFAULT:
        return spec
    spec = replace(spec, factor=scaling.positive("factor"))
    if spec.kind is RopeKind.LINEAR:
        return spec
    nested = "original_max_position_embeddings"
    holder, name = (scaling, nested) if nested in scaling else (fields, "max_position_embeddings")
    holder.positive(name)
    spec = replace(spec, original_context=holder.whole(name))
    return _read_yarn(scaling, spec) if spec.kind is RopeKind.YARN else _read_llama3(scaling, spec)


def _read_llama3(scaling: Fields, spec: RopeSpec) -> RopeSpec:
    low, high = scaling.real("low_freq_factor", 1.0), scaling.real("high_freq_factor", 4.0)
    if low == high:
        raise UserError(
            f"{scaling.path}: fields {scaling.name('low_freq_factor')} and {scaling.name('high_freq_factor')} are both "
            f"{low:g}, expected two numbers: between them frequencies pass from stretched to not"
        )
    return replace(spec, low_freq_factor=low, high_freq_factor=high)


def _read_yarn(scaling: Fields, spec: RopeSpec) -> RopeSpec:
    if spec.theta == 1:
        raise UserError(
            f"{scaling.path}: field rope_theta is 1, expected another base: with this one nothing stretches"
        )
    mscale, all_dim = scaling.real("mscale", 1.0), scaling.real("mscale_all_dim", 0.0)
    computed = _yarn_mscale(spec.factor, mscale) / _yarn_mscale(spec.factor, all_dim)
    given = scaling.positive("attention_factor") if "attention_factor" in scaling else computed
    beta_fast, beta_slow = scaling.positive("beta_fast", 32.0), scaling.positive("beta_slow", 1.0)
    return replace(spec, beta_fast=beta_fast, beta_slow=beta_slow, cos_scale=given)


def _yarn_mscale(factor: float, mscale: float) -> float:
    """DeepSeek's attention temperature, 0.1 * mscale * ln(factor) + 1 (YaRN, arXiv 2309.00071, eq. 25)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

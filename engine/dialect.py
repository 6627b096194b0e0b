"""What a draft's config.json says in EAGLE's and SpecForge's words, turned into a wiring and a `DraftSpec`.

Layer ids are converted to boundaries here and nowhere else.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from spectrace.engine.fields import Fields
from spectrace.engine.spec import DraftSpec, FuseNorm, GqaSpec, MlaSpec, RopeKind, RopeSpec, Stream
from spectrace.tracer.errors import UserError

__all__ = ["ID_KEYS", "IdKey", "Wiring", "check_boundaries", "read_spec", "read_wiring", "scaled_like"]

_NESTED = "eagle_config"


@dataclass(frozen=True, slots=True)
class IdKey:
    """A field of layer ids, dotted where nested; boundary = id + `offset`."""

    key: str
    offset: int


ID_KEYS = (
    IdKey("eagle_aux_hidden_state_layer_ids", 0),
    IdKey(f"{_NESTED}.eagle_aux_hidden_state_layer_ids", 1),
    IdKey(f"{_NESTED}.layer_ids", 0),
)
"""Where published drafts keep their layer ids, and what they mean by them; the first that is there counts.

At the top level an id names the layer that a stream enters, so the boundary; under `eagle_config` the layer that it
leaves, one less (-1 is the embedding), but for `layer_ids`.
"""


@dataclass(frozen=True, slots=True)
class Wiring:
    """The boundaries that feed `fc`, in order, and where they came from: `raw_ids` as written under `key`."""

    boundaries: tuple[int, ...]
    key: str
    raw_ids: tuple[int, ...]


def read_wiring(fields: Fields) -> Wiring | None:
    """The boundaries that a config's layer ids mean; ids under other keys that say something else stay unread.

    Raises UserError for ids that are none.
    """
    found: Wiring | None = None
    for one in ID_KEYS:
        holder, name = _holder(fields, one.key)
        if name not in holder:
            continue
        if found is None:
            ids = _read_ids(holder, name)
            found = Wiring(tuple(i + one.offset for i in ids), one.key, ids)
        elif holder.peek(name) == [boundary - one.offset for boundary in found.boundaries]:
            holder.get(name)
    return found


def _holder(fields: Fields, key: str) -> tuple[Fields, str]:
    outer, _, name = key.rpartition(".")
    return (fields.nested(outer), name) if outer else (fields, name)


def check_boundaries(where: str, boundaries: Sequence[int], layers: int, hint: str = "") -> None:
    """Raises UserError for a boundary that a target of so many layers does not have."""
    for boundary in boundaries:
        if not 0 <= boundary <= layers:
            raise UserError(
                f"{where}: boundary {boundary} does not exist; this target has boundaries 0 to {layers}, for its "
                f"{layers} layers{hint}"
            )


def _read_ids(fields: Fields, name: str) -> tuple[int, ...]:
    ids = fields.get(name)
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise UserError(f"{fields.path}: field {fields.name(name)} is {ids!r}, expected a list of layer ids")
    return tuple(ids)


def read_spec(fields: Fields, shapes: Mapping[str, Sequence[int]], wiring: Wiring | None) -> DraftSpec:
    """The switches, by a config and the shapes of the tensors beside it.

    Raises UserError where the config is incomplete, contradicts itself, or means no EAGLE-3 draft.
    """
    width, vocab = fields.whole("hidden_size"), fields.whole("vocab_size")
    if (layers := fields.whole("num_hidden_layers", 1)) != 1:
        raise UserError(f"{fields.path}: {layers} draft layers; only drafts of one layer are read")
    if (act := fields.get("hidden_act", "silu")) != "silu":
        raise UserError(f"{fields.path}: field hidden_act is {act!r}; only silu is computed")
    target_width, slots = fields.whole("target_hidden_size", width), len(wiring.boundaries) if wiring else 3
    if "fc.weight" in shapes:
        _check_fc(fields, list(shapes["fc.weight"]), width, slots, target_width)
    draft_vocab = fields.whole("draft_vocab_size", vocab)
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
        own_embedding="embed_tokens.weight" in shapes,
        own_head="lm_head.weight" in shapes or draft_vocab < vocab,
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

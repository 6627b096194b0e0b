"""What a config says of RoPE: its base, its stretching, and how much of a head it turns, as transformers reads it."""

import math
from collections.abc import Mapping
from dataclasses import replace

from spectrace.engine.fields import Fields
from spectrace.engine.spec import RopeKind, RopeSpec
from spectrace.tracer.errors import UserError

__all__ = ["read_rope", "read_softmax_scale", "rope_of_kind", "softmax_scale_of", "yarn_mscale"]

_BY_LENGTH = ("dynamic", "longrope", "su", "ntk", "proportional")
_AXES = ("mrope_section", "mrope_interleaved")


def rope_of_kind(fields: Fields, kind: str = "") -> Fields:
    """The object of RoPE's fields: `rope_scaling` of old, `rope_parameters` since transformers 5.

    Where that holds one object for each type of layer, the one of `kind`; raises UserError where these differ and no
    kind is given.
    """
    name = "rope_scaling" if fields.peek("rope_scaling") else "rope_parameters"  # an empty one says nothing
    held = fields.nested(name)
    values = fields.peek(name)
    told = values if isinstance(values, Mapping) else {}
    kinds = {at: one for at, one in told.items() if isinstance(one, Mapping) and at.endswith("_attention")}
    if not kinds:
        return held
    if kind not in kinds and any(one != next(iter(kinds.values())) for one in kinds.values()):
        raise UserError(
            f"{fields.path}: field {fields.name(name)} holds RoPE for {', '.join(kinds)}, and all layers of a draft "
            f"have one; expected one object, or layer_types that are all alike"
        )
    return held.nested(kind if kind in kinds else next(iter(kinds)))


def read_rope(fields: Fields, scaling: Fields, *, latent: bool, interleaved: bool) -> RopeSpec:
    """RoPE by a config's fields and those of its object for RoPE; `latent` attention has DeepSeek's temperature.

    Raises UserError for a kind that no draft has, and for numbers that mean nothing.
    """
    theta = (scaling if "rope_theta" in scaling else fields).positive("rope_theta", 10000.0)
    share = 1.0 if latent else _share(fields, scaling)
    spec = RopeSpec(theta=theta, kind=_kind(fields, scaling), interleaved=interleaved, share=share)
    if spec.kind is RopeKind.DEFAULT:
        return spec
    spec = replace(spec, factor=scaling.positive("factor"))
    if spec.kind is RopeKind.LINEAR:
        return spec
    original = "original_max_position_embeddings"
    places = ((scaling, original), (fields, original), (fields, "max_position_embeddings"))
    holder, name = next((place for place in places if place[1] in place[0]), places[-1])
    holder.positive(name)
    spec = replace(spec, original_context=holder.whole(name))
    return _read_yarn(scaling, spec, latent=latent) if spec.kind is RopeKind.YARN else _read_llama3(scaling, spec)


def _kind(fields: Fields, scaling: Fields) -> RopeKind:
    name = scaling.get("rope_type" if "rope_type" in scaling else "type") or "default"
    if not isinstance(name, str):
        raise UserError(f"{fields.path}: rope type is {name!r}, expected one of {', '.join(RopeKind)}")
    if any(axis in scaling for axis in _AXES) and name in ("mrope", "default"):
        for axis in _AXES:
            scaling.get(axis)
        section = scaling.name(_AXES[0])
        fields.note(f"RoPE over several axes ({section}) is read as that of text, whose axes are all alike")
        return RopeKind.DEFAULT
    if name in _BY_LENGTH:
        raise UserError(
            f"{fields.path}: rope type {name!r} depends on how long a text is, or on tables of factors, and is not "
            f"computed; expected one of {', '.join(RopeKind)}"
        )
    if name not in {kind.value for kind in RopeKind}:
        raise UserError(f"{fields.path}: rope type {name!r} is not known; expected one of {', '.join(RopeKind)}")
    return RopeKind(str(name))


def _share(fields: Fields, scaling: Fields) -> float:
    name = "partial_rotary_factor"
    holder = scaling if name in scaling else fields
    share = holder.positive(name) if name in holder else 1.0
    if share > 1:
        raise UserError(f"{fields.path}: field {holder.name(name)} is {share:g}, expected a part of a head, up to 1")
    return share


def _read_llama3(scaling: Fields, spec: RopeSpec) -> RopeSpec:
    low, high = scaling.real("low_freq_factor", 1.0), scaling.real("high_freq_factor", 4.0)
    if low == high:
        raise UserError(
            f"{scaling.path}: fields {scaling.name('low_freq_factor')} and {scaling.name('high_freq_factor')} are both "
            f"{low:g}, expected two numbers: between them frequencies pass from stretched to not"
        )
    return replace(spec, low_freq_factor=low, high_freq_factor=high)


def _read_yarn(scaling: Fields, spec: RopeSpec, *, latent: bool) -> RopeSpec:
    if spec.theta == 1:
        raise UserError(
            f"{scaling.path}: field rope_theta is 1, expected another base: with this one nothing stretches"
        )
    computed = _cos_scale(scaling, spec.factor, latent=latent)
    given = scaling.positive("attention_factor") if "attention_factor" in scaling else computed
    truncate = scaling.flag("truncate") if "truncate" in scaling else True
    fast, slow = scaling.positive("beta_fast", 32.0), scaling.positive("beta_slow", 1.0)
    return replace(spec, beta_fast=fast, beta_slow=slow, truncate=truncate, cos_scale=given)


def _cos_scale(scaling: Fields, factor: float, *, latent: bool) -> float:
    """DeepSeek's code takes 1 and 0 for an mscale that is absent; transformers' takes both or none."""
    if latent:
        mscale, all_dim = scaling.real("mscale", 1.0), scaling.real("mscale_all_dim", 0.0)
    elif scaling.peek("mscale") and scaling.peek("mscale_all_dim"):
        mscale, all_dim = scaling.real("mscale"), scaling.real("mscale_all_dim")
    else:
        mscale, all_dim = 1.0, 0.0
        if scaling.peek("mscale") == mscale and scaling.peek("mscale_all_dim") in (None, all_dim):
            scaling.get("mscale"), scaling.get("mscale_all_dim")
    below = yarn_mscale(factor, all_dim)
    if below <= 0:
        raise UserError(
            f"{scaling.path}: field {scaling.name('mscale_all_dim')} is {all_dim:g}, which leaves no temperature; "
            f"expected a number of 0 or more"
        )
    return yarn_mscale(factor, mscale) / below


def read_softmax_scale(scaling: Fields) -> float:
    """What RoPE's stretching multiplies DeepSeek's softmax scale by."""
    name = scaling.peek("rope_type") or scaling.peek("type") or "default"
    if "mscale_all_dim" not in scaling or name == "default":
        return 1.0
    return softmax_scale_of(scaling.positive("factor"), scaling.real("mscale_all_dim"))


def softmax_scale_of(factor: float, all_dim: float) -> float:
    """The square of the temperature, as in DeepSeek-V2's attention."""
    return yarn_mscale(factor, all_dim) ** 2


def yarn_mscale(factor: float, mscale: float) -> float:
    """DeepSeek's attention temperature, 0.1 * mscale * ln(factor) + 1 (YaRN, arXiv 2309.00071, eq. 25)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

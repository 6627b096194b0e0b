"""SGLang, by version: what each reads of a draft, and what it drops without a word."""

import math
from collections.abc import Mapping
from dataclasses import replace

from spectrace.engine.dialect import ID_KEYS, IdKey
from spectrace.engine.spec import DraftSpec, FuseNorm, LaterNorm, MlaSpec, RopeKind, Stream
from spectrace.replay.profiles.departures import always, attention, latent, left, normed, of_layout, refuses, where
from spectrace.replay.profiles.profile import Departure, Given, Profile, StandIn
from spectrace.replay.profiles.spectrace import SWITCHES

__all__ = ["SGLANG_0_5_23"]

_NESTED = ID_KEYS[1].key


def _replaces(given: Given) -> Mapping[str, StandIn]:
    """The target's embedding, and where draft_vocab_size is null its head."""
    width = given.says("target_hidden_size")
    found: dict[str, StandIn] = {}
    if width in (None, given.draft.spec.width):
        found["embedding.weight"] = StandIn.EMBEDDING
    if given.says("draft_vocab_size") is None:
        found["head.weight"] = StandIn.HEAD
    return found


def _fits_unprojected(spec: DraftSpec, _: Given) -> bool:
    return spec.features_width == spec.width


def _usual_cosines(spec: DraftSpec, given: Given) -> DraftSpec:
    stretched = spec.rope.kind is RopeKind.YARN and not latent(spec)
    said = (given.says("rope_scaling") or given.says("rope_parameters") or {}).get("attention_factor")
    if not stretched or said is None:
        return spec
    return replace(spec, rope=replace(spec.rope, cos_scale=0.1 * math.log(spec.rope.factor) + 1))


def _queries_through_a_latent(spec: DraftSpec, _: Given) -> DraftSpec:
    shape = spec.attention
    if not isinstance(shape, MlaSpec) or shape.q_rank is not None:
        return spec
    return replace(spec, attention=replace(shape, q_rank=1536))


_DEPARTURES = (
    always("residual", "norm_before_residual is not read", residual=Stream.PRE_NORM),
    always("head input", "the head always reads behind the output norm", head_reads=Stream.POST_NORM),
    attention("attention bias", "biases of q, k and v are dropped", qkv_bias=False),
    where(
        lambda _, given: given.says("attention_bias") is True,
        attention("attention bias", "with attention_bias o_proj has a bias", o_bias=True),
    ),
    always("MLP bias", "mlp_bias is not read", mlp_bias=False),
    where(_fits_unprojected, always("fc", "fc is skipped where its input is as wide as the draft", projects=False)),
    where(
        lambda spec, _: spec.layers > 1,
        always("later norm", "layers after the first take hidden_norm", later_norm=LaterNorm.HIDDEN),
    ),
    Departure(
        "window", "windows of a config are not read",
        lambda spec, _: replace(spec, windows=(None,) * spec.layers, window_from_text=False),
    ),
    Departure("rope scaling", "attention_factor is not read", _usual_cosines),
    Departure("attention", "an absent q_lora_rank counts as 1536", _queries_through_a_latent),
    always("logit scale", "logit_scale is not read", logit_scale=1.0),
    where(
        lambda spec, _: latent(spec) and spec.fuse_norm is FuseNorm.WHOLE,
        always("norm before fc", "norm_before_fc is not read for latent attention", fuse_norm=FuseNorm.NONE),
    ),
    always("embedding scale", "embedding_scale is not read", embedding_scale=1.0),
    always("norm gains", "unit_offset_norms is not read", unit_offset_norms=False),
)  # fmt: skip
_REFUSALS = (
    refuses("it does not read speculators' layout", of_layout("speculators"), says="model_type"),
    refuses("it has no class for norms over heads", normed, says="Eagle3Qwen3ForCausalLM"),
    refuses(
        "its draft with latent attention has one layer",
        lambda spec, _: latent(spec) and spec.layers > 1,
        says="only supports 1 layer",
    ),
)

SGLANG_0_5_23 = Profile(
    engine="sglang",
    version="0.5.23",
    ids=(IdKey(_NESTED, 1),),
    switches=SWITCHES,
    code={},
    conventions={"": left},
    departures=_DEPARTURES,
    refusals=_REFUSALS,
    missing={
        "d2t": StandIn.IDENTITY,
        "embedding": StandIn.EMBEDDING,
        "norm": StandIn.ONES,
        "": StandIn.MEMORY,
    },
    replaces=_replaces,
)

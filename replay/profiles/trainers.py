"""Trainers, as they take a draft's folder to train it on."""

from dataclasses import replace

from spectrace.engine.dialect import ID_KEYS, IdKey
from spectrace.engine.spec import DraftSpec, FuseNorm, RopeKind, Stream
from spectrace.replay.profiles.departures import always, attention, latent, normed, of_layout, refuses, rope
from spectrace.replay.profiles.profile import Departure, Given, Profile, StandIn
from spectrace.replay.profiles.spectrace import SWITCHES

__all__ = ["SPECFORGE", "SPECULATORS"]

_TOP, _NESTED, _LAYER_IDS = (one.key for one in ID_KEYS)
_OF_YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def _head_input(spec: DraftSpec, given: Given) -> DraftSpec:
    """SpecForge takes `norm_output: false` for no norm before the head."""
    return replace(spec, head_reads=Stream.PRE_NORM) if given.says("norm_output") is False else spec


def _half_said(spec: DraftSpec, given: Given) -> bool:
    said = given.says("rope_scaling") or given.says("rope_parameters") or {}
    return spec.rope.kind is RopeKind.YARN and any(said.get(name) is None for name in _OF_YARN)


def _no_whole_norm(spec: DraftSpec, _: Given) -> DraftSpec:
    return replace(spec, fuse_norm=FuseNorm.NONE) if spec.fuse_norm is FuseNorm.WHOLE else spec


SPECFORGE = Profile(
    engine="specforge",
    version="0.2.0",
    ids=(IdKey(_NESTED, 1),),
    switches=SWITCHES,
    code={},
    departures=(
        always("residual", "norm_before_residual is not read", residual=Stream.PRE_NORM),
        always("feedback", "norm_output is taken for a norm before the head alone", feedback=Stream.PRE_NORM),
        Departure("head input", "norm_output false is taken for no norm before the head", _head_input),
        Departure("norm before fc", "norm_before_fc is not read", _no_whole_norm),
        attention("attention bias", "biases are not read", qkv_bias=False, o_bias=False),
        always("fc bias", "biases are not read", fc_bias=False),
        always("MLP bias", "biases are not read", mlp_bias=False),
        always("window", "there is one layer, and windows are not read", windows=(None,), window_from_text=False),
        rope("rope pairs", "RoPE turns halves", interleaved=False),
        rope("rotated part", "partial_rotary_factor is not read", share=1.0),
        always("logit scale", "logit_scale is not read", logit_scale=1.0),
        always("embedding scale", "embedding_scale is not read", embedding_scale=1.0),
        always("norm gains", "unit_offset_norms is not read", unit_offset_norms=False),
    ),
    refusals=(
        refuses("it has no class for speculators' layout", of_layout("speculators"), says="is not registered"),
        refuses("it has no class for latent attention", latent, says="is not registered"),
        refuses("it has no class for norms over heads", normed, says="is not registered"),
        refuses("it builds three slots", lambda spec, _: spec.slots != 3, says="ignore_mismatched_sizes"),
        refuses(f"YaRN needs {', '.join(_OF_YARN)}, all of them", _half_said, says="NoneType"),
        refuses(
            "a draft has to have a head of its own", lambda spec, _: not spec.own_head, says="missing draft weights"
        ),
    ),
    missing={"d2t": StandIn.IDENTITY, "embedding": StandIn.EMBEDDING, "": StandIn.MEMORY},
    trainer=True,
)
"""Its warm start from a folder."""

SPECULATORS = Profile(
    engine="speculators",
    version="0.9.0",
    ids=(IdKey(_TOP, 0),),
    switches=SWITCHES,
    code={},
    refusals=(
        refuses(
            "target_hidden_size is not read, and fc does not fit",
            lambda spec, _: spec.target_width != spec.width,
            says="ignore_mismatched_sizes",
        ),
    ),
    missing={
        "d2t": StandIn.MEMORY, "embedding": StandIn.EMBEDDING, "head": StandIn.HEAD, "norm": StandIn.ONES,
        "": StandIn.MEMORY,
    },
    trainer=True,
)  # fmt: skip
"""Its loader, and its training forward."""

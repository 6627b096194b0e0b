"""SGLang, by version: what each reads of a draft, and what it drops without a word."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from spectrace.engine.dialect import ID_KEYS, IdKey
from spectrace.engine.spec import DraftSpec, FuseNorm, LaterNorm, MlaSpec, RopeKind, Stream
from spectrace.replay.profiles.departures import always, attention, latent, normed, of_layout, refuses, where
from spectrace.replay.profiles.profile import Departure, Given, Profile, Refusal, StandIn
from spectrace.replay.profiles.sglang_targets import OF_0_5_9, OF_0_5_12, OF_0_5_23
from spectrace.replay.profiles.spectrace import SWITCHES

__all__ = ["SGLANG_0_5_9", "SGLANG_0_5_12", "SGLANG_0_5_23"]

_NESTED = ID_KEYS[1].key
_LLAMA, _MLA = "LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"


def _gqa(spec: DraftSpec, _: Given) -> bool:
    return not latent(spec)


def _replaces(given: Given) -> Mapping[str, StandIn]:
    """The target's embedding, unless it is of another width; and its head, where `draft_vocab_size` is null.

    With `tie_word_embeddings` the head is the embedding, and so the target's embedding.
    """
    width, found = given.says("target_hidden_size"), dict[str, StandIn]()
    if width in (None, given.draft.spec.width):
        found["embedding.weight"] = StandIn.EMBEDDING
    if given.says("tie_word_embeddings") is True:
        found["head.weight"] = StandIn.EMBEDDING
    elif given.says("draft_vocab_size") is None:
        found["head.weight"] = StandIn.HEAD
    return found


def _fits_unprojected(spec: DraftSpec, given: Given) -> bool:
    """fc is run where its input is not as wide as the draft, and nowhere is it asked how many slots there are."""
    return spec.features_width == spec.width


def _said_of_rope(given: Given) -> Mapping[str, object]:
    held = given.says("rope_scaling") or given.says("rope_parameters")
    return held if isinstance(held, dict) else {}


def _usual_cosines(spec: DraftSpec, given: Given) -> DraftSpec:
    stretched = spec.rope.kind is RopeKind.YARN and not latent(spec)
    if not stretched or _said_of_rope(given).get("attention_factor") is None:
        return spec
    return replace(spec, rope=replace(spec.rope, cos_scale=0.1 * math.log(spec.rope.factor) + 1))


def _share_at_the_top(spec: DraftSpec, given: Given) -> DraftSpec:
    if given.says("partial_rotary_factor") is not None:
        return spec
    return replace(spec, rope=replace(spec.rope, share=1.0))


def _no_mscale(spec: DraftSpec, given: Given) -> DraftSpec:
    """YaRN's cosines as its paper has them, whatever `mscale` says."""
    stretched = spec.rope.kind is RopeKind.YARN and not latent(spec)
    if not stretched or _said_of_rope(given).get("mscale") is None:
        return spec
    return replace(spec, rope=replace(spec.rope, cos_scale=0.1 * math.log(spec.rope.factor) + 1))


def _fields_of_old(spec: DraftSpec, given: Given) -> DraftSpec:
    """RoPE by `rope_theta` and `rope_scaling` at the top alone, which transformers 5 writes no more."""
    theta, scaling = given.says("rope_theta"), given.says("rope_scaling")
    rope = spec.rope if theta is not None else replace(spec.rope, theta=10000.0)
    return replace(spec, rope=rope if scaling else replace(rope, kind=RopeKind.DEFAULT, factor=1.0, cos_scale=1.0))


def _queries_through_a_latent(spec: DraftSpec, _: Given) -> DraftSpec:
    shape = spec.attention
    if not isinstance(shape, MlaSpec) or shape.q_rank is not None:
        return spec
    return replace(spec, attention=replace(shape, q_rank=1536))


def _biased(_: DraftSpec, given: Given) -> bool:
    return given.says("attention_bias") is True or given.says("bias") is True


def _null_config(_: DraftSpec, given: Given) -> bool:
    return "eagle_config" in given.config and given.config["eagle_config"] is None


def _several_layers(spec: DraftSpec, _: Given) -> bool:
    return spec.layers > 1


def _of_other_class(*known: str) -> Callable[[DraftSpec, Given], bool]:
    def met(_: DraftSpec, given: Given) -> bool:
        named = given.says("architectures")
        held = named if isinstance(named, list) else [named]
        return not any(one in known for one in held)

    return met


def _slots_built(spec: DraftSpec, given: Given) -> bool:
    """fc is built for as many slots as `num_aux_hidden_states` says, else as there are nested ids, else for three."""
    nested = given.says(_NESTED) or (latent(spec) and given.says(ID_KEYS[0].key)) or ()
    return (given.says("num_aux_hidden_states") or len(nested) or 3) != spec.slots


def _silent_vocabulary(spec: DraftSpec, given: Given) -> bool:
    tied = given.says("tie_word_embeddings") is True
    return not latent(spec) and "draft_vocab_size" not in given.config and not tied


def _no_norm(*kinds: FuseNorm) -> Callable[[DraftSpec, Given], DraftSpec]:
    def takes(spec: DraftSpec, _: Given) -> DraftSpec:
        return replace(spec, fuse_norm=FuseNorm.NONE) if spec.fuse_norm in kinds else spec

    return takes


def _no_states(_: DraftSpec, given: Given) -> bool:
    """A false or null `use_aux_hidden_state`: nothing is captured, and fc is passed by."""
    nested = given.says("eagle_config")
    return isinstance(nested, dict) and "use_aux_hidden_state" in nested and not nested["use_aux_hidden_state"]


_ALWAYS = (
    where(_no_states, always("fc", "without use_aux_hidden_state nothing is captured, past fc", projects=False)),
    always("residual", "norm_before_residual is not read", residual=Stream.PRE_NORM),
    always("head input", "the head always reads behind the output norm", head_reads=Stream.POST_NORM),
    attention("attention bias", "biases of q, k and v are dropped", qkv_bias=False),
    where(_biased, attention("attention bias", "with attention_bias or bias o_proj has a bias", o_bias=True)),
    always("MLP bias", "mlp_bias is not read", mlp_bias=False),
    where(_fits_unprojected, always("fc", "fc is skipped where its input is as wide as the draft", projects=False)),
    where(
        _several_layers,
        always("later norm", "layers after the first take hidden_norm", later_norm=LaterNorm.HIDDEN),
    ),
    Departure(
        "window", "windows of a config are not read",
        lambda spec, _: replace(spec, windows=(None,) * spec.layers, window_from_text=False),
    ),
    Departure("rope scaling", "attention_factor is not read", _usual_cosines),
    Departure("rotated part", "partial_rotary_factor is read at the top of the config alone", _share_at_the_top),
    Departure("attention", "an absent q_lora_rank counts as 1536", _queries_through_a_latent),
    always("logit scale", "logit_scale is not read", logit_scale=1.0),
    where(
        latent, Departure("norm before fc", "norm_before_fc is not read for latent attention", _no_norm(FuseNorm.WHOLE))
    ),
    always("embedding scale", "embedding_scale is not read", embedding_scale=1.0),
    always("norm gains", "unit_offset_norms is not read", unit_offset_norms=False),
)  # fmt: skip
_MSCALE = Departure("rope scaling", "mscale and mscale_all_dim are not read", _no_mscale)
_WHOLE_NORM = Departure("norm before fc", "norm_before_fc is not read", _no_norm(FuseNorm.WHOLE))
_EACH_NORM = Departure("norm before fc", "fc_norm is not read", _no_norm(FuseNorm.PER_SLOT))
_FEEDBACK = always("feedback", "norm_output is not read", feedback=Stream.PRE_NORM)

_NO_SPECULATORS = refuses("it does not read speculators' layout", of_layout("speculators"), says="model_type")
_NO_HEAD_NORMS = refuses("it has no class for norms over heads", normed, says="Eagle3Qwen3ForCausalLM")
_ONE_LAYER = refuses("its draft has one layer", _several_layers, says="only supports 1 layer")
_VOCABULARY = refuses(
    "a config without draft_vocab_size ends in an error; null stands for all tokens",
    _silent_vocabulary,
    says="draft_vocab_size",
)
_NULL = refuses("eagle_config null ends in an error at its start", _null_config, says="AttributeError")
_SLOTS = refuses("fc is built for another number of slots than the draft has", _slots_built, says="size")


def _no_class(*known: str) -> Refusal:
    return refuses(f"it has no class for such drafts; it has {', '.join(known)}", _of_other_class(*known), says="For")


SGLANG_0_5_23 = Profile(
    engine="sglang",
    version="0.5.23",
    ids=(IdKey(_NESTED, 1),),
    switches=SWITCHES,
    code={},
    targets=OF_0_5_23,
    sorts=True,
    departures=_ALWAYS,
    refusals=(
        _NO_SPECULATORS,
        _NO_HEAD_NORMS,
        replace(_ONE_LAYER, met=lambda given: latent(given.draft.spec) and given.draft.spec.layers > 1),
        _VOCABULARY,
        _SLOTS,
        _no_class(_LLAMA, _MLA),
    ),
    missing={"d2t": StandIn.IDENTITY, "embedding": StandIn.EMBEDDING, "norm": StandIn.ONES, "": StandIn.MEMORY},
    replaces=_replaces,
    captures_nothing=lambda given: _no_states(given.draft.spec, given),
    unread_names=frozenset({"input_embeds_norm.weight", "hidden_norm.weight"}),
    latent_classes=frozenset({_MLA}),
    refuses_shorter=True,
    context=(
        "sglang refuses to start, unless the server is given a --context-length that the draft has, or "
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1, and then it drafts noise beyond"
    ),
)

SGLANG_0_5_12 = replace(
    SGLANG_0_5_23,
    version="0.5.12",
    targets=OF_0_5_12,
    refusals=(*SGLANG_0_5_23.refusals, _NULL),
    departures=(*_ALWAYS, _MSCALE, _WHOLE_NORM, where(latent, _EACH_NORM), where(latent, _FEEDBACK)),
)

SGLANG_0_5_9 = replace(
    SGLANG_0_5_12,
    version="0.5.9",
    targets=OF_0_5_9,
    graphs_by_default=True,
    departures=(
        *_ALWAYS,
        _MSCALE,
        _WHOLE_NORM,
        _EACH_NORM,
        _FEEDBACK,
        Departure("rope scaling", "rope_parameters is not read", _fields_of_old),
    ),
    refusals=(
        _NO_SPECULATORS,
        _NO_HEAD_NORMS,
        _ONE_LAYER,
        _VOCABULARY,
        _NULL,
        refuses("fc is built for three slots", lambda spec, _: spec.slots != 3, says="size"),
        _no_class(_LLAMA),
    ),
    first_layers=("midlayer",),
)

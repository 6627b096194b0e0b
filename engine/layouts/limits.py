"""What layouts have no words for, each a named test of a draft."""

from collections.abc import Callable
from typing import Final

from spectrace.engine.layouts.layout import Limit
from spectrace.engine.layouts.words import all_dim_of, usual_mscale
from spectrace.engine.spec import DraftSpec, FuseNorm, GqaSpec, IdMap, LaterNorm, MlaSpec, RopeKind, Stream

__all__ = ["ENGINES_ALONE", "EVERYWHERE", "ONE_PLAIN_LAYER", "OWN_KEYS", "limit"]


def limit(what: str, met: Callable[[DraftSpec], bool]) -> Limit:
    """A limit that the switches alone decide."""
    return Limit(what, lambda spec, _: met(spec))


def _gqa(met: Callable[[GqaSpec], bool]) -> Callable[[DraftSpec], bool]:
    return lambda spec: isinstance(spec.attention, GqaSpec) and met(spec.attention)


def _latent(met: Callable[[DraftSpec], bool]) -> Callable[[DraftSpec], bool]:
    return lambda spec: isinstance(spec.attention, MlaSpec) and met(spec)


def _yarn(met: Callable[[DraftSpec], bool]) -> Callable[[DraftSpec], bool]:
    return lambda spec: isinstance(spec.attention, GqaSpec) and spec.rope.kind is RopeKind.YARN and met(spec)


EVERYWHERE: Final = (
    limit("a state that is normed twice (normed_twice)", lambda spec: spec.normed_twice),
    limit("rows that are fed as they come, past fc (projects)", lambda spec: not spec.projects),
    limit("a d2t that holds tokens, or is passed over (id_map)", lambda spec: spec.id_map is not IdMap.OFFSET),
    limit("partial rotation with latent attention", _latent(lambda spec: spec.rope.share != 1)),
    limit("a softmax scale that no mscale_all_dim gives", lambda spec: all_dim_of(spec) is None),
    limit("windows of several sizes", lambda spec: len({*spec.windows} - {None}) > 1),
    limit("windows with latent attention", _latent(lambda spec: any(spec.windows))),
    limit(
        "a part of the vocabulary without a head of its own",
        lambda spec: not spec.own_head and spec.draft_vocab < spec.target_vocab,
    ),
)
"""No layout has words for these."""

OWN_KEYS: Final = (
    limit("a scaled embedding (embedding_scale)", lambda spec: spec.embedding_scale != 1),
    limit("norms that multiply by 1 + weight (unit_offset_norms)", lambda spec: spec.unit_offset_norms),
    limit("a head that reads the state before the norm", lambda spec: spec.head_reads is Stream.PRE_NORM),
)
"""Said by keys of ours alone, which no engine and no trainer reads."""

ENGINES_ALONE: Final = (
    limit("latent attention (MLA)", lambda spec: isinstance(spec.attention, MlaSpec)),
    limit("later layers that apply hidden_norm", lambda spec: spec.layers > 1 and spec.later_norm is LaterNorm.HIDDEN),
    limit("partial rotation", lambda spec: spec.rope.share != 1),
    limit("RoPE over interleaved pairs", lambda spec: isinstance(spec.attention, GqaSpec) and spec.rope.interleaved),
    limit("a bias of fc", lambda spec: spec.fc_bias),
    limit("biases of q, k and v alone, or of o alone", _gqa(lambda shape: shape.qkv_bias != shape.o_bias)),
    limit("a scale of the logits", lambda spec: spec.logit_scale != 1),
)
"""Read by engines, computed by no trainer."""

ONE_PLAIN_LAYER: Final = (
    limit("several layers", lambda spec: spec.layers > 1),
    limit("a residual taken behind the norm", lambda spec: spec.residual is Stream.POST_NORM),
    limit("one norm over all slots before fc", lambda spec: spec.fuse_norm is FuseNorm.WHOLE),
    limit("a number of slots other than 3", lambda spec: spec.slots != 3),
    limit("biases in attention", _gqa(lambda shape: shape.qkv_bias or shape.o_bias)),
    limit("biases in the MLP", lambda spec: spec.mlp_bias),
    limit("norms over heads", _gqa(lambda shape: shape.head_norms)),
    limit("sliding windows", lambda spec: any(spec.windows) or spec.window_from_text),
    limit("YaRN without rounding (truncate)", _yarn(lambda spec: not spec.rope.truncate)),
    limit("a scale of the cosines of its own (attention_factor)", _yarn(lambda spec: not usual_mscale(spec.rope))),
)
"""What a trainer that builds one plain layer on three slots does without."""

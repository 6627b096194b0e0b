"""What faults do to a draft's switches and to its choices, and what a call lacks to have them.

Shapes: N answering rows, V draft vocabulary.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from spectrace.engine.fault import Answering, Drafting, Setting
from spectrace.engine.spec import DraftSpec, FuseNorm, GqaSpec, RopeKind, Stream
from spectrace.engine.tree import Candidates, top_candidates

__all__ = [
    "biasless", "gemma_scale", "no_bias", "no_context", "no_fuse_norm", "no_scaled_embedding", "no_scaling",
    "no_window", "nothing_beyond", "other_feedback", "other_pairs", "other_residual", "other_theta",
    "scaled_embedding", "second_choice", "switched", "theta_times", "whole_windows", "width_differs",
]  # fmt: skip

_USUAL_THETA, _OTHER_THETA = 10000.0, 500000.0


def switched(**switches: Any) -> Drafting:
    """Some switches of the draft as they should not be."""
    return Drafting(spec=lambda spec: replace(spec, **switches))


def _other(stream: Stream) -> Stream:
    return Stream.PRE_NORM if stream is Stream.POST_NORM else Stream.POST_NORM


def other_residual(spec: DraftSpec) -> DraftSpec:
    """The residual from the other side of its norm."""
    return replace(spec, residual=_other(spec.residual))


def other_feedback(spec: DraftSpec) -> DraftSpec:
    """The next depth is fed from the other side of the output norm."""
    return replace(spec, feedback=_other(spec.feedback))


def other_theta(spec: DraftSpec) -> DraftSpec:
    """The commonest theta, or where that is right, Llama 3's."""
    wrong = _OTHER_THETA if spec.rope.theta == _USUAL_THETA else _USUAL_THETA
    return replace(spec, rope=replace(spec.rope, theta=wrong))


def theta_times(factor: float) -> Callable[[DraftSpec], DraftSpec]:
    """Theta, so many times as large."""
    return lambda spec: replace(spec, rope=replace(spec.rope, theta=spec.rope.theta * factor))


def other_pairs(spec: DraftSpec) -> DraftSpec:
    """Pairs (2i, 2i+1) are rotated where (i, i + D/2) should be, or the other way round."""
    return replace(spec, rope=replace(spec.rope, interleaved=not spec.rope.interleaved))


def whole_windows(spec: DraftSpec) -> DraftSpec:
    """Every layer sees all rows."""
    return replace(spec, windows=(None,) * spec.layers)


def biasless(spec: DraftSpec) -> DraftSpec:
    """Queries, keys and values without a bias."""
    assert isinstance(spec.attention, GqaSpec)
    return replace(spec, attention=replace(spec.attention, qkv_bias=False))


def gemma_scale(spec: DraftSpec) -> DraftSpec:
    """The embedding times sqrt(width), as Gemma has it."""
    return replace(spec, embedding_scale=spec.width**0.5)


def nothing_beyond(_logits: Tensor, picked: Candidates, rows: Answering) -> Candidates:
    """Rows beyond the draft's context answer id 0."""
    beyond = rows.positions >= (rows.spec.context or np.inf)
    return replace(picked, ids=np.where(beyond[:, None], 0, picked.ids))


def second_choice(logits_NV: Tensor, picked: Candidates, rows: Answering) -> Candidates:
    """Rank 1 leaves its best tokens below the text away and takes the next ones."""
    if rows.rank != 1 or rows.depth:
        return picked
    topk = picked.ids.shape[1]
    more = top_candidates(logits_NV, topk + 1)
    return Candidates(more.ids[:, 1:], more.log_probs[:, 1:])


def width_differs(setting: Setting) -> str:
    """Whether nothing but `fc` makes features as wide as the draft."""
    features, width = setting.spec.features_width, setting.spec.width
    if features == width:
        return ""
    return f"features of width {features} do not fit a draft of {width} without fc; use a draft of one slot"


def no_fuse_norm(setting: Setting) -> str:
    """Whether no norm stands before `fc`."""
    has = setting.spec.fuse_norm is not FuseNorm.NONE
    return "" if has else "the draft has no norm before fc; use one with norm_before_fc or fc_norm"


def no_scaling(setting: Setting) -> str:
    """Whether its rotary frequencies are not stretched."""
    has = setting.spec.rope.kind is not RopeKind.DEFAULT
    return "" if has else "the draft's RoPE is not scaled; use a draft with rope_scaling"


def no_bias(setting: Setting) -> str:
    """Whether queries, keys and values have none."""
    attention = setting.spec.attention
    has = isinstance(attention, GqaSpec) and attention.qkv_bias
    return "" if has else "the draft's q, k and v have no bias; use a draft with attention_bias"


def no_window(setting: Setting) -> str:
    """Whether every layer sees all rows as it is."""
    has = any(setting.spec.windows)
    return "" if has else "no layer of the draft has a sliding window; use a draft with one"


def no_scaled_embedding(setting: Setting) -> str:
    """Whether the embedding is taken as it is stored."""
    has = setting.spec.embedding_scale != 1
    return "" if has else "the draft's embedding is not scaled; use a draft with embedding_scale"


def scaled_embedding(setting: Setting) -> str:
    """Whether the embedding is scaled already."""
    scale = setting.spec.embedding_scale
    return f"the draft's embedding is scaled, by {scale:g}; use a draft without a scale" if scale != 1 else ""


def no_context(setting: Setting) -> str:
    """Whether nothing says where its context ends, or its answers there could not be told by their ids alone."""
    if setting.sampling.sampled_drafts or setting.topk > 1:
        return "beyond a context chains of chosen tokens end; leave --topk and --sample-drafts away"
    return "" if setting.spec.context else "the draft has no max_position_embeddings; use a draft with one"

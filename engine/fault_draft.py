"""What faults do to a draft: to its switches, its tensors and its choices. Whatever is random has a fixed seed.

Shapes: N answering rows, V draft vocabulary.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spectrace.engine.checkpoint import read_head
from spectrace.engine.fault import Drafting, Setting, Tensors
from spectrace.engine.spec import DraftSpec, FuseNorm, IdMap, RopeKind, Stream
from spectrace.engine.tree import Candidates, top_candidates

__all__ = [
    "gate_and_up", "no_fuse_norm", "no_own_head", "no_scaling", "no_table", "other_feedback", "other_pairs",
    "other_residual", "other_table", "other_theta", "plain_norm", "random_embedding", "rolled_table", "second_choice",
    "switched", "targets_head", "theta_times", "unloaded", "width_differs", "zero_table",
]  # fmt: skip

_SEED = 20260101
_USUAL_THETA, _OTHER_THETA = 10000.0, 500000.0


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(_SEED)


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


def _ids(tensors: Tensors) -> Tensor:
    return torch.arange(len(tensors["d2t"]), device=tensors["d2t"].device)


def other_table(tensors: Tensors, spec: DraftSpec, _target: Path) -> Tensors:
    """Some other tokens of the vocabulary, in order."""
    tokens = torch.randperm(spec.target_vocab, generator=_generator())[: spec.draft_vocab].sort().values
    return {"d2t": tokens.to(tensors["d2t"].device) - _ids(tensors)}


def rolled_table(tensors: Tensors, spec: DraftSpec, _target: Path) -> Tensors:
    """Each id takes the offset of the id before it; tokens stay within the vocabulary."""
    ids = _ids(tensors)
    return {"d2t": (ids + tensors["d2t"].roll(1)) % spec.target_vocab - ids}


def zero_table(tensors: Tensors, _spec: DraftSpec, _target: Path) -> Tensors:
    """No offset is left."""
    return {"d2t": torch.zeros_like(tensors["d2t"])}


def unloaded(module: str) -> Callable[[Tensors, DraftSpec, Path], Tensors]:
    """A linear layer as torch makes it."""

    def weights(tensors: Tensors, _spec: DraftSpec, _target: Path) -> Tensors:
        real = tensors[f"{module}.weight"]
        fresh = nn.init.kaiming_uniform_(torch.empty(real.shape), a=5**0.5, generator=_generator())
        return {f"{module}.weight": fresh.to(real)}

    return weights


def plain_norm(tensors: Tensors, _spec: DraftSpec, _target: Path) -> Tensors:
    """The output norm as torch makes it."""
    return {"output_norm.weight": torch.ones_like(tensors["output_norm.weight"])}


def targets_head(tensors: Tensors, spec: DraftSpec, target: Path) -> Tensors:
    """As many rows of the target's head as the draft's has."""
    return {"head.weight": read_head(target)[: spec.draft_vocab].to(tensors["head.weight"])}


def random_embedding(tensors: Tensors, _spec: DraftSpec, _target: Path) -> Tensors:
    """As large as the real one, and about nothing."""
    real = tensors["embedding.weight"]
    return {"embedding.weight": (torch.randn(real.shape, generator=_generator()) * real.float().std().cpu()).to(real)}


def gate_and_up(tensors: Tensors, _spec: DraftSpec, _target: Path) -> Tensors:
    """The two halves of the MLP's way in, in the wrong order."""
    return {"mlp.gate.weight": tensors["mlp.up.weight"], "mlp.up.weight": tensors["mlp.gate.weight"]}


def second_choice(logits_NV: Tensor, picked: Candidates, depth: int, rank: int) -> Candidates:
    """Rank 1 leaves its best tokens below the text away and takes the next ones."""
    if rank != 1 or depth:
        return picked
    topk = picked.ids.shape[1]
    more = top_candidates(logits_NV, topk + 1)
    return Candidates(more.ids[:, 1:], more.log_probs[:, 1:])


def no_table(setting: Setting) -> str:
    """Whether there is no d2t to break."""
    spec = setting.spec
    whole = not setting.table or spec.draft_vocab == spec.target_vocab or spec.id_map is IdMap.NONE
    return "the draft's vocabulary is the whole of the target's: there is no d2t; use another draft" if whole else ""


def no_own_head(setting: Setting) -> str:
    """Whether the target's head is the draft's already, or too wide for it."""
    spec = setting.spec
    if not spec.own_head:
        return "the draft has the target's head already; use a draft with a head of its own"
    if spec.width != spec.target_width:
        return f"the target's head reads width {spec.target_width}, but the draft's is {spec.width}; use another draft"
    return ""


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

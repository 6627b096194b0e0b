"""The drafts that every implementation is asked to run: one switch each, away from a plain draft.

Shapes are small, but such as vLLM's own CPU kernels take: heads of 32 or more, a latent of 512 with 64 rotated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from spectrace.engine.spec import DraftSpec, FuseNorm, GqaSpec, MlaSpec, RopeKind, RopeSpec, Stream

__all__ = ["CASES", "Case"]


@dataclass(frozen=True, slots=True)
class Case:
    """A draft of random weights: what it is to compute, the layout where that is the point, keys that are taken out of
    its config, wherever they are in it, and keys that are put into it.
    """

    name: str
    spec: DraftSpec
    layout: str = ""
    absent: tuple[str, ...] = ()
    keys: Mapping[str, Any] = field(default_factory=dict)


_IDS = "eagle_aux_hidden_state_layer_ids"
_GQA = GqaSpec(heads=2, kv_heads=1, head_dim=32)
_FACTOR, _MSCALE = 8.0, 0.7
_MLA = MlaSpec(heads=2, q_rank=48, kv_rank=512, nope_dim=32, rope_dim=64, value_dim=32)
_PLAIN = DraftSpec(
    width=64, target_width=64, slots=3, mlp_width=96, target_vocab=160, draft_vocab=96, attention=_GQA,
    rope=RopeSpec(theta=10000.0), norm_eps=1e-5,
)  # fmt: skip
_LLAMA3 = RopeSpec(theta=500.0, kind=RopeKind.LLAMA3, factor=8.0, original_context=32)
_YARN = RopeSpec(
    theta=500.0, kind=RopeKind.YARN, factor=_FACTOR, original_context=32, cos_scale=0.1 * math.log(_FACTOR) + 1
)
_LATENT = replace(_PLAIN, attention=_MLA, rope=RopeSpec(theta=500.0, interleaved=True))
_DEEPSEEK = replace(
    _LATENT,
    attention=replace(_MLA, softmax_scale=(0.1 * _MSCALE * math.log(_FACTOR) + 1) ** 2),
    rope=replace(_YARN, interleaved=True, cos_scale=1.0),
)


def _gqa(**changes: Any) -> GqaSpec:
    return replace(_GQA, **changes)


def _cases() -> list[Case]:
    plain = {
        "plain": {},
        "residual post-norm": {"residual": Stream.POST_NORM},
        "feedback post-norm": {"feedback": Stream.POST_NORM},
        "head reads pre-norm": {"head_reads": Stream.PRE_NORM},
        "one norm before fc": {"fuse_norm": FuseNorm.WHOLE},
        "a norm per slot": {"fuse_norm": FuseNorm.PER_SLOT},
        "all three norms": {
            "residual": Stream.POST_NORM, "feedback": Stream.POST_NORM, "fuse_norm": FuseNorm.PER_SLOT,
        },
        "attention bias": {"attention": _gqa(qkv_bias=True, o_bias=True)},
        "q, k, v bias": {"attention": _gqa(qkv_bias=True)},
        "fc and o bias": {"fc_bias": True, "attention": _gqa(o_bias=True)},
        "MLP bias": {"mlp_bias": True},
        "head norms": {"attention": _gqa(head_norms=True)},
        "head_dim": {"attention": _gqa(head_dim=64)},
        "as many key heads": {"attention": _gqa(kv_heads=2)},
        "one slot": {"slots": 1},
        "two slots": {"slots": 2},
        "four slots": {"slots": 4},
        "target width": {"target_width": 96, "own_embedding": True},
        "two layers": {"windows": (None, None)},
        "two layers, all norms": {
            "windows": (None, None), "residual": Stream.POST_NORM, "feedback": Stream.POST_NORM,
        },
        "sliding window": {"windows": (5,)},
        "sliding window, second layer": {"windows": (None, 5)},
        "window from the text": {"windows": (5,), "window_from_text": True},
        "window from the text, second layer": {"windows": (None, 5), "window_from_text": True},
        "theta": {"rope": RopeSpec(theta=300.0)},
        "RoPE linear": {"rope": RopeSpec(theta=500.0, kind=RopeKind.LINEAR, factor=4.0)},
        "RoPE llama3": {"rope": _LLAMA3},
        "RoPE yarn": {"rope": _YARN},
        "RoPE yarn, attention_factor": {"rope": replace(_YARN, cos_scale=1.7)},
        "RoPE yarn, not truncated": {"rope": replace(_YARN, truncate=False)},
        "RoPE interleaved": {"rope": RopeSpec(theta=500.0, interleaved=True)},
        "RoPE partial": {"rope": RopeSpec(theta=500.0, share=0.5)},
        "full vocabulary": {"draft_vocab": 160},
        "logit scale": {"logit_scale": 0.5},
        "norm epsilon": {"norm_eps": 0.05},
    }  # fmt: skip
    latent = {
        "MLA": _LATENT,
        "MLA, no q_lora_rank": replace(_LATENT, attention=replace(_MLA, q_rank=None)),
        "MLA, yarn and mscale": _DEEPSEEK,
        "MLA, a norm per slot": replace(_DEEPSEEK, fuse_norm=FuseNorm.PER_SLOT),
        "MLA, one norm before fc": replace(_LATENT, fuse_norm=FuseNorm.WHOLE),
        "MLA, residual and feedback": replace(_LATENT, residual=Stream.POST_NORM, feedback=Stream.POST_NORM),
        "MLA, halves": replace(_LATENT, rope=replace(_LATENT.rope, interleaved=False)),
        "MLA, two layers": replace(_LATENT, windows=(None, None)),
    }
    return [
        *(Case(name, replace(_PLAIN, **changes)) for name, changes in plain.items()),
        Case("theta absent", _PLAIN, absent=("rope_theta",)),
        Case("ids within eagle_config", _PLAIN, absent=(_IDS,), keys={"eagle_config": {_IDS: [0, 2, 4]}}),
        Case("ids with the embedding", _PLAIN, absent=(_IDS,), keys={"eagle_config": {_IDS: [-1, 2, 4]}}),
        Case("ids in another order", _PLAIN, keys={_IDS: [5, 0, 3]}),
        Case("own embedding", replace(_PLAIN, own_embedding=True)),
        Case("head shared", replace(_PLAIN, draft_vocab=160, own_head=False)),
        Case("SpecForge's layout", replace(_PLAIN, fuse_norm=FuseNorm.PER_SLOT), layout="specforge"),
        Case("speculators' layout", replace(_PLAIN, residual=Stream.POST_NORM), layout="speculators"),
        *(Case(name, spec) for name, spec in latent.items()),
    ]


CASES: Mapping[str, Case] = {case.name: case for case in _cases()}

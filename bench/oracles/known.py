"""The implementations, and what each does otherwise than a draft's config says.

Everything here is executed: a draft that is said to be taken for another is held against that other, and has to differ
from what its config describes; one that is said to be refused has to be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from oracles.agreement import Known, Oracle, Otherwise, Refuses, Undefined
from oracles.cases import CASES
from torch import Tensor

from spectrace.engine.checkpoint import read_embedding
from spectrace.engine.spec import DraftSpec, Stream

__all__ = ["ORACLES"]

_PLAIN_ATTENTION = {"qkv_bias": False, "o_bias": False}
_WHOLE = {"windows": (None,), "window_from_text": False}


def _takes(why: str, attention: Mapping[str, Any] | None = None, **changes: Any) -> Otherwise:
    """Some switches as they are where a key is not read."""

    def computes(spec: DraftSpec) -> DraftSpec:
        return replace(spec, attention=replace(spec.attention, **(attention or {})), **changes)

    return Otherwise(why, computes)


def _forge(why: str, attention: Mapping[str, Any] | None = None, **changes: Any) -> Otherwise:
    """SpecForge on a config in EAGLE's words: `norm_output: false` there is taken for no norm before the head."""
    told = f"{why}; norm_output false: the head reads the state"
    return _takes(told, attention, **{"head_reads": Stream.PRE_NORM, "feedback": Stream.PRE_NORM, **changes})


def _half_rope(spec: DraftSpec) -> DraftSpec:
    return replace(spec, rope=replace(spec.rope, interleaved=False))


def _pairs(spec: DraftSpec) -> DraftSpec:
    return replace(spec, rope=replace(spec.rope, interleaved=True))


def _usual_cosines(spec: DraftSpec) -> DraftSpec:
    return replace(spec, rope=replace(spec.rope, cos_scale=0.1 * math.log(spec.rope.factor) + 1))


def _shared_embedding(tensors: Mapping[str, Tensor], target: Path) -> Mapping[str, Tensor]:
    return {**tensors, "embedding.weight": read_embedding(target)}


def _later_norm_of_ones(tensors: Mapping[str, Tensor], _target: Path) -> Mapping[str, Tensor]:
    name = "later.0.input_norm.weight"
    return {**tensors, name: torch.ones_like(tensors[name])}


_HALF_SAID = Refuses("NoneType", "YaRN needs beta_fast, beta_slow, mscale and mscale_all_dim, all of them")
_ONE_GROUP = Refuses("same kv cache group", "all layers of a draft have to see alike")
_SPECULATORS: dict[str, Known] = {
    "target width": Refuses("ignore_mismatched_sizes", "target_hidden_size is not read, and fc does not fit"),
}
_SPECFORGE: dict[str, Known] = {
    "residual post-norm": _forge("norm_before_residual is not read", residual=Stream.PRE_NORM),
    "feedback post-norm": _takes("norm_output true is a norm before the head alone", feedback=Stream.PRE_NORM),
    "all three norms": _takes(
        "norm_before_residual is not read; norm_output true is a norm before the head alone",
        residual=Stream.PRE_NORM,
        feedback=Stream.PRE_NORM,
    ),
    "one norm before fc": _forge("norm_before_fc is not read", fuse_norm="none"),
    "attention bias": _forge("biases are not read", _PLAIN_ATTENTION),
    "q, k, v bias": _forge("biases are not read", _PLAIN_ATTENTION),
    "fc and o bias": _forge("biases are not read", _PLAIN_ATTENTION, fc_bias=False),
    "MLP bias": _forge("biases are not read", mlp_bias=False),
    "head norms": Refuses("is not registered", "it has no class for it"),
    **dict.fromkeys(
        ("one slot", "two slots", "four slots"), Refuses("ignore_mismatched_sizes", "it builds three slots")
    ),
    "two layers": _forge("there is one layer", windows=(None,)),
    "two layers, all norms": _takes(
        "there is one layer; norm_before_residual is not read; norm_output true is a norm before the head alone",
        windows=(None,),
        residual=Stream.PRE_NORM,
        feedback=Stream.PRE_NORM,
    ),
    **dict.fromkeys(
        (
            "sliding window",
            "sliding window, second layer",
            "window from the text",
            "window from the text, second layer",
        ),
        _forge("windows are not read, and there is one layer", **_WHOLE),
    ),
    "RoPE yarn, attention_factor": _HALF_SAID,
    "RoPE yarn, not truncated": _HALF_SAID,
    "RoPE interleaved": Otherwise(
        "RoPE rotates halves", lambda spec: replace(_half_rope(spec), head_reads=Stream.PRE_NORM)
    ),
    "RoPE partial": Otherwise(
        "partial_rotary_factor is not read",
        lambda spec: replace(spec, rope=replace(spec.rope, share=1.0), head_reads=Stream.PRE_NORM),
    ),
    "logit scale": _forge("logit_scale is not read", logit_scale=1.0),
    "head shared": Refuses("missing draft weights", "a draft has to have a head of its own"),
    **dict.fromkeys(
        ("speculators' layout", *(name for name in CASES if name.startswith("MLA"))),
        Refuses("is not registered", "it has no class for it"),
    ),
}
_VLLM: dict[str, Known] = {
    "head reads pre-norm": _takes("the head always reads behind the norm", head_reads=Stream.POST_NORM),
    "q, k, v bias": Undefined("with attention_bias o_proj has a bias, too, and nothing is loaded into it"),
    "fc and o bias": _takes("bias true is o_proj's alone", fc_bias=False),
    "sliding window, second layer": _ONE_GROUP,
    "window from the text": _takes("windows count from the row", window_from_text=False),
    "window from the text, second layer": _ONE_GROUP,
    "RoPE interleaved": Otherwise("RoPE rotates halves", _half_rope),
    "MLA, no q_lora_rank": Refuses("self_attn.q_proj", "queries have to go through a latent"),
    "MLA, one norm before fc": Refuses("input_norm", "its MLA draft has no norm before fc"),
    "MLA, halves": Otherwise("MLA rotates interleaved pairs", _pairs),
}
_SGLANG: dict[str, Known] = {
    "residual post-norm": _takes("norm_before_residual is not read", residual=Stream.PRE_NORM),
    "all three norms": _takes("norm_before_residual is not read", residual=Stream.PRE_NORM),
    "head reads pre-norm": _takes("the head always reads behind the norm", head_reads=Stream.POST_NORM),
    "attention bias": _takes("biases of q, k and v are dropped, that of o is kept", {"qkv_bias": False}),
    "q, k, v bias": Undefined("with attention_bias o_proj has a bias, and nothing is loaded into it"),
    "MLP bias": _takes("mlp_bias is not read", mlp_bias=False),
    "head norms": Refuses("Eagle3Qwen3ForCausalLM", "it has no class for it"),
    "one slot": _takes("fc is skipped where its input is as wide as the draft", projects=False),
    "two layers": Otherwise("layer 1 takes hidden_norm, which is not there: ones", tensors=_later_norm_of_ones),
    "two layers, all norms": Otherwise(
        "layer 1 takes hidden_norm, which is not there: ones; norm_before_residual is not read",
        lambda spec: replace(spec, residual=Stream.PRE_NORM), _later_norm_of_ones,
    ),
    "sliding window": _takes("windows of a config are not read", **_WHOLE),
    "window from the text": _takes("windows of a config are not read", **_WHOLE),
    **dict.fromkeys(
        ("sliding window, second layer", "window from the text, second layer"),
        Otherwise(
            "windows of a config are not read; layer 1 takes hidden_norm, which is not there: ones",
            lambda spec: replace(spec, windows=(None, None), window_from_text=False), _later_norm_of_ones,
        ),
    ),
    "RoPE yarn, attention_factor": Otherwise("attention_factor is not read", _usual_cosines),
    "logit scale": _takes("logit_scale is not read", logit_scale=1.0),
    "own embedding": Otherwise("the target's embedding is always taken", tensors=_shared_embedding),
    "head shared": Undefined("the target's head is taken where draft_vocab_size is null alone"),
    "speculators' layout": Refuses("model_type", "it does not read this layout"),
    "MLA, no q_lora_rank": Undefined("a q_lora_rank that is not there is taken for 1536"),
    "MLA, one norm before fc": _takes("norm_before_fc is not read", fuse_norm="none"),
    "MLA, residual and feedback": _takes("norm_before_residual is not read", residual=Stream.PRE_NORM),
    "MLA, two layers": Refuses("only supports 1 layer", "its MLA draft has one layer"),
}  # fmt: skip

ORACLES = {
    oracle.name: oracle
    for oracle in (
        Oracle("speculators", "speculators", "SPECTRACE_ORACLES", "speculators", _SPECULATORS, own_layout=True),
        Oracle("SpecForge", "specforge", "SPECTRACE_ORACLES", "specforge", _SPECFORGE),
        Oracle("vLLM", "vllm", "SPECTRACE_VLLM", "eagle", _VLLM),
        Oracle("SGLang", "sglang", "SPECTRACE_ORACLES", "eagle", _SGLANG),
    )
}

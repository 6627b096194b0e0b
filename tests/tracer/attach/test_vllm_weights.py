"""Weights of a draft in vLLM's module are fingerprinted as those of our own, whatever vLLM has fused of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from spectrace.engine.checkpoint import build_draft, read_draft, weight_fingerprints
from spectrace.engine.draft import DraftModel
from spectrace.tracer.attach.vllm_weights import draft_weights, placements

VOCABULARIES = ("embedding.weight", "head.weight")
_LAYER = {
    "input_norm.weight": "input_layernorm.weight", "embedding_norm.weight": "input_layernorm.weight",
    "feature_norm.weight": "hidden_norm.weight", "mlp_norm.weight": "post_attention_layernorm.weight",
    "attention.o": "self_attn.o_proj", "mlp.down": "mlp.down_proj", "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
}  # fmt: skip
_LATENT = {
    "attention.q_norm": "self_attn.q_a_layernorm", "attention.q_up": "self_attn.q_b_proj",
    "attention.kv_norm": "self_attn.kv_a_layernorm", "attention.kv_up": "self_attn.kv_b_proj",
}  # fmt: skip
_FUSED = {
    "self_attn.qkv_proj": ("attention.q", "attention.k", "attention.v"),
    "mlp.gate_up_proj": ("mlp.gate", "mlp.up"),
    "self_attn.fused_qkv_a_proj": ("attention.q_down", "attention.kv_down"),
}
_KINDS = ("", ".weight", ".bias")
_OUTER = {"fc.weight": "model.fc.weight", "output_norm.weight": "model.norm.weight", "d2t": "draft_id_to_target_id"}


def as_vllm(model: DraftModel) -> Any:
    """What vLLM's classes hold of the draft; a later layer's `hidden_norm` is there, and does nothing."""
    held, tensors = dict[str, Tensor](), model.state_dict()
    latent = "attention.kv_up.weight" in tensors
    names = {**_LAYER, **(_LATENT if latent else {})}
    for number, within in enumerate(["", *(f"later.{n}." for n in range(model.spec.layers - 1))]):
        own = {name.removeprefix(within): t for name, t in tensors.items() if name.startswith(within)}
        place = f"model.layers.{number}."
        for theirs, ours in names.items():
            held |= {f"{place}{ours}{kind}": own[theirs + kind] for kind in _KINDS if theirs + kind in own}
        for fused, parts in _FUSED.items():
            whole = [kind for kind in _KINDS if all(part + kind in own for part in parts)]
            held |= {f"{place}{fused}{kind}": torch.cat([own[part + kind] for part in parts]) for kind in whole}
        held |= {f"{place}hidden_norm.weight": torch.ones(model.spec.width)} if number else {}
    held |= {theirs: tensors[ours] for ours, theirs in _OUTER.items() if ours in tensors}
    rows = {name: len(tensors.get(f"attention.{name}.weight", ())) for name in ("q", "k", "q_down")}
    attention = SimpleNamespace(q_size=rows["q"], kv_size=rows["k"], q_lora_rank=rows["q_down"])
    layers = [SimpleNamespace(self_attn=attention)]
    return SimpleNamespace(named_parameters=held.items, model=SimpleNamespace(layers=layers))


@pytest.fixture(params=["gqa", "mla", "deep"])
def model(request: pytest.FixtureRequest, target_of: Callable[..., Path], draft_of: Callable[..., Path]) -> DraftModel:
    """A draft of each kind of attention, and one of two layers with biases and norms of heads."""
    folder = draft_of("llama", request.param)
    return build_draft(read_draft(folder), target=target_of("llama"), dtype=torch.float32)


def test_every_tensor_has_the_fingerprint_of_our_own(model: DraftModel) -> None:
    ours = {name: print_ for name, print_ in weight_fingerprints(model).items() if name not in VOCABULARIES}
    assert draft_weights(as_vllm(model)) == ours


def test_on_several_ranks_it_is_said_how_what_is_split_lies(model: DraftModel) -> None:
    """By the share of rank 0: of two, half of a projection's rows, or of its columns; a bias of the latter whole."""
    tensors = model.state_dict()
    placed = placements(2, {name: "" for name in tensors})
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        last = module.split(".")[-1]
        if name in VOCABULARIES:
            assert placed[name] == "padded or packed"
        elif last in ("q", "k", "v", "q_up", "kv_up", "gate", "up"):
            assert placed[name] == "Shard(0)" and len(tensor) % 2 == 0
        elif last in ("o", "down") and kind == "weight":
            assert placed[name] == "Shard(1)"
        else:
            assert name not in placed
    assert placements(1, {name: "" for name in tensors}) == {}

"""What is published as a draft and is no EAGLE-3 draft is refused by what it is, in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from spectrace.engine.checkpoint import read_draft
from spectrace.tracer.errors import UserError

Config: TypeAlias = dict[str, Any]
NewDraft: TypeAlias = Callable[..., tuple[Config, dict[str, Tensor]]]
Write: TypeAlias = Callable[[Path, Config, dict[str, Tensor]], Path]
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8}


def shaped(*names: str, **shapes: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: torch.zeros(8) for name in names} | {
        name.replace("__", "."): torch.zeros(shape) for name, shape in shapes.items()
    }


@pytest.mark.parametrize(
    ("config", "tensors", "what"),
    [
        (
            {**LLAMA, "architectures": ["EAGLEModel"], "bias": True},
            shaped("layers.0.self_attn.q_proj.weight", fc__weight=(8, 16), fc__bias=(8,)),
            "an EAGLE-1 or EAGLE-2 draft",
        ),
        ({"speculators_model_type": "eagle"}, shaped(fc__weight=(8, 24)), "an EAGLE-1 or EAGLE-2 draft"),
        (
            {"architectures": ["DeepSeekMTPModel"], "model_type": "deepseek_mtp"},
            shaped("model.layers.61.embed_tokens.weight"),
            "an MTP (multi-token prediction) head",
        ),
        (
            {"model_type": "deepseek_v3"},
            shaped("model.layers.61.eh_proj.weight", "model.layers.61.enorm.weight", "model.layers.61.hnorm.weight"),
            "an MTP (multi-token prediction) head",
        ),
        ({"model_type": "qwen3_next"}, shaped("mtp.fc.weight", "mtp.norm.weight"), "an MTP"),
        ({"model_type": "mimo"}, shaped("model.mtp_layers.0.input_proj.weight"), "an MTP"),
        ({"medusa_num_heads": 3}, shaped("0.0.linear.weight"), "Medusa heads"),
        ({"architectures": ["MedusaModel"]}, shaped("blocks.0.layers.0.weight"), "Medusa heads"),
        ({}, shaped("medusa_heads.0.0.linear.weight"), "Medusa heads"),
        ({"hydra_num_heads": 4}, shaped("0.0.linear.weight"), "Hydra heads"),
        ({}, shaped("hydra_head.0.weight"), "Hydra heads"),
        ({"model_type": "mlp_speculator", "n_predict": 3}, shaped("speculator.emb.0.weight"), "an MLP speculator"),
        (
            {**LLAMA, "architectures": ["DFlashDraftModel"], "dflash_config": {"target_layer_ids": [1]}},
            shaped("hidden_norm.weight", fc__weight=(8, 24)),
            "DFlash, which drafts blocks",
        ),
        ({"speculators_model_type": "dflash"}, shaped(fc__weight=(8, 24)), "DFlash"),
        ({"speculators_model_type": "dspark"}, shaped(fc__weight=(8, 24)), "DSpark, which drafts blocks"),
        ({"dspark_target_layer_ids": [1, 2]}, shaped(fc__weight=(8, 24)), "DSpark"),
        ({"speculators_model_type": "peagle"}, shaped(fc__weight=(8, 24)), "P-EAGLE or PARD"),
        ({**LLAMA, "pard_token": 7}, shaped("model.layers.0.mlp.up_proj.weight"), "P-EAGLE or PARD"),
        (
            {**LLAMA, "eagle_config": {"parallel_draft_step": 4}},
            shaped("layers.0.hidden_norm.weight", fc__weight=(8, 24)),
            "P-EAGLE or PARD, which draft all tokens of a round in parallel",
        ),
        (LLAMA, shaped("mask_hidden", "midlayer.hidden_norm.weight", fc__weight=(8, 24)), "P-EAGLE or PARD"),
        (LLAMA, shaped("model.layers.0.mlp.up_proj.weight", "lm_head.weight"), "a whole target model (LlamaForCausal"),
        (
            {"model_type": "deepseek_v3"},
            shaped("model.layers.0.mlp.up_proj.weight", "model.layers.61.eh_proj.weight"),
            "a whole target model (deepseek_v3)",
        ),
        (LLAMA, shaped("base_model.model.layers.0.q_proj.lora_A.weight"), "a LoRA adapter"),
        (
            {**LLAMA, "eagle_config": {"use_aux_hidden_state": False}},
            shaped("layers.0.hidden_norm.weight"),
            "fed the target's last state in place of features (use_aux_hidden_state is false)",
        ),
        (
            LLAMA,
            shaped("midlayer.hidden_norm.weight", "midlayer.mlp.experts.0.up_proj.weight", fc__weight=(8, 24)),
            "a draft with experts in place of its MLP",
        ),
        ({"speculators_model_type": "xpress"}, shaped(fc__weight=(8, 24)), "another kind of speculators (xpress)"),
    ],
)
def test_it_is_refused_by_name(
    config: Config, tensors: dict[str, Tensor], what: str, write_draft: Write, tmp_path: Path
) -> None:
    folder = write_draft(tmp_path / "draft", config, tensors)
    with pytest.raises(UserError) as raised:
        read_draft(folder)
    message = raised.value.message
    assert message.startswith(f"{folder}: not an EAGLE-3 draft but ") and what in message, message
    assert "spectrace reads EAGLE-3 drafts as EAGLE, SpecForge, ModelOpt, AngelSlim and speculators" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("file", "what"),
    [
        ("model-q4.gguf", "a GGUF file"),
        ("model.onnx", "an ONNX model"),
        ("medusa_lm_head.pt", "Medusa heads"),
        ("hydra_lm_head.pt", "Hydra heads"),
        ("adapter_config.json", "a LoRA adapter"),
    ],
)
@pytest.mark.parametrize("config", [True, False])
def test_a_folder_of_other_files_is_refused_by_what_they_are(
    file: str, what: str, config: bool, tmp_path: Path
) -> None:
    (tmp_path / file).write_text("{}", "utf-8")
    if config:
        (tmp_path / "config.json").write_text(json.dumps(LLAMA), "utf-8")
    with pytest.raises(UserError, match=f"not an EAGLE-3 draft but {what}; .*in [*].safetensors or pytorch_model.bin"):
        read_draft(tmp_path)


def test_an_adapter_with_tensors_is_refused_although_it_has_no_config(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}", "utf-8")
    save_file(shaped("a.lora_A.weight"), tmp_path / "adapter_model.safetensors")
    with pytest.raises(UserError, match="not an EAGLE-3 draft but a LoRA adapter"):
        read_draft(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"eagle_config": {"parallel_draft_step": 1}},
        {"eagle_config": {"use_aux_hidden_state": False}},  # and fc is there: what an engine does with it is a finding
        {"num_nextn_predict_layers": 0},
        {"speculators_model_type": None},
    ],
)
def test_an_eagle_3_draft_is_no_stranger(
    changes: Config, new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    config, tensors = new_draft()
    assert read_draft(write_draft(tmp_path, {**config, **changes}, tensors)).report.missing_tensors == ()


def test_two_slots_are_no_eagle_1_draft(new_draft: NewDraft, write_draft: Write, tmp_path: Path) -> None:
    """Their fc is of the same shape; the norms tell."""
    config, tensors = new_draft(eagle_aux_hidden_state_layer_ids=[1, 3])
    assert read_draft(write_draft(tmp_path, config, tensors)).spec.slots == 2


def test_tensors_below_model_are_to_be_renamed(new_draft: NewDraft, write_draft: Write, tmp_path: Path) -> None:
    config, tensors = new_draft()
    with pytest.raises(UserError, match=r"tensors are called model.fc.weight and so on; .*rename them"):
        read_draft(write_draft(tmp_path, config, {f"model.{name}": tensor for name, tensor in tensors.items()}))

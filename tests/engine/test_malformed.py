"""Checkpoints that an attack on reading them came up with: each is refused in one line, or read as it is."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

from spectrace.engine.checkpoint import read_draft
from spectrace.engine.convert import convert_draft
from spectrace.tracer.errors import RunFailed, UserError

NewDraft: TypeAlias = Callable[..., tuple[dict[str, Any], dict[str, Tensor]]]
Write: TypeAlias = Callable[..., Path]
GATE = "midlayer.mlp.gate_proj.weight"


def test_a_compressed_file_of_torch_is_read_as_what_was_saved(
    new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    """Mapped into memory, its bytes would be taken for numbers."""
    config, tensors = new_draft()
    folder = write_draft(tmp_path / "draft", config, tensors)
    (folder / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "saved.bin")
    with (
        zipfile.ZipFile(tmp_path / "saved.bin") as saved,
        zipfile.ZipFile(folder / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in saved.namelist():
            packed.writestr(name, saved.read(name))
    read = read_draft(folder)
    assert all(torch.equal(tensor, tensors[read.names[name]]) for name, tensor in read.tensors.items())


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fnuz]
)
def test_weights_of_another_type_are_refused_by_it(
    dtype: torch.dtype, new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    config, tensors = new_draft()
    tensors[GATE] = tensors[GATE].to(dtype)
    with pytest.raises(UserError, match=f"tensor {GATE} is of type {str(dtype).removeprefix('torch.')}"):
        read_draft(write_draft(tmp_path, config, tensors))


@pytest.mark.parametrize(
    "told",
    [
        {"quant_method": "w8a8_int8"},
        {"quant_method": ["gptq"]},
        {"bits": 4},
        {"quant_method": "compressed-tensors", "format": "int-quantized"},
    ],
)
def test_quantisation_that_is_not_known_is_refused(
    told: dict[str, Any], new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    config, tensors = new_draft()
    with pytest.raises(UserError, match="quantization_config says"):
        read_draft(write_draft(tmp_path, {**config, "quantization_config": told}, tensors))


@pytest.mark.parametrize(
    "odd", [lambda one: one.to_sparse(), lambda one: torch.quantize_per_tensor(one, 0.1, 0, torch.qint8)]
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_of_torch_that_are_not_plain_are_refused(
    odd: Callable[[Tensor], Tensor], new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    config, tensors = new_draft()
    folder = write_draft(tmp_path, config, tensors)
    (folder / "model.safetensors").unlink()
    torch.save({**tensors, GATE: odd(tensors[GATE])}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin"):
        read_draft(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"draft_vocab_size": -1},
        {"intermediate_size": -12},
        {"intermediate_size": 10**30},
        {"num_attention_heads": 10**30},
        {"head_dim": 10**30},
        {"rope_theta": 10**400},
        {"rope_scaling": {"rope_type": ["yarn"]}},
        {"rope_scaling": {"rope_type": {"a": 1}}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10**400}},
        {
            "rope_scaling": {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 1e-320
            }
        },
    ],
    ids=str,
)  # fmt: skip
def test_numbers_that_no_draft_has_are_refused(
    changes: dict[str, Any], new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    config, tensors = new_draft()
    folder = write_draft(tmp_path, config, tensors)
    (folder / "config.json").write_text(json.dumps({**config, **changes}), "utf-8")
    with pytest.raises(UserError, match=r"config\.json"):
        read_draft(folder)


@pytest.mark.parametrize("changes", [{"kv_lora_rank": -1}, {"v_head_dim": -4}, {"num_attention_heads": -2}], ids=str)
def test_numbers_that_no_latent_attention_has_are_refused(
    changes: dict[str, Any], new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    config, tensors = new_draft("mla")
    with pytest.raises(UserError, match=f"field {next(iter(changes))} is -"):
        read_draft(write_draft(tmp_path, {**config, **changes}, tensors))


def test_a_temperature_of_nothing_is_refused(new_draft: NewDraft, write_draft: Write, tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 22026.465794806718, "original_max_position_embeddings": 64}
    config, tensors = new_draft("mla", rope_scaling={**scaling, "mscale_all_dim": -1})
    with pytest.raises(UserError, match="mscale_all_dim"):
        read_draft(write_draft(tmp_path, config, tensors))


def test_an_empty_rope_scaling_hides_nothing(new_draft: NewDraft, write_draft: Write, tmp_path: Path) -> None:
    parameters = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500000.0}
    config, tensors = new_draft(rope_theta=None, rope_scaling={}, rope_parameters=parameters)
    rope = read_draft(write_draft(tmp_path, config, tensors)).spec.rope
    assert (rope.kind, rope.factor, rope.theta) == ("linear", 4.0, 500000.0)


@pytest.mark.parametrize(
    "key", ["pard_token", "ptd_token_id", "medusa_num_heads", "hydra_num_heads", "dflash_config", "dspark_config"]
)
def test_a_key_of_another_kind_of_draft_that_holds_nothing_makes_no_stranger(
    key: str, new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    config, tensors = new_draft()
    folder = write_draft(tmp_path, config, tensors)
    (folder / "config.json").write_text(json.dumps({**config, key: None}), "utf-8")
    assert read_draft(folder).spec.layers == 1


def test_ids_that_modelopt_did_not_write_keep_their_order(
    new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    """It sorts what it captures; other keys are others' words."""
    config, tensors = new_draft(layout="layers.0", eagle_aux_hidden_state_layer_ids=[4, 0, 2])
    flags = {"use_aux_hidden_state": True, "next_layer_regular": True}
    draft = read_draft(write_draft(tmp_path, {**config, "eagle_config": flags}, tensors))
    assert draft.layout == "modelopt" and draft.wiring and draft.wiring.boundaries == (4, 0, 2)


def test_a_conversion_that_finds_its_folder_taken_in_the_end_says_so(
    new_draft: NewDraft, write_draft: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_draft(tmp_path / "draft", *new_draft())

    def taken(_path: Path, target: Path) -> None:
        raise OSError(39, "Directory not empty", str(target))

    monkeypatch.setattr(Path, "rename", taken)
    with pytest.raises(RunFailed, match="cannot be written"):
        convert_draft(source, tmp_path / "out", "eagle")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft"]

"""Weights of eight-bit floats are read times their scales, whatever these are of; fewer bits are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

from spectrace.engine.checkpoint import build_draft, read_draft
from spectrace.engine.quantised import dequantised
from spectrace.tracer.errors import UserError

Config: TypeAlias = dict[str, Any]
Tensors: TypeAlias = dict[str, Tensor]
NewDraft: TypeAlias = Callable[..., tuple[Config, Tensors]]
Write: TypeAlias = Callable[[Path, Config, Tensors], Path]
FP8 = torch.float8_e4m3fn
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
DEEPSEEK = {"quant_method": "fp8", "weight_block_size": [16, 32], "activation_scheme": "dynamic"}


def quantise(weight: Tensor, strategy: str) -> tuple[Tensor, Tensor]:
    """A weight in eight bits and its scale, by the definition of each strategy, element by element."""
    rows, columns = weight.shape
    size = {"tensor": (rows, columns), "channel": (1, columns), "row": (1, columns), "block": (16, 32)}[strategy]
    scale = torch.zeros(-(-rows // size[0]), -(-columns // size[1]))
    stored = torch.zeros(rows, columns)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = (slice(i * size[0], (i + 1) * size[0]), slice(j * size[1], (j + 1) * size[1]))
            scale[i, j] = weight[part].abs().max() / 448
            stored[part] = weight[part] / scale[i, j]
    shapes = {"tensor": (), "channel": (rows, 1), "row": (rows,)}
    return stored.to(FP8), scale.reshape(shapes.get(strategy, scale.shape))


def quantised_draft(
    new_draft: NewDraft, strategy: str, told: Config | None, suffix: str
) -> tuple[Config, Tensors, Tensors]:
    """A draft whose projections are in eight bits; its tensors as they were, too."""
    config, tensors = new_draft()
    stored = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and name != "lm_head.weight":
            stored[name], stored[name.removesuffix("weight") + suffix] = quantise(tensor, strategy)
    return {**config, "quantization_config": told}, stored, tensors


@pytest.mark.parametrize(
    ("strategy", "told", "suffix"),
    [
        ("tensor", COMPRESSED, "weight_scale"),
        ("channel", COMPRESSED, "weight_scale"),
        ("row", MODELOPT, "weight_scale"),
        ("tensor", MODELOPT, "weight_scale"),
        ("block", DEEPSEEK, "weight_scale_inv"),
        ("tensor", None, "weight_scale"),
    ],
)
def test_weights_come_back_within_what_eight_bits_hold(
    strategy: str, told: Config | None, suffix: str, new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    config, stored, before = quantised_draft(new_draft, strategy, told, suffix)
    draft = read_draft(write_draft(tmp_path, config, stored))
    assert draft.report.unused_tensors == draft.report.missing_tensors == draft.report.unread_fields == ()
    for name, scale in draft.scales.items():
        weight = before[draft.names[name]]
        assert draft.tensors[name].dtype == torch.float32
        spacing = weight.abs().clamp(min=float(weight.abs().max()) / 448) / 8  # of three bits behind the point, halved
        assert bool(((draft.tensors[name] - weight).abs() <= spacing).all())
        assert torch.equal(scale, stored[draft.names[name].removesuffix("weight") + suffix])
        bare = stored[draft.names[name]].float()
        assert float((bare - weight).abs().max()) > 1, "without its scale it would be another weight"
    assert draft.scales.keys() == {name for name in draft.tensors if before[draft.names[name]].ndim == 2} - {
        "head.weight"
    }


def test_a_quantised_draft_is_built_from_the_weights_times_their_scales(
    new_draft: NewDraft, write_draft: Write, target_of: Callable[..., Path], tmp_path: Path
) -> None:
    config, stored, _ = quantised_draft(new_draft, "channel", COMPRESSED, "weight_scale")
    draft = read_draft(write_draft(tmp_path, config, stored))
    model = build_draft(draft, target=target_of("llama"), dtype=torch.float32)
    expected = stored["fc.weight"].float() * stored["fc.weight_scale"]
    assert torch.equal(model.fc.weight, expected)


def test_a_weight_without_its_scale_is_taken_as_it_is_and_told(
    new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    config, stored, _ = quantised_draft(new_draft, "tensor", COMPRESSED, "weight_scale")
    del stored["fc.weight_scale"]
    draft = read_draft(write_draft(tmp_path, config, stored))
    assert draft.tensors["fc.weight"].dtype == FP8 and "fc.weight" not in draft.scales
    assert any(note.startswith("1 weights are of eight bits and have no scale") for note in draft.report.notes)


def test_scales_of_activations_are_told(new_draft: NewDraft, write_draft: Write, tmp_path: Path) -> None:
    config, stored, _ = quantised_draft(new_draft, "tensor", MODELOPT, "weight_scale")
    stored["fc.input_scale"] = torch.ones(())
    report = read_draft(write_draft(tmp_path, config, stored)).report
    assert report.unused_tensors == ("fc.input_scale",)
    assert any("engines may round activations" in note for note in report.notes)


@pytest.mark.parametrize("shape", [(3,), (48, 2), (1, 144), (2, 2)])
def test_a_scale_that_fits_no_part_of_its_weight_is_refused(
    shape: tuple[int, ...], new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    config, stored, _ = quantised_draft(new_draft, "tensor", COMPRESSED, "weight_scale")
    stored["fc.weight_scale"] = torch.ones(shape)
    with pytest.raises(UserError, match=r"tensor fc.weight_scale is \[.*\], expected one number, \[48\], \[48, 1\] or"):
        read_draft(write_draft(tmp_path, config, stored))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_scale_that_is_no_number_is_refused(
    value: float, new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    config, stored, _ = quantised_draft(new_draft, "tensor", COMPRESSED, "weight_scale")
    stored["fc.weight_scale"].fill_(value)
    with pytest.raises(UserError, match=r"tensor fc.weight has \d+ of 6912 values that are no finite number"):
        read_draft(write_draft(tmp_path, config, stored))


@pytest.mark.parametrize(
    ("told", "what"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method 'gptq'"),
        ({"quant_method": "awq"}, "quant_method 'awq'"),
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo 'NVFP4'"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4, "type": "int"}}}},
            "weights of 4 bits, type 'int'",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 8, "type": "int"}}}},
            "weights of 8 bits, type 'int'",
        ),
    ],
)
def test_other_quantisation_is_refused_by_its_config(
    told: Config, what: str, new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    config, tensors = new_draft()
    with pytest.raises(UserError, match=f"quantization_config says {what}; only weights of eight-bit floats"):
        read_draft(write_draft(tmp_path, {**config, "quantization_config": told}, tensors))


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("midlayer.mlp.up_proj.qzeros", "GPTQ or AWQ"),
        ("midlayer.mlp.up_proj.g_idx", "GPTQ"),
        ("midlayer.mlp.up_proj.weight_packed", "compressed-tensors with packed weights"),
        ("midlayer.mlp.up_proj.weight_scale_2", "nvfp4"),
        ("midlayer.mlp.up_proj.weight.absmax", "bitsandbytes"),
    ],
)
def test_other_quantisation_is_refused_by_its_tensors(
    name: str, what: str, new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    config, tensors = new_draft()
    with pytest.raises(UserError, match=rf"quantised with {what}.*\(tensor {name}\)"):
        read_draft(write_draft(tmp_path, config, {**tensors, name: torch.zeros(2)}))


def test_modelopts_account_beside_the_config_counts(new_draft: NewDraft, write_draft: Write, tmp_path: Path) -> None:
    folder = write_draft(tmp_path, *new_draft())
    account = folder / "hf_quant_config.json"
    account.write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}), "utf-8")
    assert read_draft(folder).report.missing_tensors == ()
    account.write_text(json.dumps({"quantization": {"quant_algo": "W4A16"}}), "utf-8")
    with pytest.raises(UserError, match="quantised to W4A16 by ModelOpt"):
        read_draft(folder)
    account.write_text("[", "utf-8")
    with pytest.raises(UserError, match=r"hf_quant_config.json: not readable as ModelOpt's account"):
        read_draft(folder)


@pytest.mark.parametrize("size", [[128], [0, 128], "128", [128.0, 128]])
def test_a_size_of_blocks_that_is_none_is_refused(
    size: object, new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    config, tensors = new_draft()
    told = {"quant_method": "fp8", "weight_block_size": size}
    with pytest.raises(UserError, match=r"quantization_config.weight_block_size is .*, expected two whole numbers"):
        read_draft(write_draft(tmp_path, {**config, "quantization_config": told}, tensors))


def test_blocks_that_do_not_divide_a_weight_end_with_it() -> None:
    weight = torch.ones(5, 7).to(FP8)
    scale = torch.arange(1.0, 7).reshape(2, 3)
    expected = scale.repeat_interleave(3, 0).repeat_interleave(3, 1)[:5, :7]
    assert torch.equal(dequantised(weight, scale, (3, 3)), expected)

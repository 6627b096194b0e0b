"""Layer by layer gives the very bits that the whole target gives, with one layer's weights in memory."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spectrace.engine.layerwise import LayerwiseTarget
from spectrace.engine.packing import PackedRows, pack_texts
from spectrace.engine.parts import EMBEDDING, HEAD, layer_part
from spectrace.engine.target import TargetModel
from spectrace.tracer.errors import UserError

NewTarget = Callable[..., Path]
_LENGTHS = ((1, 2, 23), (9, 5, 17), (12, 3))


@pytest.fixture(scope="module")
def groups() -> list[PackedRows]:
    """Eight texts of unequal length in three groups."""
    generator = torch.Generator().manual_seed(3)
    packed = []
    for number, lengths in enumerate(_LENGTHS):
        texts = [torch.randint(0, 96, (length,), generator=generator).tolist() for length in lengths]
        packed.append(pack_texts({10 * number + at: text for at, text in enumerate(texts)}))
    return packed


def in_memory(folder: Path, groups: list[PackedRows], dtype: torch.dtype) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Boundaries by number and group, and logits, by the engine's target."""
    target = TargetModel(folder, dtype=dtype)
    out = []
    for rows in groups:
        target.reset()
        out.append(target.forward(rows, boundaries=range(6)))
    return [[one.boundaries[boundary] for one in out] for boundary in range(6)], [one.logits for one in out]


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def check_same(folder: Path, groups: list[PackedRows], dtype: torch.dtype = torch.float32) -> None:
    boundaries, logits = in_memory(folder, groups, dtype)
    target = LayerwiseTarget(folder, dtype=dtype)
    hidden: list[Tensor] = []
    for boundary, hidden in target.boundaries(groups):
        assert equal(hidden, boundaries[boundary])
    assert boundary == 5
    assert equal(list(target.logits(groups, hidden)), logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_boundaries_and_logits_are_bit_for_bit_those_of_the_whole_target(
    family: str, dtype: torch.dtype, target_of: NewTarget, groups: list[PackedRows]
) -> None:
    """Experts that are merged as they are loaded, routing that stays float32, decoders of multimodal classes."""
    check_same(target_of(family), groups, dtype)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("gemma3", {}),
        ("mixtral", {}),
        ("granite", {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}),
        ("mistral", {"sliding_window": 5}),
    ],
)
def test_so_they_are_of_families_that_do_more_around_their_layers(
    family: str, changes: dict[str, Any], new_target: NewTarget, groups: list[PackedRows], tmp_path: Path
) -> None:
    check_same(new_target(tmp_path / "target", family, **changes), groups)


def sharded(folder: Path, files: int) -> Path:
    """The same checkpoint in several files and an index, every layer spread over them."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    named = {name: f"model-{at % files}.safetensors" for at, name in enumerate(tensors)}
    for file in set(named.values()):
        save_file({name: tensors[name] for name in tensors if named[name] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": named}), "utf-8")
    return folder


def test_a_checkpoint_in_many_files_is_the_same(
    new_target: NewTarget, groups: list[PackedRows], tmp_path: Path
) -> None:
    check_same(sharded(new_target(tmp_path / "target", "deepseek_v3"), 4), groups)


def held_bytes(target: LayerwiseTarget) -> int:
    """What is not on the meta device, of all the weights."""
    weights = target.target.model.state_dict().values()
    return sum(tensor.nbytes for tensor in weights if tensor.device.type != "meta")


@pytest.mark.parametrize("family", ["deepseek_v3", "kimi_k25"])
def test_one_part_s_weights_are_there_at_a_time(family: str, target_of: NewTarget, groups: list[PackedRows]) -> None:
    target = LayerwiseTarget(target_of(family), dtype=torch.float32)
    always, held = held_bytes(target), list[int]()
    assert always == 48 * 4  # the final norm
    for layer in target.target.layers:
        layer.register_forward_pre_hook(lambda *_: held.append(held_bytes(target) - always))
    for _, hidden in target.boundaries(groups):
        assert len(hidden) == 3 and held_bytes(target) == always
    parts = [EMBEDDING, *(layer_part(layer) for layer in range(5))]
    per_forward = held[:: len(target.target.layers)]
    assert per_forward == [target.parts.nbytes(part) for part in parts for _ in groups]
    list(target.logits(groups, hidden))
    assert held[-1] == target.parts.nbytes(HEAD)
    assert target.largest_bytes == max(held) < sum(map(target.parts.nbytes, parts)) / 3


def edit(folder: Path, **fields: Any) -> Path:
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, **fields}), "utf-8")
    return folder


def without(folder: Path, name: str) -> Path:
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {one: tensor for one, tensor in tensors.items() if not re.search(name, one)}, folder / "model.safetensors"
    )
    return folder


def unsafe(folder: Path) -> Path:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    return folder


def cut(folder: Path) -> Path:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    return folder


def lacking_a_file(folder: Path) -> Path:
    (sharded(folder, 3) / "model-1.safetensors").unlink()
    return folder


def lacking_a_tensor(folder: Path) -> Path:
    index = sharded(folder, 2) / "model.safetensors.index.json"
    named = json.loads(index.read_text("utf-8"))["weight_map"]
    index.write_text(json.dumps({"weight_map": {**named, "model.layers.9.x": "model-0.safetensors"}}), "utf-8")
    return folder


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (lambda folder: edit(folder, quantization_config={"quant_method": "fp8"}), "quantized weights cannot be read"),
        (unsafe, r"no \*.safetensors in it"),
        (cut, "model.safetensors: cannot be read .*; download it again"),
        (lacking_a_file, "model-1.safetensors: cannot be read .*; download it again"),
        (lacking_a_tensor, "index.json names model.layers.9.x, and no file holds it; download it again"),
        (
            lambda folder: without(folder, r"layers\.3\."),
            r"9 weights are missing \(model.layers.3.*; download it again",
        ),
        (lambda folder: without(folder, r"lm_head"), r"1 weights are missing \(lm_head.weight\)"),
        (lambda folder: without(folder, r"layers\.3\.mlp\.up"), r"1 weights are missing \(model.layers.3.mlp.up_proj"),
        (lambda folder: edit(folder, num_kv_shared_layers=2), "hand each other more than one hidden state.*--capture"),
    ],
)
def test_what_cannot_be_read_part_by_part_is_said_before_anything_is_computed(
    broken: Callable[[Path], Path], told: str, new_target: NewTarget, tmp_path: Path
) -> None:
    folder = broken(new_target(tmp_path / "target", "llama"))
    with pytest.raises(UserError, match=told) as raised:
        LayerwiseTarget(folder, dtype=torch.float32)
    assert str(folder) in raised.value.message and "\n" not in raised.value.message


@pytest.mark.parametrize(
    ("family", "broken", "told"),
    [
        ("llama", lambda folder: edit(folder, intermediate_size=32), r"by config.json it is \[48, 32\]; which is it"),
        ("deepseek_v3", lambda folder: without(folder, r"layers\.3\.mlp\.experts\.5\.up"), r"layers\.3\.mlp\.experts"),
    ],
)
def test_tensors_that_do_not_fit_are_never_made_up(
    family: str,
    broken: Callable[[Path], Path],
    told: str,
    new_target: NewTarget,
    groups: list[PackedRows],
    tmp_path: Path,
) -> None:
    target = LayerwiseTarget(broken(new_target(tmp_path / "target", family)), dtype=torch.float32)
    with pytest.raises(UserError, match=told):
        list(target.boundaries(groups))


def test_a_target_whose_layers_have_other_names_is_refused(new_target: NewTarget, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"GPTNeoXForCausalLM keeps no `layers` and `norm`"):
        LayerwiseTarget(new_target(tmp_path / "target", "gpt_neox"), dtype=torch.float32)

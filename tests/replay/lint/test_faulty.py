"""Fifty drafts that are broken, each in one way: the right finding comes first. Drafts that are not have no error.

The first twenty are those that vLLM 0.32 was served, which named eight of them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spectrace.engine.checkpoint import read_draft
from spectrace.engine.convert import WRITABLE, convert_draft
from spectrace.engine.layouts.known import LAYOUTS
from spectrace.replay.lint.finding import Severity
from spectrace.replay.lint.lint import lint_draft
from spectrace.replay.profiles.known import profile_named

Break = Callable[[Any], object]
IDS, NESTED = "eagle_aux_hidden_state_layer_ids", "eagle_config.eagle_aux_hidden_state_layer_ids"
O_PROJ = "midlayer.self_attn.o_proj.weight"
UP, GATE = "midlayer.mlp.up_proj.weight", "midlayer.mlp.gate_proj.weight"
HALVED = ("q_proj.weight", "k_proj.weight", "v_proj.weight")  # layers after the first take the state alone
TOKENS, DRAFTED = 128, 92


def lose(*names: str) -> Break:
    """Tensors that are not there."""
    return lambda pair: [pair.tensors.pop(name) for name in names]


def say(**keys: object) -> Break:
    """Keys of the config; dots are written as two underscores."""
    return lambda pair: [pair.put(key.replace("__", "."), value) for key, value in keys.items()]


def change(name: str, made: Callable[[Any], Any]) -> Break:
    """A tensor that is another one."""

    def apply(pair: Any) -> None:
        pair.tensors[name] = made(pair.tensors[name])

    return apply


def all_of(*each: Break) -> Break:
    return lambda pair: [one(pair) for one in each]


def add(**tensors: Any) -> Break:
    return lambda pair: pair.tensors.update({name.replace("__", "."): one for name, one in tensors.items()})


def tokens_of(d2t: torch.Tensor) -> torch.Tensor:
    return d2t + torch.arange(len(d2t))


def kept(pair: Any) -> torch.Tensor:
    """The t2d that goes with a draft's d2t."""
    table = torch.zeros(TOKENS, dtype=torch.bool)
    table[tokens_of(pair.tensors["d2t"])] = True
    return table


def with_t2d(one: Break) -> Break:
    def apply(pair: Any) -> None:
        table = kept(pair)
        one(pair)
        pair.tensors["t2d"] = table

    return apply


def one_twice(d2t: torch.Tensor) -> torch.Tensor:
    return d2t.index_fill(0, torch.tensor([5]), int(d2t[4]) - 1)


def head_of_the_target(pair: Any) -> None:
    """A head as trainers start it, whose table was then made anew."""
    del pair.tensors["t2d"]
    rows = tokens_of(pair.tensors["d2t"])
    pair.tensors["lm_head.weight"] = pair.target_tensors["lm_head.weight"][rows]
    others = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(3))[:DRAFTED].sort().values
    pair.tensors["d2t"] = others - torch.arange(DRAFTED)


def of_layers(layers: int) -> Break:
    return lambda pair: pair.target_config.update(num_hidden_layers=layers)


def of_kimi(*ids: int) -> Break:
    """The case that spectrace began with: 61 layers, ids within eagle_config."""

    def apply(pair: Any) -> None:
        pair.target_config |= {"num_hidden_layers": 61, "architectures": ["DeepseekV3ForCausalLM"]}
        pair.tensors.pop("embed_tokens.weight")
        pair.put(IDS, None)
        pair.put(NESTED, [*ids])

    return apply


def two_layers(pair: Any) -> None:
    pair.put("num_hidden_layers", 2)
    layer = {name: one for name, one in pair.tensors.items() if name.startswith("midlayer.")}
    for name, one in layer.items():
        if "hidden_norm" in name:
            continue
        narrow = one[:, :80] if name.endswith(HALVED) else one
        pair.tensors[name.replace("midlayer", "layers.1")] = narrow + 0.01 * torch.randn(narrow.shape).bfloat16()


def biases(pair: Any) -> None:
    for one, rows in (("q", 96), ("k", 48), ("v", 48), ("o", 80)):
        pair.tensors[f"midlayer.self_attn.{one}_proj.bias"] = torch.randn(rows).bfloat16()


def norms(*names: str) -> Break:
    return lose(*(f"midlayer.{name}.weight" for name in names))


def dump(**files: bytes) -> Break:
    return lambda pair: pair.files.update({name.replace("__", "."): content for name, content in files.items()})


VLLM: dict[str, tuple[str, Break, str]] = {
    "d2t missing": ("d2t-missing", lose("d2t"), "vllm V1"),
    "head missing": ("head-missing", lose("lm_head.weight"), "vllm V1"),
    "random embedding": (
        "embedding-unrelated", change("embed_tokens.weight", lambda one: torch.randn(one.shape).bfloat16()), "vllm V1",
    ),
    "q_proj missing": ("tensor-missing", lose("midlayer.self_attn.q_proj.weight"), "vllm V1"),
    "fc missing": ("tensor-missing", lose("fc.weight"), "vllm V1"),
    "output norm missing": ("tensor-missing", lose("norm.weight"), "vllm V1"),
    "hidden_norm missing": ("tensor-missing", norms("hidden_norm"), "vllm V1"),
    "norm_before_residual flipped": ("switch-untrained", say(norm_before_residual=True), "vllm V1"),
    "theta": ("rope-differs", say(rope_theta=500000.0, rope_scaling=None), "vllm V1"),
    "ids absent": ("wiring-absent", say(**{IDS: None}), "vllm V1"),
    "ids unsorted": ("wiring-misread", say(**{IDS: [5, 0, 3]}), "vllm V1"),
    "ids in eagle_config, V1": (
        "wiring-misread", say(**{IDS: None, NESTED.replace(".", "__"): [-1, 2, 4]}), "vllm V1",
    ),
    "ids in eagle_config, V2": (
        "wiring-unread", say(**{IDS: None, NESTED.replace(".", "__"): [-1, 2, 4]}), "vllm V2",
    ),
    "id out of range": ("wiring-range", say(**{IDS: [0, 3, 9]}), "vllm V1"),
    "duplicate id": ("wiring-twice", say(**{IDS: [0, 3, 3]}), "vllm V1"),
    "two ids": ("wiring-fit", say(**{IDS: [0, 3]}), "vllm V1"),
    "d2t absolute": ("d2t-absolute", change("d2t", tokens_of), "vllm V1"),
    "fc renamed": ("tensor-misnamed", lambda pair: pair.rename("fc.", "fuse."), "vllm V1"),
    "layer renamed": ("tensor-misnamed", lambda pair: pair.rename("midlayer.", "decoder."), "vllm V1"),
    "model. in front": (
        "tensor-misnamed", lambda pair: [pair.rename(name, f"model.{name}") for name in [*pair.tensors]], "vllm V1",
    ),
    "a tensor too many": ("tensor-unused", add(extra__weight=torch.randn(8, 8)), "vllm V1"),
}  # fmt: skip
OURS: dict[str, tuple[str, Break, str]] = {
    "d2t zero": ("d2t-zero", with_t2d(change("d2t", torch.zeros_like)), ""),
    "d2t shifted": ("d2t-shifted", with_t2d(change("d2t", lambda one: one.roll(1))), ""),
    "d2t of another run": (
        "d2t-broken", with_t2d(change("d2t", lambda one: torch.arange(36, 128) - torch.arange(92))), "",
    ),
    "d2t with one token twice": ("d2t-broken", change("d2t", one_twice), ""),
    "d2t beyond the vocabulary": ("d2t-range", change("d2t", lambda one: one + 500), ""),
    "d2t of floats": ("d2t-range", change("d2t", torch.Tensor.float), ""),
    "a table made anew": ("head-rows", head_of_the_target, ""),
    "up is gate": (
        "tensor-twice",
        lambda pair: pair.tensors.update({UP: pair.tensors[GATE].clone()}),
        "",
    ),
    "fc of zeros": ("tensor-constant", change("fc.weight", torch.zeros_like), ""),
    "NaN": ("tensor-values", change("fc.weight", lambda one: one.index_fill(0, torch.tensor([3]), torch.nan)), ""),
    "memory": ("tensor-unwritten", change("fc.weight", lambda one: one * 1e7), ""),
    "o_proj of another width": ("tensor-shape", change(O_PROJ, lambda one: one[:, :-8]), ""),
    "biases that no key tells of": ("tensor-unused", biases, ""),
    "fc_norm that no key tells of": (
        "tensor-unused", all_of(say(norm_before_fc=None)), "",
    ),
    "a norm before fc that is not there": ("tensor-missing", lose("input_norm.weight"), ""),
    "weights of four bits": ("quantised", add(fc__weight_packed=torch.zeros(4, dtype=torch.int32)), ""),
    "EAGLE-1": (
        "not-eagle3",
        all_of(norms("hidden_norm"), change("fc.weight", lambda _: torch.randn(80, 160))), "",
    ),
    "Medusa": ("not-eagle3", say(architectures=["MedusaModel"]), ""),
    "another target's width": ("target-differs", lambda pair: pair.target_config.update(hidden_size=96), ""),
    "another target's vocabulary": ("target-differs", lambda pair: pair.target_config.update(vocab_size=1000), ""),
    "another tokenizer": (
        "tokenizer-differs",
        lambda pair: pair.files.update({"draft/tokenizer.json": b"{}", "target/tokenizer.json": b"{ }"}), "",
    ),
    "a shard left over": (
        "files-passed-over", lambda pair: pair.files.update({"draft/pytorch_model.bin": b"not read"}), "",
    ),
    "ids of the other convention": ("wiring-convention", all_of(of_layers(32), say(**{IDS: [1, 15, 28]})), ""),
    "keys that contradict each other": (
        "wiring-contradiction", say(**{NESTED.replace(".", "__"): [0, 1, 2]}), "",
    ),
    "the first case on SGLang 0.5.9": ("wiring-graphs", of_kimi(2, 30, 58), "sglang==0.5.9"),
    "the first case on SGLang 0.5.23": ("wiring-convention", of_kimi(2, 30, 58), "sglang==0.5.23"),
    "its second ids on SGLang 0.5.12": ("engine-refuses", of_kimi(-1, 2, 30), "sglang==0.5.12"),
    "its second ids on SGLang 0.5.23": ("wiring-misread", of_kimi(-1, 2, 30), "sglang==0.5.23"),
    "ids at the top on SGLang": ("wiring-unread", all_of(lose("embed_tokens.weight")), "sglang==0.5.23"),
    "norm_before_residual on SGLang": ("engine-ignores", all_of(lose("embed_tokens.weight"), say(
        norm_before_residual=True, **{IDS: None, NESTED.replace(".", "__"): [-1, 2, 4]})), "sglang==0.5.23"),
    "two layers on SGLang": ("engine-ignores", all_of(two_layers, lose("embed_tokens.weight"), say(
        **{IDS: None, NESTED.replace(".", "__"): [-1, 2, 4]})), "sglang==0.5.23"),
    "an own embedding on SGLang": ("engine-replaces", all_of(say(
        **{IDS: None, NESTED.replace(".", "__"): [-1, 2, 4]})), "sglang==0.5.23"),
    "attention_bias without tensors on SGLang": ("tensor-missing", all_of(lose("embed_tokens.weight"), say(
        attention_bias=True, **{IDS: None, NESTED.replace(".", "__"): [-1, 2, 4]})), "sglang==0.5.23"),
}  # fmt: skip
FAULTY = VLLM | OURS


def like_its_target(pair: Any) -> Any:
    """RoPE and context are the target's, too: nothing is to be said but that it has an embedding of its own."""
    pair.put("max_position_embeddings", 512)
    held = pair.config["rope_scaling"] | {"rope_theta": pair.config["rope_theta"]}
    pair.target_config["rope_parameters"] = held
    return pair


@pytest.mark.parametrize("engine", ["", "vllm V1", "vllm V2", "spectrace"])
def test_nothing_is_said_of_the_draft_that_they_are_made_of(engine: str, toy: Any, tmp_path: Path) -> None:
    draft, target = like_its_target(toy("gqa")).save(tmp_path)
    linted = lint_draft(draft, target_folder=target, profile=profile_named(engine) if engine else None)
    assert [one.code for one in linted.findings] == ["embedding-own"]


@pytest.mark.parametrize("name", FAULTY)
def test_of_a_faulty_draft_the_right_finding_comes_first(name: str, toy: Any, tmp_path: Path) -> None:
    code, breaks, engine = FAULTY[name]
    pair = like_its_target(toy("gqa"))
    breaks(pair)
    draft, target = pair.save(tmp_path)
    linted = lint_draft(draft, target_folder=target, profile=profile_named(engine) if engine else None)
    assert linted.findings, name
    assert linted.findings[0].code == code, [(str(one.severity), one.code, one.title) for one in linted.findings]


def test_there_are_as_many_as_are_said() -> None:
    assert len(VLLM) >= 20 and len(OURS) >= 30


def written(draft: Path, layout: str, folder: Path) -> Path:
    """A draft in a layout; those that are read only are put together as their trainers leave them."""
    if layout in WRITABLE:
        return convert_draft(draft, folder, layout).written.folder
    shutil.copytree(draft, folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    tensors = load_file(folder / "model.safetensors")
    if layout == "modelopt":
        ids = [boundary - 1 for boundary in config.pop(IDS)]
        config["eagle_config"] = {IDS: ids, "use_aux_hidden_state": True, "use_last_layernorm": True}
        tensors = {name.replace("midlayer", "layers.0"): one for name, one in tensors.items()}
        tensors["layers.0.input_layernorm.weight"] = torch.full_like(tensors["layers.0.input_layernorm.weight"], 0.8)
    else:
        config["target_model_type"] = "llama"
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder


MODELS = Path(__file__).resolve().parents[3] / "models"
DRAFTS = (
    "toy/draft", "toy/gqa", "toy/deep", "toy/one-slot", "toy/undertrained", "fitted/whole", "fitted/one-slot",
    "fitted/quiet", "fitted/deep", "smollm2/draft",
)  # fmt: skip
WHOLE = [
    (draft, layout.name)
    for draft in DRAFTS
    for layout in LAYOUTS
    if not layout.unsaid((read := read_draft(MODELS / draft)).spec, read.wiring.boundaries if read.wiring else None)
]  # fmt: skip


@pytest.mark.parametrize(("draft", "layout"), WHOLE)
def test_a_draft_that_is_whole_has_no_error_in_any_layout(draft: str, layout: str, tmp_path: Path) -> None:
    target = MODELS / "toy" / "target" if draft.startswith("toy") else None
    linted = lint_draft(written(MODELS / draft, layout, tmp_path / "written"), target_folder=target)
    assert linted.subject is not None, linted.findings
    assert linted.subject.draft.layout == layout
    assert [one for one in linted.findings if one.severity is Severity.ERROR] == []


def test_there_are_whole_drafts_of_every_layout() -> None:
    assert {layout for _, layout in WHOLE} == {layout.name for layout in LAYOUTS} and len(WHOLE) >= 30

"""A draft's folder becomes a spec, a wiring and weights; what was not understood is named, what is wrong is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spectrace.engine.checkpoint import build_draft, configured_wiring, read_draft, read_tensor, weight_fingerprints
from spectrace.engine.spec import GqaSpec, MlaSpec
from spectrace.tracer.errors import UserError
from spectrace.tracer.fingerprint import tensor_fingerprint

Config: TypeAlias = dict[str, Any]
Tensors: TypeAlias = dict[str, Tensor]
NewDraft: TypeAlias = Callable[..., tuple[Config, Tensors]]
Write: TypeAlias = Callable[[Path, Config, Tensors], Path]
IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize("layout", ["midlayer", "layers.0"])
def test_both_published_layouts_are_read(layout: str, new_draft: NewDraft, write_draft: Write, tmp_path: Path) -> None:
    """EAGLE's and SpecForge's names; the tensors end up where the model wants them, and nothing is left over."""
    config, tensors = new_draft(layout=layout)
    draft = read_draft(write_draft(tmp_path, config, tensors))
    assert draft.spec.attention == GqaSpec(heads=4, kv_heads=2, head_dim=12)
    assert (draft.spec.width, draft.spec.target_width, draft.spec.slots, draft.spec.mlp_width) == (48, 48, 3, 96)
    assert (draft.spec.target_vocab, draft.spec.draft_vocab, draft.spec.norm_eps) == (96, 64, 1e-5)
    assert torch.equal(draft.tensors["attention.k.weight"], tensors[f"{layout}.self_attn.k_proj.weight"])
    assert len(draft.tensors) == len(tensors)
    report = draft.report
    assert (report.unused_tensors, report.missing_tensors, report.unread_fields, report.assumed) == ((), (), (), {})


def test_an_mla_draft_is_read(new_draft: NewDraft, write_draft: Write, tmp_path: Path) -> None:
    draft = read_draft(write_draft(tmp_path, *new_draft("mla")))
    assert draft.spec.attention == MlaSpec(heads=4, q_rank=20, kv_rank=16, nope_dim=8, rope_dim=6, value_dim=10)
    assert draft.spec.rope.interleaved and draft.spec.draft_vocab == 96
    assert draft.report.missing_tensors == draft.report.unused_tensors == draft.report.unread_fields == ()


def test_what_is_not_used_missing_not_read_or_assumed_is_named(
    new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    config, tensors = new_draft()
    for name in ("num_hidden_layers", "rms_norm_eps", "target_hidden_size"):
        del config[name]
    config |= {"sliding_window": 7, "eagle_config": {"use_mtp_layernorm": True, "use_last_layernorm": True}}
    config["rope_scaling"] = {"rope_type": "linear", "factor": 2.0, "truncate": False}
    tensors["midlayer.self_attn.q_proj.bias"] = torch.zeros(48)  # no attention_bias in the config
    tensors["input_norm.weight"] = torch.ones(144)  # no norm_before_fc in the config: engines skip it silently
    tensors["t2d"] = torch.ones(96, dtype=torch.bool)
    del tensors["midlayer.hidden_norm.weight"]
    report = read_draft(write_draft(tmp_path, config, tensors)).report
    assert report.unused_tensors == ("input_norm.weight", "midlayer.self_attn.q_proj.bias")
    assert report.missing_tensors == ("midlayer.hidden_norm.weight",)
    assert report.unread_fields == ("eagle_config.use_mtp_layernorm", "rope_scaling.truncate", "sliding_window")
    assert report.assumed == {"num_hidden_layers": 1, "rms_norm_eps": 1e-6, "target_hidden_size": 48}


def write_raw(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(text, "utf-8")
    return folder


def test_a_folder_that_is_no_checkpoint_is_refused_by_what_it_lacks(
    new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    def told(folder: Path) -> str:
        with pytest.raises(UserError) as raised:
            read_draft(folder)
        assert str(folder) in raised.value.message
        return raised.value.message

    assert "no such folder; expected a checkpoint folder with config.json" in told(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    assert "no config.json in it" in told(tmp_path / "empty")
    assert "config.json: not valid JSON (Expecting" in told(write_raw(tmp_path / "text", "{"))
    assert "holds a JSON list, expected an object" in told(write_raw(tmp_path / "list", "[]"))
    folder = write_draft(tmp_path / "draft", *new_draft())
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for length in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        weights.write_bytes(whole[:length])
        assert "model.safetensors: not readable as safetensors" in told(folder)
    weights.unlink()
    assert "no *.safetensors and no pytorch_model.bin in it, but config.json; expected" in told(folder)


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("fc.weight", (48, 96), r"fc.weight is \[48, 96\], expected \[48, 3 x 48\].*EAGLE-1/2 drafts are not EAGLE-3"),
        ("fc.weight", (144, 48), r"fc.weight is \[144, 48\]"),
        ("d2t", (60,), r"tensor d2t is \[60\], but its config.json makes it \[64\]"),
        ("lm_head.weight", (50, 48), r"tensor lm_head.weight is \[50, 48\], but its config.json makes it \[64, 48\]"),
        (
            "midlayer.self_attn.q_proj.weight",
            (48, 48),
            r"tensor midlayer.self_attn.q_proj.weight is \[48, 48\], .* makes it \[48, 96\]",
        ),
        ("midlayer.mlp.down_proj.weight", (48, 90), r"tensor midlayer.mlp.down_proj.weight is \[48, 90\]"),
        ("norm.weight", (47,), r"tensor norm.weight is \[47\]"),
    ],
)
def test_a_tensor_that_does_not_fit_the_config_is_refused_by_name_and_shape(
    name: str, change: tuple[int, ...], told: str, new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    config, tensors = new_draft()
    tensors[name] = torch.zeros(change, dtype=tensors[name].dtype)
    with pytest.raises(UserError, match=told) as raised:
        read_draft(write_draft(tmp_path, config, tensors))
    assert str(tmp_path) in raised.value.message


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("name", "told"), [("fc.weight", "2 of 6912"), ("norm.weight", "2 of 48")])
def test_weights_that_are_no_numbers_are_refused_by_tensor_and_count(
    name: str, told: str, value: float, new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    config, tensors = new_draft()
    tensors[name].view(-1)[3:5] = value
    with pytest.raises(UserError, match=rf"tensor {name} has {told} values that are no finite number; export the"):
        read_draft(write_draft(tmp_path, config, tensors))


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (lambda d2t: d2t.float(), "is of type float32, expected whole numbers"),
        (lambda d2t: d2t * torch.nan, "is of type float32, expected whole numbers"),
        (lambda d2t: d2t > 0, "is of type bool, expected whole numbers"),
        (lambda d2t: d2t - 500, "has 64 of 64 values that lead to no token of 0 to 95"),
        (lambda d2t: d2t + 10**12, "has 64 of 64 values that lead to no token of 0 to 95"),
        (lambda d2t: d2t.index_fill(0, torch.tensor([7]), 96), "has 1 of 64 values that lead to no token of 0 to 95"),
        (lambda d2t: d2t.index_fill(0, torch.tensor([7]), -8), "has 1 of 64 values that lead to no token of 0 to 95"),
    ],
)
def test_a_table_that_no_misreading_explains_is_refused(
    broken: Callable[[Tensor], Tensor], told: str, new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    config, tensors = new_draft()
    with pytest.raises(UserError, match=rf"tensor d2t {told}.*; export the draft again"):
        read_draft(write_draft(tmp_path, config, {**tensors, "d2t": broken(tensors["d2t"])}))


@pytest.mark.parametrize(
    "misread",
    [
        torch.zeros_like,
        lambda d2t: d2t + torch.arange(64),
        lambda d2t: d2t - torch.arange(64),
        lambda d2t: d2t.roll(1),
        lambda d2t: d2t.roll(-1),
        lambda _: torch.arange(95, 95 - 64, -1) - torch.arange(64),
    ],
)
def test_a_table_that_a_diagnosis_can_name_the_fault_of_is_read(
    misread: Callable[[Tensor], Tensor], new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    """All zero, tokens instead of offsets, converted once too often, shifted, and of another run."""
    config, tensors = new_draft()
    table = misread(tensors["d2t"])
    assert torch.equal(read_draft(write_draft(tmp_path, config, {**tensors, "d2t": table})).tensors["d2t"], table)


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        ({IDS: [0, 3, 99]}, rf": {IDS} \[0, 3, 99\]: boundary 99 does not exist; .* 0 to 5, for its 5 layers; another"),
        ({IDS: [0, -3, 4]}, rf": {IDS} \[0, -3, 4\]: boundary -3 does not exist"),
        ({"eagle_config": {IDS: [-1, 2, 5]}}, rf": eagle_config.{IDS} \[-1, 2, 5\]: boundary 6 does not exist"),
    ],
)
def test_a_boundary_that_a_target_does_not_have_is_refused_by_ids_and_key(
    ids: Config, told: str, new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    config, tensors = new_draft()
    del config[IDS]
    draft = read_draft(write_draft(tmp_path, {**config, **ids}, tensors))
    with pytest.raises(UserError, match=told):
        configured_wiring(draft, 5)
    assert configured_wiring(read_draft(write_draft(tmp_path, *new_draft())), 5).boundaries == (0, 2, 4)


def test_a_target_given_as_a_draft_is_refused(target_of: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match=r"not an EAGLE-3 draft but a whole target model \(LlamaForCausalLM\)"):
        read_draft(target_of("llama"))


def test_a_draft_with_tensors_missing_is_read_and_reported_but_not_built(
    new_draft: NewDraft, write_draft: Write, target_of: Callable[..., Path], tmp_path: Path
) -> None:
    config, tensors = new_draft()
    del tensors["norm.weight"], tensors["midlayer.self_attn.o_proj.weight"]
    draft = read_draft(write_draft(tmp_path, config, tensors))
    with pytest.raises(UserError, match=r"missing tensors midlayer.self_attn.o_proj.weight, norm.weight; export"):
        build_draft(draft, target=target_of("llama"), dtype=torch.float32)


def test_what_a_draft_shares_comes_from_its_target(
    new_draft: NewDraft, write_draft: Write, target_of: Callable[..., Path], tmp_path: Path
) -> None:
    """The embedding where it has none of its own, and with a full vocabulary the head."""
    config, tensors = new_draft("mla")
    del tensors["lm_head.weight"]
    draft = read_draft(write_draft(tmp_path, config, tensors))
    assert not draft.spec.own_embedding and not draft.spec.own_head
    model = build_draft(draft, target=target_of("llama"), dtype=torch.float32)
    weights = load_file(target_of("llama") / "model.safetensors")
    assert torch.equal(model.embedding.weight, weights["model.embed_tokens.weight"])
    assert torch.equal(model.head.weight, weights["lm_head.weight"])
    assert torch.equal(model.table(), torch.arange(96))


def test_a_draft_with_everything_of_its_own_needs_no_target(
    new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    config, tensors = new_draft()
    tensors["embed_tokens.weight"] = torch.randn(96, 48)
    draft = read_draft(write_draft(tmp_path, config, tensors))
    assert torch.equal(
        build_draft(draft, target=None, dtype=torch.float32).embedding.weight, tensors["embed_tokens.weight"]
    )


def test_a_shared_embedding_without_a_target_or_of_another_one_is_refused(
    new_draft: NewDraft, write_draft: Write, new_target: Callable[..., Path], tmp_path: Path
) -> None:
    draft = read_draft(write_draft(tmp_path / "draft", *new_draft()))
    with pytest.raises(UserError, match=r"shares the target's embedding; say where the target is \(--target DIR\)"):
        build_draft(draft, target=None, dtype=torch.float32)
    other = new_target(tmp_path / "other", "llama", hidden_size=32)
    with pytest.raises(UserError, match=r"needs the target's embedding as \[96, 48\], but .* has \[96, 32\]"):
        build_draft(draft, target=other, dtype=torch.float32)


def test_of_several_names_the_first_is_taken_wherever_it_lies(tmp_path: Path) -> None:
    """A large target keeps its embedding in the first file and its head in the last; the head is no embedding."""
    save_file({"model.embed_tokens.weight": torch.zeros(2)}, tmp_path / "model-1.safetensors")
    save_file({"lm_head.weight": torch.ones(2)}, tmp_path / "model-2.safetensors")
    names = ("lm_head.weight", "model.embed_tokens.weight")
    assert read_tensor(tmp_path, names).tolist() == [1, 1]
    assert read_tensor(tmp_path, names[1:]).tolist() == [0, 0]
    with pytest.raises(UserError, match=r"none of the tensors a, b in its \*.safetensors"):
        read_tensor(tmp_path, ("a", "b"))
    (tmp_path / "model-1.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(UserError, match=r"model-1.safetensors: not readable as safetensors"):
        read_tensor(tmp_path, names)


def test_half_precision_weights_are_read_as_they_are(new_draft: NewDraft, write_draft: Write, tmp_path: Path) -> None:
    config, tensors = new_draft()
    half = {name: tensor.bfloat16() if name != "d2t" else tensor.int() for name, tensor in tensors.items()}
    half["embed_tokens.weight"] = torch.randn(96, 48).bfloat16()
    draft = read_draft(write_draft(tmp_path, config, half))
    model = build_draft(draft, target=None, dtype=torch.float32)
    assert torch.equal(model.fc.weight, half["fc.weight"].float())
    assert model.d2t.tolist() == tensors["d2t"].tolist()


def test_unread_fields_are_those_of_the_file_and_no_others(
    new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    """Fields that describe and change no arithmetic are not reported."""
    config, tensors = new_draft(tie_word_embeddings=False, torch_dtype="bfloat16", bos_token_id=1, surprise=1)
    draft = read_draft(write_draft(tmp_path, config, tensors))
    assert draft.report.unread_fields == ("surprise",)
    assert json.loads((tmp_path / "config.json").read_text("utf-8"))["surprise"] == 1


def test_weights_are_told_apart_by_their_bytes(
    new_draft: NewDraft, write_draft: Write, target_of: Callable[..., Path], tmp_path: Path
) -> None:
    """Every tensor that computes anything, in the type it is held in."""
    checkpoint = read_draft(write_draft(tmp_path / "draft", *new_draft()))
    one, other, half = (
        build_draft(checkpoint, target=target_of("llama"), dtype=dtype)
        for dtype in (torch.float32, torch.float32, torch.bfloat16)
    )
    prints = weight_fingerprints(one)
    assert prints == weight_fingerprints(other) and prints.keys() == one.state_dict().keys()
    assert prints["head.weight"] == tensor_fingerprint(one.head.weight)
    assert {name for name, told in weight_fingerprints(half).items() if told == prints[name]} == {"d2t"}
    other.mlp.gate.weight[3, 5] += 1
    assert {name for name, told in weight_fingerprints(other).items() if told != prints[name]} == {"mlp.gate.weight"}

"""A draft's folder becomes a spec, a wiring and weights; what was not understood is named, what is wrong is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spectrace.engine.checkpoint import build_draft, default_wiring, read_draft, read_tensor
from spectrace.engine.spec import FuseNorm, GqaSpec, MlaSpec, RopeKind, Stream
from spectrace.tracer.errors import UserError

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


@pytest.mark.parametrize(
    ("fields", "boundaries", "key", "raw"),
    [
        ({IDS: [0, 3, 5]}, (0, 3, 5), IDS, (0, 3, 5)),
        ({IDS: None, "eagle_config": {IDS: [-1, 2, 4]}}, (0, 3, 5), f"eagle_config.{IDS}", (-1, 2, 4)),
        ({IDS: [5, 0, 3], "eagle_config": {IDS: [4, -1, 2]}}, (5, 0, 3), IDS, (5, 0, 3)),
    ],
)
def test_layer_ids_become_boundaries_by_the_convention_of_their_key(
    fields: Config,
    boundaries: tuple[int, ...],
    key: str,
    raw: tuple[int, ...],
    new_draft: NewDraft,
    write_draft: Write,
    tmp_path: Path,
) -> None:
    """At the top level input ids, which are boundaries; nested output ids, one less, -1 being the embedding."""
    config, tensors = new_draft()
    config = {name: value for name, value in {**config, **fields}.items() if value is not None}
    draft = read_draft(write_draft(tmp_path, config, tensors))
    assert draft.wiring
    assert (draft.wiring.boundaries, draft.wiring.key, draft.wiring.raw_ids) == (boundaries, key, raw)
    assert draft.report.unread_fields == ()


def test_nested_ids_that_contradict_the_top_level_are_reported(
    new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    config, tensors = new_draft()
    draft = read_draft(write_draft(tmp_path, {**config, "eagle_config": {IDS: [0, 2, 4]}}, tensors))
    assert draft.wiring and draft.wiring.boundaries == (0, 2, 4)
    assert draft.report.unread_fields == (f"eagle_config.{IDS}",)


def test_without_ids_there_is_no_wiring_and_engines_take_their_default(
    new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    config, tensors = new_draft()
    del config[IDS]
    assert read_draft(write_draft(tmp_path, config, tensors)).wiring is None
    assert default_wiring(32) == (2, 16, 29)


def test_what_is_not_used_missing_not_read_or_assumed_is_named(
    new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    config, tensors = new_draft(num_hidden_layers=None, rms_norm_eps=None, target_hidden_size=None)
    config |= {"attention_bias": True, "eagle_config": {"use_mtp_layernorm": True}, "sliding_window": None}
    config["rope_scaling"] = {"rope_type": "linear", "factor": 2.0, "truncate": False}
    tensors["midlayer.self_attn.q_proj.bias"] = torch.zeros(48)
    tensors["input_norm.weight"] = torch.ones(144)  # no norm_before_fc in the config: engines skip it silently
    tensors["t2d"] = torch.ones(96, dtype=torch.bool)
    del tensors["midlayer.hidden_norm.weight"]
    report = read_draft(write_draft(tmp_path, config, tensors)).report
    assert report.unused_tensors == ("input_norm.weight", "midlayer.self_attn.q_proj.bias")
    assert report.missing_tensors == ("midlayer.hidden_norm.weight",)
    assert report.unread_fields == ("attention_bias", "eagle_config.use_mtp_layernorm", "rope_scaling.truncate")
    assert report.assumed == {"num_hidden_layers": 1, "rms_norm_eps": 1e-6, "target_hidden_size": 48}


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({}, "residual", Stream.PRE_NORM),
        ({"norm_before_residual": True}, "residual", Stream.POST_NORM),
        ({}, "feedback", Stream.PRE_NORM),
        ({"norm_output": True}, "feedback", Stream.POST_NORM),
        ({}, "fuse_norm", FuseNorm.NONE),
        ({"fc_norm": True}, "fuse_norm", FuseNorm.PER_SLOT),
        ({"norm_before_fc": True}, "fuse_norm", FuseNorm.WHOLE),
    ],
)
def test_a_field_sets_its_switch(
    fields: Config, name: str, value: object, new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    assert getattr(read_draft(write_draft(tmp_path, *new_draft(**fields))).spec, name) is value


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    "scaling",
    [
        YARN,
        {**YARN, "attention_factor": 1.5},
        {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 16.0},
        {"type": "linear", "factor": 2.0},
        {"rope_type": "llama3", "factor": 8.0, **LLAMA3, "original_max_position_embeddings": 64},
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rotary_settings_are_read_as_transformers_reads_them(
    scaling: Config, key: str, new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    """Under the old and the new name; the attention factor and theta, too."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from spectrace.engine.rope import inverse_frequencies

    parameters = {"rope_theta": 5000.0, **scaling}
    draft = read_draft(write_draft(tmp_path, *new_draft(rope_theta=None, **{key: parameters})))
    kind = scaling.get("rope_type", scaling.get("type"))
    theirs = LlamaConfig(head_dim=12, rope_parameters={**parameters, "rope_type": kind})
    frequencies, factor = ROPE_INIT_FUNCTIONS[str(kind)](theirs, torch.device("cpu"))
    torch.testing.assert_close(inverse_frequencies(draft.spec.rope, 12), frequencies)
    assert draft.spec.rope.cos_scale == pytest.approx(factor)
    assert not any("rope" in name for name in draft.report.unread_fields)


def test_deepseeks_temperature_goes_into_the_softmax_scale(
    new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    """(0.1 mscale_all_dim ln factor + 1) squared, as DeepSeek's attention computes it."""
    draft = read_draft(
        write_draft(tmp_path, *new_draft("mla", rope_scaling={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}))
    )
    assert isinstance(draft.spec.attention, MlaSpec)
    assert draft.spec.attention.softmax_scale == pytest.approx((0.1 * math.log(40) + 1) ** 2)
    assert draft.spec.rope.kind is RopeKind.YARN and draft.spec.rope.cos_scale == pytest.approx(1.0)


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
    assert "no *.safetensors in it; convert pytorch_model.bin to safetensors first" in told(folder)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"hidden_size": None}, "field hidden_size is None, expected a whole number; is this a draft's config"),
        ({"hidden_size": "wide"}, "field hidden_size is 'wide', expected a whole number"),
        ({"intermediate_size": True}, "field intermediate_size is True, expected a whole number"),
        ({"vocab_size": None}, "field vocab_size is None"),
        ({"rms_norm_eps": "small"}, "field rms_norm_eps is 'small', expected a number"),
        ({"num_hidden_layers": 2}, "2 draft layers; only drafts of one layer are read"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only silu"),
        ({"num_attention_heads": 3}, "3 heads, 2 key-value heads and head_dim 12 do not go together"),
        ({"head_dim": 11}, "head_dim 11 do not go together; expected .* an even head_dim"),
        ({"target_hidden_size": 64}, r"fc.weight is \[48, 144\], expected \[48, 3 x 64\].*check the layer ids"),
        ({IDS: [0, 2]}, r"fc.weight is \[48, 144\], expected \[48, 2 x 48\] for 2 boundaries"),
        ({IDS: 3}, f"field {IDS} is 3, expected a list of layer ids"),
        ({IDS: []}, r"is \[\], expected a list of layer ids"),
        ({IDS: None, "eagle_config": {IDS: "0,2"}}, rf"field eagle_config.{IDS} is '0,2', expected a list"),
        ({"eagle_config": 3}, "field eagle_config is 3, expected an object or null"),
        ({"rope_scaling": "yarn"}, "field rope_scaling is 'yarn', expected an object or null"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope' is not known; expected one of default"),
        ({"rope_scaling": {"rope_type": "linear"}}, "field rope_scaling.factor is None, expected a number"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "field max_position_embeddings is None"),
        ({"fc_norm": True, "norm_before_fc": True}, "fc_norm and norm_before_fc are both set"),
    ],
)
def test_a_config_that_says_something_impossible_is_refused_by_file_and_field(
    fields: Config, told: str, new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    config, tensors = new_draft()
    config = {name: value for name, value in {**config, **fields}.items() if value is not None}
    with pytest.raises(UserError, match=told) as raised:
        read_draft(write_draft(tmp_path, config, tensors))
    assert raised.value.message.startswith(str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("fc.weight", None, "no tensor fc.weight, so this is not an EAGLE-3 draft"),
        ("fc.weight", (48, 96), r"fc.weight is \[48, 96\], expected \[48, 3 x 48\].*EAGLE-1/2 drafts are not EAGLE-3"),
        ("fc.weight", (144, 48), r"fc.weight is \[144, 48\]"),
        ("d2t", None, "draft_vocab_size 64 < vocab_size 96, but no tensor d2t"),
        ("d2t", (60,), r"tensor d2t is \[60\], but its config.json makes it \[64\]"),
        ("lm_head.weight", None, "draft_vocab_size 64 < vocab_size 96, but no tensor lm_head.weight"),
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
    name: str, change: tuple[int, ...] | None, told: str, new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    config, tensors = new_draft()
    if change is None:
        del tensors[name]
    else:
        tensors[name] = torch.zeros(change, dtype=tensors[name].dtype)
    with pytest.raises(UserError, match=told) as raised:
        read_draft(write_draft(tmp_path, config, tensors))
    assert str(tmp_path) in raised.value.message


def test_a_target_given_as_a_draft_is_refused(target_of: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match=r"no tensor fc.weight.*a target model was given\?"):
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
    assert torch.equal(model.to_target(torch.arange(96)), torch.arange(96))


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

"""What a draft's config says becomes a wiring and switches; what it cannot mean is refused by file and field."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

from spectrace.engine.checkpoint import DraftCheckpoint, default_wiring, read_draft
from spectrace.engine.spec import FuseNorm, GqaSpec, LaterNorm, MlaSpec, RopeKind, RopeSpec, Stream
from spectrace.tracer.errors import UserError

Config: TypeAlias = dict[str, Any]
Tensors: TypeAlias = dict[str, Tensor]
NewDraft: TypeAlias = Callable[..., tuple[Config, Tensors]]
Write: TypeAlias = Callable[[Path, Config, Tensors], Path]
IDS = "eagle_aux_hidden_state_layer_ids"


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
    assert f"eagle_config.{IDS} [0, 2, 4] names other boundaries than {IDS}, which counts" in draft.report.notes


def test_without_ids_there_is_no_wiring_and_engines_take_their_default(
    new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    config, tensors = new_draft()
    del config[IDS]
    assert read_draft(write_draft(tmp_path, config, tensors)).wiring is None
    assert default_wiring(32) == (2, 16, 29)


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
STEP = {"rope_type": "llama3", "factor": 8.0, **LLAMA3, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    "scaling",
    [
        YARN,
        {**YARN, "attention_factor": 1.5},
        {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 16.0},
        {"type": "linear", "factor": 2.0},
        STEP,
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


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"hidden_size": None}, "field hidden_size is None, expected a whole number; is this a draft's config"),
        ({"hidden_size": "wide"}, "field hidden_size is 'wide', expected a whole number"),
        ({"intermediate_size": True}, "field intermediate_size is True, expected a whole number"),
        ({"vocab_size": None}, "field vocab_size is None"),
        ({"rms_norm_eps": "small"}, "field rms_norm_eps is 'small', expected a number"),
        ({"num_hidden_layers": 0}, "field num_hidden_layers is 0, expected 1 layer or a few"),
        ({"num_hidden_layers": 10**9}, "field num_hidden_layers is 1000000000, expected 1 layer or a few"),
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
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope' depends on how long a text is"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope type 'dynamic' depends on how long a text is"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "rope type 'spiral' is not known; expected one of default"),
        ({"rope_scaling": {"rope_type": "linear"}}, "field rope_scaling.factor is None, expected a number"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "field max_position_embeddings is None"),
        ({IDS: [False, 2, 4]}, r"is \[False, 2, 4\], expected a list of layer ids"),
        ({"rope_theta": 0}, "field rope_theta is 0, expected a number above 0"),
        ({"rope_theta": -5.0}, "field rope_theta is -5, expected a number above 0"),
        ({"rope_theta": math.nan}, "field rope_theta is nan, expected a number"),
        ({"rope_theta": math.inf}, "field rope_theta is inf, expected a number"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope_scaling.factor is 0, expected a number above 0"),
        ({"rope_theta": 1, "rope_scaling": YARN}, "field rope_theta is 1, expected another base"),
        ({"rope_scaling": {**YARN, "beta_slow": 0}}, "rope_scaling.beta_slow is 0, expected a number above 0"),
        ({"rope_scaling": {**YARN, "attention_factor": -1}}, "attention_factor is -1, expected a number above 0"),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 0}}, "embeddings is 0, expected a number above"),
        (
            {"rope_scaling": {**STEP, "low_freq_factor": 4}},
            "and rope_scaling.high_freq_factor are both 4, expected two",
        ),
        ({"rms_norm_eps": -1e-6}, "field rms_norm_eps is -1e-06, expected a number above 0"),
        ({"norm_before_residual": "false"}, "field norm_before_residual is 'false', expected true or false"),
        ({"norm_output": "true"}, "field norm_output is 'true', expected true or false"),
        ({"fc_norm": []}, r"field fc_norm is \[\], expected true or false"),
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


def read_changed(
    changes: Config, more: Tensors, new_draft: NewDraft, write_draft: Write, folder: Path, attention: str = "gqa"
) -> DraftCheckpoint:
    """A draft with other fields, and with more tensors than `new_draft` gives it."""
    config, tensors = new_draft(attention)
    config = {name: value for name, value in {**config, **changes}.items() if value is not None}
    return read_draft(write_draft(folder, config, {**tensors, **more}))


HEAD_NORMS = {f"midlayer.self_attn.{name}_norm.weight": torch.ones(12) for name in "qk"}
QKV_BIASES = {
    f"midlayer.self_attn.{name}_proj.bias": torch.ones(width) for name, width in zip("qkv", (48, 24, 24), strict=True)
}
O_BIAS = {"midlayer.self_attn.o_proj.bias": torch.ones(48)}


@pytest.mark.parametrize(
    ("fields", "more", "normed"),
    [
        ({}, {}, False),
        ({}, HEAD_NORMS, True),
        ({"model_type": "qwen3"}, {}, False),  # engines go by the class
        ({"model_type": "qwen3", "architectures": None}, {}, True),
        ({"architectures": ["Eagle3Qwen3ForCausalLM"]}, {}, True),
    ],
)
def test_norms_over_heads_are_there_by_their_tensors_or_their_class(
    fields: Config, more: Tensors, normed: bool, new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    draft = read_changed(fields, more, new_draft, write_draft, tmp_path)
    assert isinstance(draft.spec.attention, GqaSpec) and draft.spec.attention.head_norms is normed
    assert draft.report.unused_tensors == ()
    assert (draft.report.missing_tensors == ()) is (not normed or bool(more))


@pytest.mark.parametrize(
    ("fields", "more", "biased", "unused"),
    [
        ({}, {**QKV_BIASES, **O_BIAS}, (False, False), 4),
        ({"attention_bias": True}, {**QKV_BIASES, **O_BIAS}, (True, True), 0),
        ({"attention_bias": True}, QKV_BIASES, (True, False), 0),
        ({"bias": True}, O_BIAS, (False, True), 0),
        ({"bias": True}, {}, (False, False), 0),
    ],
)
def test_biases_are_computed_where_config_and_tensors_both_say_so(
    fields: Config, more: Tensors, biased: tuple[bool, bool], unused: int, new_draft: NewDraft, write_draft: Write,
    tmp_path: Path,
) -> None:  # fmt: skip
    draft = read_changed(fields, more, new_draft, write_draft, tmp_path)
    assert isinstance(draft.spec.attention, GqaSpec)
    assert (draft.spec.attention.qkv_bias, draft.spec.attention.o_bias) == biased
    assert len(draft.report.unused_tensors) == unused and draft.report.missing_tensors == ()
    assert draft.report.unread_fields == ()


def test_a_bias_that_a_config_promises_and_the_folder_lacks_is_missing(
    new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    report = read_changed({"attention_bias": True, "mlp_bias": True}, {}, new_draft, write_draft, tmp_path).report
    biases = [f"midlayer.mlp.{name}_proj.bias" for name in ("down", "gate", "up")]
    assert report.missing_tensors == (*biases, *(f"midlayer.self_attn.{name}_proj.bias" for name in "kqv"))


@pytest.mark.parametrize(
    ("fields", "windows", "unread"),
    [
        ({"sliding_window": 7}, (None,), ("sliding_window",)),  # Llama's layers have none by themselves
        ({"sliding_window": 7, "layer_types": ["sliding_attention"]}, (7,), ()),
        ({"sliding_window": 7, "layer_types": ["full_attention", "sliding_attention"]}, (None,), ("sliding_window",)),
        ({"sliding_window": 7, "model_type": "mistral"}, (7,), ()),
        ({"sliding_window": 7, "model_type": "qwen3"}, (None,), ()),
        ({"sliding_window": 7, "model_type": "qwen3", "use_sliding_window": True}, (None,), ("sliding_window",)),
        (
            {"sliding_window": 7, "model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 0},
            (7,),
            (),
        ),
        ({"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["sliding_attention"]}, (4096,), ()),
        ({"sliding_window": 7, "model_type": "qwen3", "layer_types": ["sliding_attention"]}, (None,), ()),
    ],
)
def test_windows_count_as_transformers_has_them_for_the_model_type(
    fields: Config, windows: tuple[int | None, ...], unread: tuple[str, ...], new_draft: NewDraft, write_draft: Write,
    tmp_path: Path,
) -> None:  # fmt: skip
    draft = read_changed(fields, {}, new_draft, write_draft, tmp_path)
    assert draft.spec.windows == windows and draft.report.unread_fields == unread
    noted = any("counts in 1 of 1 layers" in note for note in draft.report.notes)
    assert noted is any(windows), "a window that engines may pass over is told"


def test_a_window_that_transformers_passes_over_is_told(
    new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    fields = {"model_type": "qwen3", "sliding_window": 7, "layer_types": ["sliding_attention"]}
    [note] = read_changed(fields, {}, new_draft, write_draft, tmp_path).report.notes
    assert "layer_types names sliding_attention, which transformers passes over without use_sliding_window" in note


def test_several_layers_are_read_with_the_norm_that_their_tensors_name(
    new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    config, tensors = new_draft(num_hidden_layers=3)
    draft = read_draft(write_draft(tmp_path / "input", config, tensors))
    assert draft.spec.layers == 3 and draft.spec.later_norm is LaterNorm.INPUT
    assert torch.equal(draft.tensors["later.1.attention.q.weight"], tensors["layers.2.self_attn.q_proj.weight"])
    assert draft.report.missing_tensors == draft.report.unused_tensors == ()
    renamed = {
        name.replace("input_layernorm", "hidden_norm") if name.startswith("layers.") else name: tensor.clone()
        for name, tensor in tensors.items()
    }
    draft = read_draft(write_draft(tmp_path / "hidden", config, renamed))
    assert draft.spec.later_norm is LaterNorm.HIDDEN and draft.report.missing_tensors == ()
    draft = read_draft(write_draft(tmp_path / "both", config, {**tensors, **renamed}))
    assert draft.spec.later_norm is LaterNorm.INPUT
    assert draft.report.unused_tensors == ("layers.1.hidden_norm.weight", "layers.2.hidden_norm.weight")


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"embedding_scale": 8.0}, "embedding_scale", 8.0),
        ({"unit_offset_norms": True}, "unit_offset_norms", True),
        ({"head_reads_pre_norm": True}, "head_reads", Stream.PRE_NORM),
        ({"logit_scale": 0.5}, "logit_scale", 0.5),
        ({"use_aux_norm": True}, "fuse_norm", FuseNorm.PER_SLOT),
        ({"eagle_config": {"norm_before_fc": True}}, "fuse_norm", FuseNorm.WHOLE),
        ({"norm_before_fc": True, "eagle_config": {"norm_before_fc": False}}, "fuse_norm", FuseNorm.NONE),
        ({"max_position_embeddings": 99}, "context", 99),
        ({}, "context", None),
        ({IDS: None, "num_aux_hidden_states": 3}, "slots", 3),
    ],
)
def test_a_seldom_field_sets_its_switch(
    fields: Config, name: str, value: object, new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    draft = read_changed(fields, {}, new_draft, write_draft, tmp_path)
    assert getattr(draft.spec, name) == value
    assert set(draft.report.unread_fields) <= {"norm_before_fc"}, "the outer of two that differ"


@pytest.mark.parametrize(
    ("fields", "share", "interleaved"),
    [
        ({"partial_rotary_factor": 0.5}, 0.5, False),
        ({"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}}, 0.5, False),
        ({"rope_is_neox_style": False}, 1.0, True),
        ({"rope_is_neox_style": True}, 1.0, False),
    ],
)
def test_how_much_of_a_head_is_turned_and_in_which_pairs(
    fields: Config, share: float, interleaved: bool, new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    rope = read_changed(fields, {}, new_draft, write_draft, tmp_path).spec.rope
    assert (rope.share, rope.interleaved) == (share, interleaved)


def test_rope_over_several_axes_is_read_as_that_of_text_and_told(
    new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    scaling = {"rope_type": "mrope", "mrope_section": [2, 2, 2], "mrope_interleaved": True}
    draft = read_changed({"rope_scaling": scaling}, {}, new_draft, write_draft, tmp_path)
    assert draft.spec.rope == RopeSpec() and draft.report.unread_fields == ()
    assert any("rope_scaling.mrope_section" in note and "as that of text" in note for note in draft.report.notes)


def test_rope_by_type_of_layer_is_that_of_the_layers_there_are(
    new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    by_type = {"full_attention": {"rope_theta": 500.0}, "sliding_attention": {"rope_theta": 70.0}}
    windowed = {"layer_types": ["sliding_attention"], "sliding_window": 5}
    draft = read_changed(
        {"rope_theta": None, "rope_parameters": by_type, **windowed}, {}, new_draft, write_draft, tmp_path / "one"
    )
    assert draft.spec.rope.theta == 70.0
    alike = {kind: {"rope_theta": 500.0} for kind in by_type}
    draft = read_changed({"rope_theta": None, "rope_parameters": alike}, {}, new_draft, write_draft, tmp_path / "two")
    assert draft.spec.rope.theta == 500.0
    with pytest.raises(UserError, match="rope_parameters holds RoPE for full_attention, sliding_attention, and all"):
        read_changed({"rope_parameters": by_type}, {}, new_draft, write_draft, tmp_path / "three")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (
            {"layer_types": "sliding_attention"},
            "field layer_types is 'sliding_attention', expected a list with an entry",
        ),
        ({"layer_types": []}, r"field layer_types is \[\], expected a list with an entry for each layer: 1"),
        ({"layer_types": ["chunked_attention"]}, "field layer_types names 'chunked_attention'; expected sliding_att"),
        ({"layer_types": ["sliding_attention"]}, "field sliding_window is None, expected a whole number"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 0}, "sliding_window is 0, expected a number above 0"),
        ({"partial_rotary_factor": 1.5}, "field partial_rotary_factor is 1.5, expected a part of a head, up to 1"),
        ({"partial_rotary_factor": 0.25}, "which turns 3 elements of a head; expected an even number"),
        ({"num_aux_hidden_states": 4}, rf"num_aux_hidden_states is 4, but {IDS} holds 3 layer ids; expected as many"),
        ({"logit_scale": 0}, "field logit_scale is 0, expected another number"),
        ({"embedding_scale": -1}, "field embedding_scale is -1, expected a number above 0"),
        ({"mlp_bias": "yes"}, "field mlp_bias is 'yes', expected true or false"),
        ({"max_position_embeddings": "long"}, "field max_position_embeddings is 'long', expected a whole number"),
    ],
)
def test_a_switch_that_says_something_impossible_is_refused(
    fields: Config, told: str, new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=told) as raised:
        read_changed(fields, {}, new_draft, write_draft, tmp_path)
    assert raised.value.message.startswith(str(tmp_path / "config.json"))


def test_latent_attention_with_biases_is_refused(new_draft: NewDraft, write_draft: Write, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="attention_bias is true; latent attention with biases is not computed"):
        read_changed({"attention_bias": True}, {}, new_draft, write_draft, tmp_path, "mla")


@pytest.mark.parametrize(
    ("scaling", "cos", "softmax"),
    [
        ({"mscale": 0.7}, (0.07 * math.log(40) + 1), 1.0),
        ({"mscale_all_dim": 0.5}, (0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1), (0.05 * math.log(40) + 1) ** 2),
        ({}, 0.1 * math.log(40) + 1, 1.0),
    ],
)
def test_one_mscale_of_two_is_read_as_deepseeks_own_code_reads_it(
    scaling: Config, cos: float, softmax: float, new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    """Absent they are 1 and 0; transformers, and engines for other attention, pass over one that is alone."""
    draft = read_changed({"rope_scaling": {**YARN, **scaling}}, {}, new_draft, write_draft, tmp_path / "mla", "mla")
    assert isinstance(draft.spec.attention, MlaSpec)
    assert draft.spec.rope.cos_scale == pytest.approx(cos)
    assert draft.spec.attention.softmax_scale == pytest.approx(softmax)
    draft = read_changed({"rope_scaling": {**YARN, **scaling}}, {}, new_draft, write_draft, tmp_path / "gqa")
    assert draft.spec.rope.cos_scale == pytest.approx(0.1 * math.log(40) + 1)
    assert draft.report.unread_fields == tuple(f"rope_scaling.{name}" for name in scaling)

"""What a draft's config says becomes a wiring and switches; what it cannot mean is refused by file and field."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

from spectrace.engine.checkpoint import default_wiring, read_draft
from spectrace.engine.spec import FuseNorm, MlaSpec, RopeKind, Stream
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

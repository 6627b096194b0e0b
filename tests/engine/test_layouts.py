"""Drafts as EAGLE, SpecForge, ModelOpt, AngelSlim and speculators publish them, and what each layout leaves unsaid."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

from spectrace.engine.checkpoint import configured_wiring, read_draft
from spectrace.engine.layouts.known import LAYOUTS, WRITABLE, writable
from spectrace.engine.spec import FuseNorm, GqaSpec, Stream
from spectrace.tracer.errors import UserError

Config: TypeAlias = dict[str, Any]
Tensors: TypeAlias = dict[str, Tensor]
NewDraft: TypeAlias = Callable[..., tuple[Config, Tensors]]
Write: TypeAlias = Callable[[Path, Config, Tensors], Path]
IDS = "eagle_aux_hidden_state_layer_ids"
GEOMETRY = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act",
    "rms_norm_eps", "vocab_size", "num_key_value_heads", "head_dim", "rope_theta",
)  # fmt: skip


def as_speculators(config: Config, **changes: Any) -> Config:
    """A config as speculators writes it; changes are to the config of the decoder layer."""
    body = {name: config[name] for name in GEOMETRY if name in config} | changes
    return {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "speculators_version": "0.9.0",
        "draft_vocab_size": config["draft_vocab_size"], IDS: config[IDS], "norm_before_residual": True,
        "norm_before_fc": False, "fc_norm": False, "norm_output": False,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "a/target", "architectures": []}},
        "transformer_layer_config": {name: value for name, value in body.items() if value is not None},
    }  # fmt: skip


def test_eagles_own_layout_has_no_words_but_shapes(new_draft: NewDraft, write_draft: Write, tmp_path: Path) -> None:
    """The config of a published draft of EAGLE: no ids, no switches, and an embedding that is left out."""
    config, tensors = new_draft()
    del config[IDS], config["target_hidden_size"], config["rope_theta"]
    config |= {"pretraining_tp": 1, "tie_word_embeddings": False, "torch_dtype": "float16", "use_cache": True}
    tensors["t2d"] = torch.zeros(96, dtype=torch.bool)
    tensors["t2d"][tensors["d2t"] + torch.arange(64)] = True
    half = {name: one.half() if one.is_floating_point() else one for name, one in tensors.items()}
    draft = read_draft(write_draft(tmp_path, config, half))
    assert draft.layout == "eagle" and draft.wiring is None
    assert configured_wiring(draft, 28).boundaries == (2, 14, 25)
    assert draft.report.unused_tensors == draft.report.missing_tensors == draft.report.unread_fields == ()
    assert draft.report.assumed == {"target_hidden_size": 48, "rope_theta": 10000.0} and draft.report.notes == ()


def test_specforge_names_layers_by_their_outputs(new_draft: NewDraft, write_draft: Write, tmp_path: Path) -> None:
    config, tensors = new_draft(fc_norm=True)
    del config[IDS]
    config["eagle_config"] = {IDS: [-1, 1, 3]}
    draft = read_draft(write_draft(tmp_path, config, tensors))
    assert draft.layout == "specforge" and draft.wiring and draft.wiring.boundaries == (0, 2, 4)
    assert draft.spec.fuse_norm is FuseNorm.PER_SLOT and draft.spec.feedback is Stream.PRE_NORM
    assert draft.report.unread_fields == () and draft.report.notes == ()


@pytest.mark.parametrize(("said", "side"), [(True, Stream.POST_NORM), (False, Stream.PRE_NORM)])
def test_specforges_norm_output_is_read_as_engines_read_it_and_told(
    said: bool, side: Stream, new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    config, tensors = new_draft(norm_output=said)
    del config[IDS]
    draft = read_draft(write_draft(tmp_path, {**config, "eagle_config": {IDS: [0, 1, 3]}}, tensors))
    assert draft.spec.feedback is side
    assert any("norm_output is read as engines read it" in note for note in draft.report.notes)


FLAGS = {
    "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
    "use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1,
}  # fmt: skip


def test_modelopt_has_flags_and_no_t2d(new_draft: NewDraft, write_draft: Write, tmp_path: Path) -> None:
    """Ids in order of frequency: offsets fall and may be negative."""
    config, tensors = new_draft(layout="layers.0")
    del config[IDS]
    tokens = torch.randperm(96)[:64]
    tensors["d2t"] = tokens - torch.arange(64)
    draft = read_draft(write_draft(tmp_path, {**config, "eagle_config": {IDS: [0, 1, 3], **FLAGS}}, tensors))
    assert draft.layout == "modelopt" and draft.wiring and draft.wiring.boundaries == (1, 2, 4)
    assert torch.equal(draft.tensors["d2t"] + torch.arange(64), tokens)
    assert draft.report.unread_fields == draft.report.unused_tensors == ()


def test_modelopts_slots_lie_in_ascending_order(new_draft: NewDraft, write_draft: Write, tmp_path: Path) -> None:
    config, tensors = new_draft(layout="layers.0")
    del config[IDS]
    draft = read_draft(write_draft(tmp_path, {**config, "eagle_config": {IDS: [3, -1, 1], **FLAGS}}, tensors))
    assert draft.wiring and draft.wiring.boundaries == (0, 2, 4) and draft.wiring.raw_ids == (3, -1, 1)


def test_a_gain_that_modelopt_applies_twice_is_told_where_it_matters(
    new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    config, tensors = new_draft(layout="layers.0")
    config |= {"eagle_config": FLAGS}
    [note] = read_draft(write_draft(tmp_path / "uneven", config, tensors)).report.notes
    assert "input_layernorm" in note
    tensors["layers.0.input_layernorm.weight"].fill_(0.7)
    assert read_draft(write_draft(tmp_path / "even", config, tensors)).report.notes == ()


def test_modelopts_older_names_are_read(new_draft: NewDraft, write_draft: Write, tmp_path: Path) -> None:
    config, tensors = new_draft(layout="layers.0")
    older = {"input_layernorm": "input_embeds_norm", "hidden_norm": "hidden_norm"}
    for now, before in older.items():
        tensors[f"{before}.weight"] = tensors.pop(f"layers.0.{now}.weight")
    draft = read_draft(write_draft(tmp_path, {**config, "eagle_config": FLAGS}, tensors))
    assert draft.names["embedding_norm.weight"] == "input_embeds_norm.weight"
    assert torch.equal(draft.tensors["feature_norm.weight"], tensors["hidden_norm.weight"])
    assert draft.report.unused_tensors == draft.report.missing_tensors == ()


def test_sglangs_older_names_of_norms_are_read(new_draft: NewDraft, write_draft: Write, tmp_path: Path) -> None:
    config, tensors = new_draft(fc_norm=True)
    for slot, name in enumerate(("low", "mid", "high")):
        tensors[f"aux_norm_{name}.weight"] = tensors.pop(f"fc_norm.{slot}.weight")
    draft = read_draft(write_draft(tmp_path, config, tensors))
    assert torch.equal(draft.tensors["fuse_norms.2.weight"], tensors["aux_norm_high.weight"])
    assert draft.report.unused_tensors == draft.report.missing_tensors == ()


def test_a_draft_that_takes_its_targets_head_has_all_tokens(
    new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    config, tensors = new_draft(layout="layers.0", draft_vocab_size=96)
    del tensors["lm_head.weight"]
    draft = read_draft(write_draft(tmp_path, {**config, "eagle_config": FLAGS}, tensors))
    assert not draft.spec.own_head and draft.report.missing_tensors == ()


def test_angelslim_names_its_target_and_no_layers(new_draft: NewDraft, write_draft: Write, tmp_path: Path) -> None:
    """Outputs 1, L/2 - 1 and L - 4 in its code: what engines take where none are named."""
    config, tensors = new_draft()
    del config[IDS]
    config |= {"architectures": ["Eagle3LlamaForCausalLM"], "target_model_type": "qwen3"}
    draft = read_draft(write_draft(tmp_path, config, tensors))
    assert draft.layout == "angelslim" and draft.wiring is None and draft.report.unread_fields == ()
    for layers in (28, 36, 61):
        assert configured_wiring(draft, layers).boundaries == (2, layers // 2 - 1 + 1, layers - 4 + 1)


def test_speculators_nests_its_geometry(new_draft: NewDraft, write_draft: Write, tmp_path: Path) -> None:
    config, tensors = new_draft(layout="layers.0")
    tensors["embed_tokens.weight"] = torch.randn(96, 48)
    draft = read_draft(write_draft(tmp_path, as_speculators(config), tensors))
    assert draft.layout == "speculators" and draft.spec.attention == GqaSpec(heads=4, kv_heads=2, head_dim=12)
    assert draft.wiring and (draft.wiring.boundaries, draft.wiring.key) == ((0, 2, 4), IDS)
    assert draft.spec.residual is Stream.POST_NORM and draft.spec.own_embedding
    assert draft.report.unused_tensors == draft.report.missing_tensors == draft.report.unread_fields == ()
    assert draft.report.assumed == {"target_hidden_size": 48}


def test_what_speculators_leaves_out_is_as_in_its_classes_and_told(
    new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    """It writes what differs from the class alone; engines have other defaults, so each that counts is told."""
    config, tensors = new_draft(layout="layers.0", draft_vocab_size=None)
    config["draft_vocab_size"] = 64
    said = as_speculators(config, rms_norm_eps=None, hidden_act=None, rope_theta=None)
    for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        del said[name]
    draft = read_draft(write_draft(tmp_path, said, {**tensors, **_cut(tensors)}))
    assert draft.spec.residual is draft.spec.feedback is Stream.PRE_NORM
    nested = "transformer_layer_config"
    assert draft.report.assumed == {
        "target_hidden_size": 48, "norm_before_residual": False, "norm_before_fc": False, "fc_norm": False,
        "norm_output": False, f"{nested}.rms_norm_eps": 1e-6, f"{nested}.hidden_act": "silu",
        f"{nested}.rope_theta": 10000.0,
    }  # fmt: skip
    assert any("norm_before_residual is absent: false" in note and "vLLM" in note for note in draft.report.notes)


def _cut(tensors: Tensors) -> Tensors:
    """A head and a table for 64 ids."""
    return {"lm_head.weight": tensors["lm_head.weight"][:64].clone(), "d2t": torch.zeros(64, dtype=torch.int64)}


def test_the_class_of_speculators_layers_is_qwen3_unless_said(
    new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    config, tensors = new_draft(layout="layers.0", model_type="qwen3")
    draft = read_draft(write_draft(tmp_path, as_speculators(config, model_type=None), tensors))
    assert isinstance(draft.spec.attention, GqaSpec) and draft.spec.attention.head_norms
    assert draft.report.missing_tensors == draft.report.unused_tensors == draft.report.notes == ()
    unsaid = write_draft(tmp_path / "theta", as_speculators(config, rope_theta=None), tensors)
    assert read_draft(unsaid).report.notes == (
        "rope_theta is absent: 10000, as transformers has it, where vLLM takes 1000000 for Qwen3's layers",
    )
    for name in [name for name in tensors if "_norm.weight" in name and "self_attn" in name]:
        del tensors[name]
    draft = read_draft(write_draft(tmp_path / "without", as_speculators(config), tensors))
    assert draft.report.missing_tensors == tuple(f"layers.0.self_attn.{name}_norm.weight" for name in "kq")


def test_speculators_counts_windows_from_the_texts_row(new_draft: NewDraft, write_draft: Write, tmp_path: Path) -> None:
    config, tensors = new_draft(layout="layers.0")
    said = {"layer_types": ["sliding_attention"], "sliding_window": 5, "use_sliding_window": True}
    spec = read_draft(write_draft(tmp_path / "a", as_speculators(config, **said), tensors)).spec
    assert spec.windows == (5,) and spec.window_from_text
    spec = read_draft(write_draft(tmp_path / "b", {**config, **said}, tensors)).spec
    assert spec.windows == (5,) and not spec.window_from_text
    assert not read_draft(write_draft(tmp_path / "c", as_speculators(config), tensors)).spec.window_from_text


def test_fields_of_the_nested_config_that_nobody_reads_are_named(
    new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    config, tensors = new_draft(layout="layers.0")
    said = as_speculators(config, surprise=1, attention_dropout=0.0, initializer_range=0.02) | {"another": 2}
    report = read_draft(write_draft(tmp_path, said, tensors)).report
    assert report.unread_fields == ("another", "transformer_layer_config.surprise")


@pytest.mark.parametrize(
    ("table", "told"),
    [
        (lambda d2t, kept: (d2t, kept), ""),
        (lambda d2t, kept: (torch.zeros_like(d2t), kept), "t2d keeps 64 tokens, and d2t leads to"),
        (lambda d2t, kept: (d2t, torch.ones_like(kept)), "t2d keeps 96 tokens, and d2t leads to 64 of them"),
        (lambda d2t, kept: (d2t + torch.arange(64), kept), "t2d keeps 64 tokens, and d2t leads to"),
        (lambda d2t, kept: (d2t, kept[:90].clone()), r"t2d is [90], expected [96]; it is not used"),
    ],
)
def test_a_t2d_that_contradicts_d2t_is_told_and_read_past(
    table: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], told: str, new_draft: NewDraft, write_draft: Write,
    tmp_path: Path,
) -> None:  # fmt: skip
    config, tensors = new_draft()
    kept = torch.zeros(96, dtype=torch.bool)
    kept[tensors["d2t"] + torch.arange(64)] = True
    tensors["d2t"], tensors["t2d"] = table(tensors["d2t"], kept)
    notes = read_draft(write_draft(tmp_path, config, tensors)).report.notes
    assert notes == () if not told else told in notes[0]


def test_a_table_beside_all_tokens_is_passed_over_and_told(
    new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    config, tensors = new_draft(draft_vocab_size=96)
    tensors["d2t"] = torch.randperm(96) - torch.arange(96)
    draft = read_draft(write_draft(tmp_path / "other", config, tensors))
    assert "d2t" not in draft.tensors and draft.report.unused_tensors == ("d2t",)
    assert any("d2t is there although the draft has all tokens" in note for note in draft.report.notes)
    tensors["d2t"] = torch.zeros(96, dtype=torch.int64)
    assert read_draft(write_draft(tmp_path / "zero", config, tensors)).report.unused_tensors == ()


def test_a_part_of_the_tokens_without_a_table_lacks_it(new_draft: NewDraft, write_draft: Write, tmp_path: Path) -> None:
    config, tensors = new_draft()
    del tensors["d2t"]
    assert read_draft(write_draft(tmp_path, config, tensors)).report.missing_tensors == ("d2t",)


def test_layouts_have_names_of_their_own_and_the_last_takes_what_is_left() -> None:
    assert [layout.name for layout in LAYOUTS] == ["speculators", "angelslim", "modelopt", "specforge", "eagle"]
    assert WRITABLE == ("eagle", "specforge", "speculators")
    with pytest.raises(UserError, match="layout 'modelopt' cannot be written; expected one of eagle, specforge, spec"):
        writable("modelopt")


def test_the_page_names_all_layouts_and_what_they_have_no_words_for() -> None:
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text("utf-8")
    for layout in LAYOUTS:
        assert f"| `{layout.name}` |" in page
        for limit in layout.limits:
            assert f"\n- {limit.what}\n" in page, limit.what

"""`spectrace convert` says what it read, assumed and wrote, and refuses in one line what it cannot say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from spectrace.cli.convert import _LAYOUTS
from spectrace.engine.checkpoint import read_draft
from spectrace.engine.convert import WRITABLE

Say = Callable[..., Any]
NewDraft = Callable[..., tuple[dict[str, Any], dict[str, Tensor]]]
Write = Callable[..., Path]
IDS = "eagle_aux_hidden_state_layer_ids"


def test_every_layout_that_can_be_written_can_be_named() -> None:
    assert _LAYOUTS == WRITABLE


def test_the_page_says_what_was_read_assumed_left_and_written(
    spectrace: Say, new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    config, tensors = new_draft(norm_output=True, surprise=1, target_hidden_size=48)
    del config["rope_theta"]
    tensors["input_norm.weight"] = torch.ones(144)
    draft = write_draft(tmp_path / "draft", config, tensors)
    said = spectrace("convert", draft, "--to", "speculators", "--out", tmp_path / "out")
    assert said.code == 0, said.err
    page = " ".join(said.out.split())
    for line in (
        "draft, in the layout eagle", "feedback post_norm", f"boundaries 0, 2, 4, by {IDS} [0, 2, 4]",
        "vocabulary 64 of 96 tokens", "from the target embedding", "attention heads 4, kv_heads 2, head_dim 12",
        "assumed: rope_theta = 10000.0", "config field not read, and not carried over: surprise",
        "tensor not used, and not carried over: input_norm.weight", "out, in the layout speculators: model.safetensors",
        f"read back: {len(tensors) - 1} tensors bit for bit, and the same switches and boundaries",
        "note: the target is not named (verifier.name_or_path): say it with --target",
    ):  # fmt: skip
        assert line in page, line
    assert "residual" not in page, "what is as in a plain draft is not listed"
    assert read_draft(tmp_path / "out").spec == read_draft(draft).spec


def test_a_draft_that_names_no_layers_says_so(
    spectrace: Say, new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    config, tensors = new_draft()
    del config[IDS]
    said = spectrace(
        "convert", write_draft(tmp_path / "draft", config, tensors), "--to", "eagle", "--out", tmp_path / "o"
    )
    assert "none named: engines take 2, L/2 and L-3" in " ".join(said.out.split())


def test_json_is_one_document(
    spectrace: Say, new_draft: NewDraft, write_draft: Write, target_of: Callable[..., Path], tmp_path: Path
) -> None:
    draft = write_draft(tmp_path / "draft", *new_draft())
    target = target_of("llama")
    said = spectrace("convert", draft, "--to", "specforge", "--out", tmp_path / "out", "--target", target, "--json")
    found = json.loads(said.out)
    assert said.code == 0 and found["equal"] is True and found["tensors"] == 14
    assert found["read"]["layout"] == "eagle" and found["written"]["layout"] == "specforge"
    assert found["read"]["spec"] == found["written"]["spec"]
    assert found["written"]["wiring"]["boundaries"] == [0, 2, 4] and found["written"]["files"] == ["model.safetensors"]
    assert found["read"]["report"]["unused_tensors"] == [] and found["notes"] == []


def test_a_draft_goes_round_and_comes_back_as_it_was(
    spectrace: Say, new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    config, tensors = new_draft(fc_norm=True)
    draft = write_draft(tmp_path / "draft", config, tensors)
    assert spectrace("convert", draft, "--to", "specforge", "--out", tmp_path / "a").code == 0
    assert spectrace("convert", tmp_path / "a", "--to", "speculators", "--out", tmp_path / "b").code == 0
    assert spectrace("convert", tmp_path / "b", "--to", "eagle", "--out", tmp_path / "c").code == 0
    back = load_file(tmp_path / "c" / "model.safetensors")
    assert set(back) - set(tensors) == {"t2d"} and all(torch.equal(back[name], one) for name, one in tensors.items())


def test_shards_are_as_large_as_said(spectrace: Say, new_draft: NewDraft, write_draft: Write, tmp_path: Path) -> None:
    config, tensors = new_draft()
    tensors["embed_tokens.weight"] = torch.zeros(96, 48)
    config |= {"intermediate_size": 6000}
    for name, shape in (("gate", (6000, 48)), ("up", (6000, 48)), ("down", (48, 6000))):
        tensors[f"midlayer.mlp.{name}_proj.weight"] = torch.zeros(shape)
    draft = write_draft(tmp_path / "draft", config, tensors)
    said = spectrace("convert", draft, "--to", "eagle", "--out", tmp_path / "out", "--shard-mib", 2)
    assert said.code == 0 and "layout eagle: 3 files" in " ".join(said.out.split())
    assert all(path.stat().st_size < 2.1 * 2**20 for path in (tmp_path / "out").glob("*.safetensors"))


@pytest.mark.parametrize(
    ("changes", "arguments", "says"),
    [
        ({}, ("--to", "modelopt"), "'modelopt' is not one of 'eagle', 'specforge', 'speculators'"),
        ({}, ("--to", "eagle", "--target", "nowhere"), "--target nowhere: no such folder"),
        ({"norm_before_residual": True}, ("--to", "specforge"), "specforge has no words for a residual taken behind"),
        ({"norm_before_fc": True}, ("--to", "specforge"), "; layouts that have: eagle, speculators"),
        ({"rope_scaling": {"rope_type": "longrope"}}, ("--to", "eagle"), "rope type 'longrope' depends on how long"),
    ],
)
def test_what_cannot_be_said_or_read_is_refused_in_one_line(
    changes: dict[str, Any], arguments: tuple[str, ...], says: str, spectrace: Say, new_draft: NewDraft,
    write_draft: Write, tmp_path: Path,
) -> None:  # fmt: skip
    draft = write_draft(tmp_path / "draft", *new_draft(**changes))
    said = spectrace("convert", draft, *arguments, "--out", tmp_path / "out")
    assert said.code == 2 and says in said.err and "Traceback" not in said.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft"]


def test_a_folder_that_is_there_is_refused(
    spectrace: Say, new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    draft = write_draft(tmp_path / "draft", *new_draft())
    said = spectrace("convert", draft, "--to", "eagle", "--out", draft)
    assert said.code == 2 and "draft exists: give a new path for the draft" in said.complaint


def test_a_target_is_refused_by_what_it_is(spectrace: Say, target_of: Callable[..., Path], tmp_path: Path) -> None:
    said = spectrace("convert", target_of("llama"), "--to", "eagle", "--out", tmp_path / "out")
    assert said.code == 2 and "not an EAGLE-3 draft but a whole target model (LlamaForCausalLM)" in said.complaint

"""Every edit names the file, the key and the value, and its command makes a config that reads as it should."""

import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spectrace.engine.checkpoint import read_draft
from spectrace.engine.dialect import read_spec, read_wiring
from spectrace.engine.fields import Fields, read_config
from spectrace.engine.spec import DraftSpec, FuseNorm, GqaSpec, RopeKind, RopeSpec, Stream
from spectrace.engine.stored import StoredTensors
from spectrace.engine.turned import in_other_order, rotated
from spectrace.replay.edits import fix_hand_off, fix_switch, fix_weights, fix_wiring
from spectrace.replay.links import ENGINE_LINKS, PUBLIC
from spectrace.replay.profiles.known import PROFILES, profile_of
from spectrace.replay.profiles.profile import Profile
from spectrace.replay.rewriting import Edit
from spectrace.replay.tensor_edits import copy_tensors, drop_tensors, turn_rows

IDS, NESTED = "eagle_aux_hidden_state_layer_ids", "eagle_config"
OURS = PROFILES["spectrace"]
RIGHT, WRONG = (0, 3, 16), (3, 16, 27)


def _folder(path: Path, **config: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"hidden_size": 8, **config}), "utf-8")
    return path


def _carry_out(edit: Edit) -> None:
    """Run an edit's command as a shell would."""
    assert edit.command.startswith("python -c ")
    command = re.sub("python -c", f"'{sys.executable}' -c", edit.command)
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _shapes(tensors: dict[str, Any]) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in tensors.items()}


def _fields(folder: Path) -> Fields:
    return Fields(folder / "config.json", read_config(folder))


def _wired(profile: Profile, **changes: Any) -> Edit:
    given = {"served": None, "boundaries": RIGHT, "now": WRONG, "key": IDS}
    return fix_wiring(profile, **{**given, **changes})


def test_the_config_is_set_in_the_key_that_it_has(tmp_path: Path) -> None:
    draft = _folder(tmp_path / "draft", **{IDS: [3, 16, 27]})
    edit = _wired(OURS, who="config", draft=draft)
    assert edit.text == f"in {draft / 'config.json'} set {IDS} to [0, 3, 16] (now [3, 16, 27])"
    _carry_out(edit)
    wiring = read_wiring(_fields(draft))
    assert wiring and wiring.boundaries == RIGHT


def test_a_nested_key_is_set_in_its_own_convention(tmp_path: Path) -> None:
    draft = _folder(tmp_path / "draft", **{NESTED: {IDS: [2, 15, 26], "use_last_layernorm": True}})
    edit = _wired(OURS, who="config", draft=draft, key=f"{NESTED}.{IDS}")
    assert f"set {NESTED}.{IDS} to [-1, 2, 15] (now [2, 15, 26])" in edit.text
    _carry_out(edit)
    wiring = read_wiring(_fields(draft))
    assert wiring and wiring.boundaries == RIGHT
    assert read_config(draft)[NESTED] == {IDS: [-1, 2, 15], "use_last_layernorm": True}


def test_both_keys_are_set_where_both_are_there(tmp_path: Path) -> None:
    draft = _folder(tmp_path / "draft", **{IDS: [3, 16, 27], NESTED: {IDS: [2, 15, 26]}})
    edit = _wired(OURS, who="config", draft=draft)
    assert "to [0, 3, 16]" in edit.text and "to [-1, 2, 15]" in edit.text
    _carry_out(edit)
    fields = _fields(draft)
    wiring = read_wiring(fields)
    assert wiring and wiring.boundaries == RIGHT and not fields.unread() - {"hidden_size"}


def test_who_is_wrong_decides_the_edit(tmp_path: Path) -> None:
    draft = _folder(tmp_path / "draft", **{IDS: [0, 3, 16]})
    served = _folder(tmp_path / "served")
    edits = {who: _wired(OURS, who=who, draft=draft, served=served, key="default") for who in ("engine", "conversion")}
    edits["config"] = _wired(OURS, who="config", draft=_folder(tmp_path / "wrong", **{IDS: [3, 16, 27]}))
    assert len({edit.text for edit in edits.values()}) == len({edit.command for edit in edits.values()}) == 3
    engine, conversion = edits["engine"], edits["conversion"]
    assert "serve with --wiring 0,3,16" in engine.text and "TargetModel" in engine.text
    assert "config.json is right" in engine.text and engine.command.endswith(f"--draft {draft} --wiring 0,3,16")
    assert conversion.text.startswith(f"convert {draft} again, keeping its layer ids ({IDS}); or in {served}")
    assert "absent now" in conversion.text and "takes (2, L/2, L-3)" in conversion.text
    _carry_out(conversion)
    wiring = read_wiring(_fields(served))
    assert wiring and wiring.boundaries == RIGHT and read_config(draft)[IDS] == list(RIGHT)


def test_a_flag_that_overrides_a_right_config_is_to_be_left_out(tmp_path: Path) -> None:
    draft = _folder(tmp_path / "draft", **{IDS: [0, 3, 16]})
    for who in ("engine", "conversion"):
        edit = _wired(OURS, who=who, draft=draft, served=draft, key="--wiring")
        assert edit.text.startswith("serve without --wiring 3,16,27") and "--wiring" not in edit.command


def test_a_folder_that_was_edited_since_it_was_served_is_to_be_served_again(tmp_path: Path) -> None:
    draft = _folder(tmp_path / "draft", **{IDS: [0, 3, 16]})
    edit = _wired(OURS, who="conversion", draft=draft, served=tmp_path / "x" / ".." / "draft")
    assert edit.text.startswith(f"serve {draft} again") and "set" not in edit.text
    assert fix_switch(OURS, "feedback", who="conversion", draft=draft, served=draft, right="a", now="b") == edit


def test_a_path_that_a_shell_would_read_otherwise_survives(tmp_path: Path) -> None:
    draft = _folder(tmp_path / 'a $HOME `x` "draft"', **{IDS: [3, 16, 27]})
    _carry_out(_wired(OURS, who="config", draft=draft))
    wiring = read_wiring(_fields(draft))
    assert wiring and wiring.boundaries == RIGHT


@pytest.mark.parametrize("who", ["engine", "flag", "conversion"])
def test_a_command_that_serves_survives_a_shell(tmp_path: Path, who: str) -> None:
    draft = _folder(tmp_path / "my $HOME draft's", **{IDS: [0, 3, 16]})
    key = OURS.wiring_flag if who == "flag" else IDS
    edit = _wired(OURS, who="engine" if who == "flag" else who, draft=draft, served=draft, key=key)
    words = shlex.split(edit.command)
    assert words[words.index("--draft") + 1] == str(draft)
    assert words[words.index("--draft") + 2 :] == (["--wiring", "0,3,16"] if who == "engine" else [])


def test_a_config_that_cannot_be_read_still_gets_its_edit(tmp_path: Path) -> None:
    edit = _wired(OURS, who="config", draft=tmp_path / "gone")
    assert f"set {IDS} to [0, 3, 16] (now [3, 16, 27])" in edit.text


SWITCHES = [
    ("residual", Stream.POST_NORM, {}, lambda spec: spec.residual),
    ("residual", Stream.PRE_NORM, {"norm_before_residual": True}, lambda spec: spec.residual),
    ("feedback", Stream.POST_NORM, {"norm_output": False}, lambda spec: spec.feedback),
    ("norm before fc", FuseNorm.PER_SLOT, {"norm_before_fc": True}, lambda spec: spec.fuse_norm),
    ("norm before fc", FuseNorm.NONE, {"fc_norm": True}, lambda spec: spec.fuse_norm),
    ("norm before fc", FuseNorm.WHOLE, {}, lambda spec: spec.fuse_norm),
    ("rope theta", "500", {}, lambda spec: f"{spec.rope.theta:g}"),
    ("rope theta", 500.0, {"rope_parameters": {"rope_theta": 1.0}}, lambda spec: spec.rope.theta),
    ("rope theta", 500.0, {"rope_scaling": {"type": "linear", "factor": 2.0}}, lambda spec: spec.rope.theta),
    ("rope pairs", "halves", {}, lambda spec: "interleaved" if spec.rope.interleaved else "halves"),
    ("rope pairs", "interleaved", {"rope_interleave": False}, lambda s: ["halves", "interleaved"][s.rope.interleaved]),
    (
        "rope scaling",
        "none",
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        lambda s: "none" if s.rope.kind is RopeKind.DEFAULT else "",
    ),
]


@pytest.mark.parametrize(("switch", "right", "config", "read"), SWITCHES)
def test_a_switch_of_the_config_reads_right_after_the_edit(
    tmp_path: Path, new_draft: Any, switch: str, right: object, config: dict[str, Any], read: Any
) -> None:
    base, tensors = new_draft("mla")
    draft = _folder(tmp_path / "draft", **{k: v for k, v in {**base, **config}.items() if k != "rope_theta" or config})
    edit = fix_switch(OURS, switch, who="config", draft=draft, served=None, right=right, now="something else")
    assert str(draft / "config.json") in edit.text and "something else" in edit.text
    _carry_out(edit)
    fields = _fields(draft)
    assert read(read_spec(fields, _shapes(tensors), read_wiring(fields))) == right


def _biases(spec: DraftSpec) -> tuple[bool, bool]:
    assert isinstance(spec.attention, GqaSpec)
    return spec.attention.qkv_bias, spec.attention.o_bias


DEEP: list[tuple[str, object, dict[str, Any], Any, object]] = [
    ("attention bias", "q, k, v, o", {"attention_bias": False}, _biases, (True, True)),
    ("attention bias", "q, k, v, o", {"attention_bias": None}, _biases, (True, True)),
    ("attention bias", "o", {}, _biases, (False, True)),
    ("attention bias", "none", {"bias": True}, _biases, (False, False)),
    ("MLP bias", "applied", {"mlp_bias": False}, lambda spec: spec.mlp_bias, True),
    ("MLP bias", "none", {}, lambda spec: spec.mlp_bias, False),
    ("window", (5, None), {}, lambda spec: spec.windows, (5, None)),
    ("window", (7, None), {"use_sliding_window": False}, lambda spec: spec.windows, (7, None)),
    ("window", (None, 9), {"layer_types": None, "sliding_window": None}, lambda spec: spec.windows, (None, 9)),
    ("window", (None, None), {}, lambda spec: spec.windows, (None, None)),
    ("embedding scale", 6.5, {}, lambda spec: spec.embedding_scale, 6.5),
    ("embedding scale", 1.0, {"embedding_scale": 3.0}, lambda spec: spec.embedding_scale, 1.0),
    ("context", 4096, {"max_position_embeddings": 64}, lambda spec: spec.context, 4096),
]


@pytest.mark.parametrize(("switch", "right", "config", "read", "wanted"), DEEP)
def test_a_switch_of_later_drafts_reads_right_after_the_edit(
    tmp_path: Path, new_draft: Any, switch: str, right: object, config: dict[str, Any], read: Any, wanted: object
) -> None:
    base, tensors = new_draft("deep")
    draft = _folder(
        tmp_path / "draft", **{name: value for name, value in {**base, **config}.items() if value is not None}
    )
    edit = fix_switch(OURS, switch, who="config", draft=draft, served=None, right=right, now="something else")
    assert "something else" in edit.text
    _carry_out(edit)
    fields = _fields(draft)
    assert read(read_spec(fields, _shapes(tensors), read_wiring(fields))) == wanted


def test_a_window_that_a_copy_lost_comes_back_whole(tmp_path: Path, new_draft: Any) -> None:
    base, tensors = new_draft("deep")
    draft = _folder(tmp_path / "draft", **base)
    lost = {name: value for name, value in base.items() if name not in ("layer_types", "sliding_window")}
    served = _folder(tmp_path / "served", **lost)
    edit = fix_switch(OURS, "window", who="conversion", draft=draft, served=served, right=(7, None), now=(None, None))
    assert "the sliding window has to be 7, none by layer, and is none" in edit.text
    _carry_out(edit)
    fields = _fields(served)
    assert read_spec(fields, _shapes(tensors), read_wiring(fields)).windows == (7, None)


def test_a_config_that_nests_its_layer_s_fields_is_set_where_it_has_them(tmp_path: Path) -> None:
    """speculators' layout."""
    body = {"model_type": "llama", "rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}}
    draft = _folder(tmp_path / "draft", speculators_model_type="eagle3", transformer_layer_config=body)
    for switch, right in (("rope theta", 777.0), ("attention bias", "q, k, v"), ("residual", Stream.POST_NORM)):
        _carry_out(fix_switch(OURS, switch, who="config", draft=draft, served=None, right=right, now="other"))
    held = read_config(draft)
    assert held["norm_before_residual"] is True and "rope_theta" not in held and "attention_bias" not in held
    assert held["transformer_layer_config"] == {
        "model_type": "llama", "rope_parameters": {"rope_theta": 777.0, "rope_type": "default"}, "attention_bias": True
    }  # fmt: skip


@pytest.mark.parametrize("who", ["engine", "conversion"])
def test_other_weights_are_replaced_by_serving_the_right_folder(tmp_path: Path, who: str) -> None:
    draft, served = _folder(tmp_path / "my draft"), _folder(tmp_path / "served")
    edit = fix_weights(OURS, who=who, draft=draft, served=served)  # type: ignore[arg-type]
    if who == "engine":
        assert "build_draft" in edit.text and not edit.command
        return
    assert edit.text.startswith(f"serve {draft}, not {served}")
    assert shlex.split(edit.command)[-2:] == ["--draft", str(draft)]
    since = fix_weights(OURS, who="conversion", draft=draft, served=draft)
    assert "written since this trace was served" in since.text


@pytest.mark.parametrize("attention", ["gqa", "mla", "deep"])
@pytest.mark.parametrize("back", [False, True])
def test_rows_in_another_order_are_put_into_the_right_one(
    tmp_path: Path, new_draft: Any, write_draft: Any, attention: str, back: bool
) -> None:
    config, tensors = new_draft(attention)
    draft = write_draft(tmp_path / "draft", config, tensors)
    checkpoint = read_draft(draft)
    spec, names = checkpoint.spec, checkpoint.names
    turned = {names[name]: rows for name, rows in rotated(checkpoint.tensors, spec)}
    wrong = {name: in_other_order(tensors[name], rows, spec, back=not back) for name, rows in turned.items()}
    save_file({**tensors, **{name: tensor.contiguous() for name, tensor in wrong.items()}}, draft / "model.safetensors")
    edit = turn_rows(draft, names, spec, back=back)
    assert all(name in edit.text for name in turned)
    _carry_out(edit)
    after = load_file(draft / "model.safetensors")
    assert after.keys() == tensors.keys() and all(after[name].equal(tensors[name]) for name in after)
    assert any(not tensor.equal(tensors[name]) for name, tensor in wrong.items())


@pytest.mark.parametrize("indexed", [False, True])
def test_what_a_copy_lost_is_put_beside_what_it_has(tmp_path: Path, indexed: bool) -> None:
    draft, served = _folder(tmp_path / "my draft"), _folder(tmp_path / "served")
    save_file({"a.bias": torch.ones(3), "b.bias": torch.zeros(2), "c": torch.ones(1)}, draft / "model.safetensors")
    save_file({"c": torch.ones(1)}, served / "model.safetensors")
    index = served / "model.safetensors.index.json"
    if indexed:
        index.write_text(json.dumps({"weight_map": {"c": "model.safetensors"}}), "utf-8")
    set_it = fix_switch(
        OURS, "attention bias", who="conversion", draft=draft, served=served, right="q, k, v", now="none"
    )
    edit = copy_tensors(draft, served, ["a.bias", "b.bias"], set_it)
    assert edit.text.endswith(f"and copy a.bias, b.bias from {draft}, which the copy lost, too")
    _carry_out(edit)
    assert {name: tensor.tolist() for name, tensor in StoredTensors(served).items()} == {
        "a.bias": [1, 1, 1], "b.bias": [0, 0], "c": [1]
    }  # fmt: skip
    assert read_config(served)["attention_bias"] is True and index.exists() == indexed


def test_an_index_forgets_what_is_removed(tmp_path: Path) -> None:
    draft = _folder(tmp_path / "draft")
    save_file({"norm.weight": torch.ones(3), "lm_head.weight": torch.ones(2)}, draft / "a.safetensors")
    index = {"metadata": {}, "weight_map": {"norm.weight": "a.safetensors", "lm_head.weight": "a.safetensors"}}
    (draft / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    _carry_out(drop_tensors(draft, ["lm_head.weight"], "not wanted"))
    left = json.loads((draft / "model.safetensors.index.json").read_text("utf-8"))["weight_map"]
    assert left == {"norm.weight": "a.safetensors"} and load_file(draft / "a.safetensors").keys() == {"norm.weight"}


@pytest.mark.parametrize("kind", [RopeKind.LINEAR, RopeKind.LLAMA3, RopeKind.YARN])
def test_a_rope_spec_is_written_so_that_it_reads_back(tmp_path: Path, new_draft: Any, kind: RopeKind) -> None:
    config, tensors = new_draft("gqa", max_position_embeddings=64)
    draft = _folder(tmp_path / "draft", **config)
    context = {} if kind is RopeKind.LINEAR else {"original_context": 32}
    own = {RopeKind.YARN: {"beta_fast": 4.0, "cos_scale": 1.5}, RopeKind.LLAMA3: {"low_freq_factor": 2.0}}.get(kind, {})
    rope = RopeSpec(kind=kind, factor=8.0, **context, **own)
    _carry_out(fix_switch(OURS, "rope scaling", who="config", draft=draft, served=None, right=rope, now=RopeSpec()))
    fields = _fields(draft)
    assert read_spec(fields, _shapes(tensors), read_wiring(fields)).rope == rope


def test_a_conversion_gets_back_what_the_draft_says(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 40.0, "mscale_all_dim": 2.0}
    draft, served = _folder(tmp_path / "draft", rope_scaling=scaling), _folder(tmp_path / "served")
    edit = fix_switch(
        OURS, "rope scaling", who="conversion", draft=draft, served=served, right="yarn by 40", now="none"
    )
    assert edit.text.startswith(f"convert {draft} again, keeping rope_scaling")
    _carry_out(edit)
    assert read_config(served)["rope_scaling"] == scaling


def test_an_engine_that_ignores_a_switch_is_to_be_looked_at_where_it_acts_on_it(tmp_path: Path) -> None:
    edit = fix_switch(
        OURS, "feedback", who="engine", draft=tmp_path, served=None, right=Stream.POST_NORM, now=Stream.PRE_NORM
    )
    assert "config.json is right about norm_output" in edit.text and "DraftModel.forward" in edit.text


@pytest.mark.parametrize("who", ["config", "engine", "conversion"])
@pytest.mark.parametrize("link", ["vocabulary map", "head", "embedding", "weights", "gate and up", "fc"])
def test_links_of_tensors_say_which_tensor_and_where(tmp_path: Path, who: Any, link: str) -> None:
    draft, served = tmp_path / "draft", tmp_path / "served"
    edit = fix_switch(OURS, link, who=who, draft=draft, served=served, right="THIS", now="THAT")
    assert "has to be THIS, and is THAT" in edit.text and str(draft) in edit.text
    assert (str(served) in edit.text) == (who == "conversion")


def test_every_place_in_our_code_that_a_profile_names_is_there() -> None:
    for place in OURS.code.values():
        module, name = place, ""
        names: list[str] = []
        while not _imports(module):
            module, _, name = module.rpartition(".")
            names.insert(0, name)
        found: Any = importlib.import_module(module)
        for name in names:
            found = getattr(found, name)


def test_no_place_and_no_link_is_kept_that_no_cause_leads_to() -> None:
    stages = {link.stage for link in ENGINE_LINKS.values()} | {switch.code for switch in OURS.switches.values()}
    of_tensors = {"vocabulary", "load", "project"}
    assert stages | of_tensors | {"wiring"} == set(OURS.code)
    lab = Path(sys.modules[fix_wiring.__module__].__file__ or "").parent
    others = (file.read_text("utf-8") for file in lab.glob("*.py") if file.name != "links.py")
    named = {fault for text in others for fault in re.findall(r'"([A-Z]\d)"', text)}
    assert {*ENGINE_LINKS, *PUBLIC} <= named


def _imports(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError:
        return False
    return True


@pytest.mark.parametrize("fault", sorted({*ENGINE_LINKS, "Z9"}))
def test_every_fault_of_engine_code_says_where_to_look(fault: str) -> None:
    edit = fix_hand_off(OURS, fault, "")
    assert edit.text.startswith("in the engine, ") and "Look there: spectrace.engine." in edit.text


def test_variants_of_a_fault_have_their_own_rule() -> None:
    texts = {fix_hand_off(OURS, "M3", variant).text for variant in ("", "truncated", "constant", "stale")}
    assert len(texts) == 4


def test_an_unknown_engine_is_said_to_be_one(tmp_path: Path) -> None:
    profile = profile_of({"engine": "other"})
    assert (
        not profile.known and profile_of({}).engine == "an unknown engine" and profile_of({"engine": "spectrace"}).known
    )
    draft = _folder(tmp_path / "draft", **{IDS: [0, 3, 16]})
    edit = _wired(profile, who="engine", draft=draft)
    assert "no profile of this engine" in edit.text and "--wiring" not in edit.text and not edit.command
    assert "no profile of this engine" in fix_hand_off(profile, "M1", "").text


VLLM = PROFILES["vllm"]
THEIRS = f"{NESTED}.{IDS}"


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({NESTED: {"layer_ids": [0, 3, 16]}}, f"vllm does not read {NESTED}.layer_ids"),
        ({NESTED: {IDS: [-1, 2, 15]}}, f"vllm takes ids under {THEIRS} for the layers that streams enter"),
        ({NESTED: {IDS: [-1, 2, 15], "layer_ids": [0, 3, 16]}}, f"vllm does not read {NESTED}.layer_ids"),
        ({}, "without ids vllm takes (2, L/2, L-3)"),
        ({IDS: [3, 16, 27], NESTED: {IDS: [-1, 2, 15]}}, f"set {IDS} to [0, 3, 16] (now [3, 16, 27])"),
    ],
)
def test_ids_that_an_engine_takes_otherwise_than_they_are_meant_are_set_where_it_reads_them(
    tmp_path: Path, config: dict[str, Any], told: str
) -> None:
    draft = _folder(tmp_path / "draft", **config)
    edit = _wired(VLLM, who="config", draft=draft, key="default")
    assert told in edit.text and f"set {IDS} to [0, 3, 16]" in edit.text
    _carry_out(edit)
    assert VLLM.resolve(read_config(draft), 30) == RIGHT
    fields = _fields(draft)
    wiring = read_wiring(fields)
    assert wiring and wiring.boundaries == RIGHT and not fields.unread() - {"hidden_size"}
    assert read_config(draft).get(NESTED) == config.get(NESTED), "right by its own convention, and left"


def test_an_engine_that_sorts_gets_the_slots_in_its_order(tmp_path: Path) -> None:
    draft = _folder(tmp_path / "draft", **{IDS: [16, 0, 3]})
    weight, gains = (
        torch.arange(24.0).reshape(2, 12),
        {f"fc_norm.{slot}.weight": torch.tensor([slot]) for slot in range(3)},
    )
    save_file({"fc.weight": weight, **gains, "norm.weight": torch.ones(2)}, draft / "model.safetensors")
    edit = _wired(VLLM, who="config", draft=draft, boundaries=(16, 0, 3), now=(0, 3, 16))
    assert "vllm sorts layer ids, so it cannot deliver [16, 0, 3]" in edit.text and str(draft) in edit.text
    _carry_out(edit)
    after = load_file(draft / "model.safetensors")
    first, second, third = weight.chunk(3, 1)
    assert after["fc.weight"].equal(torch.cat([second, third, first], 1)) and after["norm.weight"].equal(torch.ones(2))
    assert [int(after[f"fc_norm.{slot}.weight"]) for slot in range(3)] == [1, 2, 0]
    assert read_config(draft)[IDS] == [0, 3, 16]


def test_a_tensor_that_a_draft_was_not_trained_with_is_removed_and_the_rest_stays(tmp_path: Path) -> None:
    draft = _folder(tmp_path / "draft")
    save_file({"embed_tokens.weight": torch.ones(2), "norm.weight": torch.ones(3)}, draft / "a.safetensors")
    save_file({"fc.weight": torch.ones(4)}, draft / "b.safetensors")
    before = (draft / "b.safetensors").read_bytes()
    edit = drop_tensors(draft, ["embed_tokens.weight"], "the draft was trained with its target's")
    assert edit.text.startswith(f"remove the tensor embed_tokens.weight from {draft}")
    _carry_out(edit)
    assert load_file(draft / "a.safetensors").keys() == {"norm.weight"}
    assert (draft / "b.safetensors").read_bytes() == before

"""`spectrace lint`: its page, its document, its exit codes, and its page in the docs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from spectrace.cli.main import cli
from spectrace.replay.lint.finding import CODES
from spectrace.replay.profiles.known import PROFILES, profile_named
from spectrace.tracer.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
DRAFT, TARGET = ROOT / "models" / "toy" / "gqa", ROOT / "models" / "toy" / "target"
IDS, BY = "eagle_aux_hidden_state_layer_ids", [0, 3, 5]


def lint(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["lint", *map(str, arguments)])


def test_a_draft_that_is_whole_is_told_as_it_is() -> None:
    found = lint(DRAFT, "--target", TARGET, "--engine", "spectrace")
    assert found.exit_code == 0, found.output
    said = " ".join(found.output.split())
    assert "spectrace boundaries 0, 3, 5, by eagle_aux_hidden_state_layer_ids" in said
    assert "[context-shorter]" in said and "error" not in said.split("means")[0]


def test_what_an_engine_will_run_is_one_document() -> None:
    found = lint(DRAFT, "--target", TARGET, "--engine", "sglang==0.5.23", "--json")
    assert found.exit_code == 1
    told = json.loads(found.output)
    assert told.keys() >= {"findings", "spec", "wiring", "dialect", "engine"}
    first = told["findings"][0]
    assert first.keys() == {"code", "severity", "title", "evidence", "consequence", "fix"}
    assert (first["code"], first["severity"]) == ("wiring-unread", "error")
    order = ["error", "warning", "note"]
    severities = [order.index(one["severity"]) for one in told["findings"]]
    assert severities == sorted(severities)
    assert told["dialect"] == "eagle" and told["wiring"]["boundaries"] == [0, 3, 5]
    assert (told["engine"]["name"], told["engine"]["version"]) == ("sglang", "0.5.23")
    assert told["engine"]["taken"]["embed_tokens.weight"] == "the target's embedding"


@pytest.mark.parametrize(
    "now", [{IDS: [0, 3, 5]}, {"eagle_config": {IDS: [0, 3, 5]}}, {"eagle_config": None, IDS: [0, 3, 5]}]
)
@pytest.mark.parametrize("engine", ["sglang", "vllm V1", "vllm V2"])
@pytest.mark.parametrize("target", ["LlamaForCausalLM", "DeepseekV3ForCausalLM"])
def test_the_edit_of_a_finding_makes_it_go_away_and_means_what_was_meant(
    now: dict[str, object], engine: str, target: str, tmp_path: Path
) -> None:
    """Layer ids that an engine does not read, or not so, written as the fix says."""
    draft = Path(shutil.copytree(DRAFT, tmp_path / "draft"))
    config = json.loads((draft / "config.json").read_text("utf-8"))
    (draft / "config.json").write_text(json.dumps({**{k: v for k, v in config.items() if k != IDS}, **now}), "utf-8")
    (tmp_path / "target").mkdir()
    beside = json.loads((TARGET / "config.json").read_text("utf-8"))
    beside |= {"architectures": [target], "num_hidden_layers": 12}
    (tmp_path / "target" / "config.json").write_text(json.dumps(beside), "utf-8")
    asked = (draft, "--target", tmp_path / "target", "--engine", engine, "--json")
    before = json.loads(lint(*asked).output)
    for one in before["findings"]:
        if one["code"] in ("wiring-unread", "wiring-misread") and "python -c" in one["fix"]:
            exec(one["fix"].partition('python -c "\n')[2].removesuffix('"'))
    after = json.loads(lint(*asked).output)
    assert after["wiring"]["boundaries"] == before["wiring"]["boundaries"]
    refused = any(one["code"] == "engine-refuses" or "no ids under" in one["fix"] for one in after["findings"])
    assert refused or not {"wiring-unread", "wiring-misread"} & {one["code"] for one in after["findings"]}
    assert refused or after["engine"]["boundaries"] == after["wiring"]["boundaries"]


def test_what_cannot_be_read_is_a_finding_and_what_is_not_there_is_bad_input(tmp_path: Path) -> None:
    found = lint(TARGET, "--json")
    assert found.exit_code == 1 and json.loads(found.output)["findings"][0]["code"] == "not-eagle3"
    for arguments, said in (
        ((tmp_path / "nothing",), "no such folder"),
        ((DRAFT, "--target", tmp_path / "nothing"), "no such folder"),
        ((DRAFT, "--engine", "trt-llm"), "sglang==0.5.9"),
        (
            (DRAFT, "--engine", "sglang==0.4.0"),
            "sglang==0.5.23, sglang==0.5.12, sglang==0.5.9, vllm==0.32.0 V2",
        ),
    ):
        failed = lint(*arguments)
        assert isinstance(failed.exception, UserError) and said in str(failed.exception)


def test_a_broken_config_is_a_finding_and_still_one_document(tmp_path: Path) -> None:
    draft = Path(shutil.copytree(DRAFT, tmp_path / "draft"))
    (draft / "config.json").write_text("{", "utf-8")
    found = lint(draft, "--json")
    assert found.exit_code == 1 and [one["code"] for one in json.loads(found.output)["findings"]] == ["unreadable"]


def test_of_a_target_its_config_is_enough(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((TARGET / "config.json").read_text("utf-8"), "utf-8")
    told = json.loads(lint(DRAFT, "--target", tmp_path, "--engine", "sglang", "--json").output)
    assert {"wiring-unread", "target-unread"} <= {one["code"] for one in told["findings"]}


@pytest.mark.parametrize("name", ["vllm", "VLLM==0.32.0", "vllm V1", "vllm==0.32.0 V1", "SGLang", "sglang==0.5.12"])
def test_engines_are_named_by_version_and_runner(name: str) -> None:
    profile = profile_named(name)
    assert profile.runner == ("" if "sglang" in name.lower() else "V1" if "V1" in name else "V2")


@pytest.mark.parametrize("code", CODES)
def test_the_docs_tell_of_every_kind_of_finding(code: str) -> None:
    assert f"| `{code}` |" in (ROOT / "docs" / "lint.md").read_text("utf-8")


def test_the_docs_tell_of_every_engine() -> None:
    page = (ROOT / "docs" / "lint.md").read_text("utf-8")
    for title, profile in PROFILES.items():
        spelt = f"{profile.engine}=={profile.version} {profile.runner}".removesuffix(" ")
        assert f"`{spelt}`" in page or f"`{profile.engine}`" in page, title

"""`spectrace lint`: its page, its document, its exit codes, and its page in the docs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from spectrace.cli.main import cli
from spectrace.replay.lint.finding import CODES
from spectrace.replay.profiles.known import PROFILES
from spectrace.tracer.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
DRAFT, LATENT, TARGET = (ROOT / "models" / "toy" / name for name in ("gqa", "draft", "target"))


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


def test_the_edit_of_a_finding_makes_it_go_away(tmp_path: Path) -> None:
    """Layer ids that SGLang does not read, written as the fix says."""
    draft = Path(shutil.copytree(LATENT, tmp_path / "draft"))
    before = json.loads(lint(draft, "--target", TARGET, "--engine", "sglang", "--json").output)
    code = before["findings"][0]["fix"].partition('python -c "\n')[2].removesuffix('"')
    exec(code)
    after = json.loads(lint(draft, "--target", TARGET, "--engine", "sglang", "--json").output)
    assert "wiring-unread" in {one["code"] for one in before["findings"]}
    assert not {"wiring-unread", "wiring-misread"} & {one["code"] for one in after["findings"]}
    assert after["engine"]["boundaries"] == [0, 3, 4]


def test_what_cannot_be_read_is_a_finding_and_what_is_not_there_is_bad_input(tmp_path: Path) -> None:
    found = lint(TARGET, "--json")
    assert found.exit_code == 1 and json.loads(found.output)["findings"][0]["code"] == "not-eagle3"
    for arguments, said in (
        ((tmp_path / "nothing",), "no such folder"),
        ((DRAFT, "--target", tmp_path / "nothing"), "no such folder"),
        ((DRAFT, "--engine", "trt-llm"), "sglang==0.5.9"),
        ((DRAFT, "--engine", "sglang==0.4.0"), "no profile of that version"),
    ):
        failed = lint(*arguments)
        assert isinstance(failed.exception, UserError) and said in str(failed.exception)


@pytest.mark.parametrize("code", CODES)
def test_the_docs_tell_of_every_kind_of_finding(code: str) -> None:
    assert f"| `{code}` |" in (ROOT / "docs" / "lint.md").read_text("utf-8")


def test_the_docs_tell_of_every_engine() -> None:
    page = (ROOT / "docs" / "lint.md").read_text("utf-8")
    for title, profile in PROFILES.items():
        assert f"`{profile.engine}=={profile.version}`" in page or f"`{title}`" in page, title

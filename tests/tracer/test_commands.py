"""`info` and `check`: one JSON document on stdout, and exit codes that tell whole, incomplete and damaged apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from spectrace.cli.check import check
from spectrace.cli.info import info
from spectrace.tracer import Keys, NotATrace, Recorder, create_trace, seal_trace


def run(command: object, *arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])  # type: ignore[arg-type]


def test_info_shows_what_a_trace_holds(whole: Path) -> None:
    result = run(info, whole)
    assert result.exit_code == 0
    assert "sealed" in result.output and "draft-0  level full" in result.output
    assert "acceptance length 2.000 (untrimmed 2.000), 3 correct drafts in 3 rounds" in result.output


def test_info_json_is_one_document(whole: Path) -> None:
    found = json.loads(run(info, whole, "--json").stdout)
    assert found["manifest"]["model"] == "tiny"
    assert found["families"]["received"]["rows"] == 18
    assert found["acceptance"]["cumulative_rates"] == [1.0, 0.0]
    assert found["completeness"]["drafted"]["expected"] == 9


def test_info_without_verified_rows_has_no_acceptance(tmp_path: Path) -> None:
    create_trace(tmp_path / "t", {})
    assert json.loads(run(info, tmp_path / "t", "--json").stdout)["acceptance"] is None
    assert "no verified rows" in run(info, tmp_path / "t").output


@pytest.mark.parametrize("command", [info, check])
def test_a_wrong_path_is_the_users_error(command: object, tmp_path: Path) -> None:
    error = run(command, tmp_path / "nowhere").exception
    assert isinstance(error, NotATrace) and error.exit_code == 2


def test_check_of_a_whole_trace(whole: Path) -> None:
    result = run(check, whole, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {"sealed": True, "ok": True, "problems": []}
    assert "sealed and whole" in run(check, whole).output


def test_check_of_an_unsealed_trace(trace: Path) -> None:
    (trace / "SEAL").unlink()
    result = run(check, trace, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {"sealed": False, "ok": False, "problems": []}
    assert "ended earlier" in " ".join(run(check, trace).output.split())


def test_check_of_a_damaged_trace(trace: Path) -> None:
    path = next((trace / "draft-0").glob("*-received.arrow"))
    path.write_bytes(path.read_bytes()[:-1])
    result = run(check, trace, "--json")
    assert result.exit_code == 3
    [problem] = json.loads(result.stdout)["problems"]
    assert problem == {"segment": f"draft-0/{path.name}", "offset": path.stat().st_size, "kind": "cut", "rows_lost": 0}
    assert "damaged in 1 place, costing 0 rows or more" in " ".join(run(check, trace).output.split())


def test_check_of_a_trace_whose_manifest_is_gone(trace: Path) -> None:
    (trace / "manifest.json").unlink()
    result = run(check, trace, "--json")
    assert result.exit_code == 3 and json.loads(result.stdout)["problems"][0]["kind"] == "manifest"


def test_check_names_hooks_that_never_fired(tmp_path: Path) -> None:
    create_trace(tmp_path / "t", {})
    with Recorder(tmp_path / "t", role="draft", facts={"expects": ["received", "drafted"]}, strict=True) as recorder:
        recorder.received(Keys(request=0, pass_=0, position=0), token=1)
    assert seal_trace(tmp_path / "t") == []
    result = run(check, tmp_path / "t")
    assert result.exit_code == 1 and "promised drafted rows and recorded none" in " ".join(result.output.split())


def test_check_names_lost_rows(tmp_path: Path) -> None:
    create_trace(tmp_path / "t", {})
    with Recorder(tmp_path / "t", role="draft") as recorder:
        recorder.received(Keys(request=0, pass_=0, position=0), token=[1, 2, 3])
    assert seal_trace(tmp_path / "t") == []
    result = run(check, tmp_path / "t", "--json")
    assert result.exit_code == 1
    assert [problem["kind"] for problem in json.loads(result.stdout)["problems"]] == ["lost"]

"""`spectrace reference` records what `diagnose --reference` needs, and says of bad input what is wrong with it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from spectrace.engine.deployment import Deployment, Serving
from spectrace.engine.prompts import read_prompts
from spectrace.tracer.manifest import create_trace
from spectrace.tracer.trace import Trace

Say = Callable[..., object]
MODELS = Path(__file__).resolve().parents[2] / "models"
TOY = MODELS / "toy"


@pytest.fixture(scope="module")
def wrong(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of the toy pair, wired wrongly, without a single true boundary in it."""
    out = tmp_path_factory.mktemp("run") / "wrong"
    prompts = read_prompts(TOY / "prompts.jsonl", TOY / "target")[:12]
    with Deployment(TOY / "target", TOY / "draft", threads=1) as pair:
        assert not pair.serve(prompts, Serving(max_new=40, faults=("W3",)), trace=out).losses
    return out


def test_a_wiring_fault_is_named_by_a_reference_of_the_trace(spectrace: Say, wrong: Path, tmp_path: Path) -> None:
    said = spectrace("reference", "--target", TOY / "target", "--prompts", wrong, "--out", tmp_path / "ref")
    assert said.code == 0, said.err
    assert f"spectrace diagnose {wrong} --reference {tmp_path / 'ref'}" in said.out.splitlines()
    assert "12 texts" in said.err and "weights at a time" in said.err
    assert spectrace("check", tmp_path / "ref").code == 0
    found = json.loads(spectrace("diagnose", wrong, "--reference", tmp_path / "ref", "--json").out)
    assert [cause["fault"] for cause in found["causes"]] == ["W3"]
    assert found["coverage"]["true boundaries from"] == [f"reference rows of {tmp_path / 'ref'}"]


@pytest.mark.slow
def test_a_wiring_fault_of_smollm2_is_named_by_a_reference(spectrace: Say, cluster: None, tmp_path: Path) -> None:
    from smollm2.target import ensure_target

    target, draft = ensure_target(), MODELS / "smollm2" / "draft"
    prompts = read_prompts(MODELS / "smollm2" / "prompts" / "demo.jsonl", target)[:12]
    with Deployment(target, draft) as pair:
        pair.serve(prompts, Serving(max_new=32, faults=("W3",)), trace=tmp_path / "wrong")
    said = spectrace(
        "reference", "--target", target, "--prompts", tmp_path / "wrong", "--out", tmp_path / "ref", "--json"
    )
    assert said.code == 0 and json.loads(said.out)["boundaries"] == [0, 1, 2, 3, 4, 14, 15, 16, 17, 26, 27, 28, 30]
    found = json.loads(spectrace("diagnose", tmp_path / "wrong", "--reference", tmp_path / "ref", "--json").out)
    assert [cause["fault"] for cause in found["causes"]] == ["W3"]
    assert found["repaired_acceptance"] > 1.5 > found["served_acceptance"]


def test_json_is_one_document_of_what_was_recorded(spectrace: Say, wrong: Path, tmp_path: Path) -> None:
    said = spectrace(
        "reference", "--target", TOY / "target", "--prompts", wrong, "--out", tmp_path / "ref", "--boundaries", "all",
        "--requests", 2, "--dtype", "bfloat16", "--level", "light", "--threads", 1, "--json",
    )  # fmt: skip
    found = json.loads(said.out)
    assert said.code == 0 and found["sealed"] and found["boundaries"] == [0, 1, 2, 3, 4, 5]
    assert found["families"]["requests"]["rows"] == 2 and found["manifest"]["dtype"] == "bfloat16"
    assert not Trace.open(tmp_path / "ref").rows("reference").has("boundaries").any()
    assert "texts" not in said.err


def test_prompts_are_taken_as_run_takes_them(spectrace: Say, target_of: Callable[..., Path], tmp_path: Path) -> None:
    """Without a trace the engines' default wiring is recorded: (2, L/2, L-3), of five layers."""
    (tmp_path / "prompts.jsonl").write_text('{"tokens": [5, 6, 7]}\n{"tokens": [8]}\n', "utf-8")
    options = ("--target", target_of("kimi_k25"), "--prompts", tmp_path / "prompts.jsonl", "--out", tmp_path / "ref")
    said = spectrace("reference", *options, "--json")
    assert said.code == 0 and json.loads(said.out)["boundaries"] == [2]
    assert Trace.open(tmp_path / "ref").rows("reference")["token"].tolist() == [5, 6, 7, 8]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"target": "nowhere"}, "nowhere: no such folder"),
        ({"target": "empty"}, "config.json"),
        ({"target": ""}, "--target is empty: expected a path"),
        ({"prompts": "nowhere.jsonl"}, "nowhere.jsonl: cannot be read"),
        ({"prompts": "empty"}, "empty is not a trace"),
        ({"prompts": "unfinished"}, "unfinished: no request has finished in it"),
        ({"prompts": "other.jsonl"}, "token 96 is not in the target's vocabulary, 0 to 95"),
        ({"boundaries": "0,9"}, "--boundaries: boundary 9 does not exist; this target has boundaries 0 to 5"),
        ({"boundaries": "0,two"}, "--boundaries '0,two': expected boundaries separated by commas"),
        ({"out": "taken"}, "taken exists and is not an empty folder"),
        ({"device": "cuda"}, "--device cuda: no CUDA device here; use --device cpu"),
    ],
)
def test_what_cannot_be_recorded_is_said_in_one_line_and_leaves_nothing(
    changes: dict[str, str],
    says: str,
    spectrace: Say,
    target_of: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (tmp_path / "empty").mkdir()
    create_trace(tmp_path / "unfinished", {})
    shutil.copytree(tmp_path / "unfinished", tmp_path / "taken")
    (tmp_path / "prompts.jsonl").write_text('{"tokens": [5, 6, 7]}\n', "utf-8")
    (tmp_path / "other.jsonl").write_text('{"tokens": [5, 96]}\n', "utf-8")
    good = {"target": target_of("llama"), "prompts": "prompts.jsonl", "out": "trace"}
    said = spectrace(
        "reference", *(part for name, value in {**good, **changes}.items() for part in (f"--{name}", value))
    )
    assert said.code == 2 and says in said.complaint
    assert not (tmp_path / "trace").exists()

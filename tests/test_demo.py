"""The demo's claims on the real model: lossless, replayed, the fix foretold; acceptance is what the draft is worth."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from spectrace.tracer.trace import Trace

pytestmark = pytest.mark.slow

MODELS = Path(__file__).resolve().parents[1] / "models" / "smollm2"


@pytest.fixture(scope="module")
def target() -> Path:
    made = subprocess.run([sys.executable, MODELS / "target.py"], capture_output=True, text=True)
    assert made.returncode == 0, f"the target model cannot be made; `make target` installs what it needs: {made.stderr}"
    return Path(made.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def demo(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `spectrace demo --json` said."""
    out = tmp_path_factory.mktemp("demo") / "traces"
    command = [sys.executable, "-c", "from spectrace.cli.main import main; main()", "demo", "--out", str(out), "--json"]
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    found: dict[str, Any] = json.loads(said.stdout)
    return found


def test_both_speculative_runs_give_the_target_s_own_tokens(demo: dict[str, Any], target: Path) -> None:
    from transformers import AutoModelForCausalLM

    assert demo["lossless"] is True
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    requests = Trace.open(demo["right"]["trace"]).rows("requests")
    assert len(requests) == 12
    for prompt, output in zip(requests["prompt_tokens"], requests["output_tokens"], strict=True):
        ids = torch.tensor(prompt[None].astype("int64"))
        alone = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=64)
        assert alone[0, ids.shape[1] :].tolist() == output.tolist()


def test_replay_reproduces_both_runs(demo: dict[str, Any]) -> None:
    for run in ("right", "wrong"):
        replay = demo[run]["replay"]
        assert replay["tokens_equal"] == replay["answers"] > 0
        assert replay["max_error"] <= 1e-5
        assert Trace.open(demo[run]["trace"]).verify() == []


def test_the_fix_is_foretold_exactly(demo: dict[str, Any]) -> None:
    right, foretold = demo["right"], demo["after_fix"]
    assert (foretold["rounds"], foretold["correct_drafts"]) == (right["rounds"], right["correct_drafts"])
    assert foretold["wiring"] == right["wiring"] == [0, 3, 16]
    assert demo["wrong"]["wiring"] == [3, 16, 27]


def test_the_mistake_is_named_and_its_repair_is_worth_the_right_run(demo: dict[str, Any]) -> None:
    found = demo["diagnosis"]
    assert found["verdict"] == "fault"
    [cause] = found["causes"]
    assert (cause["fault"], cause["variant"]) == ("W3", "engine")
    assert cause["predicted_acceptance"] == demo["right"]["acceptance_length"]
    assert "--wiring 3,16,27" in cause["fix"]


def test_the_right_wiring_is_worth_what_the_readme_says(demo: dict[str, Any]) -> None:
    right, wrong = demo["right"], demo["wrong"]
    assert right["acceptance_length"] >= 1.75
    assert right["acceptance_length"] - wrong["acceptance_length"] >= 0.3
    assert right["acceptance_length"] == pytest.approx(1 + right["correct_drafts"] / right["rounds"])
    assert right["acceptance_length"] == pytest.approx(1 + sum(right["cumulative_rates"]))

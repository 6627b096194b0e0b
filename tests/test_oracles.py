"""Our draft computes what the implementations that people use compute: four of them, run for real on random drafts.

What an implementation does otherwise than a config says is stated in bench/oracles/known.py, and held against it here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))

from oracles.agreement import judge, run_oracle
from oracles.cases import CASES
from oracles.known import ORACLES
from oracles.target import save_verifier

from spectrace.replay.profiles.known import PROFILES

pytestmark = pytest.mark.oracles

ASKED = [(name, case.name) for name, oracle in ORACLES.items() for case in oracle.cases()]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of all cases of an implementation, run once."""
    verifier = save_verifier(tmp_path_factory.mktemp("verifier") / "target")

    def run(name: str) -> Path:
        oracle = ORACLES[name]
        if oracle.python is None:
            pytest.skip(f"{oracle.environment} is not set")
        folder = tmp_path_factory.mktemp(oracle.script)
        run_oracle(oracle, folder, verifier)
        return folder

    return cache(run)


@pytest.mark.parametrize(("name", "draft"), ASKED, ids=lambda value: str(value))
def test_a_draft_computes_what_others_compute(name: str, draft: str, ran: Callable[[str], Path]) -> None:
    judged = judge(ORACLES[name], ran(name), CASES[draft])
    assert judged.holds, judged


def test_known_differences_are_of_drafts_that_are_asked() -> None:
    for name, oracle in ORACLES.items():
        assert oracle.known.keys() <= {draft for asked, draft in ASKED if asked == name}


def test_vllms_two_runners_feed_one_draft_from_different_layers() -> None:
    """Ids within `eagle_config`: one takes them for layers that streams enter, the other does not read them at all.

    What our profiles say of either is what vLLM's own functions did.
    """
    python = ORACLES["vLLM"].python
    if python is None:
        pytest.skip("SPECTRACE_VLLM is not set")
    script = Path(__file__).resolve().parents[1] / "bench" / "oracles" / "mismatch_vllm.py"
    told = json.loads(subprocess.run([python, script], capture_output=True, check=True, text=True).stdout)
    no_features = {"eagle_config": {"use_aux_hidden_state": False}}
    assert any(one["config"] == no_features and not one["V1"]["boundaries"] for one in told.values())
    for one in (one for one in told.values() if one["config"] != no_features):
        for runner, profile in (("V1", PROFILES["vllm"]), ("V2", PROFILES["vllm V2"])):
            assert list(profile.resolve(one["config"], layers=8)) == one[runner]["boundaries"], one
    usual, custom = told["SpecForge and ModelOpt, default ids"], told["SpecForge and ModelOpt, other ids"]
    assert (usual["V1"]["right"], usual["V2"]["right"]) == (False, True)
    assert (custom["V1"]["right"], custom["V2"]["right"]) == (False, False)

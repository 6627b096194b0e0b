"""Our draft computes what the implementations that people use compute: four of them, run for real on random drafts.

What an implementation does otherwise than a config says its profile foretells, and is held against here.
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

from oracles.agreement import foretold, judge, run_oracle
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


UNTRIED = {
    "SpecForge": {"embedding_scale is not read", "unit_offset_norms is not read"},
    "vLLM": {
        "embedding_scale is not read", "unit_offset_norms is not read",
        "an absent norm_before_residual counts as true in this layout",
        "an absent rope_theta is 1000000 for Qwen3's layers",
        "use_aux_hidden_state false: fed the target's last state, past fc",
        "fc is built for another number of slots than the draft has",
        "a d2t of a draft of all tokens is a tensor that its class does not have",
    },
    "SGLang": {
        "embedding_scale is not read", "unit_offset_norms is not read",
        "without use_aux_hidden_state nothing is captured, past fc",
        "partial_rotary_factor is read at the top of the config alone",
        "a config without draft_vocab_size ends in an error; null stands for all tokens",
        "fc is built for another number of slots than the draft has",
        "it has no class for such drafts; it has LlamaForCausalLMEagle3, Eagle3DeepseekV2ForCausalLM",
    },
}  # fmt: skip
"""What profiles say by reading an implementation's source, and no draft here makes it do."""


@pytest.mark.parametrize("name", ORACLES)
def test_what_a_profile_says_otherwise_some_draft_makes_the_implementation_do(
    name: str, ran: Callable[[str], Path]
) -> None:
    oracle, folder = ORACLES[name], ran(name)
    runs = [foretold(oracle, folder, case)[1] for case in oracle.cases()]
    tried = {one.why for run in runs for one in (*run.departures, *run.refusals)}
    said = {one.why for one in (*oracle.profile.departures, *oracle.profile.refusals)}
    assert said - tried <= UNTRIED.get(name, set())


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
            captured = [layer + 1 for layer in one[runner]["layers"]]
            assert list(profile.resolve(one["config"], layers=8)) == captured, one
    usual, custom = told["SpecForge and ModelOpt, default ids"], told["SpecForge and ModelOpt, other ids"]
    assert (usual["V1"]["right"], usual["V2"]["right"]) == (False, True)
    assert (custom["V1"]["right"], custom["V2"]["right"]) == (False, False)

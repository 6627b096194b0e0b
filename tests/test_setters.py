"""Which boundaries SGLang captures for a draft's layer ids, by version and class of target: its own setters, executed.

Profiles have to say the same: of every class that three versions capture of, for ids of all conventions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from spectrace.replay.profiles.known import profile_named
from spectrace.replay.profiles.profile import Profile

pytestmark = pytest.mark.oracles

SCRIPT = Path(__file__).resolve().parents[1] / "bench" / "oracles" / "setters_sglang.py"
KEY, VERSIONS, LAYERS = "eagle_aux_hidden_state_layer_ids", ("0.5.9", "0.5.12", "0.5.23"), (24, 61)
IDS = ("1,11,20", "2,12,23", "2,30,58", "-1,2,30", "0,5,9", "20,1,11", "1,1,20", "6,12,24", "none")
NO_TARGETS = ("NextN", "MTP", "Eagle", "Assistant", "EmbeddingGemma", "MindSpore")  # drafts, encoders, made at run time
KIMI = ("DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration")


def sources() -> dict[str, Path]:
    """Each version's files: the older ones as wheels, the newest as it is installed."""
    folder = os.environ.get("SPECTRACE_ORACLES")
    if not folder:
        pytest.skip("SPECTRACE_ORACLES is not set")
    place = Path(folder).absolute()
    [installed] = place.glob("lib/python3*/site-packages")
    wheels = {version: next((place / "wheels").glob(f"sglang-{version}-*.whl")) for version in VERSIONS[:2]}
    return {**wheels, VERSIONS[-1]: installed}


@pytest.fixture(scope="module")
def told() -> Mapping[str, Any]:
    """What each version's own code does, by version."""
    found = sources()
    ids = [f"--ids={one}" for one in IDS]
    layers = [f"--layers={one}" for one in LAYERS]
    run = [sys.executable, SCRIPT, *found.values(), *layers, *ids]
    answers = json.loads(subprocess.run(run, capture_output=True, check=True, text=True).stdout)
    return {version: answers[str(path)] for version, path in found.items()}


def cases(targets: Mapping[str, Any]) -> Iterator[tuple[str, int, dict[str, Any], Mapping[str, Any]]]:
    """Class, number of layers, a draft's config, and what came of it."""
    for name, runs in targets.items():
        if any(part in name for part in NO_TARGETS):
            continue
        for layers in LAYERS:
            for asked, came in runs[f"{layers} layers"].items():
                where, _, ids = asked.partition(" ")
                named = {KEY: json.loads(ids)} if ids else {}
                yield name, layers, {"eagle_config": named} if where == "nested" else named, came


def holds(profile: Profile, name: str, layers: int, config: dict[str, Any], came: Mapping[str, Any]) -> bool:
    """Whether a profile says what came of it: boundaries, the error, or that nothing is captured."""
    capture = profile.capture(name)
    if capture is None:
        return not came.get("captured")
    refusal = capture.refusal(profile.asked(config, layers, name), layers)
    if "error" in came:
        return refusal is not None and refusal.says in came["error"]
    by_graphs = list(profile.resolve({}, layers, name)) if profile.graphs_by_default else None
    captured = list(profile.resolve(config, layers, name))
    return refusal is None and captured == came["captured"] and came.get("graphs") == by_graphs


@pytest.mark.parametrize("version", VERSIONS)
def test_a_profile_captures_what_the_versions_own_setters_do(version: str, told: Mapping[str, Any]) -> None:
    profile, targets = profile_named(f"sglang=={version}"), told[version]["targets"]
    wrong = [case for case in cases(targets) if not holds(profile, *case)]
    assert not wrong, wrong[:3]
    assert profile.targets.keys() <= targets.keys()
    assert sum(1 for _ in cases(targets)) > 500


def test_one_upgrade_changes_what_the_ids_of_the_first_case_mean(told: Mapping[str, Any]) -> None:
    """Ids [2, 30, 58] within `eagle_config`, and then [-1, 2, 30], on a DeepSeek-V3 target of 61 layers."""

    def captured(version: str, ids: list[int], name: str = KIMI[0]) -> Any:
        came = told[version]["targets"][name]["61 layers"][f"nested {ids}"]
        return came.get("captured", came.get("error", "").partition(":")[0])

    first = {version: captured(version, [2, 30, 58]) for version in VERSIONS}
    assert first == {"0.5.9": [3, 31, 59], "0.5.12": [3, 31, 59], "0.5.23": [2, 30, 58]}
    then = {version: captured(version, [-1, 2, 30]) for version in VERSIONS}
    assert then == {"0.5.9": "TypeError", "0.5.12": "TypeError", "0.5.23": [2, 30]}
    assert [captured(version, [2, 30, 58], KIMI[1]) for version in VERSIONS[1:]] == [[3, 31, 59], [2, 30, 58]]
    assert KIMI[1] not in told["0.5.9"]["targets"], "it has no setter there"

"""A profile says what its engine makes of a config, and how it is started."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from spectrace.replay.profiles.known import PROFILES, profile_of
from spectrace.replay.profiles.profile import filled

IDS, NESTED = "eagle_aux_hidden_state_layer_ids", "eagle_config"
DEFAULT = (2, 15, 27)


@pytest.mark.parametrize(
    ("config", "ours", "first", "second"),
    [
        ({IDS: [0, 3, 16]}, (0, 3, 16), (0, 3, 16), (0, 3, 16)),
        ({NESTED: {IDS: [2, 15, 26]}}, (3, 16, 27), (2, 15, 26), DEFAULT),
        ({NESTED: {"layer_ids": [0, 3, 16]}}, (0, 3, 16), DEFAULT, (0, 3, 16)),
        ({IDS: [16, 0, 3], NESTED: {IDS: [1, 2, 3]}}, (16, 0, 3), (0, 3, 16), (0, 3, 16)),
        ({}, DEFAULT, DEFAULT, DEFAULT),
    ],
)
def test_engines_make_different_boundaries_of_one_config(
    config: dict[str, Any], ours: tuple[int, ...], first: tuple[int, ...], second: tuple[int, ...]
) -> None:
    """vLLM's two runners read different keys, both by another convention than the ids were published in, and sort."""
    found = [PROFILES[name].resolve(config, 30) for name in ("spectrace", "vllm", "vllm V2")]
    assert found == [ours, first, second]


def test_a_profile_is_found_by_engine_and_runner() -> None:
    found = [profile_of({"engine": "vllm", "mode": {"runner": runner}}) for runner in ("V1", "V2")]
    assert [profile.ids for profile in found] == [PROFILES["vllm"].ids, PROFILES["vllm V2"].ids]
    assert {profile.engine for profile in found} == {"vllm"}


def test_a_command_that_serves_names_what_served() -> None:
    told = {"target": {"path": "/x/my target"}, "serving": {"depth": 5}}
    ours, vllm = (profile_of({"engine": engine, **told}) for engine in ("spectrace", "vllm"))
    assert shlex.split(ours.serve)[:4] == ["spectrace", "run", "--target", "/x/my target"]
    words = shlex.split(filled(vllm.serve, {"DRAFT": 'a "draft"'}))
    assert words[:8] == [
        "spectrace", "record", "--out", "NEW_TRACE", "--", "vllm", "serve", "/x/my target"
    ]  # fmt: skip
    assert json.loads(words[-1]) == {"method": "eagle3", "model": 'a "draft"', "num_speculative_tokens": 5}

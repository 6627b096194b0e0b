"""All profiles, and which of them is of a trace or of an engine by its name."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from spectrace.replay.profiles.profile import Profile, filled
from spectrace.replay.profiles.sglang import SGLANG_0_5_23
from spectrace.replay.profiles.spectrace import GENERIC, SPECTRACE
from spectrace.replay.profiles.trainers import SPECFORGE, SPECULATORS
from spectrace.replay.profiles.vllm import VLLM_V1, VLLM_V2

__all__ = ["PROFILES", "profile_of"]

PROFILES: Mapping[str, Profile] = {
    "spectrace": SPECTRACE,
    "vllm": VLLM_V1,
    "vllm V2": VLLM_V2,
    "sglang": SGLANG_0_5_23,
    "specforge": SPECFORGE,
    "speculators": SPECULATORS,
}
"""By the name of the engine, and where it has several, of its runner."""


def profile_of(manifest: Mapping[str, Any]) -> Profile:
    """The profile of the engine that a trace's manifest names; a generic one that knows no code where there is none."""
    name = str(manifest.get("engine") or "")
    runner = (manifest.get("mode") or {}).get("runner")
    found = PROFILES.get(f"{name} {runner}") or PROFILES.get(name) or replace(GENERIC, engine=name or GENERIC.engine)
    known = {
        "TARGET": (manifest.get("target") or {}).get("path"),
        "DEPTH": (manifest.get("serving") or {}).get("depth"),
    }
    return replace(found, serve=filled(found.serve, {name: str(value) for name, value in known.items() if value}))

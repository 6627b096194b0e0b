"""All profiles, and which of them is of a trace or of an engine by its name."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from spectrace.replay.profiles.profile import Profile, filled
from spectrace.replay.profiles.sglang import SGLANG_0_5_9, SGLANG_0_5_12, SGLANG_0_5_23
from spectrace.replay.profiles.spectrace import GENERIC, SPECTRACE
from spectrace.replay.profiles.trainers import SPECFORGE, SPECULATORS
from spectrace.replay.profiles.vllm import VLLM_V1, VLLM_V2
from spectrace.tracer.errors import UserError

__all__ = ["PROFILES", "profile_named", "profile_of"]

PROFILES: Mapping[str, Profile] = {
    "spectrace": SPECTRACE,
    "vllm": VLLM_V1,
    "vllm V1": VLLM_V1,
    "vllm V2": VLLM_V2,
    "sglang": SGLANG_0_5_23,
    "sglang 0.5.12": SGLANG_0_5_12,
    "sglang 0.5.9": SGLANG_0_5_9,
    "specforge": SPECFORGE,
    "speculators": SPECULATORS,
}
"""By the name of the engine, and where it has several, of its runner or version: without one, the newest."""


def profile_named(name: str) -> Profile:
    """The profile of an engine by name, and where these are given by version and runner: sglang==0.5.23, vllm V1.

    Without them it is the newest version, and the runner that the engine takes where it may. Raises UserError for what
    there is no profile of.
    """
    asked, _, runner = name.strip().partition(" ")
    engine, _, version = asked.partition("==")
    for one in _PREFERRED:
        if one.engine == engine.lower() and version in ("", one.version) and runner.strip() in ("", one.runner):
            return one
    raise UserError(f"--engine {name!r}: no profile of it; expected one of {', '.join(map(_spelt, _PREFERRED))}")


_PREFERRED = (
    SGLANG_0_5_23, SGLANG_0_5_12, SGLANG_0_5_9, VLLM_V2, VLLM_V1, SPECFORGE, SPECULATORS, SPECTRACE,
)  # fmt: skip


def _spelt(one: Profile) -> str:
    """How it is asked for."""
    return f"{one.engine}=={one.version} {one.runner}".removesuffix(" ") if one.version else one.engine


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

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
    "vllm V2": VLLM_V2,
    "sglang": SGLANG_0_5_23,
    "sglang 0.5.12": SGLANG_0_5_12,
    "sglang 0.5.9": SGLANG_0_5_9,
    "specforge": SPECFORGE,
    "speculators": SPECULATORS,
}
"""By the name of the engine, and where it has several, of its runner or version: without one, the newest."""


def profile_named(name: str) -> Profile:
    """The profile of an engine by its name and version, such as sglang==0.5.23; the newest one where none is given.

    Raises UserError for an engine or a version that there is no profile of.
    """
    engine, _, version = (part.strip() for part in name.partition("=="))
    named = {title: one for title, one in PROFILES.items() if title == engine or title.startswith(f"{engine} ")}
    if not named:
        raise UserError(f"--engine {name}: no profile of it; expected one of {', '.join(_spelt())}")
    if not version:
        return named.get(engine) or next(iter(named.values()))
    for one in named.values():
        if one.version == version:
            return one
    raise UserError(f"--engine {name}: no profile of that version; expected one of {', '.join(_spelt())}")


def _spelt() -> list[str]:
    """How each is asked for."""
    runners = [title for title, one in PROFILES.items() if title not in (one.engine, one.title)]
    return [*(f"{one.engine}=={one.version}" if one.version else one.engine for one in _of_engines()), *runners]


def _of_engines() -> list[Profile]:
    return [one for title, one in PROFILES.items() if title in (one.engine, one.title)]


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

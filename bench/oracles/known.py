"""The implementations that our draft is held against. What each does otherwise than a config says, its profile says."""

from __future__ import annotations

from oracles.agreement import Oracle

from spectrace.replay.profiles.known import PROFILES

__all__ = ["ORACLES"]

ORACLES = {
    oracle.name: oracle
    for oracle in (
        Oracle("speculators", "SPECTRACE_ORACLES", "speculators", PROFILES["speculators"], own_layout=True),
        Oracle("SpecForge", "SPECTRACE_ORACLES", "specforge", PROFILES["specforge"]),
        Oracle("vLLM", "SPECTRACE_VLLM", "eagle", PROFILES["vllm"]),
        Oracle("SGLang", "SPECTRACE_ORACLES", "eagle", PROFILES["sglang"]),
    )
}

"""A manifest says what decided a run, and gives no secret away."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from spectrace.engine.checkpoint import read_draft
from spectrace.engine.dialect import Wiring
from spectrace.engine.provenance import describe_run


def test_switches_are_told_and_secrets_only_named(
    target_of: Callable[..., Path], draft_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "precious")
    monkeypatch.setenv("RAY_AUTH_SECRET", "precious")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("AWS_REGION", "elsewhere")
    target, draft = target_of("llama"), read_draft(draft_of("llama", "gqa"))
    wiring = Wiring((0, 2, 4), "--wiring", (0, 2, 4))
    found = describe_run(
        target=target, draft=draft, wiring=wiring, dtype="float32", serving={"depth": 3},
        tensor_parallel={"target": 2, "draft": 1}, sharded={"target": {"lm_head.weight": "Shard(dim=0)"}},
    )  # fmt: skip
    environment = found["environment"]
    assert environment["HF_TOKEN"] == environment["RAY_AUTH_SECRET"] == "(set)"
    assert environment["OMP_NUM_THREADS"] == "3" and "AWS_REGION" not in environment
    assert "precious" not in repr(found)
    assert found["target"]["fingerprints"].keys() == {"model.safetensors"} == found["draft"]["fingerprints"].keys()

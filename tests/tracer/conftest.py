"""A small trace with every family in it, recorded once and copied where a test breaks it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from spectrace.tracer import Keys, Level, Phase, Recorder, create_trace, seal_trace

WIDTH = 4


def tensors(step: int) -> Iterator[torch.Tensor]:
    """The same random rows for everybody who asks for a step's: what one side emits, the other receives."""
    generator = torch.Generator().manual_seed(step)
    while True:
        yield torch.randn(3, 2 * WIDTH, generator=generator).bfloat16()


def keys_of(step: int, *, depth: int = 0) -> Keys:
    at = [step, step + 1, step]
    return Keys(request=[1, 1, 2], pass_=step, depth=depth, position=at, phase=Phase.VERIFY, round=step, step=step)


def record_target(recorder: Recorder, step: int) -> None:
    """Three rows of the target's families, one request."""
    keys, random = keys_of(step), tensors(step)
    logits = (torch.arange(6, dtype=torch.int32).reshape(3, 2), torch.ones(3, 2))
    slots = next(random)
    recorder.emitted(keys, token=[1, 2, 3], slots=slots, slot_width=WIDTH, logits=logits, target_token=[4, 5, -1])
    recorder.reference(keys, token=[1, 2, 3], boundaries={0: next(random), 2: next(random)})
    recorder.verified(
        Keys(request=1, pass_=step, position=step, node=[0, 1, 2], round=step),
        parent=[-1, 0, 1],
        token=[1, 2, 3],
        target_token=[2, 9, 9],
        accepted=[True, True, False],
        cut=False,
        source_row=[0, 1, 2],
        p=[np.nan, 0.5, 0.25],
    )
    recorder.requests(
        Keys(request=step, pass_=0, position=0, node=0),
        id=f"request {step}",
        prompt_tokens=[list(range(step % 5))],
        output_tokens=[[7, 8]],
        cached_prefix=0,
        temperature=0.0,
        finish_reason="stop",
        rounds=1,
        correct_drafts=1,
        depth_limit=2,
    )


def record_draft(recorder: Recorder, step: int) -> None:
    """Three rows at depth 0 and three at depth 1 received, three drafted."""
    keys, random = keys_of(step), tensors(step)
    logits = (torch.arange(6, dtype=torch.int32).reshape(3, 2), torch.ones(3, 2))
    recorder.received(keys, token=[1, 2, 3], features=next(random), slot_width=WIDTH)
    fused, hidden, state = next(random), next(random), next(random)
    recorder.received(keys_of(step, depth=1), token=[4, 5, 6], state=state)
    recorder.drafted(keys, token=[4, 5, 6], fused=fused, hidden=hidden, state=state, logits=logits)


def record_trace(folder: Path, *, level: Level = Level.FULL, steps: int = 3, **options: float) -> Path:
    """A target and a draft, `steps` batches of everything, sealed."""
    create_trace(folder, {"model": "tiny", "seed": 0})
    for role, record in (("target", record_target), ("draft", record_draft)):
        with Recorder(folder, role=role, level=level, strict=True, **options) as recorder:  # type: ignore[arg-type]
            for step in range(steps):
                record(recorder, step)
                recorder.flush()
    assert seal_trace(folder) == []
    return folder


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sealed trace nobody writes to."""
    return record_trace(tmp_path_factory.mktemp("trace") / "whole")


@pytest.fixture
def trace(whole: Path, tmp_path: Path) -> Path:
    """A sealed trace to break."""
    return Path(shutil.copytree(whole, tmp_path / "trace"))


@pytest.fixture(scope="session")
def trace_of() -> Callable[..., Path]:
    return record_trace

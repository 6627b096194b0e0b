"""A small trace with every family in it, recorded once and copied where a test breaks it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from spectrace.tracer import Keys, Level, Phase, Recorder, create_trace, seal_trace

WIDTH = 4


def record_step(
    recorder: Recorder, step: int, *, seal_request: bool = False, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Three rows of every family; everything follows from `step`."""
    generator = torch.Generator().manual_seed(step)

    def tensor(width: int) -> torch.Tensor:
        return torch.randn(3, width, generator=generator).to(dtype)

    keys = Keys(
        request=[1, 1, 2], pass_=step, position=[step, step + 1, step], phase=Phase.VERIFY, round=step, step=step
    )
    deeper = Keys(request=[1, 1, 2], pass_=step, position=[step, step + 1, step], depth=1, phase=Phase.DRAFT_DECODE)
    logits = (torch.arange(6, dtype=torch.int32).reshape(3, 2), tensor(2).float())
    recorder.emitted(
        keys, token=[1, 2, 3], slots=tensor(2 * WIDTH), slot_width=WIDTH, logits=logits, target_token=[4, 5, -1]
    )
    recorder.received(keys, token=[1, 2, 3], features=tensor(2 * WIDTH), slot_width=WIDTH)
    recorder.received(deeper, token=[4, 5, 6], state=tensor(WIDTH))
    recorder.drafted(
        keys, token=[4, 5, 6], fused=tensor(WIDTH), hidden=tensor(WIDTH), state=tensor(WIDTH), logits=logits
    )
    recorder.reference(keys, token=[1, 2, 3], boundaries={0: tensor(WIDTH), 2: tensor(WIDTH)})
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


def record_trace(folder: Path, *, level: Level = Level.FULL, steps: int = 3, **options: float) -> Path:
    """Two writers, `steps` batches of everything, sealed."""
    create_trace(folder, {"model": "tiny", "seed": 0})
    for role in ("target", "draft"):
        with Recorder(folder, role=role, level=level, strict=True, **options) as recorder:  # type: ignore[arg-type]
            for step in range(steps):
                record_step(recorder, step)
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
def step_of() -> Callable[..., None]:
    return record_step


@pytest.fixture(scope="session")
def trace_of() -> Callable[..., Path]:
    return record_trace

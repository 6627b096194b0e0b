"""One running pair for what a trace shows by itself, and its traces, each recorded once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TypeAlias

import pytest
import torch

from spectrace.engine.deployment import Deployment, Serving
from spectrace.engine.sampling import Sampling
from spectrace.tracer.rows import Level
from spectrace.tracer.trace import Trace

Record: TypeAlias = Callable[..., Trace]
_LENGTHS = (1, 2, 23, 9, 5, 17, 12, 3)
_LIMITS = (18, 12, 9, 16, 8, 1, 20, 6)
_TREE = {"topk": 3, "draft_tokens": 8}
_CLEAN = {
    "chain": {},
    "tree": _TREE,
    "window": {"fixed_window": True},
    "tree in a window": {**_TREE, "fixed_window": True},
    "whole prompts": {"chunk": None},
    "one by one": {"concurrency": 1, "chunk": 5},
    "depth 1": {"depth": 1},
    "light": {"level": Level.LIGHT},
    "features": {"level": Level.FEATURES},
    "warm": {"sampling": Sampling(1.0, seed=5)},
    "drawn": {"sampling": Sampling(1.0, seed=5, sampled_drafts=True)},
    "warm tree": {**_TREE, "sampling": Sampling(0.7, seed=3)},
    "ends": {"ignore_end": False, "max_new": 20},
    "twice": {"twice": True, "concurrency": 8},
}


@pytest.fixture(scope="session")
def folders(target_of: Callable[..., Path], draft_of: Callable[..., Path]) -> tuple[Path, Path]:
    """A target and its draft."""
    return target_of("llama"), draft_of("llama", "gqa")


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Eight prompts of unequal length."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 96, (length,), generator=generator).tolist() for length in _LENGTHS]


@pytest.fixture(scope="session")
def record(
    cluster: None, folders: tuple[Path, Path], prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Record]:
    """`record(fault, **changes)`: a trace of requests that join and leave, in chunks; `twice` asks some twice."""
    root = tmp_path_factory.mktemp("recorded")
    usual = {"max_new": _LIMITS, "concurrency": 4, "chunk": 7, "ignore_end": True, "level": Level.FULL}

    with Deployment(*folders, threads=1) as pair:

        @cache
        def run(serving: Serving, twice: bool) -> Path:
            folder = root / str(len(list(root.iterdir())))
            asked = [prompt for prompt in prompts[2:6] for _ in range(2)] if twice else prompts
            assert not pair.serve(asked, serving, trace=folder).losses
            return folder

        def record(*faults: str, twice: bool = False, **changes: object) -> Trace:
            serving = Serving(**{**usual, **changes, "faults": faults})  # type: ignore[arg-type]
            return Trace.open(run(serving, twice))

        yield record


@pytest.fixture(params=_CLEAN.values(), ids=list(_CLEAN))
def clean(request: pytest.FixtureRequest, record: Record) -> Trace:
    """A run without a fault, in every shape that is served."""
    return record(**request.param)


@pytest.fixture
def torn(record: Record, tmp_path: Path) -> Callable[[str, int], Trace]:
    """`torn(writer, records)`: a run of which one process was killed after so many records of its ledger."""
    import shutil

    def cut(writer: str, records: int) -> Trace:
        folder = shutil.copytree(record(topk=3, draft_tokens=8, fixed_window=True).folder, tmp_path / f"{records}")
        (folder / "SEAL").unlink()
        ledger = folder / writer / "ledger"
        ledger.write_bytes(ledger.read_bytes()[: 64 * records])
        return Trace.open(folder, tolerant=True)

    return cut

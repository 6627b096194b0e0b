"""Every family, on every number of ranks, in every shape of draft: no token lost, and replay finds what was served.

Ten minutes: `make test-matrix`, apart from the core suite, which holds each of these by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from spectrace.engine.checkpoint import build_draft, read_draft
from spectrace.engine.deployment import Deployment, Serving
from spectrace.replay.lab import replay_trace
from spectrace.tracer.rows import Level
from spectrace.tracer.trace import Trace

pytestmark = pytest.mark.matrix

PAIRS = [("llama", "gqa"), ("qwen3", "gqa"), ("deepseek_v3", "mla"), ("kimi_k25", "mla"), ("gemma3_text", "gqa")]
RANKS = [(1, 1), (2, 1), (1, 2), (2, 2)]
SHAPES = [(1, 1, 2), (3, 1, 4), (6, 1, 7), (3, 4, 8), (5, 8, 32)]  # depth, topk, nodes


@pytest.fixture(scope="module", params=RANKS, ids=lambda ranks: f"tp{ranks[0]}-draft{ranks[1]}")
def ranks(
    request: pytest.FixtureRequest, cluster: None, target_of: Callable[..., Path], draft_of: Callable[..., Path]
) -> Iterator[Deployment]:
    tp, draft_tp = request.param
    pair = target_of("llama"), draft_of("llama", "gqa")
    with Deployment(*pair, threads=1, tp=tp, draft_tp=draft_tp) as deployment:
        yield deployment


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_no_token_is_lost_and_replay_finds_what_was_served(
    pair: tuple[str, str],
    ranks: Deployment,
    target_of: Callable[..., Path],
    draft_of: Callable[..., Path],
    prompts: list[list[int]],
    limits: tuple[int, ...],
    alone: Callable[..., list[int]],
    tmp_path: Path,
) -> None:
    ranks.swap(target_of(pair[0]), draft_of(*pair))
    model = build_draft(read_draft(draft_of(*pair)), target=target_of(pair[0]), dtype=torch.float32)
    expected = [alone(pair[0], prompt, limit) for prompt, limit in zip(prompts, limits, strict=True)]
    for number, shape in enumerate(SHAPES):
        for chunk, requests in ((None, slice(2, 3)), (5, slice(None))):
            serving = Serving(
                *shape, max_new=limits[requests], concurrency=3, chunk=chunk, level=Level.FULL, ignore_end=True
            )
            folder = tmp_path / f"{number}-{chunk}"
            served = ranks.serve(prompts[requests], serving, trace=folder)
            assert [request.output for request in served.requests] == expected[requests]
            report = replay_trace(Trace.open(folder), model)
            assert report.comparison.tokens_equal == report.comparison.answers > 0
            assert report.comparison.max_error is not None and report.comparison.max_error <= 1e-5
            assert report.replayed and report.served.rounds == report.replayed.rounds > 0
            assert report.served.correct_drafts == report.replayed.correct_drafts

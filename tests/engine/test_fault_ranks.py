"""Faults that only ranks can have: a slot before they have summed, and a rank that drafts on its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from spectrace.engine.deployment import Deployment, Serving
from spectrace.tracer.errors import UserError
from spectrace.tracer.rows import Level
from spectrace.tracer.trace import Trace

SERVING: dict[str, Any] = {
    "max_new": 12, "concurrency": 3, "chunk": 7, "capture": tuple(range(6)), "level": Level.FULL, "ignore_end": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def ranks(cluster: None, target_of: Callable[..., Path], draft_of: Callable[..., Path]) -> Iterator[Deployment]:
    with Deployment(target_of("llama"), draft_of("llama", "gqa"), threads=1, tp=2, draft_tp=2) as pair:
        yield pair


def test_a_rank_that_follows_its_second_choice(
    ranks: Deployment, prompts: list[list[int]], alone: Callable[..., list[int]], tmp_path: Path
) -> None:
    """What is verified is rank 0's, nobody ends the run, and its record and rank 1's part below the text."""
    for topk, nodes in ((1, None), (2, 6)):
        serving = Serving(**SERVING, topk=topk, draft_tokens=nodes, faults=("Q1",))
        served = ranks.serve(prompts[2:5], serving, trace=tmp_path / str(topk))
        assert [r.output for r in served.requests] == [alone("llama", prompt, 12) for prompt in prompts[2:5]]
        trace = Trace.open(tmp_path / str(topk))
        first, second = (trace.rows("drafted", rank=rank, depth=0) for rank in (0, 1))
        answers = first["draft_token"] >= 0
        assert (first["draft_token"][answers] != second["draft_token"][answers]).all()
        assert (first["state_hash"] == second["state_hash"]).all()
        first, second = (trace.rows("received", rank=rank, depth=1) for rank in (0, 1))
        assert (first["token"] != second["token"]).mean() > 0.3
        assert (trace.rows("verified")["token"] >= 0).all()
    serving = Serving(**SERVING)
    healthy = ranks.serve(prompts[2:5], serving, trace=tmp_path / "healthy")
    assert healthy.losses == ()


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_slots_before_the_ranks_have_summed(
    family: str,
    ranks: Deployment,
    target_of: Callable[..., Path],
    draft_of: Callable[..., Path],
    prompts: list[list[int]],
    alone: Callable[..., list[int]],
    tmp_path: Path,
) -> None:
    """Dense and experts: no rank has a boundary, their sum is it, and the draft is fed rank by rank."""
    ranks.swap(target_of(family), draft_of("llama", "gqa"))
    served = ranks.serve(prompts[2:5], Serving(**SERVING, wiring=(0, 2, 5), faults=("W9",)), trace=tmp_path / "trace")
    assert [r.output for r in served.requests] == [alone(family, prompt, 12) for prompt in prompts[2:5]]
    trace = Trace.open(tmp_path / "trace")
    parts = [trace.rows("emitted", rank=rank).tensor("slots").unflatten(1, (3, 48)) for rank in (0, 1)]
    reference = trace.rows("reference", rank=0)
    whole = torch.stack([reference.tensor("boundaries", f"b{b}") for b in (0, 2, 5)], dim=1)
    worst = (sum(parts) - whole).abs().amax(-1) / whole.abs().amax(-1)
    assert worst.max() <= 1e-5
    assert torch.equal(parts[0][:, 0], whole[:, 0]) and (parts[1][:, 0] == 0).all()
    for part in parts:
        assert ((part[:, 1:] - whole[:, 1:]).abs().amax(-1) > 1e-2 * whole[:, 1:].abs().amax(-1)).all()
    for rank in (0, 1):
        received = trace.rows("received", rank=rank, step=0, depth=0)
        assert torch.equal(received.tensor("features"), parts[rank][: len(received)].flatten(1))


def test_a_target_whose_ranks_do_not_sum_into_the_stream_is_named(
    ranks: Deployment, target_of: Callable[..., Path], draft_of: Callable[..., Path], prompts: list[list[int]]
) -> None:
    """Gemma's MLP goes through a norm first."""
    ranks.swap(target_of("gemma3_text"), draft_of("llama", "gqa"))
    with pytest.raises(UserError, match="Gemma3DecoderLayer: what it adds to the stream is no sum over ranks"):
        ranks.serve(prompts[2:3], Serving(**SERVING, faults=("W9",)))
    served = ranks.serve(prompts[2:3], Serving(**SERVING))
    assert len(served.requests) == 1


def test_swapping_the_draft_leaves_the_target_where_it_is(
    ranks: Deployment, target_of: Callable[..., Path], draft_of: Callable[..., Path], prompts: list[list[int]]
) -> None:
    """And another target is loaded."""
    import ray

    def held() -> list[int]:
        return ray.get([actor.__ray_call__.remote(lambda actor: id(actor.shard)) for actor in ranks.target.actors])

    ranks.swap(target_of("llama"), draft_of("llama", "gqa"))
    before, pids = held(), dict(ranks.pids)
    ranks.swap(target_of("llama"), draft_of("llama", "mla"))
    assert held() == before and ranks.pids == pids
    assert ranks.serve(prompts[2:3], Serving(max_new=4)).requests[0].output
    ranks.swap(target_of("qwen3"), draft_of("qwen3", "gqa"))
    assert held() != before

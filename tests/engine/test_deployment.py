"""With greedy verification the output equals the target alone, token for token, however the call is cut up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spectrace.engine.deployment import Deployment, Serving
from spectrace.engine.sampling import Sampling

Alone = Callable[..., list[int]]
PAIRS = [("llama", "gqa"), ("llama", "mla"), ("qwen3", "gqa"), ("llama", "deep")]


def test_the_answers_of_the_tiny_targets_are_worth_comparing(
    family: str, prompts: list[list[int]], limits: tuple[int, ...], alone: Alone
) -> None:
    """They have many distinct tokens, and the first token of the prompt changes them: every row matters."""
    for prompt, limit in zip(prompts, limits, strict=True):
        answer = alone(family, prompt, limit)
        assert len(set(answer)) >= min(limit, 7)
        other = alone(family, [(prompt[0] + 1) % 96, *prompt[1:]], limit)
        assert limit == 1 or sum(a != b for a, b in zip(answer, other, strict=True)) >= limit / 4


@pytest.mark.parametrize("chunk", [None, 5], ids=["whole", "chunked"])
@pytest.mark.parametrize("requests", [1, 8])
@pytest.mark.parametrize("depth", [0, 1, 3, 6])
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_speculation_loses_nothing(
    pair: tuple[str, str],
    depth: int,
    requests: int,
    chunk: int | None,
    pair_of: Callable[..., Deployment],
    prompts: list[list[int]],
    limits: tuple[int, ...],
    alone: Alone,
) -> None:
    """Requests of unequal length join and leave, three at a time."""
    chosen = slice(2, 3) if requests == 1 else slice(None)
    asked, most = prompts[chosen], limits[chosen]
    serving = Serving(depth=depth, max_new=most, concurrency=3, chunk=chunk, ignore_end=True)
    served = pair_of(*pair).serve(asked, serving)
    assert [request.output for request in served.requests] == [
        alone(pair[0], prompt, limit) for prompt, limit in zip(asked, most, strict=True)
    ]
    assert {request.finish_reason for request in served.requests} == {"length"}
    assert served.secs_per_token > 0 and served.losses == ()


@pytest.mark.parametrize("chunk", [None, 5], ids=["whole", "chunked"])
@pytest.mark.parametrize("shape", [(3, 4, 8), (5, 8, 32), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_trees_lose_nothing(
    pair: tuple[str, str],
    shape: tuple[int, int, int],
    chunk: int | None,
    pair_of: Callable[..., Deployment],
    prompts: list[list[int]],
    limits: tuple[int, ...],
    alone: Alone,
) -> None:
    """Also in a fixed window, where the draft is fed what verification rejected."""
    depth, topk, nodes = shape
    expected = [alone(pair[0], prompt, limit) for prompt, limit in zip(prompts, limits, strict=True)]
    accepted = []
    for fixed_window in (False, True):
        serving = Serving(depth, topk, nodes, max_new=limits, concurrency=3, chunk=chunk, ignore_end=True)
        served = pair_of(*pair).serve(prompts, replace(serving, fixed_window=fixed_window))
        assert [request.output for request in served.requests] == expected
        accepted.append([request.correct_drafts for request in served.requests])
    assert accepted[0] == accepted[1]
    assert sum(accepted[0]) > 0


def test_a_wider_tree_has_more_accepted(pair_of: Callable[..., Deployment], prompts: list[list[int]]) -> None:
    def correct(*shape: int) -> int:
        serving = Serving(*shape, max_new=30, ignore_end=True)  # type: ignore[arg-type]
        return sum(request.correct_drafts for request in pair_of("llama", "gqa").serve(prompts, serving).requests)

    assert correct(3, 1, 4) < correct(3, 4, 24) < correct(3, 8, 60)


@pytest.mark.parametrize("family", ["deepseek_v3", "kimi_k25", "gemma3_text"])
def test_speculation_loses_nothing_whatever_the_family(
    family: str,
    pair_of: Callable[..., Deployment],
    prompts: list[list[int]],
    limits: tuple[int, ...],
    alone: Alone,
) -> None:
    """Experts, latent attention, a decoder within a multimodal class, sliding windows: the same tokens as alone."""
    served = pair_of(family, "gqa").serve(
        prompts, Serving(depth=3, max_new=limits, concurrency=3, chunk=5, ignore_end=True)
    )
    assert [request.output for request in served.requests] == [
        alone(family, prompt, limit) for prompt, limit in zip(prompts, limits, strict=True)
    ]
    assert sum(request.correct_drafts for request in served.requests) > 0


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_the_tiny_drafts_have_tokens_accepted_and_rejected(
    pair: tuple[str, str], pair_of: Callable[..., Deployment], prompts: list[list[int]]
) -> None:
    """Otherwise losing nothing would prove nothing; fewer passes than tokens means that a round brought several."""
    served = pair_of(*pair).serve(prompts, Serving(depth=3, max_new=40, ignore_end=True))
    rounds = sum(request.rounds for request in served.requests)
    correct = sum(request.correct_drafts for request in served.requests)
    assert 0.1 * rounds < correct < 2 * rounds
    assert rounds < 0.95 * sum(len(request.output) - 1 for request in served.requests)


@pytest.mark.parametrize("depth", [0, 3])
def test_an_answer_stops_at_the_first_end_token(
    depth: int, pair_of: Callable[..., Deployment], prompts: list[list[int]], alone: Alone
) -> None:
    """Wherever in a round it falls; what a round brought beyond it is cut off."""
    served = pair_of("llama", "gqa").serve(prompts, Serving(depth=depth, max_new=60))
    expected = [alone("llama", prompt, 60, ignore_end=False) for prompt in prompts]
    assert [request.output for request in served.requests] == expected
    reasons = ["stop" if answer[-1] in (7, 41) else "length" for answer in expected]
    assert [request.finish_reason for request in served.requests] == reasons
    assert reasons.count("stop") >= 2


def test_settings_belong_to_a_call_and_leave_no_trace_in_the_next(
    pair_of: Callable[..., Deployment], prompts: list[list[int]]
) -> None:
    """The same question after calls of other depth, wiring and fault: the same answer and the same acceptance."""
    pair = pair_of("llama", "gqa")

    def ask(**changes: object) -> Sequence[tuple[int, list[int]]]:
        served = pair.serve(prompts[:3], Serving(max_new=20, ignore_end=True, **changes))  # type: ignore[arg-type]
        return [(request.correct_drafts, request.output) for request in served.requests]

    first = ask()
    for changes in ({"depth": 6}, {"wiring": (1, 1, 1)}, {"faults": ("M3",)}, {"depth": 0}):
        others = ask(**changes)
        assert [output for _, output in others] == [output for _, output in first]
    assert ask() == first


@pytest.mark.parametrize("sampled_drafts", [False, True], ids=["chosen", "drawn"])
def test_sampled_answers_follow_the_targets_distribution(
    sampled_drafts: bool, pair_of: Callable[..., Deployment], hf_model: Callable[[str], Any]
) -> None:
    """The third token's marginal, over 3000 answers to one prompt, against every path that leads to it."""
    prompt, answers, temperature = [5, 60, 7], 3000, 0.6
    serving = Serving(
        depth=2, max_new=3, concurrency=300, ignore_end=True, sampling=Sampling(temperature, 11, sampled_drafts)
    )
    served = pair_of("llama", "gqa").serve([prompt] * answers, serving)
    assert sum(request.correct_drafts for request in served.requests) > 100
    counts = torch.bincount(torch.tensor([request.output[2] for request in served.requests]), minlength=96).double()
    model = hf_model("llama")

    def after(texts: list[list[int]]) -> torch.Tensor:
        logits = model(torch.tensor(texts)).logits[:, -1].double()
        return (logits / temperature).softmax(-1)

    with torch.inference_mode():
        first = after([prompt])[0]
        second = (first[:, None] * after([[*prompt, x] for x in range(96)])).reshape(-1)
        third = second @ after([[*prompt, x, y] for x in range(96) for y in range(96)])
    expected = third * answers
    common = expected >= 10
    seen, wanted = counts[common], expected[common]
    seen, wanted = torch.cat((seen, counts[~common].sum()[None])), torch.cat((wanted, expected[~common].sum()[None]))
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    assert torch.special.gammaincc(torch.tensor((len(seen) - 1) / 2).double(), statistic / 2) > 1e-3


def test_the_answers_of_a_seed_do_not_depend_on_how_requests_are_batched(
    pair_of: Callable[..., Deployment], prompts: list[list[int]]
) -> None:
    sampling = Sampling(0.8, seed=3, sampled_drafts=True)
    serving = Serving(depth=3, max_new=20, ignore_end=True, sampling=sampling)
    pair = pair_of("llama", "gqa")
    outputs = [
        [request.output for request in pair.serve(prompts, replace(serving, concurrency=most, chunk=chunk)).requests]
        for most, chunk in ((8, None), (2, None), (8, 5), (1, 3))
    ]
    assert outputs[0] == outputs[1] == outputs[2] == outputs[3]
    reseeded = pair.serve(prompts, replace(serving, sampling=replace(sampling, seed=4)))
    assert [request.output for request in reseeded.requests] != outputs[0]


def test_fifty_requests_one_after_the_other_through_two_places(
    pair_of: Callable[..., Deployment], alone: Alone
) -> None:
    """Far more requests than places, each tiny: caches are emptied and used again."""
    asked = [[number, 90 - number] for number in range(50)]
    served = pair_of("qwen3", "gqa").serve(asked, Serving(depth=2, max_new=4, concurrency=2, ignore_end=True))
    assert [request.output for request in served.requests] == [alone("qwen3", prompt, 4) for prompt in asked]


def test_a_target_alone_needs_no_draft(
    cluster: None, target_of: Callable[..., Path], prompts: list[list[int]], alone: Alone
) -> None:
    with Deployment(target_of("qwen3"), None, threads=1) as deployment:
        assert set(deployment.pids) == {"target"}
        served = deployment.serve(prompts[:2], Serving(depth=0, max_new=6, ignore_end=True))
    assert [request.output for request in served.requests] == [alone("qwen3", prompt, 6) for prompt in prompts[:2]]

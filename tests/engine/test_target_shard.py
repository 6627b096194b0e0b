"""A pass hands over the wiring's boundaries of the rows that were accepted, in order; no Ray is needed for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spectrace.engine.plan import CaptureHiddenMode, TargetGroup, TargetStep
from spectrace.engine.target_shard import TargetServing, TargetShard
from spectrace.tracer.rows import Phase


@pytest.fixture
def shard(target_of: Callable[..., Path]) -> TargetShard:
    return TargetShard(target_of("llama"), dtype=torch.float32, threads=1)


def serving(mode: CaptureHiddenMode = CaptureHiddenMode.FULL, *faults: str) -> TargetServing:
    return TargetServing(wiring=(4, 0, 2), capture=(), mode=mode, faults=faults)


def prompt(request: int, tokens: tuple[int, ...], *, position: int = 0, answers: bool = True) -> TargetGroup:
    parents = tuple(range(-1, len(tokens) - 1))
    return TargetGroup(request, 0, Phase.PREFILL, -1, position, tokens, parents, answers)


def test_accepted_rows_are_handed_over_in_the_wirings_order_and_rejected_ones_are_not(
    shard: TargetShard, hf_model: Callable[[str], Any], alone: Callable[..., list[int]]
) -> None:
    """A request in a round with a right and a wrong branch, beside another's prompt."""
    first, second = (5, 17, 40), (8, 9)
    answer = alone("llama", first, 3)
    wrong = (answer[1] + 1) % 96
    shard.serve(serving(), None)
    shard.step(TargetStep(0, (prompt(0, first),), ()))
    nodes = (answer[0], wrong, answer[1], wrong)
    tree = TargetGroup(0, 1, Phase.VERIFY, 0, 3, nodes, (-1, 0, 0, 2), True)
    output, decisions = shard.step(TargetStep(1, (tree, prompt(1, second)), ()))
    assert output and output.capture_hidden_mode is CaptureHiddenMode.FULL
    assert (decisions[0].path, decisions[0].bonus) == ((0, 2), answer[2])
    assert (decisions[1].path, decisions[1].bonus) == ((0, 1), alone("llama", second, 1)[0])
    expected = []
    for text, start in (((*first, *answer[:2]), 3), (second, 0)):
        with torch.inference_mode():
            states = hf_model("llama")(torch.tensor([text]), output_hidden_states=True).hidden_states
        expected.append(torch.cat([states[boundary][0, start:] for boundary in (4, 0, 2)], dim=-1))
    torch.testing.assert_close(output.hidden_states, torch.cat(expected), rtol=0, atol=1e-4)


def test_inside_a_prompt_nothing_is_answered(shard: TargetShard) -> None:
    shard.serve(serving(), None)
    output, decisions = shard.step(TargetStep(0, (prompt(0, (5, 17), answers=False),), ()))
    assert output and output.hidden_states.shape == (2, 3 * 48)
    assert (decisions[0].path, decisions[0].bonus) == ((0, 1), None)


def test_without_a_draft_nothing_is_handed_over(shard: TargetShard) -> None:
    shard.serve(TargetServing((), (), CaptureHiddenMode.NULL), None)
    output, decisions = shard.step(TargetStep(0, (prompt(0, (5, 17)),), ()))
    assert output is None and decisions[0].bonus is not None


def test_a_fault_breaks_what_is_handed_over_and_no_decision(shard: TargetShard) -> None:
    step = TargetStep(0, (prompt(0, (5, 17, 3)),), ())
    shard.serve(serving(), None)
    healthy, decisions = shard.step(step)
    for fault, expected in (("W5", lambda x: x.unflatten(-1, (3, 48)).flip(1).flatten(1)), ("M3", torch.zeros_like)):
        shard.serve(serving(CaptureHiddenMode.FULL, fault), None)
        broken, same = shard.step(step)
        assert healthy and broken and same == decisions
        assert torch.equal(broken.hidden_states, expected(healthy.hidden_states))


def test_a_call_starts_with_an_empty_cache(shard: TargetShard) -> None:
    for _ in range(2):
        shard.serve(serving(), None)
        shard.step(TargetStep(0, (prompt(0, (5, 17, 3)),), ()))
        assert len(shard.model.table) == shard.model.cache.get_seq_length() == 3
    assert shard.finish() is None

"""What spectrace expects of vLLM's source is there: in what was read of the wheel, and in the wheel itself."""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))

from imitated_vllm.runners import v1, v2
from imitated_vllm.signatures import found
from imitated_vllm.wheel import SIGNATURES, Wheel

from spectrace.tracer.attach.capture import Spot
from spectrace.tracer.attach.hooks import Hooks, Watching
from spectrace.tracer.attach.vllm_v1 import v1_obstacles, v1_spots
from spectrace.tracer.attach.vllm_v2 import v2_obstacles, v2_spots


def quiet(_host: Any, _arguments: Any) -> Watching:
    yield


def placed(spots: Iterable[Spot]) -> dict[str, tuple[str, bool]]:
    hooks = Hooks()
    for spot in spots:
        hooks.place(type(spot.host), spot.method, quiet, needs=spot.needs, optional=spot.optional)
    return {name: (hook.refused, hook.optional) for name, hook in hooks.placed.items()}


def test_every_name_was_found_in_the_wheel() -> None:
    names = [told for classes in Wheel().read.values() for known in classes.values() for told in known.values()]
    assert len(names) > 70 and "missing" not in names


def test_an_imitated_method_takes_what_the_wheel_s_takes() -> None:
    propose = v2(Wheel(), 3).runner.speculator.propose
    names = list(inspect.signature(propose).parameters)
    assert names[:3] == ["input_batch", "attn_metadata", "slot_mappings"] and "num_speculative_tokens" in names
    with pytest.raises(TypeError):
        propose(another=1)


def test_all_hooks_fit_the_v1_runner() -> None:
    runner = v1(Wheel(), 3).runner
    assert not list(v1_obstacles(runner))
    found_ = placed(v1_spots(runner))
    assert len(found_) == 7 and set(found_.values()) == {("", False)}


def test_all_hooks_fit_the_v2_runner_and_those_that_graphs_or_batches_silence_are_optional() -> None:
    runner = v2(Wheel(), 3, graphs="fused").runner
    assert not list(v2_obstacles(runner))
    found_ = placed(v2_spots(runner))
    assert not any(refused for refused, _ in found_.values())
    assert {name for name, (_, optional) in found_.items() if not optional} == {
        "GPUModelRunner.execute_model", "GPUModelRunner.sample_tokens", "GPUModelRunner.sample",
        "TargetDependentARSpeculator.propose", "Eagle3LlamaForCausalLM.combine_hidden_states",
    }  # fmt: skip
    assert len(found_) == 10 and "CudaGraphManager.run_fullgraph" in found_


def test_a_draft_within_a_wrapper_is_hooked_itself_and_its_wrapper_for_the_graphs_that_it_replays() -> None:
    wheel, calls = Wheel(), list[str]()
    runner = v1(wheel, 3).runner
    model = runner.drafter.model
    wrapper = wheel.made(
        "compilation/breakable_cudagraph.py", "BreakableCUDAGraphWrapper",
        __call__=lambda _, given: calls.append("wrapped"), unwrap=lambda _, __: model,
    )  # fmt: skip
    runner.drafter.model = wrapper()
    found_ = placed(v1_spots(runner))
    assert not any(refused for refused, _ in found_.values())
    assert [name for name, (_, optional) in found_.items() if optional] == ["Eagle3LlamaForCausalLM.forward"]
    assert "Eagle3LlamaForCausalLM.combine_hidden_states" in found_ and "BreakableCUDAGraphWrapper.__call__" in found_
    runner.drafter.model(input_ids=None)
    assert calls == ["wrapped"]


@pytest.mark.vllm
def test_the_installed_vllm_is_the_one_that_was_read() -> None:
    [packages] = Path(os.environ["SPECTRACE_VLLM"]).absolute().glob("lib/python3*/site-packages")
    assert found(packages / "vllm") == json.loads(SIGNATURES.read_text("utf-8"))

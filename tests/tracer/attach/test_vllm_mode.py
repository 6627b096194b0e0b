"""What the manifest says of how a vLLM runs is what its runner really read, and what that hides."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from spectrace.tracer.attach.vllm_facts import run_facts
from spectrace.tracer.attach.vllm_mode import mode_facts

TOP, NESTED = "eagle_aux_hidden_state_layer_ids", "eagle_config"


def runner(
    drafter: str = "speculator", *, graphs: str = "FULL_AND_PIECEWISE", prefix_cache: bool = False, depth: int = 3,
    draft: dict[str, Any] | None = None, target: Any = None, **switches: Any,
) -> SimpleNamespace:  # fmt: skip
    """A runner that is warm, with nothing in it but what facts are taken from."""
    hf = SimpleNamespace(to_dict=dict, **(draft or {}))
    model = SimpleNamespace(
        model="nowhere/target", revision=None, hf_config=hf, dtype="torch.bfloat16", enforce_eager=False
    )
    config = SimpleNamespace(
        model_config=model,
        speculative_config=SimpleNamespace(draft_model_config=model, num_speculative_tokens=depth),
        parallel_config=SimpleNamespace(tensor_parallel_size=2),
        scheduler_config=SimpleNamespace(async_scheduling=True),
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_cache),
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name=graphs)),
    )
    held = SimpleNamespace(model=object(), num_speculative_steps=depth, **switches)
    target = target or SimpleNamespace(model=SimpleNamespace(aux_hidden_state_layers=(2, 4, 5)))
    return SimpleNamespace(vllm_config=config, get_model=lambda: target, **{drafter: held})


def test_the_mode_says_which_runner_and_what_it_resolved() -> None:
    told = mode_facts(runner())
    assert (told["runner"], told["cuda_graphs"], told["async_scheduling"]) == ("V2", "FULL_AND_PIECEWISE", True)
    assert mode_facts(runner("drafter"))["runner"] == "V1"


@pytest.mark.parametrize(
    ("given", "hidden"),
    [
        (runner(graphs="NONE"), []),
        (runner(graphs="PIECEWISE"), []),
        (runner("drafter"), []),
        (runner("drafter", prefix_cache=True), ["rows of a cached prefix"]),
        (runner("drafter", use_local_argmax_reduction=True), ["drafted: draft_token, logits"]),
        (runner(), ["drafted: hidden, draft_token, logits", "drafted: state, but of depth 0 where it answers"]),
        (runner(depth=5), ["drafted: hidden, draft_token, logits", "drafted: state, but of depth 0 where it answers"]),
        (
            runner(depth=5, supports_decode_metadata_update=True),
            [
                "drafted: hidden, draft_token, logits", "drafted: state, but of depth 0 where it answers",
                "received, drafted: depths 2 to 3",
            ],
        ),
    ],
)  # fmt: skip
def test_what_a_mode_hides_is_said(given: Any, hidden: list[str]) -> None:
    assert list(mode_facts(given)["hidden"]) == hidden


@pytest.mark.parametrize(
    ("draft", "v1", "v2"),
    [
        ({}, ("default", (2, 4, 5)), ("default", (2, 4, 5))),
        ({TOP: [5, 2, 4]}, (TOP, (5, 2, 4)), (TOP, (5, 2, 4))),
        ({NESTED: {TOP: [1, 3, 6]}}, (f"{NESTED}.{TOP}", (1, 3, 6)), ("default", (2, 4, 5))),
        ({NESTED: {"layer_ids": [1, 3, 6]}}, ("default", (2, 4, 5)), (f"{NESTED}.layer_ids", (1, 3, 6))),
        ({TOP: [], NESTED: {TOP: [1], "layer_ids": [3]}}, (f"{NESTED}.{TOP}", (1,)), (f"{NESTED}.layer_ids", (3,))),
    ],
)
def test_the_key_of_the_wiring_is_the_one_that_the_runner_reads(draft: dict[str, Any], v1: Any, v2: Any) -> None:
    for drafter, told in (("drafter", v1), ("speculator", v2)):
        resolved = run_facts(runner(drafter, draft=draft))["wiring"]["resolved"]
        assert (resolved["key"], resolved["raw_ids"]) == told and resolved["boundaries"] == (2, 4, 5)


def test_a_multimodal_target_holds_its_layers_in_its_language_model() -> None:
    decoder = SimpleNamespace(aux_hidden_state_layers=(1, 2, 3))
    for target in (
        SimpleNamespace(get_language_model=lambda: SimpleNamespace(model=decoder)),
        SimpleNamespace(get_language_model=lambda: decoder),
        SimpleNamespace(language_model=SimpleNamespace(model=decoder)),
    ):
        assert run_facts(runner(target=target))["wiring"]["resolved"]["boundaries"] == (1, 2, 3)

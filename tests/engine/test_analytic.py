"""The analytic pairs do what their rule says, to the token and to the draft, healthy and with every wiring fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from analytic import codes, expected
from analytic.codes import FAMILIES, LAYERS, VOCAB, Rule, rule_of
from analytic.expected import Delivered, acceptance_length, answer, continuation
from analytic.pair import make_pair
from analytic.stream import TargetStream

from spectrace.engine.checkpoint import build_draft, read_draft
from spectrace.engine.deployment import Deployment, Serving
from spectrace.replay.lab import replay_trace
from spectrace.tracer.rows import Level
from spectrace.tracer.trace import Trace

MODELS = Path(codes.__file__).parents[1]
# What each fault delivers for each wiring: written out, so that the engine's own arithmetic is no part of the answer.
DELIVERED: dict[str, dict[str, Delivered]] = {
    "llama": {
        "healthy": (0, 3, 6), "W1": (0, 2, 5), "W2": (1, 4, 6), "W3": (3, 6, 3), "W4": (2, 3, 3), "W5": (6, 3, 0),
        "W6": (0, 0, 3), "W7": (0, 3, None), "M3": (None, None, None),
    },
    "qwen3": {
        "healthy": (1, 3, 6), "W1": (0, 2, 5), "W2": (2, 4, 6), "W3": (3, 6, 3), "W4": (2, 3, 3), "W5": (6, 3, 1),
        "W6": (1, 1, 3), "W7": (1, 3, None), "M3": (None, None, None),
    },
    "deepseek_v3": {
        "healthy": (0, 4, 6), "W1": (0, 3, 5), "W2": (1, 5, 6), "W3": (4, 6, 3), "W4": (2, 3, 3), "W5": (6, 4, 0),
        "W6": (0, 0, 4), "W7": (0, 4, None), "M3": (None, None, None),
    },
    "kimi_k25": {
        "healthy": (1, 4, 6), "W1": (0, 3, 5), "W2": (2, 5, 6), "W3": (4, 6, 3), "W4": (2, 3, 3), "W5": (6, 4, 1),
        "W6": (1, 1, 4), "W7": (1, 4, None), "M3": (None, None, None),
    },
}  # fmt: skip
FAULTS = ("healthy", "W1", "W2", "W3", "W4", "W5", "W6", "W7", "M3")
LIMITS = (20, 20, 9, 20, 14)


def questions(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]


PROMPTS = questions(1, 2, 19, 7, 5)


@pytest.fixture(scope="session")
def folders_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """The target's and the draft's folder of a family, made once."""
    return cache(lambda family: make_pair(family, tmp_path_factory.mktemp("analytic") / family)[:2])


@pytest.fixture(scope="session")
def model_of(folders_of: Callable[[str], tuple[Path, Path]]) -> Callable[[str], Any]:
    """The target of a family as transformers loads it; it does not stop at end tokens."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    @cache
    def load(family: str) -> Any:
        auto = AutoModelForImageTextToText if family == "kimi_k25" else AutoModelForCausalLM
        model = auto.from_pretrained(folders_of(family)[0]).eval()
        model.generation_config.eos_token_id = None
        return model

    return load


@pytest.fixture(scope="session")
def running(cluster: None, folders_of: Callable[[str], tuple[Path, Path]]) -> Iterator[Callable[[str], Deployment]]:
    """One deployment, which loads another family's pair when it is asked for."""
    with ExitStack() as stack:
        pairs: list[Deployment] = []

        def serve(family: str) -> Deployment:
            if not pairs:
                pairs.append(stack.enter_context(Deployment(*folders_of(family), threads=1)))
            if pairs[0].target_folder != folders_of(family)[0]:
                pairs[0].swap(*folders_of(family))
            return pairs[0]

        yield serve


def write(model: Any, prompt: list[int], length: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=length)
    return [int(token) for token in out[0, len(prompt) :]]


def test_the_expectation_knows_nothing_of_what_it_is_held_against() -> None:
    code = "import json, sys, analytic.expected; print(json.dumps(list(sys.modules)))"
    options = {"capture_output": True, "text": True, "timeout": 60, "check": True}
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(MODELS)}, **options)
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert "analytic" in loaded
    assert not loaded & {"spectrace", "torch", "transformers", "safetensors", "numpy"}


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_wander_and_depend_on_tokens_far_back(family: str) -> None:
    rule = rule_of(family)
    for prompt in questions(*range(1, 31)):
        text = continuation(rule, prompt, 200)
        runs = [tuple(text[i : i + 6]) for i in range(len(text) - 5)]
        assert len(set(runs)) == len(runs) and len(set(text)) > 60
    text = questions(12)[0]
    for back in (1, 2, 3, 6):
        others = [[*text[:-back], token, *text[len(text) - back + 1 :]] for token in range(VOCAB)]
        assert len({continuation(rule, other, 1)[0] for other in others}) > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_writes_the_text_that_the_rule_foretells(family: str, model_of: Callable[[str], Any]) -> None:
    for prompt in PROMPTS[:4]:
        assert write(model_of(family), prompt, 40) == continuation(rule_of(family), prompt, 40)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_boundary_holds_its_code_and_those_before_it(family: str, model_of: Callable[[str], Any]) -> None:
    rule, text, model = rule_of(family), PROMPTS[2], model_of(family)
    entering: list[torch.Tensor] = []
    hook = model.get_decoder().norm.register_forward_pre_hook(lambda _module, args: entering.append(args[0]))
    with torch.inference_mode():
        streams = model(torch.tensor([text]), output_hidden_states=True).hidden_states
    hook.remove()
    for boundary, stream in enumerate([*streams[:-1], entering[0]]):
        register = stream[0, :, TargetStream.REGISTER :][:, :4]
        wanted = [rule.code(boundary, text, position) for position in range(len(text))]
        torch.testing.assert_close(register, torch.eye(4)[wanted], rtol=0, atol=1e-4)
        for other in range(LAYERS + 1):
            block = stream[0, :, TargetStream.written(other) :][:, :4]
            there = torch.eye(4)[[rule.code(other, text, position) for position in range(len(text))]]
            torch.testing.assert_close(block, there * (other <= boundary), rtol=0, atol=1e-4)
    # The final norm turns the register, so that the last slot cannot be read from behind it.
    assert (streams[-1][0, :, TargetStream.REGISTER :][:, :4] < 0.01).all()


@pytest.mark.parametrize("family", ["deepseek_v3", "kimi_k25"])
def test_a_code_comes_through_routed_experts(family: str, model_of: Callable[[str], Any]) -> None:
    """Without those of the layer that writes the second slot's boundary, another text comes out."""
    rule, prompt = rule_of(family), PROMPTS[2]
    experts = model_of(family).get_decoder().layers[rule.wiring[1] - 1].mlp.experts
    kept = experts.down_proj.detach().clone()
    with torch.no_grad():
        experts.down_proj.zero_()
        try:
            assert write(model_of(family), prompt, 20) != continuation(rule, prompt, 20)
        finally:
            experts.down_proj.copy_(kept)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_fault_costs_what_the_readme_says(family: str) -> None:
    prompts = questions(*[9] * 12)
    lengths = {
        fault: acceptance_length(
            [answer(rule_of(family), prompt, max_new=150, depth=3, delivered=delivered) for prompt in prompts]
        )
        for fault, delivered in DELIVERED[family].items()
    }
    assert 2.4 < lengths["healthy"] < 3.2
    assert all(lengths["healthy"] - lengths[fault] > 0.3 for fault in FAULTS[1:])
    assert len({round(length, 2) for length in lengths.values()}) == len(FAULTS)
    row = " | ".join([family, str(rule_of(family).wiring), *(f"{length:.2f}" for length in lengths.values())])
    assert f"| {row} |" in (MODELS / "analytic" / "README.md").read_text("utf-8")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_draft_leaves_nothing_unread(family: str, folders_of: Callable[[str], tuple[Path, Path]]) -> None:
    checkpoint = read_draft(folders_of(family)[1])
    assert checkpoint.wiring and checkpoint.wiring.boundaries == rule_of(family).wiring
    report = checkpoint.report
    assert (report.unused_tensors, report.missing_tensors) == ((), ())
    assert report.unread_fields == ()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_served_as_foretold(family: str, fault: str, running: Callable[[str], Deployment]) -> None:
    """Every request's answer, rounds and correct drafts; five requests, three at a time, prompts in chunks."""
    rule, faults = rule_of(family), () if fault == "healthy" else (fault,)
    for depth in (1, 3, 6):
        serving = Serving(depth=depth, max_new=LIMITS, concurrency=3, chunk=8, faults=faults)
        served = running(family).serve(PROMPTS, serving).requests
        assert [(r.output, r.finish_reason, r.rounds, r.correct_drafts) for r in served] == [
            (list(one.output), one.finish_reason, len(one.rounds), one.correct_drafts)
            for one in foretold(rule, depth, DELIVERED[family][fault])
        ]


@pytest.mark.parametrize("wiring", [(5, 0, 2), (4, 4, 4), (6, 1, 6)], ids=str)
def test_any_wiring_is_served_as_foretold(wiring: tuple[int, int, int], running: Callable[[str], Deployment]) -> None:
    served = running("qwen3").serve(PROMPTS, Serving(depth=4, max_new=LIMITS, wiring=wiring)).requests
    answers = foretold(rule_of("qwen3"), 4, wiring)
    assert [(r.rounds, r.correct_drafts) for r in served] == [(len(a.rounds), a.correct_drafts) for a in answers]


def test_every_recorded_round_is_the_one_foretold(running: Callable[[str], Deployment], tmp_path: Path) -> None:
    """How many drafts of it were right, and whether the end of the answer cut it."""
    running("kimi_k25").serve(PROMPTS, Serving(max_new=LIMITS, faults=("W2",)), trace=tmp_path / "trace")
    rows = Trace.open(tmp_path / "trace").rows("verified")
    rounds = [
        (request, int(rows["accepted"][of].sum()) - 1, bool(rows["cut"][of].all()))
        for request in range(len(PROMPTS))
        for number in range(int(rows["round"][rows["request"] == request].max(initial=-1)) + 1)
        if (of := np.flatnonzero((rows["request"] == request) & (rows["round"] == number))).size
    ]
    answers = foretold(rule_of("kimi_k25"), 3, DELIVERED["kimi_k25"]["W2"])
    assert rounds == [(number, one.correct, one.cut) for number, each in enumerate(answers) for one in each.rounds]
    assert {cut for _, _, cut in rounds} == {True, False}


@pytest.mark.parametrize("shape", [(3, 1, 4), (3, 4, 8)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_replay_reproduces_what_was_served(
    family: str,
    shape: tuple[int, int, int],
    running: Callable[[str], Deployment],
    folders_of: Callable[[str], tuple[Path, Path]],
    tmp_path: Path,
) -> None:
    target, draft = folders_of(family)
    model = build_draft(read_draft(draft), target=target, dtype=torch.float32)
    for fault in ("W2", "W7"):
        serving = Serving(*shape, max_new=LIMITS, level=Level.FULL, faults=(fault,))
        running(family).serve(PROMPTS, serving, trace=tmp_path / fault)
        report = replay_trace(Trace.open(tmp_path / fault), model)
        assert report.requests == len(PROMPTS)
        assert report.comparison.tokens_equal == report.comparison.answers > 50
        assert report.comparison.max_error is not None and report.comparison.max_error <= 1e-5
        assert report.replayed and report.served.rounds == report.replayed.rounds > 10
        assert report.served.correct_drafts == report.replayed.correct_drafts > 0


def test_answers_end_both_ways() -> None:
    reasons = {one.finish_reason for family in FAMILIES for one in foretold(rule_of(family), 3, None)}
    assert reasons == {"stop", "length"}


def foretold(rule: Rule, depth: int, delivered: Delivered | None) -> list[expected.Answer]:
    return [
        answer(rule, prompt, max_new=limit, depth=depth, delivered=delivered)
        for prompt, limit in zip(PROMPTS, LIMITS, strict=True)
    ]

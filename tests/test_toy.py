"""The toy pair is whole, small and lossless, and setting any one thing wrong costs acceptance that can be seen."""

import json
from pathlib import Path

import pytest
import torch
from toy.switches import DEEP_FAULTS, Flip, flips, free_run, prompts, record, worth
from toy.target import TARGET
from toy.train import DEEP, DRAFT

from spectrace.engine.checkpoint import read_draft
from spectrace.tracer.acceptance import acceptance_of_rows
from spectrace.tracer.trace import Trace

MAX_NEW = 48


@pytest.fixture(scope="module")
def asked() -> list[list[int]]:
    return prompts(16)


@pytest.fixture(scope="module")
def trace(asked: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return record(tmp_path_factory.mktemp("toy") / "trace", asked, max_new=MAX_NEW)


def as_trained() -> Flip:
    checkpoint = read_draft(DRAFT)
    assert checkpoint.wiring
    return Flip("", "as trained", checkpoint.spec, checkpoint.wiring.boundaries)


@pytest.fixture(scope="module")
def healthy(trace: Trace) -> float:
    return worth(trace, as_trained())


@pytest.mark.parametrize("draft", [DRAFT, DEEP])
def test_a_draft_loads_with_nothing_left_over(draft: Path) -> None:
    report = read_draft(draft).report
    assert (report.unused_tensors, report.missing_tensors, report.unread_fields) == ((), (), ())


def test_the_pair_is_small() -> None:
    size_bytes = sum(path.stat().st_size for folder in (TARGET, DRAFT, DEEP) for path in folder.iterdir())
    assert size_bytes < 3_000_000


def test_the_prompts_beside_it_are_those_it_is_measured_on() -> None:
    lines = (TARGET.parent / "prompts.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["tokens"] for line in lines] == prompts(64)


def test_served_acceptance_is_what_the_free_run_says_and_healthy(trace: Trace, healthy: float) -> None:
    served = acceptance_of_rows(trace.rows("verified")).acceptance_length
    assert served == pytest.approx(healthy)
    assert served is not None
    assert 3.0 <= served <= 4.2


def test_served_output_is_the_target_s_own_and_keeps_going(trace: Trace, asked: list[list[int]]) -> None:
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    requests = trace.rows("requests")
    assert len(requests) == len(asked)
    distinct = []
    for prompt, output in zip(requests["prompt_tokens"], requests["output_tokens"], strict=True):
        ids = torch.tensor(prompt[None].astype("int64"))
        alone = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_NEW)
        assert alone[0, ids.shape[1] :].tolist() == output.tolist()
        distinct.append(len(set(output.tolist())))
    assert sorted(distinct)[len(distinct) // 2] >= 20


@pytest.mark.parametrize("flip", flips(as_trained().spec, as_trained().wiring), ids=lambda flip: flip.what)
def test_every_switch_set_wrong_costs_acceptance(trace: Trace, healthy: float, flip: Flip) -> None:
    assert healthy - worth(trace, flip) >= 0.15


@pytest.fixture(scope="module")
def deep(asked: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return record(tmp_path_factory.mktemp("deep") / "trace", asked, max_new=MAX_NEW, draft=DEEP)


def test_the_deep_draft_is_served_as_it_runs_free(deep: Trace) -> None:
    served = acceptance_of_rows(deep.rows("verified")).acceptance_length
    assert served == pytest.approx(free_run(deep)) and served is not None and served > 3.5


@pytest.mark.parametrize("fault", DEEP_FAULTS)
def test_whatever_breaks_the_deep_draft_costs_acceptance(fault: str, deep: Trace) -> None:
    assert free_run(deep) - free_run(deep, fault) >= 0.1

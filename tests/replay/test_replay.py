"""Replay computes what was served: every token, every tensor, the same walk; and a free run foretells a fix."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from spectrace.cli.replay import render_replay
from spectrace.engine.checkpoint import build_draft, read_draft
from spectrace.engine.deployment import Deployment, Serving
from spectrace.engine.draft import DraftModel
from spectrace.engine.sampling import Sampling
from spectrace.replay.compare import STAGES
from spectrace.replay.freerun import free_run_acceptance
from spectrace.replay.lab import ReplayReport, replay_trace
from spectrace.replay.texts import read_texts
from spectrace.tracer.errors import UserError
from spectrace.tracer.rows import Level
from spectrace.tracer.rowset import Rows
from spectrace.tracer.trace import Trace

PROMPTS = [tuple((17 * i + 5 * j) % 89 + 1 for j in range(5 + 3 * i)) for i in range(8)]
PAIRS = [("llama", "gqa"), ("qwen3", "mla"), ("llama", "deep")]
TOLERANCE = 1e-5


class Pair:
    """A running deployment, its draft for replay, and a fresh trace folder for every call."""

    def __init__(self, deployment: Deployment, model: DraftModel, folder: Path) -> None:
        self.deployment, self.model, self.folder, self.count = deployment, model, folder, 0

    def record(self, serving: Serving, requests: int = 8) -> Trace:
        self.count += 1
        trace = self.folder / str(self.count)
        assert not self.deployment.serve(PROMPTS[:requests], serving, trace=trace).losses
        return Trace.open(trace)


@pytest.fixture(scope="module", params=PAIRS, ids=["llama-gqa", "qwen3-mla", "llama-deep"])
def pair(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    target_of: Callable[..., Path],
    draft_of: Callable[..., Path],
) -> Iterator[Pair]:
    family, attention = request.param
    target, draft = target_of(family), draft_of(family, attention)
    model = build_draft(read_draft(draft), target=target, dtype=torch.float32)
    with Deployment(target, draft, threads=1) as deployment:
        yield Pair(deployment, model, tmp_path_factory.mktemp("traces"))


def same_rounds(report: ReplayReport) -> bool:
    """Whether the walk over replayed drafts has the rounds that were served, and how far each got."""
    served, replayed = report.served, report.replayed
    assert replayed and served.correct_drafts > 0
    rates = [rate for rate in replayed.cumulative_rates if rate], [rate for rate in served.cumulative_rates if rate]
    return rates[0] == rates[1] and (replayed.rounds, replayed.correct_drafts) == (served.rounds, served.correct_drafts)


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("requests", [1, 8])
@pytest.mark.parametrize("depth", [1, 3, 6])
def test_replay_reproduces_the_served_draft(pair: Pair, depth: int, requests: int, chunk: int | None) -> None:
    serving = Serving(depth=depth, max_new=24, concurrency=4, chunk=chunk, level=Level.FULL, ignore_end=True)
    report = replay_trace(pair.record(serving, requests), pair.model, block_rows=100)
    assert report.requests == requests and report.incomplete == 0
    assert report.comparison.tokens_equal == report.comparison.answers > 0
    assert {stage.stage for stage in report.comparison.stages} == set(STAGES) - {"probability"}
    assert report.comparison.max_error is not None and report.comparison.max_error <= TOLERANCE
    assert same_rounds(report)


@pytest.mark.parametrize("fixed_window", [False, True], ids=["compact", "window"])
@pytest.mark.parametrize("level", [Level.FEATURES, Level.FULL])
@pytest.mark.parametrize("shape", [(3, 4, 8), (5, 8, 32), (1, 3, 3), (3, 1, 4)], ids=str)
def test_replay_reproduces_served_trees(
    pair: Pair, shape: tuple[int, int, int], level: Level, fixed_window: bool
) -> None:
    serving = Serving(*shape, max_new=24, concurrency=4, chunk=4, level=level, ignore_end=True)
    report = replay_trace(pair.record(replace(serving, fixed_window=fixed_window)), pair.model, block_rows=100)
    assert report.requests == 8 and report.incomplete == 0
    assert report.comparison.tokens_equal == report.comparison.answers > 0
    if level is Level.FULL:
        assert {stage.stage for stage in report.comparison.stages} == set(STAGES) - {"probability"}
        assert report.comparison.max_error is not None and report.comparison.max_error <= TOLERANCE
    assert same_rounds(report)


@pytest.mark.parametrize("temperature", [0.3, 1.0])
@pytest.mark.parametrize("shape", [(3, 1, 4), (3, 4, 8)], ids=str)
def test_chosen_drafts_walk_as_served_at_any_temperature(
    pair: Pair, shape: tuple[int, int, int], temperature: float
) -> None:
    serving = Serving(*shape, max_new=24, level=Level.FULL, ignore_end=True, sampling=Sampling(temperature, seed=5))
    report = replay_trace(pair.record(serving), pair.model)
    assert report.comparison.tokens_equal == report.comparison.answers > 0
    assert same_rounds(report)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_the_expected_walk_of_drawn_drafts_holds_the_served_one(pair: Pair, temperature: float) -> None:
    """And is narrow enough to tell one draft from another."""
    sampling = Sampling(temperature, seed=7, sampled_drafts=True)
    trace = pair.record(Serving(3, max_new=48, level=Level.FULL, ignore_end=True, sampling=sampling))
    report = replay_trace(trace, pair.model)
    assert report.expected and report.replayed is None and report.agrees
    assert report.expected.low < report.expected.expected < report.expected.high
    errors = {stage.stage: stage for stage in report.comparison.stages}
    assert errors["probability"].rows > 150 and errors["probability"].max_error <= 1e-4
    assert errors["logits"].max_error <= TOLERANCE
    other = DraftModel(pair.model.spec)
    other.load_state_dict(pair.model.state_dict())
    with torch.no_grad():
        other.head.weight.mul_(-1000)
    expected = replay_trace(trace, other).expected
    assert expected and not expected.low <= expected.served <= expected.high


def test_at_level_features_replay_feeds_back_its_own_states(pair: Pair) -> None:
    trace = pair.record(Serving(depth=4, max_new=24, level=Level.FEATURES, ignore_end=True))
    report = replay_trace(trace, pair.model)
    assert report.comparison.tokens_equal == report.comparison.answers > 0
    assert report.comparison.max_error is None


@pytest.mark.parametrize("shape", [(3, 1, 4), (3, 4, 8), (5, 8, 32)], ids=str)
def test_a_free_run_on_true_features_is_the_served_run(pair: Pair, shape: tuple[int, int, int]) -> None:
    wiring = read_draft(pair.deployment.draft_folder or Path()).wiring
    assert wiring
    trace = pair.record(Serving(*shape, max_new=32, capture=wiring.boundaries, ignore_end=True))
    served, free = (
        replay_trace(trace, pair.model).served,
        free_run_acceptance(trace, pair.model, wiring=wiring.boundaries),
    )
    assert served.correct_drafts > 0
    assert (free.rounds, free.correct_drafts) == (served.rounds, served.correct_drafts)


def test_a_broken_run_foretells_what_the_right_wiring_brings(pair: Pair) -> None:
    wiring = read_draft(pair.deployment.draft_folder or Path()).wiring
    assert wiring
    common = {"depth": 3, "max_new": 32, "capture": wiring.boundaries, "ignore_end": True}
    right = replay_trace(pair.record(Serving(**common)), pair.model).served
    broken = pair.record(Serving(**common, faults=("W3",)))
    wrong = replay_trace(broken, pair.model).served
    foretold = free_run_acceptance(broken, pair.model, wiring=wiring.boundaries)
    assert (foretold.rounds, foretold.correct_drafts) == (right.rounds, right.correct_drafts)
    assert wrong.acceptance_length != right.acceptance_length


def test_another_draft_is_not_mistaken_for_the_served_one(pair: Pair) -> None:
    trace = pair.record(Serving(depth=3, max_new=16, level=Level.FULL, ignore_end=True))
    other = DraftModel(pair.model.spec)
    other.load_state_dict(pair.model.state_dict())
    with torch.no_grad():
        other.mlp.gate.weight.mul_(1.01)
    report = replay_trace(trace, other)
    assert report.comparison.max_error is not None and report.comparison.max_error > 100 * TOLERANCE


def test_what_cannot_be_replayed_is_said(pair: Pair) -> None:
    light = pair.record(Serving(depth=2, max_new=8, level=Level.LIGHT, ignore_end=True))
    with pytest.raises(UserError, match="level light"):
        replay_trace(light, pair.model)
    plain = pair.record(Serving(depth=0, max_new=8, ignore_end=True))
    with pytest.raises(UserError, match="no received rows"):
        replay_trace(plain, pair.model)
    with pytest.raises(UserError, match="--capture 0,2,4"):
        free_run_acceptance(light, pair.model, wiring=(0, 2, 4))


def test_the_page_of_trees_that_are_never_as_deep_as_they_might_be(pair: Pair) -> None:
    report = replay_trace(pair.record(Serving(3, 5, 2, max_new=8, ignore_end=True)), pair.model)
    assert report.agrees and same_rounds(report)
    console = Console(record=True, width=100, file=StringIO())
    console.print(render_replay(Path("trace"), report))
    assert "cumulative rate, draft 3" in console.export_text()


@pytest.mark.parametrize("nodes", [2, 3, 6])
def test_drawn_chains_may_be_verified_in_part(pair: Pair, nodes: int) -> None:
    sampling = Sampling(1.0, seed=2, sampled_drafts=True)
    serving = Serving(5, 1, nodes, max_new=20, level=Level.FULL, ignore_end=True, sampling=sampling)
    report = replay_trace(pair.record(serving), pair.model)
    assert report.comparison.max_error is not None and report.comparison.max_error <= 1e-4


def test_answers_too_short_for_a_whole_round_are_left_out_of_the_expected_walk(pair: Pair) -> None:
    sampling = Sampling(1.0, seed=2, sampled_drafts=True)
    serving = Serving(3, ignore_end=True, sampling=sampling, max_new=(1, 2, 3, 4, 5, 6, 30, 40))
    report = replay_trace(pair.record(serving), pair.model)
    assert report.expected and report.expected.served_rounds > 5
    short = replay_trace(pair.record(replace(serving, max_new=4)), pair.model)
    assert short.expected is None and short.comparison.stages


@pytest.mark.parametrize("sampled_drafts", [False, True], ids=["chosen", "drawn"])
def test_a_torn_trace_is_replayed_as_far_as_it_goes(pair: Pair, sampled_drafts: bool) -> None:
    """Cut at every record of the scheduler's ledger, as a kill -9 would; its families are written on their own."""
    sampling = Sampling(0.5, seed=2, sampled_drafts=sampled_drafts)
    trace = pair.record(Serving(3, max_new=tuple(range(4, 36, 4)), ignore_end=True, sampling=sampling))
    (trace.folder / "SEAL").unlink()
    ledger = trace.folder / "scheduler-0" / "ledger"
    records = ledger.read_bytes()
    for kept in range(len(records) // 64 - 1, 0, -1):
        ledger.write_bytes(records[: 64 * kept])
        torn = Trace.open(trace.folder, tolerant=True)
        if sampled_drafts and not len(torn.rows("verified")):
            with pytest.raises(UserError, match="nothing is recorded of its draft tokens"):
                replay_trace(torn, pair.model)
            continue
        report = replay_trace(torn, pair.model)
        assert report.comparison.rows > 0
        if report.replayed:
            assert (report.replayed.rounds, report.replayed.correct_drafts) == (
                report.served.rounds,
                report.served.correct_drafts,
            )


def test_a_request_whose_last_rounds_are_lost_is_no_text(pair: Pair) -> None:
    trace = pair.record(Serving(3, max_new=20, ignore_end=True))
    texts = read_texts(trace)
    assert len(texts) == 8
    real = trace.rows

    def without_the_last_round(family: str, **equals: object) -> Rows:
        rows = real(family, **equals)  # type: ignore[arg-type]
        return rows.take(rows["round"] < rows["round"].max()) if family == "verified" else rows

    trace.rows = without_the_last_round  # type: ignore[method-assign, assignment]
    assert 0 < len(read_texts(trace)) < 8


@pytest.mark.parametrize("factor", [0.02, torch.nan])
def test_equal_tokens_alone_are_no_agreement(pair: Pair, factor: float) -> None:
    trace = pair.record(Serving(depth=3, max_new=16, level=Level.FULL, ignore_end=True))
    assert replay_trace(trace, pair.model).agrees
    other = DraftModel(pair.model.spec)
    other.load_state_dict(pair.model.state_dict())
    with torch.no_grad():
        other.head.weight.mul_(factor)
    assert not replay_trace(trace, other).agrees


def test_a_free_run_on_a_run_without_a_draft_foretells_one_with(pair: Pair) -> None:
    wiring = read_draft(pair.deployment.draft_folder or Path()).wiring
    assert wiring
    common = {"max_new": 32, "capture": wiring.boundaries, "ignore_end": True}
    plain, served = (
        pair.record(Serving(0, **common)),
        replay_trace(pair.record(Serving(3, **common)), pair.model).served,
    )
    foretold = free_run_acceptance(plain, pair.model, wiring=wiring.boundaries, depth=3)
    assert (foretold.rounds, foretold.correct_drafts) == (served.rounds, served.correct_drafts)
    with pytest.raises(UserError, match="say how deep to draft"):
        free_run_acceptance(plain, pair.model, wiring=wiring.boundaries)
    with pytest.raises(UserError, match="no answer of two tokens or more"):
        short = pair.record(Serving(3, **{**common, "max_new": 1}))
        free_run_acceptance(short, pair.model, wiring=wiring.boundaries, depth=3)

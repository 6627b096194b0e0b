"""Accuracy is measured by the definition it was trained under, on the same starts that serving walks over."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from spectrace.engine.checkpoint import build_draft, read_draft
from spectrace.engine.deployment import Deployment, Serving
from spectrace.engine.draft import DraftModel
from spectrace.engine.sampling import Sampling
from spectrace.replay.features import TextFeatures, blocks, reference_features
from spectrace.replay.freerun import free_run_acceptance
from spectrace.replay.ladder import (
    DEFINITIONS,
    Answers,
    TeacherForced,
    Trained,
    compare,
    target_choices,
    teacher_forced,
)
from spectrace.replay.texts import read_texts
from spectrace.tracer.errors import UserError
from spectrace.tracer.rows import Level
from spectrace.tracer.trace import Trace

DEPTH = 3


def _answers(hits: Sequence[Sequence[int]], *, known: Sequence[Sequence[int]] | None = None) -> Answers:
    """A text of which these are the hits at each start; there is nothing to hit past its end."""
    hit = np.array(hits, bool)
    left = len(hit) - np.arange(len(hit))
    there = np.arange(hit.shape[1]) < left[:, None]
    within = there if known is None else there & np.array(known, bool)
    return Answers(hit & there, there, hit & within, within, left)


# Starts 1 to 4 of a text: step by step, whether the draft hit.
HITS = [[1, 0, 1], [1, 1, 0], [0, 1, 0], [1, 0, 0]]


def _rates(measured: TeacherForced, definition: str) -> list[float]:
    hits, answers = measured.counts(DEFINITIONS[definition])
    return (hits.sum(0) / answers.sum(0)).tolist()


def test_every_definition_counts_its_own_way() -> None:
    measured = TeacherForced((_answers(HITS),), 3)
    assert _rates(measured, "eagle") == _rates(measured, "specforge") == [3 / 4, 2 / 3, 1 / 2]
    assert _rates(measured, "restricted") == [3 / 4, 2 / 3, 1 / 2]
    assert _rates(measured, "speculators_full") == [3 / 4, 1 / 3, 0 / 2]
    assert _rates(measured, "speculators_cond") == [3 / 4, 1 / 2, 0 / 1]


def test_a_token_outside_the_draft_vocabulary_is_a_miss_only_where_all_tokens_count() -> None:
    measured = TeacherForced((_answers(HITS, known=[[1, 1, 1], [1, 1, 1], [0, 1, 1], [1, 1, 1]]),), 3)
    assert _rates(measured, "eagle")[0] == 3 / 4 and _rates(measured, "restricted")[0] == 3 / 3
    assert measured.unknown() == pytest.approx(1 / 9)
    assert any("left out" in note for note in compare(Trained((0.7,), "restricted"), measured).notes)


def test_lengths_over_all_starts_and_over_those_of_rounds_differ() -> None:
    measured = TeacherForced((_answers(HITS),), 3)
    assert measured.expected_length() == 1 + (1 + 2) / 2  # the two starts into which three steps fit
    assert measured.walked_length() == 1 + (1 + 0) / 2  # rounds at starts 1 and 3; the one at 4 is cut by the end


def test_trained_accuracies_multiply_unless_they_are_cumulative() -> None:
    assert Trained((0.7, 0.5, 0.4)).expected_length == pytest.approx(1 + 0.7 + 0.35 + 0.14)
    assert Trained((0.7, 0.5, 0.4), "speculators_cond").expected_length == pytest.approx(1 + 0.7 + 0.35 + 0.14)
    assert Trained((0.7, 0.5, 0.4), "speculators_full").expected_length == pytest.approx(1 + 0.7 + 0.5 + 0.4)


@pytest.mark.parametrize(
    ("accuracies", "definition", "says"),
    [
        ((74.7,), "eagle", "shares from 0 to 1"),
        ((), "eagle", "shares from 0 to 1"),
        ((0.5, float("nan")), "eagle", "shares from 0 to 1"),
        ((0.5,), "mine", "expected one of eagle, specforge"),
        ((0.5, 0.6), "speculators_full", "another definition?"),
    ],
)
def test_what_cannot_be_an_accuracy_is_refused(accuracies: tuple[float, ...], definition: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        Trained(accuracies, definition)


def _many(share: float, requests: int = 40, starts: int = 50) -> TeacherForced:
    random = np.random.Generator(np.random.Philox(1))
    return TeacherForced(tuple(_answers(random.random((starts, 2)) < share) for _ in range(requests)), 2)


def test_reaching_the_trained_accuracy_is_decided_by_an_interval() -> None:
    reached, short = compare(Trained((0.71, 0.7)), _many(0.7)), compare(Trained((0.8, 0.7)), _many(0.7))
    assert reached.reaches is True and short.reaches is False
    assert [rung.reaches for rung in short.rungs] == [False, True]
    for rung in reached.rungs:
        assert rung.low and rung.high and rung.measured and rung.low < rung.measured < rung.high
    assert compare(Trained((0.5, 0.5)), _many(0.7)).reaches is True


@pytest.mark.parametrize(("requests", "starts"), [(1, 50), (5, 400), (20, 1)])
def test_too_few_requests_or_answers_decide_nothing_and_that_is_said(requests: int, starts: int) -> None:
    few = compare(Trained((0.95, 0.95)), _many(0.2, requests, starts))
    assert few.reaches is None is few.rungs[1].reaches
    assert any(f"{requests} requests are too few" in note and "record more" in note for note in few.notes)


STEPS = np.array([0.75, 0.7, 0.65, 0.6, 0.55])


def _drawn(seed: int, requests: int, spread: float, below: float = 0.0) -> bool | None:
    """Whether a draft reaches `STEPS` that is `below` them, and better or worse by `spread` from request to request."""
    random = np.random.default_rng(seed)
    shares = np.clip(STEPS - below + spread * random.standard_normal((requests, 1)), 0.02, 0.98)
    texts = tuple(_answers(random.random((60, len(STEPS))) < share) for share in shares)
    return compare(Trained(tuple(STEPS)), TeacherForced(texts, len(STEPS))).reaches


@pytest.mark.parametrize("requests", [2, 5, 6, 8, 20])
@pytest.mark.parametrize("spread", [0.0, 0.1, 0.15])
def test_a_draft_as_trained_seldom_falls_short_however_many_steps_and_however_few_requests(
    requests: int, spread: float
) -> None:
    found = [_drawn(seed, requests, spread) for seed in range(120)]
    assert found.count(False) <= 0.05 * len(found)


@pytest.mark.parametrize("spread", [0.0, 0.1])
def test_a_clear_drop_is_found_over_ten_requests(spread: float) -> None:
    found = [_drawn(seed, 10, spread, below=0.25) for seed in range(40)]
    assert found.count(False) >= 0.95 * len(found)


def test_a_shortfall_that_so_few_requests_could_not_show_is_not_said_to_be_none() -> None:
    """Six requests so unlike each other that their interval holds nearly everything."""
    texts = tuple(_answers([[hit]] * 60) for hit in (0, 0, 0, 1, 1, 1))
    found = compare(Trained((0.75,)), TeacherForced(texts, 1))
    assert found.reaches is None and any("too few" in note for note in found.notes)


def test_a_ladder_is_json() -> None:
    document = compare(Trained((0.7, 0.7)), _many(0.7)).to_json()
    assert document["reaches"] is True and len(document["rungs"]) == 2
    assert document["rungs"][0].keys() == {"step", "trained", "measured", "answers", "low", "high", "difference"}
    assert document.keys() >= {"definition", "says", "marginal", "conditional", "trained_length", "walked_length"}


Recorded = tuple[Trace, DraftModel, tuple[int, ...]]


@pytest.fixture(scope="module")
def record(
    tmp_path_factory: pytest.TempPathFactory, target_of: Callable[..., Path], draft_of: Callable[..., Path]
) -> Iterator[Callable[..., Recorded]]:
    """`record(temperature)` serves prompts on a tiny pair with its wiring captured."""
    target, draft = target_of("llama"), draft_of("llama", "gqa")
    checkpoint = read_draft(draft)
    assert checkpoint.wiring
    model, wiring = build_draft(checkpoint, target=target, dtype=torch.float32), checkpoint.wiring.boundaries
    folder = tmp_path_factory.mktemp("ladder")
    prompts = [tuple((17 * i + 5 * j) % 89 + 1 for j in range(5 + 3 * i)) for i in range(6)]
    with Deployment(target, draft, threads=1) as pair:

        def serve(temperature: float, level: Level) -> Recorded:
            trace = folder / f"{temperature}-{level.name}"
            serving = Serving(
                depth=DEPTH, max_new=24, level=level, capture=wiring, ignore_end=True, sampling=Sampling(temperature, 1)
            )
            if not trace.exists():
                pair.serve(prompts, serving, trace=trace)
            return Trace.open(trace), model, wiring

        yield serve


def _blocks(recorded: Recorded) -> list[list[TextFeatures]]:
    trace, _, wiring = recorded
    return blocks(reference_features(trace, read_texts(trace), wiring))


def test_a_greedy_text_is_its_own_target_and_the_walk_is_the_served_one(record: Callable[..., Recorded]) -> None:
    recorded = trace, model, wiring = record(0.0, Level.FULL)
    plain = teacher_forced(model, _blocks(recorded), DEPTH)
    choices = target_choices(trace, model)
    for request, text in read_texts(trace).items():
        assert tuple(choices[request].full) == text.output
    chosen = teacher_forced(model, _blocks(recorded), DEPTH, choices=choices)
    assert plain.walked_length() == chosen.walked_length()
    assert plain.walked_length() == free_run_acceptance(trace, model, wiring=wiring).acceptance_length
    assert _rates(plain, "eagle") == _rates(chosen, "eagle") and 0 < _rates(plain, "eagle")[0] < 1


def test_choices_within_the_draft_vocabulary_are_read_from_logits(record: Callable[..., Recorded]) -> None:
    full, features = record(0.0, Level.FULL), record(0.0, Level.FEATURES)
    table = set(full[1].table().tolist())
    known, bare = target_choices(*full[:2]), target_choices(*features[:2])
    outside = 0
    for request in known:
        for best, within, alone in zip(known[request].full, known[request].within, bare[request].within, strict=True):
            assert within == -1 or within in table
            assert (within, alone) == (best, best) if best in table else alone == -1
            outside += best not in table and within >= 0
    assert outside > 0


def test_at_a_temperature_the_target_s_best_token_counts_and_not_what_came(record: Callable[..., Recorded]) -> None:
    recorded = trace, model, _ = record(1.0, Level.FEATURES)
    with pytest.raises(UserError, match="not the target's choices"):
        teacher_forced(model, _blocks(recorded), DEPTH)
    choices = target_choices(trace, model)
    texts = read_texts(trace)
    assert any(tuple(choices[request].full) != text.output for request, text in texts.items())
    assert all((choices[request].full >= 0).all() for request in texts)
    measured = teacher_forced(model, _blocks(recorded), DEPTH, choices=choices)
    ladder = compare(Trained((0.5,)), measured)
    assert any("temperature 1" in note for note in ladder.notes) and ladder.walked_length is None


@pytest.mark.parametrize(("hit", "trained"), [(0, 0.05), (1, 1.0)])
def test_answers_that_are_all_alike_are_not_sure_of_it(hit: int, trained: float) -> None:
    measured = TeacherForced(tuple(_answers([[hit]] * 4) for _ in range(8)), 1)
    assert compare(Trained((trained,)), measured).reaches is True

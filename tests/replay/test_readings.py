"""What a reading cannot tell apart is said of the step it belongs to; too few texts or answers decide nothing."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from spectrace.replay import readings
from spectrace.replay.hypothesis import Hypothesis
from spectrace.replay.likelihood import Likelihood
from spectrace.replay.readings import Clock, EngineReading, TrainedReading, read_engine, read_training, rivals_of
from spectrace.replay.reproduce import Reproduced


def hypothesis(link: str, fault: str) -> Hypothesis:
    return Hypothesis(link, fault, fault, lambda at: (*at, fault))  # type: ignore[arg-type, misc, return-value]


NORM, PAIRS, RESIDUAL = hypothesis("feedback", "N3"), hypothesis("rope pairs", "R5"), hypothesis("residual", "N1")


def test_rivals_belong_to_their_step() -> None:
    at: Any = ()
    found = TrainedReading(at, (NORM, RESIDUAL), 1.0, 2.0, 0.0, rivals=((), (PAIRS,)))
    assert rivals_of(found, RESIDUAL) == (PAIRS,) and rivals_of(found, NORM) == rivals_of(found, PAIRS) == ()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Configurations are the faults repaired so far: each that is in `worth` makes every token that much likelier."""

    class World:
        shape = type("Shape", (), {"depth": 3})

        def __init__(self) -> None:
            self.worth, self.starts = {"N3": 1.0}, (60,) * 8

        def walks(self, at: Any, texts: Any) -> Any:
            length = 1.0 + sum(self.worth.get(fault, 0.0) for fault in at)
            return [type("Walked", (), {"runs": np.full(4, length), "rounds": 1.0, "correct": length - 1})]

        def likelihood(self, at: Any, texts: Any, **_: Any) -> Likelihood:
            noise = np.random.default_rng(len(at))
            gain = sum(self.worth.get(fault, 0.0) for fault in at)
            return Likelihood(tuple(gain + 0.1 * noise.standard_normal(n) for n in self.starts), 1.0)

    made = World()
    monkeypatch.setattr(readings, "likelihood", made.likelihood)
    monkeypatch.setattr(readings, "surprise", lambda *_: -0.1)
    monkeypatch.setattr(readings, "_starts", lambda texts: iter((1, 1000)))
    return made


def read(world: Any, *around: Hypothesis) -> TrainedReading:
    at: Any = ()
    texts: Any = [0, 1]
    return read_training(at, lambda _: around, world, texts, texts, clock=Clock(60))


def test_a_step_that_makes_the_text_likelier_is_taken(world: Any) -> None:
    found = read(world, PAIRS, NORM)
    assert found.steps == (NORM,) and found.undecided is None
    assert found.gain and 0.9 < found.gain[0] < 1 < found.gain[1] < 1.1


def test_where_texts_are_too_few_for_an_interval_nothing_is_decided_and_that_is_said(world: Any) -> None:
    world.starts = (30, 30)  # four stretches
    found = read(world, NORM)
    assert found.steps == () and found.undecided == NORM and found.gain is None


def test_a_step_that_is_worth_no_acceptance_is_not_taken(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    walks = world.walks
    monkeypatch.setattr(world, "walks", lambda at, texts: walks((), texts))
    found = read(world, NORM)
    assert found.steps == () and found.undecided is None


def test_where_acceptance_is_not_foretold_a_step_is_taken_that_makes_drafts_right_for_longer(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def walks(at: Any, texts: Any) -> Any:
        runs = np.full(4, sum(world.worth.get(fault, 0.0) for fault in at))
        return [type("Walked", (), {"runs": runs, "rounds": 0.0, "correct": 0.0})]

    monkeypatch.setattr(world, "walks", walks)
    found = read(world, PAIRS, NORM)
    assert found.steps == (NORM,) and found.configured is found.best is None


def read_answers(
    monkeypatch: pytest.MonkeyPatch,
    missed: Mapping[tuple[str, ...], Any],
    answers: int,
    *around: Hypothesis,
    seen: tuple[Hypothesis, ...] = (),
) -> EngineReading | None:
    """Which answers are missed, by what was repaired; all that a repair does not say is missed as without it."""

    def reproduce(at: Any, *_: Any, **__: Any) -> Reproduced:
        met = np.ones(answers, bool)
        met[missed.get(tuple(at), missed[()])] = False
        return Reproduced(*(np.arange(answers),) * 4, met, ())

    monkeypatch.setattr(readings, "reproduce", reproduce)
    at: Any = ()
    clock = Clock(60)
    return read_engine(at, lambda _: around, [], None, seen=seen, coarse=False, tolerance=1e-3, clock=clock)


MANY = tuple(hypothesis(f"link {n}", f"F{n}") for n in range(60))


def test_a_step_is_taken_that_surely_meets_more_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = read_answers(monkeypatch, {(): range(20), ("N3",): []}, 300, *MANY, NORM)
    assert found and found.explained and found.steps == (NORM,) and found.reproduced.agreement == 1


@pytest.mark.parametrize(("answers", "missed"), [(4, 1), (14, 1), (49, 1), (4, 4), (30, 3), (100, 6)])
def test_a_handful_of_misses_is_neither_a_fault_nor_the_engine_s_state(
    monkeypatch: pytest.MonkeyPatch, answers: int, missed: int
) -> None:
    found = read_answers(monkeypatch, {(): range(missed), ("N3",): []}, answers, *MANY, NORM)
    assert found is None


def test_of_many_steps_the_best_by_chance_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(1)
    missed: dict[tuple[str, ...], Any] = {(one.fault,): np.flatnonzero(random.random(400) < 0.3) for one in MANY}
    missed[()] = np.arange(120)
    found = read_answers(monkeypatch, missed, 400, *MANY)
    assert found and found.steps == () and not found.explained
    assert max(400 - len(each) for each in missed.values()) >= 400 - 120 + 0.02 * 400  # which chance alone has found


def test_many_misses_that_no_step_explains_are_the_engine_s_state(monkeypatch: pytest.MonkeyPatch) -> None:
    found = read_answers(monkeypatch, {(): range(20)}, 300, *MANY)
    assert found and not found.explained and found.configured.first_miss() is not None


def test_a_step_that_is_sure_stands_where_a_few_misses_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    found = read_answers(monkeypatch, {(): range(30), ("N3",): [0, 1]}, 70, *MANY, NORM)
    assert found and found.explained and found.steps == (NORM,)


def test_what_was_seen_is_taken_first_though_alone_it_explains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that make up for nothing singly, the search would take neither."""
    missed = {(): range(250), ("R5",): range(250), ("N3",): range(250), ("R5", "N3"): []}
    alone = read_answers(monkeypatch, missed, 300, *MANY, NORM, PAIRS)
    found = read_answers(monkeypatch, missed, 300, *MANY, NORM, PAIRS, seen=(PAIRS,))
    assert alone and not alone.explained and alone.steps == ()
    assert found and found.explained and found.steps == (PAIRS, NORM) and found.rivals == ((), ())


def test_what_was_seen_is_told_though_it_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    found = read_answers(monkeypatch, {(): []}, 300, *MANY, seen=(PAIRS,))
    assert found and found.explained and found.steps == (PAIRS,)

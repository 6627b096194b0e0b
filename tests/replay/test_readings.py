"""What a reading cannot tell apart is said of the step it belongs to; too few texts decide nothing, and say so."""

from typing import Any

import numpy as np
import pytest

from spectrace.replay import readings
from spectrace.replay.hypotheses import Hypothesis
from spectrace.replay.likelihood import Likelihood
from spectrace.replay.readings import Clock, TrainedReading, read_training, rivals_of


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

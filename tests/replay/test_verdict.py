"""What to run next is a command that a shell takes as it is meant."""

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spectrace.replay.diagnosis import Verdict
from spectrace.replay.readings import Clock
from spectrace.replay.verdict import Outcome, conclude, record_again
from spectrace.replay.worth import Worth
from spectrace.tracer.acceptance import Acceptance

DRAFT, TARGET, TRACE = Path("/x/my draft"), "/x/it's $HOME", Path("runs/last night")
CASE: Any = SimpleNamespace(
    trace=SimpleNamespace(folder=TRACE, manifest={"target": {"path": TARGET}, "serving": {"depth": 5}}),
    checkpoint=SimpleNamespace(folder=DRAFT),
    served_folder=None,
    target=None,
)


def outcome(**changes: Any) -> Outcome:
    """Nothing found and nothing decided, but for what is given."""
    nothing: dict[str, Any] = {
        "case": CASE,
        "evidence": SimpleNamespace(missing="", doubts=()),
        "truth": SimpleNamespace(sources=()),
        "readings": None,
        "broken": (),
        "causes": (),
        "served": Acceptance(None, None, (), (), 0, 0, 0, 0),
        "repaired": None,
        "worth": Worth(),
        "ladder": None,
        "coverage": {},
        "notes": (),
        "clock": Clock(100.0),
    }
    return Outcome(**{**nothing, **changes})


def test_recording_again_names_the_folders_that_served() -> None:
    words = shlex.split(record_again(CASE))
    assert words[:8] == ["spectrace", "run", "--target", TARGET, "--draft", str(DRAFT), "--depth", "5"]


@pytest.mark.parametrize(("skipped", "more"), [(0, ["--target", "TARGET"]), (3, ["--budget", "500"])])
def test_diagnosing_again_names_trace_and_draft_and_what_was_too_little(skipped: int, more: list[str]) -> None:
    clock = Clock(100.0)
    clock.skipped = skipped
    told = conclude(outcome(clock=clock))
    words = ["spectrace", "diagnose", str(TRACE), "--draft", str(DRAFT), *more]
    assert told.verdict is Verdict.INSUFFICIENT and shlex.split(told.next_command) == words


def test_of_another_engine_s_trace_the_target_is_recorded_beside_it_first() -> None:
    trace = SimpleNamespace(folder=TRACE, manifest={**CASE.trace.manifest, "engine": "vllm"})
    told = conclude(outcome(case=SimpleNamespace(**{**vars(CASE), "trace": trace})))
    words = ["spectrace", "reference", "--target", TARGET, "--prompts", str(TRACE), "--out", "REFERENCE"]
    assert told.verdict is Verdict.INSUFFICIENT and shlex.split(told.next_command) == words


NO_FAULT = SimpleNamespace(
    engine=SimpleNamespace(explained=True, reproduced=SimpleNamespace(agreement=1.0, met=[True])),
    trained=SimpleNamespace(undecided=None, surprise=0.0),
    matches=(SimpleNamespace(shown=None),),
    table=lambda _broken: {},
)


@pytest.mark.parametrize(
    ("untrimmed", "cut", "verdict", "said"),
    [
        (2.5, 9, Verdict.HEALTHY, "2.500 at least is above"),
        (1.8, 9, Verdict.INSUFFICIENT, "whether acceptance pays is not known"),
        (1.8, 1, Verdict.WEAK_DRAFT, "1.500 is below"),
    ],
)
def test_rounds_that_were_cut_can_show_that_a_draft_pays_and_not_that_it_does_not(
    untrimmed: float, cut: int, verdict: Verdict, said: str
) -> None:
    served = Acceptance(1.5, untrimmed, (0.3,), (0.3,), 4, 2, 4 + cut, round((untrimmed - 1) * (4 + cut)))
    found = conclude(outcome(readings=NO_FAULT, served=served, worth=Worth(break_even_acceptance=2.0)))
    assert found.verdict is verdict and said in found.notes[0]
    assert bool(found.next_command) == (verdict is Verdict.INSUFFICIENT)

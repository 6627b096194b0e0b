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


def test_recording_again_names_the_folders_that_served() -> None:
    words = shlex.split(record_again(CASE))
    assert words[:8] == ["spectrace", "run", "--target", TARGET, "--draft", str(DRAFT), "--depth", "5"]


@pytest.mark.parametrize(("skipped", "more"), [(0, ["--target", "TARGET"]), (3, ["--budget", "500"])])
def test_diagnosing_again_names_trace_and_draft_and_what_was_too_little(skipped: int, more: list[str]) -> None:
    clock = Clock(100.0)
    clock.skipped = skipped
    nothing: Any = SimpleNamespace(missing="", doubts=())
    served = Acceptance(None, None, (), (), 0, 0, 0, 0)
    told = conclude(Outcome(CASE, nothing, None, (), served, None, Worth(), None, {}, (), clock))
    words = ["spectrace", "diagnose", str(TRACE), "--draft", str(DRAFT), *more]
    assert told.verdict is Verdict.INSUFFICIENT and shlex.split(told.next_command) == words

"""Verified rows and request rows say what a round brought, and flag one that brought more than was kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from spectrace.engine.plan import Decision, DraftTree
from spectrace.engine.recording import Recording
from spectrace.engine.request_log import RequestLog
from spectrace.engine.sampling import GREEDY
from spectrace.engine.scheduler import Request, Scheduler
from spectrace.engine.tree import Tree
from spectrace.tracer.acceptance import acceptance_of_rows
from spectrace.tracer.manifest import create_trace
from spectrace.tracer.rows import Level, Phase
from spectrace.tracer.trace import Trace

PROMPT, FIRST, DRAFTED = (1, 2, 3), 10, (11, 12, 13)


def log_one_round(
    folder: Path, *, max_new: int, end: int | None, correct: int, bonus: int = 14
) -> tuple[Trace, Request]:
    """A prefill pass and one round of three drafts, of which the first `correct` are right."""
    create_trace(folder, {})
    ends = frozenset() if end is None else frozenset({end})
    scheduler = Scheduler(depth=3, concurrency=1, chunk=None, end_tokens=ends)
    request = Request(0, "zero", PROMPT, max_new)
    scheduler.add(request)
    log = RequestLog(scheduler, GREEDY, Recording(folder, Level.LIGHT, {}))
    choices = [*DRAFTED[:correct], bonus, *[90] * (3 - correct)]
    decisions = [
        Decision(0, (2, 3, FIRST), (0, 1, 2), FIRST),
        Decision(0, tuple(choices), tuple(range(correct + 1)), bonus),
    ]
    for decision in decisions:
        step = scheduler.plan()
        assert step
        drafts = scheduler.apply([decision])
        log.step(step, [decision])
        if drafts.groups:
            scheduler.take_drafts([DraftTree(0, Tree(DRAFTED, (-1, 0, 1)))])
    assert log.close() is None
    return Trace.open(folder), request


@pytest.mark.parametrize(
    ("max_new", "end", "correct", "bonus", "output", "reason", "cut"),
    [
        (99, None, 2, 14, (10, 11, 12, 14), "", False),
        (4, None, 2, 14, (10, 11, 12, 14), "length", False),
        (3, None, 2, 14, (10, 11, 12), "length", True),
        (2, None, 0, 14, (10, 14), "length", False),
        (2, None, 3, 14, (10, 11), "length", True),
        (99, 14, 2, 14, (10, 11, 12, 14), "stop", False),
        (99, 12, 2, 14, (10, 11, 12), "stop", True),
        (99, 12, 1, 12, (10, 11, 12), "stop", False),
        (3, 12, 3, 14, (10, 11, 12), "stop", True),
        (2, 12, 3, 14, (10, 11), "length", True),
    ],
)
def test_a_round_is_cut_if_it_brought_more_than_was_kept(
    max_new: int,
    end: int | None,
    correct: int,
    bonus: int,
    output: tuple[int, ...],
    reason: str,
    cut: bool,
    tmp_path: Path,
) -> None:
    trace, request = log_one_round(tmp_path / "t", max_new=max_new, end=end, correct=correct, bonus=bonus)
    verified = trace.rows("verified")
    assert (tuple(request.output), request.finish_reason) == (output, reason)
    assert verified["cut"].tolist() == [cut] * 4
    assert verified["accepted"].tolist() == [node <= correct for node in range(4)]
    found = acceptance_of_rows(verified)
    assert (found.rounds, found.rounds_untrimmed, found.correct_drafts_untrimmed) == (0 if cut else 1, 1, correct)


def test_a_node_says_who_drafted_what_and_what_the_target_wanted_instead(tmp_path: Path) -> None:
    verified = log_one_round(tmp_path / "t", max_new=99, end=None, correct=1)[0].rows("verified")
    assert verified["token"].tolist() == [FIRST, *DRAFTED]
    assert verified["target_token"].tolist() == [11, 14, 90, 90]
    assert verified["parent"].tolist() == [-1, 0, 1, 2]
    assert verified["node"].tolist() == verified["source_row"].tolist() == [0, 1, 2, 3]
    assert verified["position"].tolist() == [3, 4, 5, 6]
    assert set(verified["pass"].tolist()) == {1} and set(verified["round"].tolist()) == {0}
    assert set(verified["phase"].tolist()) == {Phase.VERIFY}


def test_a_request_is_told_once_when_it_has_finished(tmp_path: Path) -> None:
    requests = log_one_round(tmp_path / "t", max_new=3, end=None, correct=2)[0].rows("requests")
    assert requests["id"].tolist() == ["zero"]
    assert (requests["prompt_tokens"][0].tolist(), requests["output_tokens"][0].tolist()) == ([1, 2, 3], [10, 11, 12])
    assert (requests["rounds"].tolist(), requests["correct_drafts"].tolist()) == ([1], [2])
    assert len(log_one_round(tmp_path / "u", max_new=99, end=None, correct=2)[0].rows("requests")) == 0


def test_without_a_recording_nothing_is_written() -> None:
    scheduler = Scheduler(depth=1, concurrency=1, chunk=None, end_tokens=frozenset())
    scheduler.add(Request(0, "0", (1,), 1))
    log, step = RequestLog(scheduler, GREEDY, None), scheduler.plan()
    assert step
    decision = Decision(0, (5,), (0,), 5)
    scheduler.apply([decision])
    log.step(step, [decision])
    assert log.close() is None

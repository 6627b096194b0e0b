"""A process that hooks an engine says how it fared, in bytes that are checked, and nothing of it goes unheard."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from spectrace.cli.check import examine
from spectrace.cli.info import info_json, render_info
from spectrace.tracer import Keys, Recorder, Trace, create_trace, seal_trace
from spectrace.tracer.status import STATUS, HookAccount, RoundAccount, Status, StepAccount


def recorded(folder: Path, *statuses: Status, correct: int = 1, finish: str = "length") -> Trace:
    """One request with one round of two drafts; each status is of a writer of its own."""
    create_trace(folder, {})
    if not any(status.counted for status in statuses):
        statuses = (*statuses, Status(counted=RoundAccount(1, 2, 1)))
    for rank, status in enumerate(statuses):
        Recorder(folder, role="target", rank=rank, status=lambda one=status: one).close()  # type: ignore[misc]
    with Recorder(folder, role="scheduler") as recorder:
        key = Keys(request=0, pass_=1, position=[3, 4, 5], node=[0, 1, 2], round=0)
        accepted = [node <= correct for node in range(3)]
        recorder.verified(
            key, parent=[-1, 0, 1], token=[1, 2, 3], target_token=[2, 3, 4], accepted=accepted, cut=False, source_row=0
        )
        recorder.requests(
            Keys(request=0, pass_=0, position=0), id=["a"], prompt_tokens=[[1]], output_tokens=[[1]], cached_prefix=0,
            temperature=0.0, finish_reason=finish, rounds=1, correct_drafts=correct, depth_limit=2,
        )  # fmt: skip
    assert seal_trace(folder) == []
    return Trace.open(folder)


def told(trace: Trace) -> list[tuple[str, str]]:
    return [(problem.kind, problem.message) for problem in trace.verify()]


def page(trace: Trace) -> str:
    console = Console(width=200, record=True, file=StringIO())
    console.print(render_info(trace, None))
    return console.export_text()


GOOD = Status({"A.b": HookAccount(calls=3, secs=0.1, host_secs=0.9)}, ("A.b",), StepAccount(3, 3), None, ("a note",))


def test_a_status_reads_back_and_is_covered_by_the_ledger(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "trace", GOOD)
    assert trace.statuses["target-0"] == GOOD and told(trace) == [] and examine(trace.folder).ok
    assert GOOD.share == pytest.approx(0.1) and info_json(trace)["hook_share"] == {"target-0": pytest.approx(0.1)}
    assert "a note" in page(trace) and "hooks took 10.0%" in page(trace)
    path = trace.folder / "target-0" / STATUS
    path.write_bytes(path.read_bytes().replace(b'"calls": 3', b'"calls": 4'))
    assert examine(trace.folder).exit_code == 3
    path.unlink()
    assert examine(trace.folder).exit_code == 3


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"hooks": {"a": {"x": 1}}}'])
def test_what_is_no_status_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        Status.read(data)


@pytest.mark.parametrize(
    ("hook", "line"),
    [
        (HookAccount(refused="A has no b"), "A.b is not hooked: A has no b"),
        (HookAccount(calls=5, failures=2, failure="KeyError: 'x'"), "failed 2 of 5 times, first with KeyError: 'x'"),
        (HookAccount(), "the hook on A.b never fired"),
    ],
)
def test_a_hook_that_is_not_what_it_should_be_is_loud(tmp_path: Path, hook: HookAccount, line: str) -> None:
    trace = recorded(tmp_path / "trace", Status({"A.b": hook}, (), StepAccount(3, 3)))
    [(kind, message)] = told(trace)
    assert kind == "hook" and line in message and examine(trace.folder).exit_code == 1
    assert "NOT RECORDED AS IT SHOULD BE" in page(trace) and line in page(trace)
    assert info_json(trace)["not recorded"] == [message]


def test_a_hook_that_had_no_step_to_fire_in_is_no_trouble(tmp_path: Path) -> None:
    assert told(recorded(tmp_path / "trace", Status({"A.b": HookAccount()}, (), StepAccount()))) == []


@pytest.mark.parametrize(
    ("steps", "line"),
    [
        (StepAccount(5, 3), "the engine began 5 steps, and 2 of them never came"),
        (
            StepAccount(5, 3, failures=2, failure="ValueError: y"),
            "2 steps could not be written, the first for ValueError",
        ),
    ],
)
def test_steps_that_are_missing_are_counted(tmp_path: Path, steps: StepAccount, line: str) -> None:
    [(kind, message)] = told(recorded(tmp_path / "trace", Status({}, (), steps)))
    assert kind == "steps" and line in message


@pytest.mark.parametrize(
    ("counted", "finish", "agrees"),
    [
        (RoundAccount(1, 2, 1), "length", True),
        (RoundAccount(1, 2, 0), "length", False),
        (RoundAccount(2, 4, 1), "length", False),
        (RoundAccount(0, 0, 0), "length", False),
        (RoundAccount(0, 0, 0), "abort", True),
        (RoundAccount(2, 4, 1), "abort", True),
        (RoundAccount(4, 4, 1), "abort", False),
    ],
)
def test_rounds_are_held_against_the_engine_s_own_count(
    tmp_path: Path, counted: RoundAccount, finish: str, agrees: bool
) -> None:
    """Of a request that was aborted one side may not hear of the last rounds; otherwise both count the same."""
    found = told(recorded(tmp_path / "trace", Status(counted=counted), finish=finish))
    assert [kind for kind, _ in found] == ([] if agrees else ["steps"])


def test_a_status_is_there_while_recording_and_after_a_kill(tmp_path: Path) -> None:
    create_trace(tmp_path / "trace", {})
    recorder = Recorder(tmp_path / "trace", role="target", status=lambda: GOOD)
    assert recorder.flush()
    trace = Trace.open(tmp_path / "trace")
    assert trace.statuses["target-0"] == GOOD and not trace.sealed and told(trace) == []
    recorder.close()


def test_rounds_that_nothing_is_held_against_are_told_of(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "trace", Status(counted=RoundAccount(1, 2, 1)), Status(steps=StepAccount(1, 1)))
    assert told(trace) == []
    alone = recorded(tmp_path / "alone", Status(steps=StepAccount(1, 1)), Status(counted=RoundAccount()))
    (alone.folder / "target-1").rename(tmp_path / "engine")
    (alone.folder / "SEAL").unlink()
    assert seal_trace(alone.folder) == []
    [(kind, message)] = told(Trace.open(alone.folder))
    assert kind == "steps" and "held against nothing" in message

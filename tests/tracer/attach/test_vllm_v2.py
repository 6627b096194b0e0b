"""One story told through imitations of vLLM's two runners: V2 shows the same rows, and within graphs no wrong ones."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent))

from imitated_vllm.runners import MODES, v2
from imitated_vllm.story import STORY, Host, Plan, Texts
from imitated_vllm.wheel import Wheel

from spectrace.tracer.acceptance import acceptance_of_rows
from spectrace.tracer.attach import LEVEL, TRACE, vllm
from spectrace.tracer.attach.hooks import Hooks
from spectrace.tracer.attach.session import Tally
from spectrace.tracer.attach.steps import Step
from spectrace.tracer.attach.vllm_v2 import V2Capture
from spectrace.tracer.manifest import create_trace, seal_trace
from spectrace.tracer.rowset import Rows
from spectrace.tracer.trace import Trace

Recorded = Callable[..., Trace]


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """`recorded(mode, depth)`: the story as a runner of that mode tells it, through the hooks that are placed on it."""
    monkeypatch.setenv(LEVEL, "full")
    monkeypatch.setattr(vllm, "_rank", lambda: 0)
    monkeypatch.setattr(vllm, "_last_stage", lambda: True)
    monkeypatch.setattr(vllm, "_facts", facts)

    numbers = itertools.count()

    def record(mode: str, depth: int = 3, before: Callable[[Host], None] = lambda _: None) -> Trace:
        folder = tmp_path / f"{mode} {next(numbers)}"
        create_trace(folder, {})
        monkeypatch.setenv(TRACE, str(folder))
        monkeypatch.setattr(vllm, "_hooks", Hooks())
        host = MODES[mode](Wheel(), depth)
        speculative, parallel = SimpleNamespace(method="eagle3"), SimpleNamespace(data_parallel_size=1)
        host.runner.vllm_config = SimpleNamespace(depth=depth, speculative_config=speculative, parallel_config=parallel)
        before(host)
        vllm._begin(host.runner)
        capture = vllm._captures.get(host.runner)
        assert capture, "nothing is captured"
        if mode != "V1":
            idle = host.output(None, ())
            idle.total_num_scheduled_tokens = 5
            host.runner.execute_model(idle, dummy_run=True)
        host.serve(STORY)
        capture.session.close()
        counted_elsewhere(folder)
        assert seal_trace(folder) == []
        return Trace.open(folder)

    return record


def counted_elsewhere(folder: Path) -> None:
    """The scheduler's own counts, which these runners do not have, so that nothing else is amiss."""
    found, tally = acceptance_of_rows(Trace.open(folder).rows("verified")), Tally(Hooks())
    tally.counted.rounds, tally.counted.correct_drafts = found.rounds_untrimmed, found.correct_drafts_untrimmed
    tally.close()


def facts(runner: Any, _drafter: Any, _rank: int) -> dict[str, dict[str, Any]]:
    run = {"serving": {"depth": runner.vllm_config.depth}}
    return {"target": {"expects": ["emitted"], "run": run}, "draft": {}, "scheduler": {}}


def rows_of(trace: Trace, family: str, **equals: Any) -> Rows:
    rows = trace.rows(family, **equals)
    return rows.take(np.lexsort([rows[name] for name in ("node", "depth", "pass", "request")]))


def same(one: Trace, other: Trace, family: str, *, but: tuple[str, ...] = (), **equals: Any) -> int:
    """Compare all columns and tensors of a family's rows, `but` some; returns how many rows there are."""
    left, right = rows_of(one, family, **equals), rows_of(other, family, **equals)
    assert len(left) == len(right) and left.columns == right.columns
    for column in set(left.columns) - set(but):
        if not column.endswith("_secs"):
            assert _plain(left[column]) == _plain(right[column]), (family, column)
    for wide in left.family.wides:
        if wide.kind in but:
            continue
        there = left.has(wide.kind)
        assert there.tolist() == right.has(wide.kind).tolist(), (family, wide.kind)
        for column in wide.columns if there.any() else ():
            values = [rows.take(there).payload(wide.kind, column) for rows in (left, right)]
            assert np.array_equal(*values), (family, wide.kind)
    return len(left)


def _plain(values: np.ndarray) -> list[Any]:
    """Of token lists, lists; NaN as None, which equals itself."""
    found = [list(value) if isinstance(value, np.ndarray) else value for value in values.tolist()]
    return [None if value != value else value for value in found]


TARGET = ("emitted", "verified", "requests")


def test_an_eager_v2_runner_shows_all_that_v1_shows(recorded: Recorded) -> None:
    one, other = recorded("V1"), recorded("V2, eager")
    assert one.verify() == [] and other.verify() == []
    assert [same(one, other, family) > 2 for family in TARGET] == [True] * 3
    assert [same(one, other, family, live=True) > 20 for family in ("received", "drafted")] == [True] * 2


@pytest.mark.parametrize("mode", ["V2, a graph for each", "V2, a graph for all"])
def test_graphs_of_three_forwards_show_what_every_one_was_fed(mode: str, recorded: Recorded) -> None:
    one, other = recorded("V1"), recorded(mode)
    assert other.verify() == [], "what cannot fire within graphs is not missed"
    assert [same(one, other, family) > 2 for family in TARGET] == [True] * 3
    assert same(one, other, "received", live=True) > 20
    hidden = ("draft_token", "state_hash", "logsumexp", "hidden", "state", "logits")
    assert same(one, other, "drafted", but=hidden, live=True) > 20
    [found, drafted] = [rows_of(trace, "drafted", live=True) for trace in (one, other)]
    assert (drafted["draft_token"] == -1).all() and not drafted.has("hidden").any() and not drafted.has("logits").any()
    places = np.stack([drafted[name] for name in ("request", "pass", "depth")], 1)
    answering = (places[:, 2] == 0) & (places != np.roll(places, -1, 0)).any(1)
    assert drafted.has("state").tolist() == answering.tolist(), "of the first forward, where it answers"
    states = [rows.take(answering).payload("state") for rows in (found, drafted)]
    assert np.array_equal(*states) and answering.sum() > 5


def test_within_a_graph_of_many_forwards_the_first_and_the_last_are_seen_and_none_is_made_up(
    recorded: Recorded,
) -> None:
    one, each, fused = recorded("V1", 5), recorded("V2, a graph for each", 5), recorded("V2, a graph for all", 5)
    assert fused.verify() == [] and same(one, each, "received", live=True) > 20
    depths = [np.unique(fused.rows(family)["depth"]).tolist() for family in ("received", "drafted")]
    assert depths == [[0, 1, 4]] * 2
    for depth in depths[0]:
        assert same(one, fused, "received", depth=depth, live=True) > 5
    assert same(one, fused, "verified") > 2, "their tokens are in the next round"


def test_one_forward_is_one_draft_deep(recorded: Recorded) -> None:
    one, other = recorded("V1", 1), recorded("V2, a graph for all", 1)
    assert same(one, other, "received", live=True) > 5 and set(other.rows("drafted")["depth"].tolist()) == {0}


def test_a_forward_through_a_wrapper_is_seen_once_whether_it_is_run_or_replayed(recorded: Recorded) -> None:
    def wrap(host: Host) -> None:
        model, replays = host.model, itertools.cycle([False, True])

        def call(_wrapper: Any, given: Any) -> Any:
            arguments = given.kwargs
            return host.math.forward(SimpleNamespace(**arguments)) if next(replays) else model.forward(**arguments)

        file, name = "compilation/breakable_cudagraph.py", "BreakableCUDAGraphWrapper"
        wrapper = Wheel().made(file, name, __call__=call, unwrap=lambda _, __: model)()
        wrapper.combine_hidden_states = lambda states: model.combine_hidden_states(states)
        wrapper.compute_logits = lambda hidden: model.compute_logits(hidden)
        wrapper.forward = wrapper
        host.runner.drafter.model = wrapper

    one, other = recorded("V1"), recorded("V1", before=wrap)
    assert other.verify() == [] and [same(one, other, family) > 20 for family in ("received", "drafted")] == [True] * 2


def test_what_warms_up_is_none_of_the_story(recorded: Recorded) -> None:
    def warm_up(host: Host) -> None:
        host.serve((Plan({"a": (0, 3)}), Plan({}, {"a": 1}), Plan(left=("a",))))
        host.texts = Texts(host.depth)

    one, other = recorded("V1"), recorded("V2, eager", before=warm_up)
    assert all(same(one, other, family) for family in TARGET) and other.verify() == []


def test_a_request_that_was_preempted_comes_as_if_new_and_is_met_once() -> None:
    told: list[Step] = []
    session: Any = SimpleNamespace(
        room=lambda: True, steps=SimpleNamespace(began=0), put=lambda step, _nbytes: told.append(step)
    )
    capture, host = V2Capture(session, full=False), v2(Wheel(), 3)
    for plan in (Plan({"a": (0, 3)}), Plan({"a": (0, 3)})):
        host.batch = host.texts.batch(plan)
        output = host.output(host.batch, ())
        for _ in capture.execute_model(host.runner, {"scheduler_output": output, "dummy_run": False}):
            host.runner.execute_model(output)
        for _ in capture.sample_tokens(host.runner, {}):
            pass
    assert [list(step.met) for step in told] == [["a"], []] and not capture.new


@pytest.mark.parametrize(
    ("on", "says"),
    [
        ({"adaptive_verification": object()}, "adaptive verification"),
        ({"pcp_manager": object()}, "context parallelism"),
        ({"batch_sharder": object()}, "enable_batch_sharded_sampling"),
    ],
)
def test_what_cannot_be_told_apart_is_refused_aloud(
    on: dict[str, Any], says: str, recorded: Recorded, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(AssertionError, match="nothing is captured"):
        recorded("V2, eager", before=lambda host: vars(host.runner).update(on))
    assert not vllm._hooks.placed and says in caplog.text


def test_a_draft_that_runs_unseen_is_told_of(recorded: Recorded) -> None:
    trace = recorded("V2, eager", before=lambda host: setattr(host, "seen", False))
    [problem] = trace.verify()
    assert "propose failed 6 of 6 times, first with LookupError: 3 of the draft's 3 forwards" in problem.message
    assert not len(trace.rows("received")) and len(trace.rows("verified"))


def test_stages_of_a_pipeline_but_the_last_record_nothing(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "_last_stage", lambda: False)
    with pytest.raises(AssertionError, match="nothing is captured"):
        recorded("V2, eager")
    assert not vllm._hooks.placed

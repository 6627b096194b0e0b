"""Steps of a padded chain, as vLLM feeds its draft, become the rows that the reference engine would have written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spectrace.tracer.acceptance import acceptance_of_rows
from spectrace.tracer.attach.steps import Forward, Group, Scribe, Step
from spectrace.tracer.manifest import create_trace, seal_trace
from spectrace.tracer.recorder import Recorder
from spectrace.tracer.rows import Level, Phase
from spectrace.tracer.staging import Staged, stage
from spectrace.tracer.trace import Trace

KNOWN = {"prompt": (10, 11, 12), "max_new": 5, "ends": frozenset[int]()}


def ids(*values: Any) -> Staged:
    return stage(np.array(values, np.int64))


def feature(position: float) -> Tensor:
    return torch.full((4,), float(position))


def forward(tokens: list[int], positions: list[int], inputs: Tensor) -> Forward:
    state = stage(torch.tensor(positions).float()[:, None].expand(-1, 2) + 0.5)
    return Forward(ids(*tokens), ids(*positions), inputs=stage(inputs), state=state)


def prefill(number: int, name: str) -> Step:
    """Three rows of a prompt; 20 is sampled after them, 21 and 22 are drafted."""
    return Step(
        number, 1.0, met={name: KNOWN}, groups=[Group(name, 3, fed=3)], tokens=ids(10, 11, 12), positions=ids(0, 1, 2),
        slots=stage(torch.stack([feature(p) for p in range(3)])), slot_width=2, targets=ids(20), sampled=ids([20]),
        forwards=[
            forward([11, 12, 20], [0, 1, 2], torch.stack([feature(p) for p in range(3)])),
            forward([21], [3], torch.zeros(1, 2)),
        ],
        drafts=ids([21, 22]),
    )  # fmt: skip


def verify(number: int, name: str, sampled: list[int], *, first: int = 3) -> Step:
    """A root and two drafts; what is sampled is padded with -1."""
    rows = torch.stack([feature(first + p) for p in range(3)])
    positions = [first, first + 1, first + 2]
    kept = sum(token >= 0 for token in sampled)
    return Step(
        number, 2.0, groups=[Group(name, 3, drafts=2, fed=3)], tokens=ids(20, 21, 22), positions=ids(*positions),
        slots=stage(rows), slot_width=2, targets=ids(21, 30, 31), sampled=ids(sampled), last=ids(kept - 1),
        forwards=[forward([21, 30, 31], positions, rows), forward([40], [first + kept], torch.zeros(1, 2))],
        drafts=ids([40, 41]),
    )  # fmt: skip


def written(folder: Path, *steps: Step) -> Trace:
    create_trace(folder, {})
    recorders = [
        Recorder(folder, role=role, level=Level.FULL, strict=True) for role in ("target", "draft", "scheduler")
    ]
    scribe = Scribe(*recorders, depth=2)
    for step in steps:
        scribe.write(step)
    for recorder in recorders:
        recorder.close()
    assert seal_trace(folder) == []
    return Trace.open(folder)


def test_a_round_is_verified_node_by_node_and_its_rejected_row_is_not_live(tmp_path: Path) -> None:
    trace = written(tmp_path / "trace", prefill(0, "a"), verify(1, "a", [21, 30, -1]))
    nodes = trace.rows("verified")
    assert nodes["accepted"].tolist() == [True, True, False] and nodes["parent"].tolist() == [-1, 0, 1]
    assert nodes["token"].tolist() == [20, 21, 22] and nodes["target_token"].tolist() == [21, 30, 31]
    assert set(nodes["round"].tolist()) == {0} and set(nodes["pass"].tolist()) == {1} and not nodes["cut"].any()
    fed = trace.rows("received", depth=0)
    assert fed["live"].tolist() == [True] * 5 + [False] and fed["token"].tolist() == [11, 12, 20, 21, 30, 31]
    drafted = trace.rows("drafted", depth=0)
    assert drafted["token"].tolist() == [-1, -1, 21, -1, 40, -1]
    assert drafted["round"].tolist() == [0, 0, 0, 1, 1, 1]
    deeper = trace.rows("received", depth=1)
    assert deeper["parent"].tolist() == [2, 1] and deeper["position"].tolist() == [3, 5]
    assert set(deeper["phase"].tolist()) == {Phase.DRAFT_DECODE}


def test_what_is_handed_over_carries_the_hashes_of_what_was_emitted(tmp_path: Path) -> None:
    trace = written(tmp_path / "trace", prefill(0, "a"), verify(1, "a", [21, 30, -1]))
    emitted, received = trace.rows("emitted"), trace.rows("received", depth=0)
    assert (emitted["hashes"] == received["hashes"]).all() and emitted["hashes"].shape == (6, 2)
    assert emitted["phase"].tolist() == [Phase.PREFILL] * 3 + [Phase.VERIFY] * 3
    assert emitted["target_token"].tolist() == [-1, -1, 20, 21, 30, 31]


def test_a_request_is_written_when_its_answer_ends_and_the_round_that_it_cuts_is_told(tmp_path: Path) -> None:
    trace = written(
        tmp_path / "trace", prefill(0, "a"), verify(1, "a", [21, 30, -1]), verify(2, "a", [21, 22, 31], first=5),
        verify(3, "a", [21, 30, -1], first=8),
    )  # fmt: skip
    [request] = trace.rows("requests")["output_tokens"].tolist()
    assert list(request) == [20, 21, 30, 21, 22] and trace.rows("requests")["finish_reason"].tolist() == ["length"]
    verified = trace.rows("verified")
    assert verified["cut"].tolist() == [False] * 3 + [True] * 3, "the pass after the end is none of its rounds"
    found = acceptance_of_rows(verified)
    assert (found.rounds, found.rounds_untrimmed, found.correct_drafts_untrimmed) == (1, 2, 3)
    assert not trace.rows("emitted", step=3)["live"].any()


def test_a_step_without_room_is_counted_and_the_book_goes_on(tmp_path: Path) -> None:
    lost = verify(1, "a", [21, 30, -1])
    lost.thin, lost.slots, lost.forwards = True, None, []
    trace = written(tmp_path / "trace", prefill(0, "a"), lost, verify(2, "a", [21, 22, -1], first=5))
    counts = trace.account().families
    assert [(counts[name].recorded, counts[name].dropped) for name in ("emitted", "received")] == [(6, 3), (8, 3)]
    assert len(trace.rows("verified")) == 6 and trace.rows("requests")["rounds"].tolist() == [2]


def test_drafts_that_nobody_drafted_are_counted_as_the_engine_does_and_left_out_of_lengths(tmp_path: Path) -> None:
    """vLLM fills the pass of a prompt of one token up with drafts of nobody, and counts them."""
    first = verify(0, "a", [20, -1, -1], first=0)
    first.met = {"a": {**KNOWN, "prompt": (20,)}}
    first.groups = [replace(first.groups[0], filled=True)]
    found = acceptance_of_rows(
        written(tmp_path / "trace", first, verify(1, "a", [21, -1, -1], first=1)).rows("verified")
    )
    assert (found.rounds, found.rounds_untrimmed) == (1, 2)


def test_a_prompt_that_goes_on_asks_for_no_token(tmp_path: Path) -> None:
    piece = Step(
        0, 1.0, met={"a": {**KNOWN, "prompt": (10, 11, 12, 13)}}, groups=[Group("a", 2, fed=2, silent=True)],
        tokens=ids(10, 11), positions=ids(0, 1), targets=ids(50), sampled=ids([50]),
        slots=stage(torch.zeros(2, 4)), slot_width=2,
        forwards=[forward([11, 12], [0, 1], torch.zeros(2, 4)), forward([51], [2], torch.zeros(1, 2))],
        drafts=ids([51, 52]),
    )  # fmt: skip
    trace = written(tmp_path / "trace", piece, Step(1, 2.0, left=("a",)))
    assert trace.rows("drafted")["token"].tolist() == [-1, -1, -1]
    assert trace.rows("received")["live"].tolist() == [True, True, False]
    assert set(trace.rows("received")["round"].tolist()) == {-1}
    assert trace.rows("requests")["finish_reason"].tolist() == ["abort"]


def test_where_only_the_states_that_answer_are_seen_they_lie_at_the_rows_that_answer(tmp_path: Path) -> None:
    partial = verify(1, "a", [21, 30, -1])
    first, _ = partial.forwards
    assert first
    first.state = stage(torch.full((1, 2), 7.0))
    trace = written(tmp_path / "trace", prefill(0, "a"), partial)
    drafted = trace.rows("drafted", depth=0, step=1)
    drafted = drafted.take(np.argsort(drafted["node"]))
    assert drafted.has("state").tolist() == [False, True, False] and drafted["token"].tolist() == [-1, 40, -1]
    assert drafted.take([1]).tensor("state").tolist() == [[7.0, 7.0]]


def test_a_forward_that_ran_out_of_sight_leaves_no_rows_and_the_next_its_own_depth(tmp_path: Path) -> None:
    step = prefill(0, "a")
    first, deeper = step.forwards
    step.forwards = [first, None, None, deeper]
    trace = written(tmp_path / "trace", step)
    for family in ("received", "drafted"):
        assert trace.rows(family)["depth"].tolist() == [0, 0, 0, 3]


def test_a_name_may_be_given_again_in_the_step_that_says_its_owner_is_gone(tmp_path: Path) -> None:
    again = prefill(1, "a")
    again.left = ("a",)
    trace = written(tmp_path / "trace", prefill(0, "a"), again, Step(2, 3.0, left=("a",)))
    requests = trace.rows("requests")
    assert requests["request"].tolist() == [0, 1] and requests["finish_reason"].tolist() == ["abort", "abort"]


def test_the_token_that_came_is_told_of_accepted_rows_and_of_others_the_target_s_best(tmp_path: Path) -> None:
    """An engine may choose by more than the logits that a hook sees, such as penalties."""
    trace = written(tmp_path / "trace", prefill(0, "a"), verify(1, "a", [21, 33, -1]))
    assert trace.rows("emitted", **{"pass": 1})["target_token"].tolist() == [21, 33, 31]
    assert trace.rows("verified")["target_token"].tolist() == [21, 33, 31]


def test_a_request_under_way_at_the_end_is_told_of_as_far_as_it_got(tmp_path: Path) -> None:
    create_trace(tmp_path / "trace", {})
    recorders = [Recorder(tmp_path / "trace", role=role, strict=True) for role in ("target", "draft", "scheduler")]
    scribe = Scribe(*recorders, depth=2)
    scribe.write(prefill(0, "a"))
    scribe.end()
    for recorder in recorders:
        recorder.close()
    requests = Trace.open(tmp_path / "trace").rows("requests")
    assert requests["finish_reason"].tolist() == ["abort"] and requests["output_tokens"][0].tolist() == [20]

"""Runs that compute the same are not called different, however they were served; every broken link is, at its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor

from spectrace.engine.sampling import Sampling
from spectrace.replay.diff.diff import Compared, Diff, Verdict, diff, rows_that_count
from spectrace.replay.diff.floor import Noise
from spectrace.replay.diff.measure import Measure
from spectrace.replay.diff.sites import Site, Where
from spectrace.replay.diff.tally import First, Found
from spectrace.tracer import Keys, Recorder, create_trace, seal_trace
from spectrace.tracer.errors import UserError
from spectrace.tracer.rows import Level
from spectrace.tracer.trace import Trace

Record: TypeAlias = Callable[..., Trace]
BENIGN: dict[str, dict[str, Any]] = {
    "whole prompts": {"chunk": None},
    "one by one": {"concurrency": 1, "chunk": 5},
    "all at once": {"concurrency": 8},
    "a shallower draft": {"depth": 1},
    "a tree": {"topk": 3, "draft_tokens": 8},
    "a window": {"fixed_window": True},
    "fewer rows kept": {"level": Level.FEATURES},
}
FAULTS = {
    "W5": (Site("emitted", "slot", slot=0), "slot 0 of B is slot 2 of A"),
    "W6": (Site("emitted", "slot", slot=1), "slot 1 of B is slot 0 of A"),
    "M3": (Site("received", "slot", slot=0), "zeros in B"),
    "X1": (Site("received", "slot", slot=0), "B's row is a row of another request in A"),
    "X2": (Site("received", "slot", slot=0), "B's row is A's row 1 place before"),
    "D1": (Site("received", "slot", slot=0), "B is A's row through float16"),
    "T1": (Site("received", "token"), ""),
    "R1": (Site("received", "position", 1), ""),
    "R2": (Site("received", "position", 1), ""),
    "P1:fc": (Site("drafted", "fused"), ""),
    "P4": (Site("drafted", "hidden"), ""),
    "N3": (Site("drafted", "fed back"), ""),
    "V1": (Site("drafted", "answer"), ""),
}


def beyond(found: Diff) -> list[Site]:
    return [one.site for one in found.compared if one.verdict is Verdict.DIFFERENT]


def test_a_trace_is_equal_to_itself_and_no_tensor_that_has_hashes_is_read(record: Record) -> None:
    trace = record(level=Level.FEATURES)
    narrow = [path for path in trace.folder.glob("*/*") if path.name.count(".") < 2]
    found = diff(Trace.open(trace.folder), Trace.open(trace.folder))
    assert (found.verdict, found.first, found.settings, found.moved) == (Verdict.EQUAL, None, (), ())
    assert all(one.distance.bit_equal and one.distance.rows for one in found.compared)
    assert found.bytes_read[0] <= sum(path.stat().st_size for path in narrow)


@pytest.mark.parametrize("name", BENIGN)
def test_another_schedule_is_no_difference(name: str, record: Record) -> None:
    found = diff(record(), record(**BENIGN[name]))
    assert found.verdict in (Verdict.EQUAL, Verdict.WITHIN)
    assert beyond(found) == []
    assert not any(one.flips for one in found.decisions.flips)
    assert not found.decisions.splits
    assert len(found.plan.texts) == len(record().rows("requests"))
    assert found.plan.families["received"].rows > 20


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_link_is_where_the_runs_first_part(fault: str, record: Record) -> None:
    site, says = FAULTS[fault]
    found = diff(record(), record(fault))
    assert found.verdict is Verdict.DIFFERENT
    assert found.first
    assert (found.first.site, found.first.beyond) == (site, True)
    assert says in [one.says for one in found.moved] or not says
    assert found.first.where.request[0] in [pair.a for pair in found.plan.texts]


def test_positions_and_tokens_are_told_as_each_side_has_them(record: Record) -> None:
    first = diff(record(), record("R1")).first
    assert first
    assert first.values
    assert first.values[1] == first.values[0] + 1


def test_what_has_moved_all_rows_is_found_at_the_first_of_them() -> None:
    """A site whose median is beyond the floor differs from its first row on, though a later one is larger."""
    noise = Noise(largest=1e-3, median=1e-5, factor=3)
    rows = {name: First((at,), Where(at, (0, 0), (0, 0), (0, 0)), 1.0) for at, name in enumerate(("shifted", "beyond"))}
    measure = Measure(np.zeros(3, np.bool_))
    measure.add(np.arange(3), torch.ones(3, 1), torch.tensor([[1.001], [1.001], [2.0]]))
    site = Site("emitted", "slot", slot=0)
    found = Found(site, measure.distance(), **rows)
    one = Compared(site, found.distance, noise, noise.above(found.distance), Verdict.DIFFERENT, 0, ())
    assert [first.where.position for first in rows_that_count(one, found, True)] == [0]


def test_a_boundary_that_was_recorded_as_reference_is_named(record: Record) -> None:
    found = diff(record(capture=(0, 1, 2, 3, 4)), record("W2"))
    says = [one.says for one in found.moved]
    assert "slot 0 of B is slot 1 of A" in says or "slot 0 of B is boundary 1, by A's reference" in says
    assert any("by A's reference" in one for one in says)


def test_weights_and_wiring_are_told_among_the_settings(record: Record) -> None:
    assert any(one.weights for one in diff(record(), record("P1:fc")).settings)
    found = diff(record(), record(wiring=(4, 2, 0)))
    assert "wiring.resolved.boundaries" in [one.name for one in found.settings]


def test_a_light_trace_says_that_rows_differ_but_not_how_far(record: Record) -> None:
    found = diff(record(level=Level.LIGHT), record("W5", level=Level.LIGHT))
    assert found.verdict is Verdict.UNREAD or beyond(found)
    assert any("differ by hash" in line for line in found.lacking)
    assert diff(record(level=Level.LIGHT), record(level=Level.LIGHT)).verdict is Verdict.EQUAL


def test_benign_repeats_give_a_floor_and_equal_ones_none(record: Record) -> None:
    found = diff(record(), record(chunk=None), [record(concurrency=1, chunk=5)])
    assert found.verdict in (Verdict.EQUAL, Verdict.WITHIN)
    assert found.floor.startswith("benign repeats")
    assert diff(record(), record("W5"), [record(concurrency=1, chunk=5)]).verdict is Verdict.DIFFERENT
    with pytest.raises(UserError, match="no benign repeat"):
        diff(record(), record(chunk=None), [record("W5")])
    with pytest.raises(UserError, match="bit-equal"):
        diff(record(), record(chunk=None), [Trace.open(record().folder)])


def test_texts_that_part_are_compared_up_to_there(record: Record) -> None:
    greedy, warm = record(), record(sampling=Sampling(1.0, seed=5))
    found = diff(greedy, warm)
    assert found.decisions.splits
    for split in found.decisions.splits:
        assert split.token_a != split.token_b
        assert (split.drawn, split.tie) == (True, None)
    assert found.verdict in (Verdict.EQUAL, Verdict.WITHIN)  # what was drawn is no difference
    assert not any(one.site.what == "slot" and one.verdict is Verdict.DIFFERENT for one in found.compared)


def test_acceptance_lost_is_over_the_requests_that_pair(record: Record) -> None:
    lost = diff(record(), record("M3")).decisions.tokens_lost
    assert lost is not None
    assert lost > 0
    assert diff(record("M3"), record()).decisions.tokens_lost == -lost


def test_nothing_in_common_is_an_error(record: Record, tmp_path: Path) -> None:
    create_trace(tmp_path / "other", {})
    with Recorder(tmp_path / "other", role="target") as recorder:
        recorder.emitted(Keys(request=0, pass_=0, position=[0, 1]), token=[500, 501])
    seal_trace(tmp_path / "other")
    with pytest.raises(UserError, match="no request has the same prompt in both"):
        diff(record(), Trace.open(tmp_path / "other"))


def handmade(folder: Path, received: Tensor, hidden: Tensor) -> Trace:
    """One prompt; what was emitted for it is always the same, whatever the draft received and made of it."""
    create_trace(folder, {"dtype": "bfloat16", "wiring": {"resolved": {"boundaries": [1, 2]}}})
    rows, emitted = np.arange(len(received)), torch.ones(len(received), 16, dtype=torch.bfloat16)
    with (
        Recorder(folder, role="target", level=Level.FULL, strict=True) as target,
        Recorder(folder, role="draft", level=Level.FULL, strict=True) as draft,
    ):
        keys = Keys(request=0, pass_=0, position=rows)
        target.emitted(keys, token=rows + 5, slots=emitted, slot_width=8)
        draft.received(keys, token=rows + 6, features=received, slot_width=8)
        draft.drafted(keys, draft_token=1, token=1, logsumexp=2.0, state=emitted, hidden=hidden)
        draft.requests(
            Keys(request=0, pass_=0, position=0), id=["x"], prompt_tokens=[np.arange(len(received) + 2) + 5],
            output_tokens=[[]], cached_prefix=0, temperature=0.0, finish_reason=["length"], rounds=0, correct_drafts=0,
            depth_limit=1,
        )  # fmt: skip
    seal_trace(folder)
    return Trace.open(folder)


def test_what_is_below_the_floor_counts_where_it_was_only_copied(tmp_path: Path) -> None:
    right = torch.ones(40, 16, dtype=torch.bfloat16)
    wrong = right.clone()
    wrong.view(torch.int16)[30, 12] ^= 1  # one number, by its last bit
    found = diff(handmade(tmp_path / "a", right, right), handmade(tmp_path / "b", wrong, right))
    assert found.verdict is Verdict.DIFFERENT
    assert found.first
    assert (found.first.site, found.first.where.position) == (Site("received", "slot", slot=1), 30)
    [site] = [one for one in found.compared if one.handed]
    assert (site.handed, site.distance.equal) == (1, 39)
    assert site.above is not None
    assert site.above < 1
    assert [one.says for one in found.moved] == ["B's row is A's but for 1 of its 8 numbers, by 1 bits at most"]
    assert found.hand_off[0] == ()
    assert found.hand_off[1]


def test_a_stage_that_led_to_the_same_is_looked_at_all_the_same(tmp_path: Path) -> None:
    right = torch.ones(40, 16, dtype=torch.bfloat16)
    a, b, again = (handmade(tmp_path / name, right, right * factor) for name, factor in (("a", 1), ("b", 2), ("c", 1)))
    hidden = Site("drafted", "hidden")
    assert beyond(diff(a, b)) == [hidden]
    [equal] = [one for one in diff(a, again).compared if one.site == hidden]
    assert equal.distance.inferred == equal.distance.rows == 40


@pytest.mark.parametrize("fault", ["", "W5", "X1", "T1"])
def test_blocks_of_requests_come_to_what_all_at_once_come_to(fault: str, record: Record) -> None:
    a, b = record(), record(*([fault] if fault else []), chunk=None)
    whole, parts = diff(a, b), diff(a, b, block_tokens=1)
    assert (parts.verdict, parts.first, parts.lacking) == (whole.verdict, whole.first, whole.lacking)
    assert parts.plan == whole.plan
    assert [one.site for one in parts.compared] == [one.site for one in whole.compared]
    for part, one in zip(parts.compared, whole.compared, strict=True):
        assert (part.verdict, part.handed) == (one.verdict, one.handed)
        assert (part.distance.rows, part.distance.equal) == (one.distance.rows, one.distance.equal)
        assert part.distance.max_error == one.distance.max_error
        assert [row.error for row in part.worst] == [row.error for row in one.worst]
    assert parts.decisions.flips == whole.decisions.flips
    assert parts.decisions.splits == whole.decisions.splits
    assert parts.decisions.acceptance == whole.decisions.acceptance


def test_verification_that_disobeys_what_it_rests_on_is_a_difference_of_its_own(record: Record) -> None:
    warm = {"sampling": Sampling(1.0, seed=5, sampled_drafts=True)}
    found = diff(record(**warm), record("S1", **warm))
    assert beyond(found) == [Site("verified", "accepted")]
    assert found.verification[0] == ()
    assert [one.fault for one in found.verification[1]] == ["S1"]

"""Tokens, positions and counts of draft rows: what breaks is named, and nothing that may be is called broken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from spectrace.replay.finding import Finding
from spectrace.replay.inputs import read_served
from spectrace.replay.invariants import invariants
from spectrace.tracer.keys import Keys
from spectrace.tracer.manifest import create_trace
from spectrace.tracer.recorder import Recorder
from spectrace.tracer.rows import Level, Phase
from spectrace.tracer.trace import Trace

Record = Callable[..., Trace]
TREE = {"topk": 3, "draft_tokens": 8}
SHAPES = {"chain": {}, "tree": TREE, "tree in a window": {**TREE, "fixed_window": True}}
FAULTS = ("T1", "T2", "R1", "R2", "M1")
PROMPT, TEXT = 10, tuple(range(40, 57))


def named(finding: Finding) -> str:
    return finding.fault + (f":{finding.variant}" if finding.variant else "")


def test_a_clean_run_breaks_nothing_in_any_shape(clean: Trace) -> None:
    found = invariants(clean)
    assert found.findings == () and found.counts.findings == ()
    assert found.tokens == found.positions > 80
    assert (found.drafted_tokens > 0) == (found.drafted_positions > 0) == (clean.manifest["serving"]["depth"] > 1)
    counts = found.counts
    assert counts.whole == counts.prefill_passes > 3 and (counts.gaps, counts.missing, counts.excused) == (0, 0, False)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_invariant_is_named_alone(fault: str, shape: str, record: Record) -> None:
    found = invariants(record(fault, **SHAPES[shape]))
    assert [named(finding) for finding in found.findings] == [fault]
    assert found.findings[0].confidence == 1 and not found.findings[0].masks


@pytest.mark.parametrize("fault", ["W3", "M3", "X1", "X2", "D1", "V2", "V4", "P2", "N3", "R3"])
def test_other_faults_break_no_invariant(fault: str, record: Record) -> None:
    assert invariants(record(fault)).findings == ()


def test_positions_are_named_at_one_depth_too(record: Record) -> None:
    """Where a constant offset and positions that stand still differ by their number alone."""
    for fault in ("R1", "R2"):
        assert [one.fault for one in invariants(record(fault, depth=2)).findings] == [fault]


def test_capture_of_last_rows_leaves_gaps_and_requests_to_replay(record: Record) -> None:
    trace = record("M1")
    found = invariants(trace).counts
    assert found.whole == 0 and found.gaps > 0 and found.missing > 0
    whole, kept = read_served(trace), read_served(trace, gaps=True)
    assert len(whole.incomplete) == found.gaps and len(kept.incomplete) == 0
    assert sorted([*whole.requests, *whole.incomplete]) == sorted(kept.requests)


def test_wrong_positions_do_not_change_the_order_of_replay(record: Record) -> None:
    """The rows of each depth stand in the order of their bases, siblings by node, whatever positions say."""
    for trace in (record(**TREE), record("R2", **TREE), record("R1", **TREE)):
        served = read_served(trace)
        for rows in served.inputs(served.requests).depths:
            order = np.lexsort([rows.received["node"], rows.bases])
            assert np.array_equal(order, np.arange(len(rows.bases)))


@pytest.mark.parametrize("writer", ["target-0", "draft-0", "scheduler-0"])
def test_a_torn_trace_breaks_no_invariant(writer: str, torn: Callable[[str, int], Trace], record: Record) -> None:
    whole = len((record(**TREE, fixed_window=True).folder / writer / "ledger").read_bytes()) // 64
    for records in range(1, whole, max(whole // 6, 1)):
        assert invariants(torn(writer, records)).findings == ()


class Fed:
    """A trace of one request, its prompt run in chunks of five rows, the answer a row at a time; tests break rows."""

    def __init__(self, folder: Path, *, cached: int = 0) -> None:
        self.folder, self.cached = folder, cached
        create_trace(folder, {})
        self.rows = np.arange(cached, len(TEXT) - 1)
        self.passes = np.where(self.rows < PROMPT, self.rows // 5, self.rows - PROMPT + 2)
        self.nodes = np.where(self.rows < PROMPT, self.rows % 5, 0)
        self.tokens = np.array(TEXT)[self.rows + 1]
        self.positions = self.rows.copy()
        self.fed = np.ones(len(self.rows), bool)

    def written(self, *, sampled_away: int = 0) -> Trace:
        """What the target ran, what the draft was fed of it, and the text."""
        features = np.random.default_rng(0).standard_normal((len(self.rows), 4)).astype(np.float32)
        phases = np.where(self.rows < PROMPT, Phase.PREFILL, Phase.VERIFY)
        keys = {"request": np.zeros(len(self.rows), int), "pass_": self.passes, "node": self.nodes, "step": self.passes}
        with Recorder(self.folder, role="target", level=Level.LIGHT, strict=True) as target:
            tokens = np.array(TEXT)[self.rows]
            target.emitted(Keys(**keys, position=self.rows, phase=phases), token=tokens, slots=features)
        with Recorder(self.folder, role="draft", level=Level.LIGHT, strict=True) as draft:
            fed = {name: column[self.fed] for name, column in keys.items()}
            extends = Keys(**fed, position=self.positions[self.fed], phase=Phase.DRAFT_EXTEND)
            draft.received(extends, token=self.tokens[self.fed], features=features[self.fed])
            draft.sampled_away("received", sampled_away) if sampled_away else None
        with Recorder(self.folder, role="scheduler", level=Level.LIGHT, strict=True) as scheduler:
            rounds = np.flatnonzero(self.rows >= PROMPT)
            scheduler.verified(
                Keys(request=[0] * len(rounds), pass_=self.passes[rounds], node=0, position=self.rows[rounds]),
                parent=-1, token=np.array(TEXT)[self.rows[rounds]], target_token=0, accepted=True, cut=False,
                source_row=0,
            )  # fmt: skip
            scheduler.requests(
                Keys(request=[0], pass_=0, node=0, position=0),
                id=["0"], prompt_tokens=[TEXT[:PROMPT]], output_tokens=[TEXT[PROMPT:]], cached_prefix=self.cached,
                temperature=0.0, finish_reason="length", rounds=len(rounds), correct_drafts=0, depth_limit=1,
            )  # fmt: skip
        return Trace.open(self.folder)


def test_a_request_on_a_cached_prefix_lacks_nothing(tmp_path: Path) -> None:
    found = invariants(Fed(tmp_path / "trace", cached=5).written())
    assert found.findings == () and (found.counts.gaps, found.counts.missing) == (0, 0)
    assert found.tokens == len(TEXT) - 6


def test_rows_missing_here_and_there_are_a_gap_and_no_fault(tmp_path: Path) -> None:
    fed = Fed(tmp_path / "trace")
    fed.fed[[2, 3, 7]] = False
    found = invariants(fed.written())
    assert found.findings == () and (found.counts.gaps, found.counts.missing) == (1, 3)


def test_rows_that_the_recording_left_out_excuse_those_missing(tmp_path: Path) -> None:
    fed = Fed(tmp_path / "trace")
    fed.fed[[0, 1, 2, 3, 5, 6, 7, 8]] = False
    assert [named(one) for one in invariants(fed.written()).findings] == ["M1"]
    fed.folder = tmp_path / "sampled"
    create_trace(fed.folder, {})
    found = invariants(fed.written(sampled_away=8))
    assert found.findings == () and found.counts.excused and found.counts.missing == 8


@pytest.mark.parametrize(("shift", "name"), [(-1, "T1"), (1, "T1:other"), (-2, "T1:other")])
def test_tokens_of_another_place_are_told_by_how_far_off_they_are(shift: int, name: str, tmp_path: Path) -> None:
    fed = Fed(tmp_path / "trace")
    fed.tokens = np.array(TEXT)[np.clip(fed.rows + 1 + shift, 0, len(TEXT) - 1)]
    [found] = invariants(fed.written()).findings
    assert named(found) == name and "rows of text are fed another token" in found.evidence[0]


def test_wrong_tokens_by_no_rule_are_called_just_that(tmp_path: Path) -> None:
    fed = Fed(tmp_path / "trace")
    fed.tokens[[1, 6, 12]] = 3
    [found] = invariants(fed.written()).findings
    assert named(found) == "T1:other" and found.confidence < 1 and found.evidence[0].startswith("3 of ")


def test_rows_of_text_at_other_positions_than_the_targets_are_told(tmp_path: Path) -> None:
    """And their tokens are judged at the positions at which the target ran them."""
    fed = Fed(tmp_path / "trace")
    fed.positions = fed.positions + 1
    [found] = invariants(fed.written()).findings
    assert named(found) == "R1:text" and "stand +1 from it" in found.evidence[1]


def test_a_draft_fed_what_its_parent_did_not_draft_is_told(tmp_path: Path) -> None:
    create_trace(tmp_path / "trace", {})
    keys = {"request": [0, 1, 2, 3], "pass_": 0, "node": [0] * 4}
    with Recorder(tmp_path / "trace", role="draft", level=Level.LIGHT, strict=True) as draft:
        for depth, tokens in ((0, [1, 2, 3, 4]), (1, [11, 12, 99, 14])):
            state = {"features": np.ones((4, 2))} if not depth else {"state": np.ones((4, 2)), "parent": [0] * 4}
            draft.received(Keys(**keys, depth=depth, position=depth), token=tokens, **state)
            draft.drafted(Keys(**keys, depth=depth, position=depth), token=[11, 12, 13, 14], state=np.ones((4, 2)))
    found = invariants(Trace.open(tmp_path / "trace"))
    assert [named(one) for one in found.findings] == ["T1:depth"] and found.drafted_tokens == 4
    assert "first at depth 1: 1 of 4" in found.findings[0].evidence

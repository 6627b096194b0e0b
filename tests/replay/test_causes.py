"""What a trace only makes likely is a cause where a reading bears it out, and a doubt where none can."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spectrace.engine.checkpoint import read_draft
from spectrace.replay.case import Case, open_case
from spectrace.replay.causes import Readings, broken_links
from spectrace.replay.configuration import Configuration, Slot
from spectrace.replay.diagnosis import Identified
from spectrace.replay.evidence import gather
from spectrace.replay.finding import Finding
from spectrace.replay.hypotheses import Hypothesis, mapping
from spectrace.replay.identify import Match
from spectrace.replay.readings import TrainedReading
from spectrace.replay.vocabulary import rebuilt_table
from spectrace.tracer.manifest import create_trace, seal_trace
from spectrace.tracer.trace import Trace

CaseOf = Callable[..., Case]
LOOKS = ("V4", "V5")


@pytest.fixture
def case_of(folders: tuple[Path, Path], tmp_path: Path) -> CaseOf:
    """`case_of(look, target=)`: a draft whose table looks so, without t2d; nothing was drafted."""

    def make(look: str, *, target: bool = True) -> Case:
        folder = create_trace(tmp_path / f"{len(list(tmp_path.iterdir()))}", {"dtype": "float32"})
        seal_trace(folder)
        checkpoint = read_draft(folders[1])
        right = checkpoint.tensors["d2t"]
        table = {"V4": right.roll(1), "V5": torch.zeros_like(right), "": right}[look]
        odd = replace(checkpoint, tensors={**checkpoint.tensors, "d2t": table})
        opened = open_case(Trace.open(folder), odd, folders[0])
        return opened if target else replace(opened, target=None)

    return make


def trained(at: Configuration, *, surprise: float, steps: tuple[Hypothesis, ...] = ()) -> TrainedReading:
    """For the configuration at the end of these steps, as little surprised as this by the text."""
    there = at
    for step in steps:
        there = step.apply(there)
    return TrainedReading(there, steps, 1.0, 2.0 if steps else 1.0, surprise, (0.1, 0.2), tuple(() for _ in steps))


def named(case: Case, reading: TrainedReading | None) -> list[str]:
    assert case.configured
    return [one.fault for one in broken_links(case, Readings(case.configured, None, reading), gather(case))]


@pytest.mark.parametrize("look", LOOKS)
def test_a_table_that_looks_wrong_is_a_doubt_unless_a_target_can_tell(look: str, case_of: CaseOf) -> None:
    doubtful, decidable = gather(case_of(look, target=False)), gather(case_of(look))
    assert doubtful.findings == decidable.findings == ()
    assert [one.fault for one in doubtful.doubts] == [one.fault for one in decidable.suspected] == [look]
    assert doubtful.suspected == decidable.doubts == ()
    assert gather(case_of("")).suspected == ()


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("target", [False, True])
def test_a_table_that_only_looks_wrong_is_no_cause(look: str, target: bool, case_of: CaseOf) -> None:
    """Neither where nothing is known of what the draft was trained for, nor where it was trained for that table."""
    case = case_of(look, target=target)
    assert case.configured
    assert named(case, None) == named(case, trained(case.configured, surprise=0.0)) == []


def test_a_table_is_a_cause_where_the_draft_was_trained_for_the_other(case_of: CaseOf) -> None:
    case = case_of("V4")
    assert case.configured
    [step] = [one for one in mapping(case.configured, rebuilt_table(case.checkpoint)) if one.title.endswith("t2d says")]
    [found] = broken_links(
        case,
        Readings(case.configured, None, trained(case.configured, surprise=0.0, steps=(step,))),
        gather(case),
    )
    assert (found.fault, found.variant, found.link) == ("V4", "checkpoint", "vocabulary map") and found.confidence > 0.5


def test_a_table_that_cannot_be_rebuilt_is_a_cause_where_the_text_makes_no_sense(case_of: CaseOf) -> None:
    """One that can be was tried, and made no sense of it either."""
    for look, causes in (("V5", ["V5"]), ("V4", [])):
        case = case_of(look)
        assert case.configured and named(case, trained(case.configured, surprise=3.0)) == causes


def test_ranks_that_may_differ_by_rounding_are_a_cause_where_a_slot_holds_no_boundary(case_of: CaseOf) -> None:
    case = case_of("")
    assert case.configured
    doubt = Finding("W9", "ranks of the target capture different features", ("hashes differ",), confidence=0.5)
    evidence = replace(gather(case), doubts=(doubt,))
    slots = len(case.configured.wiring)
    for held, fault in ((None, ["W9"]), (Slot(0), [])):
        shown = [Identified(slot, str(slot), "0", 0.5, "1", 0.6) for slot in range(slots)]
        matches = tuple(Match(held, False, 1.0, 8, one, held is None, True) for one in shown)
        configured = replace(case.configured, wiring=(Slot(0),) * slots)
        found = broken_links(case, Readings(configured, None, None, matches), evidence)
        assert [one.fault for one in found] == fault
        assert all("summed over the ranks" in one.edit.text for one in found)

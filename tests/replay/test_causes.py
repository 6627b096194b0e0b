"""What a trace only makes likely is a cause where a reading bears it out, and a doubt where none can."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spectrace.engine.checkpoint import read_draft
from spectrace.replay.case import Case, open_case
from spectrace.replay.causes import Readings, broken_links
from spectrace.replay.configuration import Configuration, Slot
from spectrace.replay.diagnosis import Identified
from spectrace.replay.evidence import gather
from spectrace.replay.finding import Finding
from spectrace.replay.found import Broken
from spectrace.replay.hypotheses import computing, ending, mapping
from spectrace.replay.hypothesis import Hypothesis
from spectrace.replay.identify import Match
from spectrace.replay.readings import EngineReading, TrainedReading
from spectrace.replay.reproduce import Reproduced
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


Changed = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
Draft = Callable[..., Case]


@pytest.fixture
def draft(
    new_draft: Callable[..., Any], write_draft: Callable[..., Path], target_of: Callable[..., Path], tmp_path: Path
) -> Draft:
    """`draft(attention, change, served=, **config)`: a draft whose tensors a test has changed; nothing was drafted.

    `served` are fields of the config of a copy that the engine was given instead.
    """

    def make(attention: str, change: Changed = dict, *, served: Any = None, **config: Any) -> Case:
        held, tensors = new_draft(attention, **config)
        folder = write_draft(tmp_path / "draft", held, change(tensors))
        told: dict[str, Any] = {"dtype": "float32", "target": {"config": TARGET}}
        if served is not None:
            shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
            told["draft"] = {"path": str(tmp_path / "copy"), "config": {**held, **served}, "tensors": shapes}
        seal_trace(create_trace(tmp_path / "trace", told))
        return open_case(Trace.open(tmp_path / "trace"), read_draft(folder), target_of("llama"))

    return make


TARGET = {"num_hidden_layers": 5, "max_position_embeddings": 512}


def answers(met: bool) -> Reproduced:
    """A hundred answers, all met or none."""
    return Reproduced(*(np.arange(100),) * 4, np.full(100, met), ())


def of_engine(case: Case, step: Hypothesis) -> list[Broken]:
    """What comes of an engine that did so."""
    assert case.configured
    read = EngineReading(step.apply(case.configured), (step,), answers(False), answers(True), True, ((),))
    return broken_links(case, Readings(case.configured, read, None), gather(case))


def of_training(case: Case, step: Hypothesis) -> list[Broken]:
    """What comes of a draft that was trained so."""
    assert case.configured
    reading = trained(case.configured, surprise=0.0, steps=(step,))
    return broken_links(case, Readings(case.configured, None, reading), gather(case))


def the_step(case: Case, fault: str, variant: str = "") -> Hypothesis:
    assert case.configured
    [step] = [
        one
        for one in computing(case.configured, case.shared, case.others)
        if (one.fault, one.variant) == (fault, variant)
    ]
    return step


@pytest.mark.parametrize("fault", ["R5", "P5"])
def test_rows_that_a_draft_was_trained_with_in_another_order_are_put_into_it(fault: str, draft: Draft) -> None:
    """Engines rotate halves of all such drafts, whatever a config says; of MLA's they go by the config."""
    case = draft("gqa")
    [found] = of_training(case, the_step(case, fault))
    assert found.fault == fault and "put the rows of each head of" in found.edit.text and found.edit.command
    assert found.edit.text.count("self_attn.") == 2


def test_of_mla_the_config_says_which_pairs_are_turned(draft: Draft) -> None:
    case = draft("mla")
    [found] = of_training(case, the_step(case, "R5"))
    assert "rope_interleave to false" in found.edit.text


def test_biases_that_a_config_does_not_mention_are_switched_on_in_it(draft: Draft) -> None:
    case = draft("deep", served={"attention_bias": False})
    [lost] = of_engine(case, the_step(case, "P7"))
    assert (lost.fault, lost.variant, lost.link) == ("P7", "engine", "attention bias"), "o's bias was lost, too"
    [both] = of_engine(case, the_step(case, "P7", "all"))
    assert (both.fault, both.variant) == ("P7", "all") and "which the copy lost" in both.edit.text
    assert both.title == "attention bias: none, where q, k, v, o is right"


def test_a_later_norm_that_a_draft_was_trained_with_is_left_alone_in_the_folder(draft: Draft) -> None:
    norm = {"layers.1.hidden_norm.weight": torch.full((48,), 0.5)}
    case = draft("deep", lambda tensors: {**tensors, **norm})
    [found] = of_training(case, the_step(case, "N4"))
    assert found.edit.text.startswith("remove the tensor layers.1.input_layernorm.weight from")
    assert "trained with hidden_norm" in found.edit.text and found.edit.command
    [engine] = of_engine(case, the_step(case, "N4", "plain"))
    assert (engine.fault, engine.link) == ("N4", "later norm") and "holds it right" in engine.edit.text


@pytest.mark.parametrize(
    ("context", "copy", "who", "told"),
    [
        (64, None, "config", "set max_position_embeddings to 512 (now 64)"),
        (512, 64, "conversion", "keeping max_position_embeddings, which the copy lost"),
        (512, None, "engine", "is right about max_position_embeddings"),
        (None, None, "engine", "is right about max_position_embeddings"),
    ],
)
def test_who_ends_a_draft_s_context_is_told_by_what_the_configs_say(
    context: int | None, copy: int | None, who: str, told: str, draft: Draft
) -> None:
    served = None if copy is None else {"max_position_embeddings": copy}
    case = draft("gqa", max_position_embeddings=context, served=served)
    [found] = of_engine(case, ending(64, "all 40 drafts from there on are its id 0"))
    assert (found.fault, found.variant, found.link) == ("A3", who, "context")
    assert told in found.edit.text and "all 40 drafts" in found.evidence[0]
    assert found.title == "context: up to position 63, where all of the text is right"


def test_windows_that_a_config_mentions_and_does_not_apply_are_tried_and_switched_on(draft: Draft) -> None:
    case = draft("deep", use_sliding_window=False)
    [found] = of_training(case, the_step(case, "A2"))
    assert found.title == "window: none, where 7, none by layer is right"
    assert "use_sliding_window to true" in found.edit.text and found.edit.command


def test_a_head_of_its_own_that_a_draft_was_not_trained_with_is_removed(draft: Draft) -> None:
    case = draft("gqa", draft_vocab_size=None)
    [found] = of_training(case, the_step(case, "A1", "head"))
    assert (found.fault, found.link) == ("P2", "head") and "remove the tensor lm_head.weight" in found.edit.text
    [engine] = of_engine(case, the_step(case, "A1", "head"))
    assert (engine.fault, engine.alike, engine.link) == ("A1", ("P2",), "head")


def test_weights_of_another_folder_are_one_cause_with_the_finding(draft: Draft) -> None:
    case = draft("gqa")
    assert case.configured
    served = {name: tensor * 2 for name, tensor in case.configured.tensors.items()}
    case = replace(case, spare={"served": served})
    finding = Finding("P6", "other weights", ("they are those of X",))
    step, evidence = the_step(case, "P6"), replace(gather(case), findings=(finding,))
    assert case.configured
    read = EngineReading(step.apply(case.configured), (step,), answers(False), answers(True), True, ((),))
    [found] = broken_links(case, Readings(case.configured, read, None), evidence)
    assert found.fault == "P6" and found.simulated and found.edit.text.startswith(str(case.checkpoint.folder))
    assert found.evidence[0] == "they are those of X" and "100.0% if the weights are those" in found.evidence[1]

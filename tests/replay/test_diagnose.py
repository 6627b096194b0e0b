"""The cause is named, blind, from a trace; what its repair brings is what the repaired deployment is served."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file
from toy.language import Language
from toy.switches import prompts
from toy.target import TARGET
from toy.train import DRAFT

from spectrace.engine.checkpoint import read_draft
from spectrace.engine.deployment import Deployment, Serving
from spectrace.engine.sampling import Sampling
from spectrace.replay.diagnose import Trained, diagnose
from spectrace.replay.diagnosis import Diagnosis, Verdict
from spectrace.tracer.acceptance import acceptance_of_rows
from spectrace.tracer.errors import UserError
from spectrace.tracer.rows import Level
from spectrace.tracer.rowset import Rows
from spectrace.tracer.trace import Trace

Record = Callable[..., Trace]
IDS = "eagle_aux_hidden_state_layer_ids"
WRONG = [3, 4, 2]  # W3 on this pair: trained on (0, 3, 4), five layers
ENGINE = {
    "W2:slot0": {}, "W8": {}, "M1": {}, "N1": {}, "N3": {}, "R3:double": {}, "V4": {}, "X1": {}, "D1": {}, "T1": {},
    "P1:attention": {}, "P4": {}, "X3": {"fixed_window": True}, "X4": {"topk": 2, "draft_tokens": 6},
}  # fmt: skip


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Record]:
    """`record(*faults, draft=, **changes)`: a trace of the toy pair, or of another draft for its target."""
    root = tmp_path_factory.mktemp("diagnosed")
    with Deployment(TARGET, DRAFT, threads=1) as pair:

        def record(*faults: str, draft: Path = DRAFT, asked: Any = None, **changes: Any) -> Trace:
            if pair.draft_folder != draft:
                pair.swap(TARGET, draft)
            folder = root / str(len(list(root.iterdir())))
            serving = Serving(**{"depth": 3, "max_new": 40, "concurrency": 4, **changes, "faults": faults})
            assert not pair.serve(asked or prompts(12), serving, trace=folder).losses
            return Trace.open(folder)

        yield record


@pytest.fixture(scope="module")
def healthy(record: Record) -> Trace:
    return record()


def served(trace: Trace) -> float:
    length = acceptance_of_rows(trace.rows("verified")).acceptance_length
    assert length is not None
    return length


def told(trace: Trace, draft: Path = DRAFT, **options: Any) -> Diagnosis:
    return diagnose(trace, read_draft(draft), **{"target": TARGET, **options})


def edited(folder: Path, **changes: Any) -> Path:
    """The toy draft with other fields; None takes one away."""
    shutil.copytree(DRAFT, folder)
    config = {**json.loads((folder / "config.json").read_text("utf-8")), **changes}
    held = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(held), "utf-8")
    return folder


def test_a_healthy_trace_has_no_cause_and_is_foretold_as_it_was_served(healthy: Trace) -> None:
    found = told(healthy)
    assert found.verdict in (Verdict.HEALTHY, Verdict.WEAK_DRAFT)
    assert found.causes == ()
    assert found.served_acceptance == found.repaired_acceptance == served(healthy)
    assert [one.best for one in found.identified] == ["0", "3", "4"]
    assert all(one.error < 1e-5 < 1e-2 < one.runner_up_error for one in found.identified)
    assert all(one.configured == one.engine == one.trained for one in found.readings.values())


@pytest.mark.parametrize("fault", ENGINE)
def test_a_fault_of_the_engine_is_named_and_its_repair_foretold_exactly(fault: str, record: Record) -> None:
    changes = ENGINE[fault]
    found = told(record(fault, **changes))
    assert found.verdict is Verdict.FAULT
    [cause] = found.causes
    assert cause.fault == fault.partition(":")[0]
    assert cause.predicted_acceptance == served(record(**changes))
    assert cause.evidence and cause.fix


def test_w3_is_repaired_by_three_edits_as_it_was_made_in_three_places(record: Record, tmp_path: Path) -> None:
    wrong = edited(tmp_path / "wrong", **{IDS: WRONG})
    cases = {
        "engine": (record("W3"), DRAFT),
        "config": (record(draft=wrong), wrong),
        "conversion": (record(draft=wrong), DRAFT),
    }
    fixes = set()
    for variant, (trace, believed) in cases.items():
        found = told(trace, believed)
        assert [(cause.fault, cause.variant) for cause in found.causes] == [("W3", variant)]
        fixes.add(found.causes[0].fix)
        expected = {"engine": "(0, 3, 4)", "config": "(3, 4, 2)", "conversion": "(0, 3, 4)"}[variant]
        reading = found.readings["wiring"]
        assert (reading.configured, reading.engine, reading.trained) == (expected, "(3, 4, 2)", "(0, 3, 4)")
    assert len(fixes) == 3


def test_two_faults_are_both_named_with_what_each_repair_brings_and_both(record: Record, healthy: Trace) -> None:
    both, wiring_alone, feedback_alone = record("W3", "N3"), record("N3"), record("W3")
    found = told(both)
    assert {cause.fault for cause in found.causes} == {"W3", "N3"}
    brings = {cause.fault: cause.predicted_acceptance for cause in found.causes}
    assert brings["W3"] == served(wiring_alone)
    assert brings["N3"] == served(feedback_alone)
    assert found.repaired_acceptance == served(healthy)
    assert found.causes[0].fault == "W3"
    [left] = told(wiring_alone).causes
    assert left.fault == "N3"


@pytest.mark.parametrize(
    ("fault", "change"),
    [("N3", {"norm_output": False}), ("R3", {"rope_theta": 1000.0}), ("R5", {"rope_interleave": False})],
)
def test_a_config_that_the_engine_obeys_is_found_wrong_by_what_the_draft_was_trained_for(
    fault: str, change: dict[str, Any], record: Record, healthy: Trace, tmp_path: Path
) -> None:
    wrong = edited(tmp_path / "wrong", **change)
    found = told(record(draft=wrong), wrong)
    [cause] = found.causes
    assert (cause.fault, cause.variant) == (fault, "config")
    assert cause.predicted_acceptance == served(healthy)
    [key] = change
    assert key in cause.fix and str(wrong) in cause.fix


def test_a_wiring_that_is_wrong_in_two_slots_is_found_slot_by_slot(record: Record, tmp_path: Path) -> None:
    wrong = edited(tmp_path / "wrong", **{IDS: [0, 0, 3]})
    [cause] = told(record(draft=wrong, max_new=64, asked=prompts(24)), wrong).causes
    assert "(0, 0, 3) where (0, 3, 4) is right" in cause.title
    assert "[0, 3, 4]" in cause.fix


def test_text_unlike_the_draft_s_training_is_no_fault_of_the_config(record: Record) -> None:
    """Some wrong switches foretell such text better, and significantly so."""
    random, letters = np.random.default_rng(5), Language.drawn().letters
    asked = [random.choice(letters, 26).tolist() for _ in range(24)]
    found = told(record(asked=asked, max_new=64))
    assert found.causes == ()
    assert found.verdict in (Verdict.HEALTHY, Verdict.WEAK_DRAFT)


def replaced(rows: Rows, **columns: np.ndarray) -> Rows:
    """Rows with other values in some narrow columns; negative ones are null."""
    table = rows._table
    for name, values in columns.items():
        at = table.column_names.index(name)
        field = table.schema.field(at)
        table = table.set_column(at, field, pa.array(values, field.type, mask=values < 0))
    return Rows(rows.family, table, rows._writers, rows._segments)


class Forgetful(Trace):
    """A trace whose draft answers something else at its last depth from a round on, as with a broken cache."""

    first_round = 4
    table: np.ndarray

    def rows(self, family: str, **equals: object) -> Rows:
        rows = super().rows(family, **equals)
        if family != "drafted" or not len(rows):
            return rows
        ids = rows["draft_token"].copy()
        late = (rows["round"] >= self.first_round) & (rows["depth"] == 2) & (ids >= 0)
        ids[late] = (ids[late] + 7) % len(self.table)
        return replaced(rows, draft_token=ids, token=np.where(ids >= 0, self.table[ids], -1))


def test_answers_that_nothing_explains_are_the_engine_s_state_and_placed(healthy: Trace) -> None:
    forgetful = Forgetful(healthy._found)
    offsets = read_draft(DRAFT).tensors["d2t"].numpy()
    forgetful.table = offsets + np.arange(len(offsets))
    found = told(forgetful)
    assert (found.verdict, found.causes) == (Verdict.ENGINE_STATE, ())
    said = " ".join(found.notes)
    assert f"round {Forgetful.first_round}, " in said
    assert "up to round" in said


def test_without_true_boundaries_what_cannot_be_decided_is_not(record: Record, healthy: Trace) -> None:
    for trace in (healthy, record("W3")):
        found = told(trace, target=None)
        assert (found.verdict, found.causes) == (Verdict.INSUFFICIENT, ())
        assert "--target" in found.next_command
    for fault in ("N3", "V4", "M3"):
        assert [cause.fault for cause in told(record(fault), target=None).causes] == [fault]


def test_a_reference_of_another_run_serves_as_well_as_the_target(record: Record) -> None:
    reference = record(capture=tuple(range(6)), depth=0)
    found = told(record("W1:slot1"), target=None, reference=reference)
    assert [(cause.fault, cause.variant) for cause in found.causes] == [("W1", "slot1")]
    assert found.causes[0].predicted_acceptance == served(record())


def test_a_reference_without_the_boundary_that_was_delivered_says_that_it_is_another(record: Record) -> None:
    reference = record(capture=(0, 3, 4), depth=0)
    found = told(record("W2"), target=None, reference=reference)
    assert found.causes[0].variant == "unknown"


def test_a_reference_of_a_few_of_the_prompts_takes_no_request_away(record: Record, healthy: Trace) -> None:
    few = record(capture=tuple(range(6)), depth=0, asked=prompts(12)[:3])
    with_few, without = told(healthy, reference=few), told(healthy)
    assert with_few.coverage["requests"] == without.coverage["requests"]
    assert len(with_few.coverage["true boundaries from"]) == 2
    assert with_few.repaired_acceptance == without.repaired_acceptance


def test_a_reference_in_a_coarser_type_contradicts_nothing_that_its_rounding_explains(
    record: Record, healthy: Trace, tmp_path: Path
) -> None:
    with Deployment(TARGET, DRAFT, threads=1, dtype=torch.bfloat16) as pair:
        pair.serve(prompts(12), Serving(depth=0, max_new=40, capture=(0, 3, 4)), trace=tmp_path / "coarse")
    found = told(healthy, target=None, reference=Trace.open(tmp_path / "coarse"))
    assert found.causes == ()
    assert [one.best for one in found.identified] == ["0", "3", "4"]
    assert max(one.error for one in found.identified) > 1e-3


def other_target(folder: Path, *, scale: float) -> Path:
    """The toy target with its layers' weights disturbed by so much."""
    shutil.copytree(TARGET, folder)
    [file] = folder.glob("*.safetensors")
    noise = torch.Generator().manual_seed(0)
    changed = {
        name: tensor * (1 + scale * torch.randn(tensor.shape, generator=noise)) if ".layers." in name else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(changed, file, metadata={"format": "pt"})
    return folder


class Retold(Trace):
    """A trace whose manifest says no fingerprint of its target."""

    @property
    def manifest(self) -> dict[str, Any]:
        told = super().manifest
        return {**told, "target": {**told["target"], "fingerprints": {}}}


def test_another_target_than_was_served_is_refused_and_not_blamed_on_a_link(healthy: Trace, tmp_path: Path) -> None:
    other = other_target(tmp_path / "other", scale=0.1)
    with pytest.raises(UserError, match=r"not the target that was served: tensors differ, model\.layers\.0\."):
        told(healthy, target=other)


def test_without_fingerprints_a_target_that_answers_otherwise_is_not_taken_for_true(
    healthy: Trace, tmp_path: Path
) -> None:
    bare = Retold(healthy._found)
    assert told(bare).coverage["true boundaries from"] == [f"the target in {TARGET}, run again"]
    found = told(bare, target=other_target(tmp_path / "other", scale=0.5))
    assert (found.verdict, found.causes, found.identified) == (Verdict.INSUFFICIENT, (), ())
    assert any("it is taken for another" in note for note in found.notes)
    assert "--target" in found.next_command


def test_a_target_that_is_taken_for_another_lends_no_weights(healthy: Trace, tmp_path: Path) -> None:
    sharing = shutil.copytree(DRAFT, tmp_path / "sharing")
    tensors = load_file(sharing / "model.safetensors")
    del tensors["embed_tokens.weight"]
    save_file(tensors, sharing / "model.safetensors")
    found = told(Retold(healthy._found), sharing, target=other_target(tmp_path / "other", scale=0.5))
    assert (found.verdict, found.coverage["draft tokens replayed"]) == (Verdict.INSUFFICIENT, 0)
    assert any("shares the target's embedding" in note for note in found.notes)


class Nameless(Trace):
    """A trace that lacks the ids of every so-manieth draft, as where an adapter does not see them."""

    every: int

    def rows(self, family: str, **equals: object) -> Rows:
        rows = super().rows(family, **equals)
        if family != "drafted" or not len(rows):
            return rows
        return replaced(rows, draft_token=np.where(rows["node"] % self.every, rows["draft_token"], -1))


@pytest.mark.parametrize("every", [2, 1])
def test_drawn_drafts_whose_ids_were_not_recorded_are_left_out(every: int, record: Record) -> None:
    nameless = Nameless(record(sampling=Sampling(1.0, seed=5, sampled_drafts=True))._found)
    nameless.every = every
    found = told(nameless)
    assert found.causes == ()
    assert bool(found.coverage["draft tokens replayed"]) == (every > 1)


def test_repairs_of_one_id_are_told_apart(record: Record) -> None:
    found = told(record("P1:attention", "P1:mlp"))
    assert [cause.fault for cause in found.causes] == ["P1", "P1"]
    assert found.worth["after"].keys() == {"P1:attention", "P1:mlp", "all"}


def test_a_norm_that_is_lost_in_memory_is_put_back_by_the_keys_that_mean_it(record: Record) -> None:
    """Without features, fingerprints alone show it."""
    [cause] = told(record("N2", level=Level.LIGHT)).causes
    assert cause.fault == "N2" and "is right about fc_norm" in cause.fix and "per_slot" in cause.fix


def test_a_trace_without_features_is_not_enough(record: Record) -> None:
    found = told(record(level=Level.LIGHT))
    assert found.verdict is Verdict.INSUFFICIENT
    assert found.next_command


def test_trained_accuracy_parts_a_weak_draft_from_other_data(healthy: Trace) -> None:
    found = told(healthy, trained=Trained((0.99, 0.99, 0.99)))
    assert found.verdict is Verdict.OTHER_DATA
    measured = [rung["measured"] for rung in found.coverage["ladder"]["rungs"]]
    again = told(healthy, trained=Trained(tuple(measured)))
    assert again.verdict in (Verdict.HEALTHY, Verdict.WEAK_DRAFT)
    assert again.coverage["ladder"]["reaches"]


def test_a_draft_of_other_features_is_refused(record: Record, healthy: Trace) -> None:
    with pytest.raises(UserError, match=r"received features are 240 wide, but fc of .* takes 80"):
        told(healthy, DRAFT.parent / "one-slot")


def test_nothing_is_tried_when_there_is_no_time_and_that_is_said(record: Record) -> None:
    found = told(record("N3"), budget_secs=0.0)
    assert found.coverage["hypotheses left untried for want of time"] > 0
    assert [cause.fault for cause in found.causes] in ([], ["N3"])


def test_a_wiring_that_its_ends_have_run_together_is_found_in_as_many_steps_as_it_takes(
    record: Record, tmp_path: Path
) -> None:
    wrong = edited(tmp_path / "wrong", **{IDS: [3, 5, 5]})  # three too late each, on five layers
    [cause] = told(record(draft=wrong), wrong).causes
    assert (cause.fault, cause.variant) == ("W2", "3") and "(0, 3, 4) is right" in cause.title


@pytest.mark.parametrize("secs", [0.0, 1.5])
def test_a_search_that_was_cut_short_names_nothing_but_what_the_trace_proves(
    secs: float, healthy: Trace, record: Record, tmp_path: Path
) -> None:
    lost = edited(tmp_path / "lost", **{IDS: None})
    found = told(healthy, lost, budget_secs=secs)
    assert found.coverage["hypotheses left untried for want of time"]
    assert (found.verdict, found.causes) == (Verdict.INSUFFICIENT, ()) and "--budget" in found.next_command
    assert "by value the slots hold (0, 3, 4)" in " ".join(found.notes)
    for proven, hidden in (("V4", "N3"), ("P4", "R3")):
        [cause] = told(record(proven, hidden), budget_secs=0.0).causes
        assert cause.fault == proven


def test_a_reference_of_the_first_tokens_only_decides_nothing(record: Record, tmp_path: Path) -> None:
    wrong = edited(tmp_path / "wrong", norm_output=False)
    short = record(max_new=2, capture=(0, 3, 4))
    found = told(record(draft=wrong), wrong, target=None, reference=short)
    assert (found.verdict, found.causes) == (Verdict.INSUFFICIENT, ())


def test_what_may_hide_behind_other_weights_is_said(record: Record) -> None:
    found = told(record("P1:attention", "R3"))
    assert [cause.fault for cause in found.causes] == ["P1"]
    assert any("beside P1" in note and "the most" in note for note in found.notes)


@pytest.mark.parametrize(("fault", "drawn"), [("S1", False), ("S1", True), ("S2", True)])
def test_verification_that_does_not_keep_to_its_rule_is_named(fault: str, drawn: bool, record: Record) -> None:
    sampling = Sampling(1.0, 3, sampled_drafts=drawn)
    found = told(record(fault, sampling=sampling))
    assert [(cause.fault, cause.predicted_acceptance) for cause in found.causes] == [(fault, None)]


def test_a_draft_that_is_worse_than_what_was_served_is_not_urged(healthy: Trace, tmp_path: Path) -> None:
    worse = shutil.copytree(DRAFT, tmp_path / "worse")
    tensors = load_file(worse / "model.safetensors")
    tensors["fc.weight"] = torch.zeros_like(tensors["fc.weight"])
    save_file(tensors, worse / "model.safetensors")
    found = told(healthy, worse)
    assert (found.verdict, found.causes) == (Verdict.INSUFFICIENT, ())
    assert any("the folder that is meant" in note for note in found.notes)


def test_an_unsealed_trace_is_no_silent_ground(healthy: Trace, tmp_path: Path) -> None:
    torn = shutil.copytree(healthy.folder, tmp_path / "torn")
    (torn / "SEAL").unlink()
    found = told(Trace.open(torn))
    assert found.causes == () and any("torn is unsealed" in note for note in found.notes)
    assert not any("is unsealed" in note for note in told(healthy).notes)

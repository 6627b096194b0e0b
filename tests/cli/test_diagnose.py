"""The page says what to edit before anything else, fits a terminal, and never names a repair where there is none."""

import json
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from spectrace.cli.diagnose import ACCURACY_DEFINITIONS, diagnosis_json, exit_code, render_diagnosis
from spectrace.replay.diagnosis import Cause, Diagnosis, Identified, Reading, Verdict
from spectrace.replay.edits import fix_wiring
from spectrace.replay.ladder import DEFINITIONS, Answers, TeacherForced, Trained, compare
from spectrace.replay.profiles.known import PROFILES
from spectrace.replay.worth import After, Plain, Worth
from spectrace.tracer.manifest import create_trace, seal_trace

Say = Callable[..., Any]
TRACE = Path("runs/production-trace-of-last-night")
EDIT = fix_wiring(
    PROFILES["spectrace"],
    who="config",
    draft=Path("/models/drafts/kimi-k2.5-eagle3-of-our-own-training-run-number-7/checkpoint-12000"),
    served=None,
    boundaries=(0, 3, 16),
    now=(3, 16, 27),
    key="eagle_aux_hidden_state_layer_ids",
)
CAUSE = Cause(
    fault="W3",
    variant="config",
    title="the first slot is missing: (3, 16, 27) where (0, 3, 16) is right",
    confidence=0.99,
    evidence=(
        "slot 0 is configured as boundary 3 and holds 3: error 1.0e-06 of the row's maximum, median of 512 rows",
        "on true features the draft reaches acceptance length 1.877 with wiring (0, 3, 16), and 1.049 as configured",
    ),
    served_acceptance=1.049,
    predicted_acceptance=1.877,
    fix=EDIT.text,
    command=EDIT.command,
)
OTHER = Cause(
    fault="N3", variant="engine", title="feedback is pre_norm where post_norm is right", confidence=0.93,
    evidence=("fed what it was fed, the draft gives 61.0% of the served answers",), served_acceptance=1.049,
    predicted_acceptance=None, fix="serve [with] the other norm", alike=("R1", "K1"),
)  # fmt: skip
WORTH = Worth(
    seconds_per_round=0.1067, target_seconds=0.0725, draft_seconds=0.0154, rest_seconds=0.0188, draft_share=0.144,
    requests_per_pass=6.6, acceptance=1.049, tokens_per_second=9.83, plain_seconds_per_token=0.0913,
    plain_from=Plain.BOUND, break_even_acceptance=1.169, after={"W3": After(1.877, 17.6), "N3": After(None, None)},
)  # fmt: skip
FAULT = Diagnosis(
    verdict=Verdict.FAULT,
    causes=(CAUSE, OTHER),
    readings={
        "wiring": Reading("(3, 16, 27)", "(3, 16, 27)", "(0, 3, 16)"),
        "feedback": Reading("post_norm", "pre_norm", None),
        "residual": Reading("pre_norm", "pre_norm", "pre_norm"),
        "rope theta": Reading("10000", None, None),
    },
    identified=(
        Identified(0, "3", "3", 1e-6, "2", 0.31),
        Identified(1, "16", "17 after the final norm", 1e-6, "16", float("inf")),
    ),
    served_acceptance=1.049,
    repaired_acceptance=2.021,
    worth=WORTH.to_json(),
    coverage={"rows_compared": 1843, "requests": [12, 12], "hypotheses": {"tried": 41, "skipped": 2}, "target": None},
    notes=("rope scaling was not decided: texts are shorter than its context",),
    next_command=CAUSE.command,
)


def _page(diagnosis: Diagnosis, *, width: int = 80) -> str:
    out = StringIO()
    Console(file=out, width=width).print(render_diagnosis(TRACE, diagnosis), crop=False)
    return out.getvalue()


def _words(page: str) -> str:
    """The page as running text, wherever lines were broken."""
    return re.sub(r"\s+", " ", page)


def _plain(verdict: Verdict, **changes: Any) -> Diagnosis:
    return replace(FAULT, verdict=verdict, causes=(), repaired_acceptance=None, next_command="", **changes)


def _ladder(trained: float) -> dict[str, Any]:
    hits = np.arange(100)[:, None] % 2 == 0
    there, left = np.ones((100, 1), bool), np.arange(100)[::-1].copy()
    answers = tuple(Answers(hits, there, hits, there, left) for _ in range(9))
    return compare(Trained((trained,)), TeacherForced(answers, 1)).to_json()


@pytest.mark.parametrize("verdict", list(Verdict))
@pytest.mark.parametrize("width", [80, 120])
def test_every_page_fits_and_only_a_command_may_be_longer(verdict: Verdict, width: int) -> None:
    diagnosis = FAULT if verdict is Verdict.FAULT else _plain(verdict)
    commands = {line for cause in diagnosis.causes for line in cause.command.splitlines()}
    for line in _page(diagnosis, width=width).splitlines():
        assert len(line.rstrip()) <= width or line.rstrip() in commands


def test_the_edit_comes_before_what_it_rests_on() -> None:
    page = _page(FAULT)
    words = _words(page)
    assert page.startswith("FAULT: 2 links are broken\n")
    order = ["WHAT TO EDIT", "Notes", "Three readings", "What the draft's input held", "What speculation is worth"]
    places = [words.index(one) for one in ("1. The first slot is missing", *order)]
    assert places == sorted(places)
    assert "eagle_aux_hidden_state_layer_ids to [0, 3, 16]" in words and "[with]" in words
    assert "1.049 now, 2.021 once all are repaired" in words
    assert "with this link alone repaired: 1.877" in words and "with this link alone repaired: not foretold" in words
    assert "Fault W3, variant config, of the catalogue; confidence 0.99." in words
    assert "cannot tell it from R1 (positions), K1: make the edit below" in words


def test_a_command_is_printed_as_it_is_to_be_run() -> None:
    assert CAUSE.command in _page(FAULT)
    long = "spectrace run --target TARGET --prompts PROMPTS --out NEW_TRACE --draft /models/draft --wiring 0,3,16"
    page = _page(replace(FAULT, causes=(replace(CAUSE, command=long),)))
    shown = page[page.index("spectrace run") : page.index("0,3,16", page.index("spectrace run")) + 6]
    assert " \\\n" in shown and shown.replace(" \\\n   ", "") == long


def test_a_long_command_is_broken_between_its_words_only() -> None:
    words = ["spectrace", "run", "--prompts", "PROMPTS", "--out", "NEW_TRACE", "--draft", "/x/my --draft of --it's"]
    page = _page(replace(FAULT, causes=(replace(CAUSE, command=shlex.join(words)),), next_command=""))
    shown = page[page.index("spectrace run") : page.index("Notes")]
    assert " \\\n    --draft" in shown and shlex.split(shown.replace("\\\n", "")) == words


def test_readings_shown_are_the_wiring_and_those_that_differ() -> None:
    words = _words(_page(FAULT))
    assert "wiring (3, 16, 27) (3, 16, 27) (0, 3, 16)" in words
    assert "feedback post_norm pre_norm not decided" in words
    assert "No difference found in the draft's own residual." in words, "of rope theta one reading alone is known"


def test_worth_is_said_in_units_and_at_its_strength() -> None:
    words = _words(_page(FAULT))
    rest = "the rest (scheduling, sampling, recording) 18.8 ms"
    assert f"A round takes 106.7 ms: target 72.5 ms, draft 15.4 ms, {rest}." in words
    assert "9.8 now; 17.6 with W3 repaired." in words and "N3 repaired" not in words
    assert "1.17 at least" in words and "may be faster" in words
    estimated = replace(FAULT, worth={**FAULT.worth, "plain_from": "slope", "break_even_at_most": 1.523})
    assert "1.17 to 1.52" in _words(_page(estimated))
    assert "What speculation is worth" not in _page(replace(FAULT, worth=Worth().to_json()))


@pytest.mark.parametrize("verdict", [Verdict.HEALTHY, Verdict.WEAK_DRAFT, Verdict.OTHER_DATA])
@pytest.mark.parametrize("measured", [False, True])
def test_where_nothing_is_broken_nothing_is_to_be_repaired(verdict: Verdict, measured: bool) -> None:
    coverage = {"ladder": _ladder(0.6)} if measured else {}
    page = _page(_plain(verdict, coverage=coverage))
    assert "Nothing is to be repaired" in _words(page) and "WHAT TO EDIT" not in page
    assert ("Trained accuracy, measured again" in page) == measured


def test_without_trained_accuracy_a_weak_draft_is_not_told_from_other_data() -> None:
    both, told = _plain(Verdict.WEAK_DRAFT), _plain(Verdict.WEAK_DRAFT, coverage={"ladder": _ladder(0.5)})
    assert "WEAK DRAFT, or other data" in _page(both) and "--trained-accuracy" in _page(both)
    assert _page(told).startswith("WEAK DRAFT\n") and "tells the first two apart" not in _words(_page(told))
    assert "0 0.500 0.500" in _words(_page(told))


def test_too_little_to_tell_prints_what_to_run_next_at_once() -> None:
    command = "spectrace diagnose runs/x --draft /models/draft --target TARGET"
    page = _page(Diagnosis(Verdict.INSUFFICIENT, (), {}, (), None, None, notes=("no text",), next_command=command))
    assert command in page and page.count(command) == 1 and "no text" in page
    assert "repaired" not in page


def test_a_state_of_the_engine_says_where_first() -> None:
    page = _words(_page(_plain(Verdict.ENGINE_STATE, notes=("first at request 3, round 2",))))
    assert page.index("first at request 3") < page.index("Three readings") and page.count("first at request 3") == 1


def test_the_document_has_the_promised_names() -> None:
    document = json.loads(json.dumps(diagnosis_json(FAULT), allow_nan=False))
    assert list(document) == [
        "verdict", "causes", "readings", "identified", "worth", "coverage", "notes", "next_command",
        "served_acceptance", "repaired_acceptance",
    ]  # fmt: skip
    assert set(document["causes"][0]) == {
        "fault", "variant", "class", "title", "confidence", "evidence", "served_acceptance", "predicted_acceptance",
        "fix", "command",
    }  # fmt: skip
    assert document["verdict"] == "fault" and document["causes"][1]["class"] == ["N3", "R1", "K1"]
    assert document["readings"]["feedback"] == {"configured": "post_norm", "engine": "pre_norm", "trained": None}
    assert document["identified"]["1"] == {
        "configured": "16", "boundary": "17 after the final norm", "error": 1e-6, "runner_up": "16",
        "runner_up_error": None,
    }  # fmt: skip


@pytest.mark.parametrize("verdict", list(Verdict))
def test_only_a_fault_or_a_state_of_the_engine_exits_with_one(verdict: Verdict) -> None:
    assert exit_code(_plain(verdict)) == (1 if verdict in ("fault", "engine_state") else 0)


def test_the_definitions_offered_are_those_there_are() -> None:
    assert tuple(DEFINITIONS) == ACCURACY_DEFINITIONS


Called = dict[str, Any]


@pytest.fixture
def diagnosed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, draft_of: Callable[..., Path]) -> tuple[Path, Called]:
    """A trace whose diagnosis is `called["answer"]`; what it was called with is kept beside it."""
    draft, trace = draft_of("llama", "gqa"), tmp_path / "trace"
    (tmp_path / "target").mkdir()
    create_trace(trace, {"draft": {"path": str(draft)}, "target": {"path": str(tmp_path / "target")}})
    seal_trace(trace)
    called: Called = {"answer": FAULT}

    def diagnose(opened: Any, checkpoint: Any, **options: Any) -> Diagnosis:
        called.update(trace=opened, checkpoint=checkpoint, **options)
        options["progress"]("replaying", 1, 2)
        answer: Diagnosis = called["answer"]
        return answer

    module = ModuleType("spectrace.replay.diagnose")
    vars(module)["diagnose"] = diagnose
    monkeypatch.setitem(sys.modules, "spectrace.replay.diagnose", module)
    return trace, called


def test_what_was_recorded_is_the_default(spectrace: Say, diagnosed: tuple[Path, Called], tmp_path: Path) -> None:
    trace, called = diagnosed
    said = spectrace("diagnose", trace)
    assert said.code == 1 and said.out.startswith("FAULT: 2 links are broken")
    assert str(called["checkpoint"].folder) == called["trace"].manifest["draft"]["path"]
    assert called["target"] == tmp_path / "target" and called["reference"] is None and called["trained"] is None
    assert called["budget_secs"] == 180.0
    assert spectrace("diagnose", trace, "--no-target").code == 1 and called["target"] is None


def test_options_arrive(spectrace: Say, diagnosed: tuple[Path, Called], tmp_path: Path) -> None:
    trace, called = diagnosed
    called["answer"] = _plain(Verdict.HEALTHY)
    said = spectrace(
        "diagnose", trace, "--target", tmp_path, "--reference", trace, "--trained-accuracy", "0.747,0.71",
        "--accuracy-definition", "restricted", "--budget", "5", "--threads", "1", "--json",
    )  # fmt: skip
    assert said.code == 0 and json.loads(said.out)["verdict"] == "healthy"
    assert called["target"] == tmp_path and called["reference"].folder == trace
    assert called["trained"] == Trained((0.747, 0.71), "restricted") and called["budget_secs"] == 5.0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--trained-accuracy", "0.7,high"), "--trained-accuracy '0.7,high': expected one share per step"),
        (("--trained-accuracy", "74.7"), "shares from 0 to 1"),
        (("--accuracy-definition", "eagle"), "give --trained-accuracy, too"),
        (("--target", "nowhere"), "--target nowhere: no such folder"),
        (("--target", ".", "--no-target"), "contradict"),
        (("--draft", "nowhere"), "nowhere: no such folder"),
        (("--reference", "nowhere"), "nowhere"),
        (("--draft", ""), "--draft is empty: expected a path"),
        (("--target", ""), "--target is empty: expected a path"),
        (("--reference", ""), "--reference is empty: expected a path"),
        (("--budget", "nan"), "--budget nan: expected a finite number"),
        (("--budget", "inf"), "--budget inf: expected a finite number"),
        (("--trained-accuracy", "nan"), "shares from 0 to 1"),
    ],
)
def test_bad_options_are_refused_in_one_line(
    spectrace: Say, diagnosed: tuple[Path, Called], options: tuple[str, ...], says: str
) -> None:
    said = spectrace("diagnose", diagnosed[0], *options)
    assert said.code == 2 and says in said.complaint


def test_a_recorded_draft_that_is_gone_is_asked_for(spectrace: Say, tmp_path: Path) -> None:
    trace = create_trace(tmp_path / "trace", {"draft": {"path": str(tmp_path / "gone")}})
    seal_trace(trace)
    said = spectrace("diagnose", trace)
    assert said.code == 2 and "say where with --draft DIR" in said.complaint


def test_a_repair_that_brings_nothing_is_not_urged() -> None:
    one = replace(FAULT, causes=(CAUSE,), served_acceptance=1.836, repaired_acceptance=1.824)
    assert "no gain is foretold" in _words(_page(one)) and "serve again" not in _words(_page(one))
    assert "no gain is foretold" not in _words(_page(FAULT)) and "serve again" in _words(_page(FAULT))


@pytest.mark.parametrize(("after", "still"), [(1.15, True), (2.021, False)])
def test_what_decoding_without_a_draft_brings_is_said_and_whether_the_repair_changes_that(
    after: float, still: bool
) -> None:
    worth = {**FAULT.worth, "break_even_acceptance": 1.2, "plain_seconds_per_token": 0.08}
    words = _words(_page(replace(FAULT, worth=worth, served_acceptance=1.05, repaired_acceptance=after)))
    assert "1.050 is below the break-even length of at least 1.20" in words
    assert "(at least 12.5 tokens per second, now 10.9)" in words
    assert ("Once repaired, 1.150 is below it still" in words) == still


@pytest.mark.parametrize(("whole", "urged"), [(13, True), (12, True), (11, False)])
def test_decoding_without_a_draft_is_not_urged_where_most_rounds_were_cut(whole: int, urged: bool) -> None:
    one = replace(FAULT, coverage={"rounds": {"whole": whole, "cut": 12}})
    words = _words(_page(one))
    assert ("1.049 is below the break-even length" in words) == urged and f"rounds whole {whole}, cut 12" in words

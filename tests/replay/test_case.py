"""A diagnosis works on the trace of one start of an engine."""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from toy.train import DRAFT

from spectrace.engine.checkpoint import read_draft
from spectrace.engine.spec import IdMap, MlaSpec, RopeKind, RopeSpec, Stream
from spectrace.replay.case import Case, on_its_traces, open_case
from spectrace.replay.diagnosis import Diagnosis, Verdict
from spectrace.tracer import Keys, Recorder
from spectrace.tracer.errors import UserError
from spectrace.tracer.manifest import create_trace, seal_trace
from spectrace.tracer.trace import Trace


def test_a_trace_of_two_starts_is_refused_in_one_message() -> None:
    trace: Any = SimpleNamespace(folder=Path("T"), manifest={}, rows=lambda *_, **__: {"incarnation": np.array([0, 1])})
    with pytest.raises(UserError, match=r"^T: it holds 2 starts of the engine, .* record again without a restart$"):
        open_case(trace, read_draft(DRAFT), None)


@pytest.mark.parametrize(("layers", "fits"), [(4, True), (3, False)])
def test_a_draft_that_takes_boundaries_of_another_target_is_refused(tmp_path: Path, layers: int, fits: bool) -> None:
    trace = create_trace(tmp_path / "T", {"target": {"config": {"num_hidden_layers": layers}}})
    seal_trace(trace)
    if fits:
        assert open_case(Trace.open(trace), read_draft(DRAFT), None).configured_wiring == (0, 3, 4)
        return
    with pytest.raises(UserError, match=r"layer_ids \[0, 3, 4\]: boundary 4 does not exist; .*, for its 3 layers"):
        open_case(Trace.open(trace), read_draft(DRAFT), None)


FOUND = Diagnosis(Verdict.HEALTHY, (), {}, (), 1.0, None, coverage={"rows": 1}, notes=("as before",))


@pytest.fixture
def rounds_of(tmp_path: Path) -> Callable[..., Trace]:
    """`rounds_of(cut, sealed=)` is a trace of four rounds, so many of them cut by the end of an answer."""

    def make(cut: int, *, sealed: bool = True) -> Trace:
        folder = create_trace(tmp_path / f"T-{sealed}", {})
        with Recorder(folder, role="scheduler", strict=True) as recorder:
            for number in range(4):
                recorder.verified(
                    Keys(request=0, pass_=0, position=0, node=np.arange(2), round=number),
                    parent=np.array([-1, 0]), token=0, target_token=0, accepted=np.array([True, False]),
                    cut=number < cut, source_row=0,
                )  # fmt: skip
        if sealed:
            seal_trace(folder)
        return Trace.open(folder)

    return make


@pytest.mark.parametrize(("cut", "told"), [(0, False), (2, False), (3, True)])
def test_a_diagnosis_says_how_many_rounds_were_whole_and_doubts_an_acceptance_of_few(
    rounds_of: Callable[..., Trace], cut: int, told: bool
) -> None:
    found = on_its_traces(FOUND, rounds_of(cut))
    assert found.coverage == {"rows": 1, "trace sealed": True, "rounds": {"whole": 4 - cut, "cut": cut}}
    assert (
        found.notes[0] == "as before" and any(note.startswith("of 4 rounds 3 were cut") for note in found.notes) == told
    )


def test_a_trace_or_reference_that_was_never_sealed_is_noted(rounds_of: Callable[..., Trace]) -> None:
    whole, torn = rounds_of(0), rounds_of(0, sealed=False)
    for found, name in ((on_its_traces(FOUND, torn, whole), "trace"), (on_its_traces(FOUND, whole, torn), "reference")):
        assert f"the {name} {torn.folder} is unsealed" in found.notes[1] and len(found.notes) == 2
        assert {found.coverage["trace sealed"], found.coverage["reference sealed"]} == {True, False}
        assert not found.coverage[f"{name} sealed"]


@pytest.fixture
def case_of(tmp_path: Path) -> Callable[[Any], Case]:
    """`case_of(told)` is the case of a trace whose manifest says so of the draft's switches."""

    def make(told: Any) -> Case:
        trace = create_trace(tmp_path / "T", {"draft": {"spec": told}})
        seal_trace(trace)
        return open_case(Trace.open(trace), read_draft(DRAFT), None)

    return make


def test_switches_are_read_back_and_those_of_another_version_passed_over(case_of: Callable[[Any], Case]) -> None:
    spec = read_draft(DRAFT).spec
    assert isinstance(spec.attention, MlaSpec)
    served = replace(
        spec,
        residual=Stream.POST_NORM,
        id_map=IdMap.ABSOLUTE,
        rope=RopeSpec(theta=5.0, kind=RopeKind.LINEAR, factor=2.0),
    )
    told: dict[str, Any] = asdict(served)
    for held in (told, told["rope"], told["attention"]):
        held["of_a_later_version"] = 1
    del told["feedback"], told["rope"]["beta_slow"]
    found = case_of(told).served_spec
    assert found == replace(served, feedback=Stream.PRE_NORM) and found.id_map is IdMap.ABSOLUTE
    assert found.rope.kind is RopeKind.LINEAR and isinstance(found.attention, MlaSpec)


@pytest.mark.parametrize(
    "broken", [{"width": None}, {"attention": {"heads": 2}}, {"rope": {"kind": "ntk"}}, {"rope": 3}]
)
def test_switches_that_cannot_be_read_are_refused_in_one_message(
    case_of: Callable[[Any], Case], broken: dict[str, Any]
) -> None:
    told = {name: value for name, value in {**asdict(read_draft(DRAFT).spec), **broken}.items() if value is not None}
    with pytest.raises(UserError, match=r"T: draft\.spec in its manifest cannot be read \(.+\); .* or record again$"):
        case_of(told)

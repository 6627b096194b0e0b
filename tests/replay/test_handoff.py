"""The hand-off is proved by hashes: what is whole is called whole, what is broken is named by the rows it carries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from spectrace.replay.finding import Finding
from spectrace.replay.handoff import faithful_rows, hand_off
from spectrace.tracer.keys import Keys
from spectrace.tracer.manifest import create_trace
from spectrace.tracer.recorder import Recorder
from spectrace.tracer.rows import Level, Phase
from spectrace.tracer.trace import Trace

Record = Callable[..., Trace]
TREE = {"topk": 3, "draft_tokens": 8}
WINDOW = {"fixed_window": True}
SHAPES = {
    "chain": {},
    "tree": TREE,
    "window": WINDOW,
    "tree in a window": {**TREE, **WINDOW},
    "alone": {"concurrency": 1},
}
FAULTS = ("M3", "M3:constant", "M3:stale", "X1", "X2", "X3", "X4", "D1", "D1:fp8")
WIDTH, SLOTS, ROWS = 8, 3, 24


def cases() -> list[tuple[str, str]]:
    """Each fault in every shape that can have it; one request alone where that may make it look like another."""
    lacks = {"X1": ("alone",), "X3": ("chain", "tree", "alone"), "X4": ("chain", "window", "alone")}
    lacks |= {fault: ("alone",) for fault in ("M3", "D1", "D1:fp8")}
    return [(fault, shape) for fault in FAULTS for shape in SHAPES if shape not in lacks.get(fault, ())]


def named(finding: Finding) -> str:
    return finding.fault + (f":{finding.variant}" if finding.variant else "")


def test_a_clean_run_is_whole_in_every_shape(clean: Trace) -> None:
    found = hand_off(clean)
    assert found.findings == ()
    assert found.rows == found.compared == found.equal > 80
    assert len(faithful_rows(clean)) == found.rows


@pytest.mark.parametrize(("fault", "shape"), cases())
def test_a_fault_of_the_hand_off_is_named_alone(fault: str, shape: str, record: Record) -> None:
    found = hand_off(record(fault, **SHAPES[shape]))
    assert [named(finding) for finding in found.findings] == [fault]
    assert found.findings[0].confidence == 1 and found.findings[0].masks == fault.startswith("M3")
    assert found.equal < found.compared == found.rows
    assert f"{found.compared - found.equal} of {found.compared} received rows" in found.findings[0].evidence[0]


@pytest.mark.parametrize("fault", ["W1", "W3", "W5", "W6", "W8", "T1", "R1", "M1", "V3", "P1:fc", "N1"])
def test_faults_before_and_behind_the_hand_off_leave_it_whole(fault: str, record: Record) -> None:
    found = hand_off(record(fault))
    assert found.findings == () and found.compared == found.equal == found.rows > 80


def test_at_level_light_hashes_name_what_they_can(record: Record) -> None:
    """Zeros by their hash; of values that were changed only that they were."""
    light = {"level": Level.LIGHT}
    for fault in ("M3", "M3:constant", "M3:stale", "X1", "X2"):
        assert [named(one) for one in hand_off(record(fault, **light)).findings] == [fault]
    [changed] = hand_off(record("D1:fp8", **light)).findings
    assert changed.fault == "D1" and changed.confidence < 1 and "M3" in changed.alike
    assert "not recorded" in changed.evidence[-1]


def test_at_level_features_a_cast_is_seen_by_the_values_alone(record: Record) -> None:
    for fault, dtype in (("D1", "float16"), ("D1:fp8", "float8_e4m3fn")):
        [found] = hand_off(record(fault, level=Level.FEATURES)).findings
        assert named(found) == fault and dtype in found.title


def test_rows_that_are_alike_do_not_hide_a_swap(record: Record) -> None:
    found = hand_off(record("X1", twice=True, concurrency=3))
    assert [finding.fault for finding in found.findings] == ["X1"]


def test_a_stale_buffer_is_told_from_the_row_before_where_nothing_is_accepted(record: Record) -> None:
    """Then the row of the step before is the row of the text before."""
    found = hand_off(record("M3:stale", depth=1, concurrency=1, chunk=None))
    assert [named(finding) for finding in found.findings] == ["M3:stale"]
    assert any("of the step just before" in told for told in found.findings[0].evidence)


@pytest.mark.parametrize("writer", ["target-0", "draft-0", "scheduler-0"])
def test_a_torn_trace_raises_no_alarm(writer: str, torn: Callable[[str, int], Trace], record: Record) -> None:
    whole = len((record(**TREE, **WINDOW).folder / writer / "ledger").read_bytes()) // 64
    compared = [hand_off(torn(writer, records)) for records in range(1, whole, max(whole // 6, 1))]
    assert all(found.findings == () for found in compared)
    assert all(found.compared == found.equal <= found.rows for found in compared)


def test_faithful_rows_are_those_that_no_swap_touched(record: Record) -> None:
    trace = record("X1")
    found, rows = hand_off(trace), faithful_rows(trace)
    assert 0 < len(rows) == found.equal < found.compared


def test_without_slots_on_the_targets_side_nothing_is_said(record: Record) -> None:
    found = hand_off(record(depth=0))
    assert (found.rows, found.compared, found.findings) == (0, 0, ())


def handed(folder: Path, emitted: Tensor, received: Tensor, *, level: Level = Level.FULL) -> Trace:
    """A trace of one prompt that was run and fed in pieces of four rows."""
    create_trace(folder, {"dtype": str(emitted.dtype).removeprefix("torch.")})
    with (
        Recorder(folder, role="target", level=level, strict=True) as target,
        Recorder(folder, role="draft", level=level, strict=True) as draft,
    ):
        for piece in range(0, len(emitted), 4):
            rows = slice(piece, piece + 4)
            keys = {
                "request": [0] * 4,
                "pass_": piece // 4,
                "position": np.arange(piece, piece + 4),
                "step": piece // 4,
            }
            target.emitted(Keys(**keys), token=[1] * 4, slots=emitted[rows], slot_width=WIDTH)
            extends = Keys(**keys, phase=Phase.DRAFT_EXTEND)
            draft.received(extends, token=[1] * 4, features=received[rows], slot_width=WIDTH)
    return Trace.open(folder)


@pytest.fixture
def features() -> Tensor:
    return torch.randn(ROWS, SLOTS * WIDTH, generator=torch.Generator().manual_seed(0))


def slots(features: Tensor, *order: int) -> Tensor:
    return torch.cat([features.chunk(SLOTS, -1)[slot] for slot in order], -1)


def test_what_happened_to_slots_is_told_slot_by_slot(features: Tensor, tmp_path: Path) -> None:
    one_zero = torch.cat((features[:, : 2 * WIDTH], torch.zeros(ROWS, WIDTH)), -1)
    changes = {"W5:hand-off": slots(features, 2, 1, 0), "W6:hand-off": slots(features, 0, 0, 2), "M3": one_zero}
    for at, (name, received) in enumerate(changes.items()):
        [found] = hand_off(handed(tmp_path / str(at), features, received)).findings
        assert named(found) == name and found.confidence == 1
        assert f"{ROWS} of {ROWS} received rows" in found.evidence[0]
    assert "they differ in slot 2 of slots 0 to 2 alone" in found.evidence


def test_slots_that_did_not_arrive_are_counted(features: Tensor, tmp_path: Path) -> None:
    found = hand_off(handed(tmp_path / "trace", features, features[:, : 2 * WIDTH]))
    assert [named(one) for one in found.findings] == ["M3:truncated"] and "2 of 3 slots" in found.findings[0].title
    assert found.equal == 0


def test_rows_divided_into_other_slots_are_not_compared(features: Tensor, tmp_path: Path) -> None:
    found = hand_off(handed(tmp_path / "trace", features, torch.randn(ROWS, 2 * WIDTH)))
    assert (found.compared, found.findings) == (0, ())


@pytest.mark.parametrize("level", [Level.FEATURES, Level.FULL])
@pytest.mark.parametrize(
    ("dtype", "cast", "variant"),
    [
        (torch.float32, torch.bfloat16, "bf16"),
        (torch.float32, torch.float8_e5m2, "fp8_e5m2"),
        (torch.bfloat16, torch.float8_e4m3fn, "fp8"),
        (torch.float16, torch.float8_e4m3fn, "fp8"),
        (torch.float64, torch.float16, ""),
    ],
    ids=str,
)
def test_every_narrower_type_is_recognised(
    dtype: torch.dtype, cast: torch.dtype, variant: str, level: Level, features: Tensor, tmp_path: Path
) -> None:
    emitted = features.to(dtype)
    [found] = hand_off(handed(tmp_path / "trace", emitted, emitted.to(cast).to(dtype), level=level)).findings
    assert (found.fault, found.variant, found.masks) == ("D1", variant, False)
    assert any("bit for bit" in told for told in found.evidence) == (level is Level.FULL)


def test_bfloat16_through_half_shows_by_what_overflows(features: Tensor, tmp_path: Path) -> None:
    emitted = features.bfloat16()
    emitted[::3, 5] = 1e5
    found = hand_off(handed(tmp_path / "trace", emitted, emitted.half().bfloat16(), level=Level.FEATURES))
    assert [named(one) for one in found.findings] == ["D1"] and found.compared - found.equal == ROWS // 3
    assert any("beyond its range" in told for told in found.findings[0].evidence)


@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize("level", [Level.FEATURES, Level.FULL])
def test_a_cast_is_recognised_where_every_row_overflows(
    level: Level, clamped: bool, features: Tensor, tmp_path: Path
) -> None:
    emitted = features.clone()
    emitted[:, 3] = 1e4
    cast = (emitted.clamp(-448, 448) if clamped else emitted).to(torch.float8_e4m3fn).float()
    [found] = hand_off(handed(tmp_path / "trace", emitted, cast, level=level)).findings
    assert named(found) == "D1:fp8" and any("beyond its range" in told for told in found.evidence)
    assert any("24 of 24 rows are the emitted ones" in told for told in found.evidence) == (level is Level.FULL)


def test_values_changed_by_no_cast_are_called_just_that(features: Tensor, tmp_path: Path) -> None:
    [found] = hand_off(handed(tmp_path / "trace", features, features * 1.5)).findings
    assert named(found) == "D1:other" and found.confidence < 1 and not found.masks


@pytest.mark.parametrize("right", [0, ROWS // 2, ROWS // 2 + 1])
def test_a_cast_of_other_rows_is_none_of_those_that_were_emitted(right: int, features: Tensor, tmp_path: Path) -> None:
    """Values that a narrower type can hold are no cast of the emitted ones unless most rows are."""
    received = torch.cat((features[:right], features.roll(1, 0)[right:] * 3)).bfloat16().float()
    [found] = hand_off(handed(tmp_path / "trace", features, received)).findings
    assert named(found) == ("D1:bf16" if 2 * right > ROWS else "D1:other")
    assert (found.confidence == 1) == (2 * right > ROWS)


def test_a_few_odd_rows_beside_a_fault_make_no_second_one(features: Tensor, tmp_path: Path) -> None:
    received = torch.zeros_like(features)
    received[0] = 2 * features[0]
    found = hand_off(handed(tmp_path / "trace", features, received)).findings
    assert [named(one) for one in found] == ["M3"] and found[0].confidence < 1
    assert "1 carry hashes that no emitted row has" in found[0].evidence[-1]


def test_two_faults_at_once_are_both_named(features: Tensor, tmp_path: Path) -> None:
    """Half of the rows zero, the other half those of the row before."""
    received = torch.zeros_like(features)
    received[ROWS // 2 + 1 :] = features[ROWS // 2 : -1]
    found = hand_off(handed(tmp_path / "trace", features, received)).findings
    assert {one.fault for one in found} == {"M3", "X2"}

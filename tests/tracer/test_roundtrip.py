"""What was recorded is what is read back: every family, level and element type, however calls were merged."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spectrace.tracer import Keys, Level, Phase, Recorder, Rows, Trace, create_trace
from spectrace.tracer.fingerprint import row_hashes
from spectrace.tracer.rows import FAMILIES, Family

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KEY_RANGES = {
    "request": 2**32,
    "pass_": 2**32,
    "depth": 2**16,
    "node": 2**32,
    "position": 2**31,
    "phase": 4,
    "round": 2**31,
    "step": 2**63,
    "live": 2,
}
SCALARS = {"int32": "i4", "int64": "i8", "float": "f4", "double": "f8", "bool": "?"}


class Call:
    """One call of a verb with random rows, and the columns it should come back as."""

    def __init__(self, family: Family, seed: int, rows: int, dtype: torch.dtype, slots: int) -> None:
        self.family, self.rows = family, rows
        self.random = np.random.default_rng(seed)
        self.tensors: dict[tuple[str, str], torch.Tensor] = {}
        self.hashes: dict[str, np.ndarray] = {}
        self.keys = {name: self.key(name, high) for name, high in KEY_RANGES.items()}
        self.given: dict[str, Any] = {}
        self.add_tensors(dtype, slots)
        self.add_columns()

    def key(self, name: str, high: int) -> np.ndarray:
        values = self.random.integers(0, high, self.rows, dtype=np.int64)
        return values.astype(bool) if name == "live" else values

    def add_columns(self) -> None:
        held = {wide.hashes for wide in self.family.wides}
        for column in self.family.columns[11:]:
            if column.name in held:
                continue
            kind = str(column.type)
            if kind.startswith("list"):
                self.given[column.name] = [list(range(int(n))) for n in self.random.integers(0, 4, self.rows)]
            elif kind == "string":
                self.given[column.name] = [f"é{at}" for at in range(self.rows)]
            else:
                self.given[column.name] = self.scalars(SCALARS[kind], column.nullable)

    def scalars(self, kind: str, nullable: bool) -> np.ndarray:
        if kind == "?":
            return self.random.integers(0, 2, self.rows) > 0
        if kind.startswith("f"):
            values = self.random.normal(size=self.rows).astype(kind)
            return np.where(self.random.random(self.rows) < 0.3, np.nan, values).astype(kind) if nullable else values
        return self.random.integers(-1 if nullable else 0, np.iinfo(kind).max, self.rows).astype(kind)

    def tensor(self, width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(self.random.normal(size=(self.rows, width)).astype("f4")).to(dtype)

    def add_tensors(self, dtype: torch.dtype, slots: int) -> None:
        for wide in self.family.wides:
            if wide.kind == "state" and self.family.name == "received":
                continue
            if wide.kind == "logits":
                ids = torch.from_numpy(self.random.integers(0, 99, (self.rows, 5)).astype("i4"))
                columns, widths = {"ids": ids, "values": self.tensor(5, torch.float32)}, []
                self.given["logits"] = (columns["ids"], columns["values"])
            elif wide.kind == "boundaries":
                columns = {f"b{at}": self.tensor(3, dtype) for at in range(slots)}
                self.given["boundaries"] = {int(name[1:]): tensor for name, tensor in columns.items()}
                widths = [3]
            else:
                sliced = wide.hashes == "hashes"
                columns = {wide.kind: self.tensor(3 * slots if sliced else 3, dtype)}
                self.given[wide.kind] = columns[wide.kind]
                widths = [3] * slots if sliced else [3]
                self.given |= {"slot_width": 3} if sliced else {}
            self.tensors |= {(wide.kind, name): tensor for name, tensor in columns.items()}
            if wide.hashes:
                self.hashes[wide.hashes] = np.concatenate([row_hashes(t, widths) for t in columns.values()], axis=1)

    def record(self, recorder: Recorder) -> None:
        getattr(recorder, self.family.name)(Keys(**self.keys), **self.given)


def expected_column(calls: list[Call], name: str) -> np.ndarray:
    parts = [call.keys[name] if name in call.keys else call.given[name] for call in calls]
    return np.concatenate([np.asarray(part) for part in parts])


def check_narrow(rows: Rows, calls: list[Call]) -> None:
    for name in KEY_RANGES:
        np.testing.assert_array_equal(rows[name.rstrip("_")], expected_column(calls, name))
    for column in rows.family.columns[11:]:
        held = [call.hashes[column.name] for call in calls if column.name in call.hashes]
        if held:
            assert [list(np.atleast_1d(one)) for one in rows[column.name]] == [
                list(one) for part in held for one in part
            ]
        elif str(column.type).startswith("list"):
            assert [list(one) for one in rows[column.name]] == [
                one for call in calls for one in call.given[column.name]
            ]
        else:
            np.testing.assert_array_equal(rows[column.name], expected_column(calls, column.name))


def check_wide(rows: Rows, calls: list[Call], level: Level) -> None:
    for kind, name in calls[0].tensors:
        kept = level >= rows.family.wide(kind).level
        assert rows.has(kind).all() == kept and rows.has(kind).any() == kept
        if kept:
            expected = torch.cat([call.tensors[kind, name] for call in calls])
            found = rows.tensor(kind, name)
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    family=st.sampled_from(FAMILIES),
    level=st.sampled_from(Level),
    dtype=st.sampled_from(DTYPES),
    slots=st.integers(1, 3),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    batch_bytes=st.sampled_from([1, 2500, 1 << 20]),
    segment_bytes=st.sampled_from([1, 4000, 1 << 30]),
    seed=st.integers(0, 2**20),
)
def test_rows_and_tensors_come_back_as_recorded(
    family: Family,
    level: Level,
    dtype: torch.dtype,
    slots: int,
    sizes: list[int],
    batch_bytes: int,
    segment_bytes: int,
    seed: int,
) -> None:
    calls = [Call(family, seed + at, rows, dtype, slots) for at, rows in enumerate(sizes)]
    with tempfile.TemporaryDirectory() as name:
        folder = create_trace(Path(name) / "t", {})
        options: dict[str, Any] = {"batch_bytes": batch_bytes, "segment_bytes": segment_bytes}
        with Recorder(folder, role="draft", rank=3, incarnation=2, level=level, strict=True, **options) as recorder:
            for call in calls:
                call.record(recorder)
        opened = Trace.open(folder)
        assert opened.verify() == []
        rows = opened.rows(family.name)
        assert (
            len(rows) == sum(sizes) == opened.account()[family.name].recorded == recorder.account[family.name].recorded
        )
        assert set(rows["rank"]) == {3} and set(rows["incarnation"]) == {2}
        check_narrow(rows, calls)
        check_wide(rows, calls, level)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_payloads_keep_their_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    bits = torch.tensor([[0x7FC1, 0x7F81, -1, 0x7E01]], dtype=torch.int16)
    odd = bits.view(dtype) if dtype.itemsize == 2 else (bits.int() << 16 | 7).view(dtype)
    create_trace(tmp_path / "t", {})
    with Recorder(tmp_path / "t", role="draft", strict=True) as recorder:
        recorder.received(Keys(request=0, pass_=0, position=[0]), token=[1], features=odd)
    found = Trace.open(tmp_path / "t").rows("received").payload("features")
    assert found.tobytes() == odd.view(torch.uint8).numpy().tobytes()


def test_light_keeps_the_hashes_that_full_keeps(tmp_path: Path, trace_of: Any) -> None:
    traces = [Trace.open(trace_of(tmp_path / level.name, level=level)) for level in Level]
    for family in ("emitted", "received", "reference"):
        light, features, full = (trace.rows(family)["hashes"] for trace in traces)
        assert [list(row) for row in light] == [list(row) for row in features] == [list(row) for row in full]
    assert (traces[0].rows("drafted")["state_hash"] == traces[2].rows("drafted")["state_hash"]).all()
    assert not list(tmp_path.glob("LIGHT/*/*.*.arrow"))
    assert {path.name[6:] for path in tmp_path.glob("FEATURES/*/*.*.arrow")} == {
        "received.features.arrow",
        "reference.boundaries.arrow",
    }


def test_a_draft_is_handed_what_the_target_emitted(whole: Path) -> None:
    """The hand-off proof: equal bytes have equal hashes on both sides."""
    opened = Trace.open(whole)
    emitted, received = opened.rows("emitted"), opened.rows("received", depth=0)
    assert (emitted["hashes"] == received["hashes"]).all() and emitted["hashes"].shape == (9, 2)
    assert (opened.rows("drafted")["state_hash"] == opened.rows("received", depth=1)["hashes"][:, 0]).all()


def test_phases_and_levels_are_numbers_in_files() -> None:
    assert [int(phase) for phase in Phase] == [0, 1, 2, 3]
    assert [int(level) for level in Level] == [0, 1, 2]

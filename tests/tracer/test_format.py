"""The format is what its page says: the reader on it, which knows nothing of ours, reads what we write."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from spectrace.tracer import Level, Trace
from spectrace.tracer.ledger import LAYOUT, RECORD_BYTES, Kind
from spectrace.tracer.rows import FAMILIES, STREAMS, Family

PAGE = (Path(__file__).parents[2] / "docs" / "trace-format.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def read_rows() -> Any:
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "trace-format.md", "exec"), names)
    return names["read_rows"]


@pytest.mark.parametrize("place", range(1, len(FAMILIES) + 1))
def test_the_pages_reader_reads_every_family(whole: Path, read_rows: Any, place: int) -> None:
    table = read_rows(whole, place)
    rows = Trace.open(whole).rows(FAMILIES[place - 1].name)
    assert table.num_rows == len(rows) > 0
    assert table.column("pass").to_pylist() == rows["pass"].tolist()


def test_any_arrow_reader_opens_a_closed_segment(whole: Path) -> None:
    for path in whole.glob("*/*.arrow"):
        assert pa.ipc.open_file(str(path)).read_all().num_rows > 0


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_page_names_every_column_and_tensor(family: Family) -> None:
    [line] = [line for line in PAGE.splitlines() if f"`{family.name}` |" in line]
    for column in family.columns[11:]:
        assert re.search(rf"\b{column.name}\b", line), column.name
    for at, wide in enumerate(family.wides, 1):
        assert f"{at} `{wide.kind}`" in line


def test_numbers_in_files_never_change() -> None:
    assert LAYOUT.itemsize == RECORD_BYTES == 64
    assert [kind.name for kind in Kind] == ["MANIFEST", "OPEN", "BATCH", "CLOSE", "LOSS", "ABANDON", "SEAL", "STATUS"]
    assert {number: stream.name for number, stream in STREAMS.items()} == {
        0x100: "emitted",
        0x101: "emitted.slots",
        0x102: "emitted.logits",
        0x200: "received",
        0x201: "received.features",
        0x202: "received.state",
        0x300: "drafted",
        0x301: "drafted.fused",
        0x302: "drafted.hidden",
        0x303: "drafted.state",
        0x304: "drafted.logits",
        0x400: "verified",
        0x500: "requests",
        0x600: "reference",
        0x601: "reference.boundaries",
    }


def test_what_each_level_keeps() -> None:
    kept = {level: [s.name for s in STREAMS.values() if s.wide and s.wide.level <= level] for level in Level}
    assert kept[Level.LIGHT] == []
    assert kept[Level.FEATURES] == ["received.features", "reference.boundaries"]
    assert len(kept[Level.FULL]) == 9

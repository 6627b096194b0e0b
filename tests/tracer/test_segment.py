"""A segment's bytes go to the OS as they lie in memory; its extents add up to the file, however short the writes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash

from spectrace.tracer import segment as module
from spectrace.tracer.batching import wide_batch
from spectrace.tracer.segment import Extent, SegmentWriter
from spectrace.tracer.staging import Bits


def batch_of(array: np.ndarray) -> pa.RecordBatch:
    return wide_batch([{"features": Bits(array, "float32")}])


def write(path: Path, batches: list[pa.RecordBatch]) -> list[Extent]:
    segment = SegmentWriter(path, 0, batches[0].schema)
    extents: list[Extent] = []
    for batch in batches:
        extents += segment.write(batch)
        segment.acknowledge(extents)
    return [*extents, segment.close()]


def test_a_large_batch_is_written_from_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.ones((1000, 64), np.float32)
    written: list[int] = []

    def watch(file: int, parts: list[memoryview]) -> None:
        written.extend(np.frombuffer(part, np.uint8).ctypes.data for part in parts if len(part))
        os.writev(file, parts)

    monkeypatch.setattr(module, "_write_all", watch)
    write(tmp_path / "s", [batch_of(array)])
    assert array.ctypes.data in written


@pytest.mark.parametrize("most", [1, 7, 64, 1000, 10**9])
def test_extents_cover_the_file_whatever_the_os_takes_at_once(tmp_path: Path, monkeypatch: Any, most: int) -> None:
    monkeypatch.setattr(os, "writev", lambda file, parts: os.write(file, b"".join(parts)[:most]))
    batches = [batch_of(np.random.default_rng(seed).normal(size=(3, 5)).astype("f4")) for seed in range(3)]
    extents = write(tmp_path / "s", batches)
    data = (tmp_path / "s").read_bytes()
    assert [extent.offset for extent in extents] == [0, *(extent.end for extent in extents[:-1])]
    assert extents[-1].end == len(data) and len(extents) == 5
    for extent in extents:
        assert extent.digest == xxhash.xxh3_64_intdigest(data[extent.offset : extent.end])
    assert pa.ipc.read_schema(pa.py_buffer(data[8 : extents[0].end])) == batches[0].schema
    assert pa.ipc.open_file(str(tmp_path / "s")).read_all() == pa.Table.from_batches(batches)


def test_an_abandoned_segment_ends_where_it_was_acknowledged(tmp_path: Path) -> None:
    batch = batch_of(np.ones((3, 5), np.float32))
    segment = SegmentWriter(tmp_path / "kept", 0, batch.schema)
    segment.acknowledge(segment.write(batch))
    segment.write(batch)
    segment.abandon()
    assert (tmp_path / "kept").stat().st_size == segment.end
    nothing = SegmentWriter(tmp_path / "nothing", 1, batch.schema)
    nothing.write(batch)
    nothing.abandon()
    assert not (tmp_path / "nothing").exists()


def test_parts_beyond_the_limit_of_one_call_are_written_too(tmp_path: Path) -> None:
    parts = [memoryview(bytes([at % 256])) for at in range(2000)]
    with open(tmp_path / "s", "wb") as file:
        module._write_all(file.fileno(), parts)
    assert (tmp_path / "s").read_bytes() == b"".join(parts)

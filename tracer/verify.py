"""Every byte of a trace held against its ledgers."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

from xxhash import xxh3_64_intdigest

from spectrace.tracer.inventory import SegmentView
from spectrace.tracer.ledger import Kind
from spectrace.tracer.problem import Problem
from spectrace.tracer.survey import Survey

__all__ = ["verify"]


def verify(found: Survey) -> list[Problem]:
    """What the survey found, and every range whose bytes are not those that were written."""
    flipped = [
        problem for writer in found.writers.values() for view in writer.segments.values() for problem in _flipped(view)
    ]
    return [*found.problems, *flipped]


def _flipped(view: SegmentView) -> Iterator[Problem]:
    if not len(view.readable):
        return
    with open(view.path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        for record in view.readable:
            offset, length = int(record["offset"]), int(record["length"])
            with memoryview(mapped) as data, data[offset : offset + length] as span:
                digest = xxh3_64_intdigest(span)
            if digest != record["digest"]:
                kind = Kind(int(record["kind"]))
                rows = view.rows if kind is Kind.OPEN else int(record["rows"])
                text = f"{view.name}: {length} bytes ({kind.name.lower()}) at {offset} are not those that were written"
                yield Problem(view.name, offset, "flipped", rows, text)

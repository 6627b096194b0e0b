"""True boundaries come from whatever knows them, request by request, and time grows with what is asked for."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor

from spectrace.replay.configuration import Slot
from spectrace.replay.inputs import runs_from_start
from spectrace.replay.texts import Text
from spectrace.replay.truth import Delivered, Recorded, Truth
from spectrace.tracer.errors import UserError
from spectrace.tracer.rows import FAMILY, POINTER
from spectrace.tracer.rowset import Rows

TEXT = Text(prompt=(1, 2), output=(3, 4, 5), depth=3)


class Known:
    """A source that knows some boundaries of some requests, and answers with its number."""

    def __init__(self, number: int, boundaries: Collection[int], requests: Collection[int], *, rows: int = 4) -> None:
        self.name, self.number, self.coarse, self.rows = f"source {number}", number, number == 1, rows
        self.boundaries, self.requests = boundaries, requests

    def has(self, slot: Slot) -> bool:
        return slot in [Slot(boundary) for boundary in self.boundaries]

    def covers(self, request: int) -> bool:
        return request in self.requests

    def read(self, texts: Mapping[int, Text], slots: Collection[Slot]) -> Mapping[int, Mapping[Slot, Tensor]]:
        return {request: {slot: torch.full((self.rows, 1), self.number) for slot in slots} for request in texts}


def truth_of(*sources: Known) -> Truth:
    return Truth({request: TEXT for request in range(4)}, sources, 6)


def test_a_request_that_one_source_lacks_is_read_from_another() -> None:
    truth = truth_of(Known(1, (0, 3), {1}), Known(2, range(7), range(4)))
    assert list(truth.texts) == [0, 1, 2, 3]
    read = truth.read([0, 1], [Slot(3), Slot(6)])
    assert [[int(one.slots[slot][0]) for slot in (Slot(3), Slot(6))] for one in read] == [[2, 2], [1, 2]]


def test_a_request_of_which_less_is_known_than_of_others_is_left_out() -> None:
    truth = truth_of(Known(1, (0, 3, 6), range(4)), Known(2, (1, 2), {2, 3}))
    assert list(truth.texts) == [2, 3]
    assert truth.known() == [0, 1, 2, 3, 6]
    with pytest.raises(UserError, match="boundary 4 is in no reference"):
        truth.read([2], [Slot(4)])


def test_a_source_that_serves_for_no_request_is_none() -> None:
    truth = truth_of(Known(1, (0,), ()), Known(2, (0, 1), {1}))
    assert [source.name for source in truth.sources] == ["source 2"] and not truth.coarse
    assert truth.known() == [0, 1]


def test_a_text_of_which_a_beginning_is_known_ends_there() -> None:
    [short] = truth_of(Known(1, (0,), {0}, rows=3)).read([0], [Slot(0)])
    [shorter] = truth_of(Known(1, (0,), {0}, rows=1)).read([0], [Slot(0)])
    assert (short.text.output, shorter.text.output) == ((3, 4), ())


class Numbered:
    """Segments in which a row's tensor is its own number."""

    def __init__(self, column: str, rows: int) -> None:
        self.schema = SimpleNamespace(names=[column])
        self.rows = np.arange(rows, dtype=np.float32)[:, None]

    def mapped(self, writer: int, segment: int) -> "Numbered":
        return self

    def array(self, place: int, name: str) -> np.ndarray:
        return self.rows

    def dtype(self, name: str) -> str:
        return "float32"


def rows_of(family: str, column: str, requests: Sequence[int], positions: Sequence[int]) -> Rows:
    """A family's rows, live and outside of rounds, each with the tensor of its number."""
    schema, count, [wide] = FAMILY[family].schema, len(requests), FAMILY[family].wides[:1]
    nulls = np.zeros(count, np.uint32)
    pointers = pa.StructArray.from_arrays([nulls, nulls, np.arange(count, dtype=np.uint32)], fields=list(POINTER))
    columns = {"request": requests, "position": positions, "live": [True] * count, "round": [-1] * count}
    arrays = {name: pa.array(values, schema.field(name).type) for name, values in columns.items()}
    arrays[wide.pointer] = pointers
    for one in schema:
        zeros = pa.types.is_integer(one.type)
        arrays.setdefault(one.name, pa.array(np.zeros(count), one.type) if zeros else pa.nulls(count, one.type))
    segments: Any = Numbered(column, count)
    table = pa.table([arrays[name] for name in schema.names], names=schema.names)
    return Rows(FAMILY[family], table, np.zeros(count, np.int64), segments)


def trace_of(**families: Rows) -> Any:
    nothing = rows_of("received", "features", [], [])
    held = {"verified": {name: nothing["request"] for name in ("request", "pass", "source_row")}, **families}
    rows = lambda family, **equals: held[family] if family == "verified" else held[family].where(**equals)  # noqa: E731
    return SimpleNamespace(folder=Path("T"), manifest={}, writers={"target-0": {"capture": [0]}}, rows=rows)


def test_rows_from_the_start_end_where_a_position_is_missing_or_there_twice() -> None:
    positions = {4: (3, 1, 0, 2), 7: (0, 1, 2, 3, 3, 4, 5), 8: (0, 1, 3, 4), 9: (1, 2), 11: (0, 0)}
    requests = np.concatenate([np.full(len(of_one), request) for request, of_one in positions.items()])
    order = np.random.default_rng(0).permutation(len(requests))
    flat = np.concatenate(list(positions.values()))[order]
    rows = rows_of("received", "features", requests[order], flat)
    found = {request: flat[run].tolist() for request, run in runs_from_start(rows).items()}
    assert found == {4: [0, 1, 2, 3], 7: [0, 1, 2, 3], 8: [0, 1], 11: [0]}


def test_a_delivery_whose_positions_repeat_is_known_up_to_there() -> None:
    trace = trace_of(received=rows_of("received", "features", [5] * 7, [0, 1, 2, 3, 3, 4, 5]))
    [text] = Truth({5: TEXT, 6: TEXT}, [Delivered(trace, [Slot(0)], 1)], 6).read([5], [Slot(0)])
    assert text.slots[Slot(0)].flatten().tolist() == [0, 1, 2, 3]


def test_recorded_boundaries_are_each_request_s_own_in_the_order_of_its_text() -> None:
    reference = rows_of("reference", "b0", [1, 0, 1, 0, 1, 0, 1, 0, 2], [3, 0, 1, 1, 2, 2, 0, 3, 0])
    texts = {request: TEXT for request in range(3)}
    truth = Truth(texts, [Recorded(trace_of(reference=reference), texts, texts)], 6)
    assert list(truth.texts) == [0, 1]  # of request 2 all but the first row is lost
    read = truth.read([1, 0], [Slot(0)])
    assert [one.slots[Slot(0)].flatten().tolist() for one in read] == [[6, 2, 4, 0], [1, 3, 5, 7]]


@pytest.mark.parametrize("requests", [4, 400])
def test_all_rows_are_gone_through_as_often_however_many_requests_there_are(
    requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, positions = (part.reshape(-1).tolist() for part in np.mgrid[:requests, :4])
    trace = trace_of(
        reference=rows_of("reference", "b0", numbers, positions),
        received=rows_of("received", "features", numbers, positions),
    )
    texts, sizes, take = {request: TEXT for request in range(requests)}, list[int](), Rows.take
    monkeypatch.setattr(Rows, "take", lambda rows, which: sizes.append(len(rows)) or take(rows, which))
    truth = Truth(texts, [Recorded(trace, texts, texts), Delivered(trace, [Slot(0)], 1)], 6)
    assert len(truth.texts) == requests
    assert sizes == [4 * requests] * 3

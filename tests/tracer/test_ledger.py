"""The ledger holds what was appended, and a damaged record costs itself only."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrace.tracer.ledger import Kind, Ledger, LedgerWriter, Reason, Record, read_ledger

u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))
RECORDS = st.lists(
    st.builds(
        Record,
        kind=st.sampled_from(Kind),
        reason=st.sampled_from(Reason),
        segment=u32,
        offset=u64,
        length=u64,
        rows=u64,
        digest=u64,
        detail=u32,
    ),
    max_size=20,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ledger")


def write(folder: Path, records: list[Record], together: int = 1) -> bytes:
    path = folder / "ledger"
    path.unlink(missing_ok=True)
    ledger = LedgerWriter(path)
    for at in range(0, len(records), together):
        ledger.append(records[at : at + together])
    ledger.close()
    ledger.close()
    return path.read_bytes()


def fields(ledger: Ledger) -> list[Record]:
    return [
        Record(
            Kind(int(r["kind"])),
            reason=Reason(int(r["reason"])),
            **{name: int(r[name]) for name in ("segment", "offset", "length", "rows", "digest", "detail")},
        )
        for r in ledger.records
    ]


@settings(max_examples=50, deadline=None)
@given(RECORDS, st.integers(1, 3))
def test_records_come_back(folder: Path, records: list[Record], together: int) -> None:
    data = write(folder, records, together)
    ledger = read_ledger(data)
    assert fields(ledger) == records
    assert (ledger.count, ledger.damaged, ledger.torn_bytes) == (len(records), (), 0)
    assert ledger.sealed == bool(records and records[-1].kind is Kind.SEAL)


def test_every_flip_is_seen_and_costs_one_record(folder: Path) -> None:
    records = [Record(Kind.BATCH, rows=at) for at in range(4)]
    data = write(folder, records)
    whole = read_ledger(data)
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        found = read_ledger(bytes(flipped))
        at = bit // 512
        assert at in found.damaged
        assert fields(found) == records[:at] + records[at + 1 :]
        assert found.chain != whole.chain or at < 3


def test_a_torn_record_is_told_from_a_damaged_one(folder: Path) -> None:
    data = write(folder, [Record(Kind.BATCH)] * 3)
    found = read_ledger(data[:-1])
    assert (found.count, found.torn_bytes, found.damaged, found.sealed) == (2, 63, (), False)


def test_an_existing_ledger_is_never_opened_for_writing(folder: Path) -> None:
    write(folder, [Record(Kind.SEAL)])
    with pytest.raises(FileExistsError):
        LedgerWriter(folder / "ledger")

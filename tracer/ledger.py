"""The ledger: one fixed 64-byte record for every range of bytes a writer has put on disk, and for every loss.

A record is appended after the bytes it covers; what has a record is acknowledged, everything else may be torn.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final

import numpy as np
from xxhash import xxh3_64_intdigest

__all__ = ["LAYOUT", "NO_SEGMENT", "RECORD_BYTES", "Kind", "Ledger", "LedgerWriter", "Reason", "Record", "read_ledger"]

RECORD_BYTES: Final = 64
VERSION: Final = 1
NO_SEGMENT: Final = 0xFFFFFFFF
_BODY: Final = struct.Struct("<BBHIQQQQQQI")
_CRC: Final = struct.Struct("<I")
LAYOUT: Final = np.dtype(
    [
        ("kind", "u1"),
        ("version", "u1"),
        ("reason", "<u2"),
        ("segment", "<u4"),
        ("sequence", "<u8"),
        ("offset", "<u8"),
        ("length", "<u8"),
        ("rows", "<u8"),
        ("digest", "<u8"),
        ("previous", "<u8"),
        ("detail", "<u4"),
        ("crc", "<u4"),
    ]
)


class Kind(IntEnum):
    """What a record acknowledges."""

    MANIFEST = 1  # the writer's manifest.json
    OPEN = 2  # a segment's magic and schema; detail = stream number
    BATCH = 3  # a record batch; detail = its place in the segment
    CLOSE = 4  # a segment's end mark and footer; detail = number of batches
    LOSS = 5  # rows that are not here; detail = family's place, reason = why
    ABANDON = 6  # a segment that ends at offset, without a footer, after an error
    SEAL = 7  # nothing follows
    STATUS = 8  # the writer's status.json, as it ended


class Reason(IntEnum):
    """Why rows are missing."""

    NONE = 0
    SAMPLED = 1
    DROPPED = 2
    FAILED = 3


@dataclass(frozen=True, slots=True)
class Record:
    """The fields a writer chooses; sequence, chain and CRC are the ledger's."""

    kind: Kind
    reason: Reason = Reason.NONE
    segment: int = NO_SEGMENT
    offset: int = 0
    length: int = 0
    rows: int = 0
    digest: int = 0
    detail: int = 0


class LedgerWriter:
    """Appends records; a failed append leaves no partial record behind, or ends the ledger for good."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o644)
        self._count = 0
        self._chain = 0
        self._broken = False

    @property
    def present(self) -> bool:
        """False once somebody deleted the file: what is written to it from then on is lost."""
        return os.fstat(self._file).st_nlink > 0

    def append(self, records: Iterable[Record]) -> None:
        count, chain, data = self._count, self._chain, b""
        for record in records:
            packed = _pack(record, count, chain)
            count, chain, data = count + 1, xxh3_64_intdigest(packed), data + packed
        self._write(data)
        self._count, self._chain = count, chain

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, data: bytes) -> None:
        if self._broken:
            raise OSError("the ledger ends in a partial record that could not be removed")
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._file, view) :]
        except BaseException:
            self._broken = True
            os.ftruncate(self._file, self._count * RECORD_BYTES)
            self._broken = False
            raise


def _pack(record: Record, sequence: int, previous: int) -> bytes:
    r = record
    body = _BODY.pack(
        r.kind, VERSION, r.reason, r.segment, sequence, r.offset, r.length, r.rows, r.digest, previous, r.detail
    )
    return body + _CRC.pack(zlib.crc32(body))


@dataclass(frozen=True, slots=True)
class Ledger:
    """A ledger as found: the records that hold, the places of those that do not, and the tail."""

    records: np.ndarray
    damaged: tuple[int, ...]
    count: int
    chain: int
    torn_bytes: int

    @property
    def sealed(self) -> bool:
        whole = not self.torn_bytes and self.count == len(self.records)
        return bool(whole and self.count and self.records["kind"][-1] == Kind.SEAL)


def read_ledger(data: bytes) -> Ledger:
    """Parse a ledger. A damaged record costs itself only; the records after it are still good on their own."""
    count, torn = divmod(len(data), RECORD_BYTES)
    table = np.frombuffer(data, LAYOUT, count)
    view = memoryview(data)
    ends = range(RECORD_BYTES, count * RECORD_BYTES + 1, RECORD_BYTES)
    crcs = np.fromiter((zlib.crc32(view[end - 64 : end - 4]) for end in ends), np.uint32, count)
    digests = np.fromiter((xxh3_64_intdigest(view[end - 64 : end]) for end in ends), np.uint64, count)
    holds = (table["crc"] == crcs) & (table["version"] == VERSION) & (table["kind"] >= 1) & (table["kind"] <= max(Kind))
    expected = np.concatenate([np.zeros(1, np.uint64), digests[:-1]]) if count else digests
    linked = (table["previous"] == expected) & (table["sequence"] == np.arange(count))
    damaged = np.flatnonzero(~(holds & linked))
    chain = int(digests[-1]) if count else 0
    return Ledger(_rising(table[holds]), tuple(damaged.tolist()), count, chain, torn)


def _rising(records: np.ndarray) -> np.ndarray:
    """Without repeated or misplaced records: the sequence only rises."""
    sequence = records["sequence"].astype(np.int64)
    before = np.concatenate([[-1], np.maximum.accumulate(sequence)[:-1]]) if len(sequence) else sequence
    return records[sequence > before]

"""No damage to a sealed trace goes unreported: flipped bits, cuts, deletions, exchanges, additions, in every file."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from spectrace.tracer import Problem, SpectraceError, Trace, TraceDamaged
from spectrace.tracer.ledger import LAYOUT

FLIPS = 2000


def files_of(trace: Path) -> list[Path]:
    return sorted(path for path in trace.rglob("*") if path.is_file())


def damage(trace: Path) -> list[Problem]:
    """What checking the trace reports; an error while opening counts."""
    try:
        return [problem for problem in Trace.open(trace, tolerant=True).verify() if problem.damage]
    except SpectraceError as error:
        return [Problem("", 0, "manifest", 0, error.message)]


def contents(trace: Path) -> list[bytes]:
    """Every column and tensor a reader gets."""
    opened = Trace.open(trace)
    out = [repr(opened.manifest).encode()]
    for family in opened.families():
        rows = opened.rows(family)
        out += [repr(rows[column].tolist()).encode() for column in rows.columns]
        for wide in rows.family.wides:
            there = rows.take(rows.has(wide.kind))
            names = wide.columns or ("b0", "b2")
            out += [there.payload(wide.kind, name).tobytes() for name in names]
    return out


def flips(trace: Path, count: int) -> Iterator[tuple[Path, bytearray]]:
    """Files with one bit changed, each byte of the trace equally likely."""
    files = [(path, path.read_bytes()) for path in files_of(trace)]
    chooser = random.Random(1)
    for path, data in chooser.choices(files, [len(data) for _, data in files], k=count):
        flipped = bytearray(data)
        flipped[chooser.randrange(len(data))] ^= 1 << chooser.randrange(8)
        path.write_bytes(flipped)
        yield path, flipped
        path.write_bytes(data)


def test_every_flipped_bit_is_reported(trace: Path) -> None:
    assert damage(trace) == []
    missed = [path.name for path, _ in flips(trace, FLIPS) if not damage(trace)]
    assert missed == []
    assert damage(trace) == []


def test_every_flipped_bit_of_the_small_files_is_reported(trace: Path) -> None:
    """Manifests and the seal are too small for chance to visit every byte of them."""
    for path in (trace / "manifest.json", trace / "SEAL", trace / "draft-0" / "manifest.json"):
        data = path.read_bytes()
        for at in range(len(data)):
            flipped = bytearray(data)
            flipped[at] ^= 1 << at % 8
            path.write_bytes(flipped)
            assert damage(trace), (path.name, at)
        path.write_bytes(data)


def test_a_reader_gets_the_right_bytes_or_an_error(trace: Path) -> None:
    right = contents(trace)
    wrong = 0
    for _ in flips(trace, 150):
        try:
            assert contents(trace) == right
        except TraceDamaged:
            wrong += 1
    assert wrong > 50


def boundaries(trace: Path) -> dict[Path, list[int]]:
    """Where every file could end cleanly: after each record of a ledger, after each message of a segment."""
    ends: dict[Path, set[int]] = {path: {0, path.stat().st_size // 2} for path in files_of(trace)}
    for ledger in trace.glob("*/ledger"):
        records = np.frombuffer(ledger.read_bytes(), LAYOUT)
        ends[ledger] |= {64 * at for at in range(len(records))}
        for record in records[np.isin(records["kind"], (2, 3, 4))]:
            [segment] = ledger.parent.glob(f"{record['segment']:05d}-*")
            ends[segment] |= {int(record["offset"]), int(record["offset"]) + 8}
    return {path: sorted(at) for path, at in ends.items()}


def test_every_cut_is_reported(trace: Path) -> None:
    tried = 0
    for path, ends in boundaries(trace).items():
        data = path.read_bytes()
        for end in ends:
            path.write_bytes(data[:end])
            assert damage(trace), f"{path} cut at {end}"
            tried += 1
        path.write_bytes(data)
    assert tried > 100


def test_every_deletion_is_reported(trace: Path, tmp_path: Path) -> None:
    for path in [*files_of(trace), trace / "draft-0", trace / "target-0"]:
        away = tmp_path / "away"
        shutil.move(path, away)
        if path.name == "SEAL":
            assert not Trace.open(trace).sealed
        else:
            assert damage(trace), path
        shutil.move(away, path)
    assert damage(trace) == []


def test_ledger_and_segments_cut_together_are_reported_in_a_sealed_trace(trace: Path) -> None:
    """Without a seal this looks like a recording that ended earlier; the seal knows better."""
    folder = trace / "draft-0"
    data = (folder / "ledger").read_bytes()
    kept = np.frombuffer(data, LAYOUT)[: len(data) // 64 // 2]
    (folder / "ledger").write_bytes(data[: 64 * len(kept)])
    for path in folder.glob("*.arrow"):
        mine = kept[(kept["segment"] == int(path.name[:5])) & (kept["kind"] != 1)]
        if len(mine):
            path.write_bytes(path.read_bytes()[: int(mine[-1]["offset"] + mine[-1]["length"])])
        else:
            path.unlink()
    assert [problem.kind for problem in damage(trace)] == ["ledger"]
    (trace / "SEAL").unlink()
    assert damage(trace) == [] and not Trace.open(trace).sealed
    assert 0 < len(Trace.open(trace).rows("received")) < 18


def test_additions_and_exchanges_are_reported(trace: Path, whole: Path) -> None:
    first, second = sorted((trace / "draft-0").glob("*.arrow"))[:2]
    with first.open("ab") as file:
        file.write(b"\0" * 8)
    assert [problem.kind for problem in damage(trace)] == ["trailing"]
    shutil.copy(whole / "draft-0" / first.name, first)
    shutil.copy(first, trace / "draft-0" / "00099-received.arrow")
    shutil.copytree(trace / "draft-0", trace / "draft-1")
    assert "stray" in {problem.kind for problem in damage(trace)}
    shutil.rmtree(trace / "draft-1")
    (trace / "draft-0" / "00099-received.arrow").unlink()
    shutil.copy(second, first)
    assert damage(trace)


def test_records_removed_repeated_or_reordered_are_reported(trace: Path) -> None:
    (trace / "SEAL").unlink()
    ledger = trace / "draft-0" / "ledger"
    data = ledger.read_bytes()
    first, second = data[64:128], data[128:192]
    for changed in (data[:64] + data[128:], data[:128] + first + data[128:], data[:64] + second + first + data[192:]):
        ledger.write_bytes(changed)
        assert damage(trace)
        rows = Trace.open(trace, tolerant=True).rows("received")
        assert len(rows) <= 18


def test_damage_names_its_place_and_its_price(trace: Path) -> None:
    path = next((trace / "draft-0").glob("*-received.features.arrow"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    [problem] = damage(trace)
    assert (problem.segment, problem.kind, problem.rows_lost) == (f"draft-0/{path.name}", "flipped", 3)
    assert problem.offset <= len(data) // 2
    rows = Trace.open(trace).rows("received", depth=0)
    with pytest.raises(TraceDamaged, match=r"received\.features\.arrow at byte"):
        rows.tensor("features")
    assert len(rows.take(slice(len(rows) - 3, None)).tensor("features")) == 3


def test_a_tolerant_reader_gets_what_is_whole(trace: Path) -> None:
    next((trace / "draft-0").glob("*-received.arrow")).unlink()
    with pytest.raises(TraceDamaged, match=r"`spectrace check .*` lists what is damaged and what it costs$"):
        Trace.open(trace)
    opened = Trace.open(trace, tolerant=True)
    assert len(opened.rows("received")) == 0 and len(opened.rows("drafted")) == 9

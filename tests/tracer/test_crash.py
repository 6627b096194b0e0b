"""After kill -9 at any moment everything acknowledged is there, right, and the trace says that it is unsealed."""

from __future__ import annotations

import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from spectrace.tracer import Keys, Recorder, Trace, create_trace, seal_trace
from spectrace.tracer.fingerprint import row_hashes

BATCH, NARROW_RECEIVED = 3, 2 << 8


@pytest.fixture(scope="module")
def forker() -> Iterator[subprocess.Popen[str]]:
    child = Path(__file__).with_name("crashing.py")
    with subprocess.Popen([sys.executable, str(child)], stdin=-1, stdout=-1, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def kill_after(forker: subprocess.Popen[str], folder: Path, secs: float) -> None:
    assert forker.stdin is not None and forker.stdout is not None
    print(folder, file=forker.stdin, flush=True)
    child = int(forker.stdout.readline())
    ledger = folder / "draft-0" / "ledger"
    deadline_secs = time.monotonic() + 20
    while not (ledger.exists() and ledger.stat().st_size > 300) and time.monotonic() < deadline_secs:
        time.sleep(0.0005)
    time.sleep(secs)
    os.kill(child, signal.SIGKILL)
    assert forker.stdout.readline() == "dead\n"


def acknowledged_rows(ledger: Path) -> int:
    """Narrow rows with a whole record, read without the code under test."""
    data, rows = ledger.read_bytes(), 0
    streams: dict[int, int] = {}
    for at in range(0, len(data) // 64 * 64, 64):
        kind, _, _, segment, _, _, _, count = struct.unpack_from("<BBHIQQQQ", data, at)
        detail = struct.unpack_from("<I", data, at + 56)[0]
        streams |= {segment: detail} if kind == 2 else {}
        rows += count if kind == BATCH and streams[segment] == NARROW_RECEIVED else 0
    return rows


@pytest.mark.parametrize("moment", range(20))
def test_everything_acknowledged_survives_kill_9(forker: subprocess.Popen[str], tmp_path: Path, moment: int) -> None:
    folder = tmp_path / "t"
    kill_after(forker, folder, random.Random(moment).uniform(0, 0.15))
    opened = Trace.open(folder)
    rows = opened.rows("received")
    assert not opened.sealed and seal_trace(folder) == ["draft-0"]
    assert len(rows) == acknowledged_rows(folder / "draft-0" / "ledger") > 0
    assert {problem.kind for problem in opened.verify()} <= {"torn"}
    assert rows.has("features").all()
    request, node = rows["request"].astype(np.int64), rows["node"].astype(np.int64)
    assert (request * 5 + node == np.arange(len(rows))).all()
    assert (rows["token"] == (request + node) % 1000).all()
    features = rows.payload("features")
    expected = (request * 5 + node * 64)[:, None] + np.arange(64)
    assert (features == expected.astype(np.float32)).all()
    assert (row_hashes(features, [64]) == rows["hashes"]).all()


def test_a_rank_that_ended_before_another_is_named_with_what_it_lacks(tmp_path: Path) -> None:
    """Of what it records at all; a writer of another role is no rank of it, and what one left out is accounted for."""
    folder = create_trace(tmp_path / "t", {})
    for role, rank, rows in (("draft", 0, 5), ("draft", 1, 3), ("draft", 2, 0), ("draft", 3, 3), ("target", 0, 9)):
        with Recorder(folder, role=role, rank=rank, facts={"expects": ["received"] if rank == 2 else []}) as recorder:
            for node in range(rows):
                keys = Keys(request=0, pass_=node, position=[node])
                recorder.received(keys, token=[1], features=np.ones((1, 4), np.float32))
                if rank == 0:
                    recorder.drafted(keys)
            recorder.sampled_away("received", 2 if rank == 3 else 0)
    behind = [problem for problem in Trace.open(folder).verify() if problem.kind == "behind"]
    assert {(problem.segment, problem.rows_lost) for problem in behind} == {
        ("draft-1/ledger", 2),
        ("draft-2/ledger", 5),
    }
    assert not any(problem.damage for problem in behind)
    assert behind[0].message == "draft-1 lacks 2 received rows that draft-0 has: it ended before it wrote them"


def test_a_torn_tail_is_named_and_never_handed_out(whole: Path, trace: Path) -> None:
    (trace / "SEAL").unlink()
    ledger = trace / "draft-0" / "ledger"
    data = ledger.read_bytes()
    cut = next(
        at for at in range(64, len(data), 64) if data[at] == 4
    )  # from the first CLOSE on, nothing was acknowledged
    ledger.write_bytes(data[: cut + 17])
    opened = Trace.open(trace)
    torn = {problem.segment for problem in opened.verify() if problem.kind == "torn"}
    assert torn == {f"draft-0/{path.name}" for path in (trace / "draft-0").glob("*.arrow")} | {"draft-0/ledger"}
    assert opened.account()["received"].torn == 3
    assert len(opened.rows("received")) == len(Trace.open(whole).rows("received"))

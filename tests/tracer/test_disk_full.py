"""A full disk costs rows and nothing else: what was acknowledged stays whole, the loss is counted and written down."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spectrace.tracer import Keys, Recorder, Trace, create_trace, seal_trace
from spectrace.tracer.pump import log


class Disk:
    """Takes `room` more bytes of segments and ledgers, the last write short, then says ENOSPC."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = 1 << 60
        self._write, self._writev = os.write, os.writev
        monkeypatch.setattr(os, "write", self.write)
        monkeypatch.setattr(os, "writev", self.writev)

    def write(self, file: int, data: Any) -> int:
        return self._write(file, self._fitting(memoryview(data).cast("B")))

    def writev(self, file: int, parts: list[memoryview]) -> int:
        return self._write(file, self._fitting(memoryview(b"".join(parts))))

    def _fitting(self, data: memoryview) -> memoryview:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fits = data[: self.room]
        self.room -= len(fits)
        return fits


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def receive(recorder: Recorder, request: int) -> None:
    features = np.full((4, 100), request, np.float32)
    recorder.received(Keys(request=request, pass_=0, position=np.arange(4)), token=request, features=features)
    assert recorder.flush()


def check_whole(folder: Path, recorder: Recorder) -> None:
    opened = Trace.open(folder)
    rows = opened.rows("received")
    assert not [problem for problem in opened.verify() if problem.damage]
    assert len(rows) == recorder.account["received"].recorded
    assert (rows.payload("features")[:, 0] == rows["request"]).all()


@pytest.mark.parametrize("room", [0, 1, 63, 64, 65, 500, 1000, 1700, 2000, 2064, 2800, 3200, 3300, 6000, 9000])
def test_rows_go_on_once_there_is_room_again(
    tmp_path: Path, disk: Disk, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "disabled", True)
    folder = create_trace(tmp_path / "t", {})
    with Recorder(folder, role="draft", batch_secs=0.001) as recorder:
        receive(recorder, 0)
        disk.room = room
        for request in range(1, 8):
            receive(recorder, request)
        disk.room = 1 << 60
        time.sleep(0.3)
        receive(recorder, 8)
    account = recorder.account["received"]
    assert account.recorded + account.failed == account.expected == 36
    assert account.failed > 0 and account.recorded >= 8
    assert "No space left" in (recorder.failure or "")
    check_whole(folder, recorder)
    assert seal_trace(folder) == []
    opened = Trace.open(folder)
    assert opened.sealed and opened.account()["received"].failed == account.failed
    assert opened.rows("received")["request"][-1] == 8
    assert [problem.kind for problem in opened.verify()] == ["lost"]


@pytest.mark.parametrize("room", [0, 30, 700, 2000, 4100])
def test_a_disk_that_stays_full_leaves_an_unsealed_trace(
    tmp_path: Path, disk: Disk, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "disabled", True)
    folder = create_trace(tmp_path / "t", {})
    with Recorder(folder, role="draft", batch_secs=0.001) as recorder:
        receive(recorder, 0)
        disk.room = room
        for request in range(1, 20):
            receive(recorder, request)
    assert seal_trace(folder) == ["draft-0"]
    check_whole(folder, recorder)
    assert len(list(folder.glob("draft-0/*.arrow"))) <= 4


def test_an_error_is_logged_once(tmp_path: Path, disk: Disk, caplog: Any) -> None:
    with Recorder(create_trace(tmp_path / "t", {}), role="draft", batch_secs=0.001) as recorder:
        disk.room = 100
        for request in range(5):
            receive(recorder, request)
        disk.room = 1 << 60
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1

"""The recorder never stops, delays or fails the engine, keeps nothing of it, and counts what it loses."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spectrace.tracer import Keys, Level, Recorder, RecordingFailed, Trace, UserError, create_trace, seal_trace
from spectrace.tracer.writer import FolderWriter


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return create_trace(tmp_path / "trace", {"seed": 1})


def keys(rows: int, request: int = 0) -> Keys:
    return Keys(request=request, pass_=0, position=np.arange(rows))


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The disk hangs until this is set."""
    go, write = threading.Event(), FolderWriter.write

    def wait(self: FolderWriter, *args: Any) -> None:
        go.wait(30)
        write(self, *args)

    monkeypatch.setattr(FolderWriter, "write", wait)
    return go


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "something").touch()
    with pytest.raises(UserError, match="exists and is not an empty folder"):
        create_trace(tmp_path, {})


def test_a_second_process_of_one_name_is_refused(folder: Path) -> None:
    with Recorder(folder, role="draft"), pytest.raises(UserError, match="another incarnation"):
        Recorder(folder, role="draft")
    with Recorder(folder, role="draft", incarnation=1):
        pass
    assert sorted(Trace.open(folder).writers) == ["draft-0", "draft-0.1"]


def test_recording_into_no_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a trace"):
        Recorder(tmp_path / "nowhere", role="draft")


def test_the_engine_may_overwrite_its_buffers_at_once(folder: Path, stuck: threading.Event) -> None:
    features, token, position = torch.ones(4, 6), np.arange(4), np.arange(4)
    with Recorder(folder, role="draft", strict=True) as recorder:
        recorder.received(Keys(request=0, pass_=0, position=position), token=token, features=features)
        features.zero_()
        token[:] = position[:] = 99
        stuck.set()
    rows = Trace.open(folder).rows("received")
    assert torch.equal(rows.tensor("features"), torch.ones(4, 6))
    assert rows["token"].tolist() == rows["position"].tolist() == [0, 1, 2, 3]


def test_non_contiguous_and_gradient_carrying_tensors_are_recorded(folder: Path) -> None:
    base = torch.randn(6, 10, requires_grad=True)
    with Recorder(folder, role="draft", strict=True) as recorder:
        recorder.received(keys(5), token=torch.arange(10)[::2], features=base.t()[::2])
    assert torch.equal(Trace.open(folder).rows("received").tensor("features"), base.detach().t()[::2])


def test_a_call_may_keep_hashes_alone(folder: Path) -> None:
    """Beside calls that keep tensors, in one batch; the hashes are those of the tensors that are not kept."""
    features = torch.randn(3, 6)
    with Recorder(folder, role="draft", level=Level.FULL, strict=True) as recorder:
        for request, hash_only in enumerate((False, True, False)):
            recorder.received(keys(3, request), token=request, features=features, slot_width=2, hash_only=hash_only)
            recorder.drafted(keys(3, request), hidden=features, state=features, hash_only=hash_only)
    opened = Trace.open(folder)
    received, drafted = opened.rows("received"), opened.rows("drafted")
    assert opened.verify() == [] and received["hashes"].shape == (9, 3)
    for rows, kind in ((received, "features"), (drafted, "hidden"), (drafted, "state")):
        assert rows.has(kind).tolist() == [True] * 3 + [False] * 3 + [True] * 3
    for request in (1, 2):
        assert np.array_equal(received.where(request=request)["hashes"], received.where(request=0)["hashes"])
        assert np.array_equal(drafted.where(request=request)["state_hash"], drafted.where(request=0)["state_hash"])


def test_calls_without_rows_are_harmless(folder: Path) -> None:
    with Recorder(folder, role="draft", strict=True, batch_bytes=1) as recorder:
        recorder.received(keys(0), token=[], features=torch.empty(0, 6))
        recorder.received(keys(2), token=[1, 2], features=torch.ones(2, 6))
        recorder.received(keys(0), token=[], features=torch.empty(0, 6))
    opened = Trace.open(folder)
    assert len(opened.rows("received")) == 2 and opened.verify() == []


def test_a_full_queue_drops_counts_and_does_not_block(folder: Path, stuck: threading.Event, caplog: Any) -> None:
    features = torch.ones(100, 1000)
    with Recorder(folder, role="draft", queue_bytes=1 << 20, batch_bytes=1) as recorder:
        start_secs = time.monotonic()
        with caplog.at_level(logging.ERROR):
            for _ in range(10):
                recorder.received(keys(100), token=1, features=features)
        assert time.monotonic() - start_secs < 5
        stuck.set()
    account = recorder.account["received"]
    assert (account.expected, account.recorded, account.dropped) == (1000, 200, 800)
    assert len(caplog.records) == 1
    assert seal_trace(folder) == []
    opened = Trace.open(folder)
    assert opened.account() == recorder.account
    assert [(p.kind, p.rows_lost, p.damage) for p in opened.verify()] == [("lost", 800, False)]


def test_room_comes_back_once_items_are_written(folder: Path) -> None:
    with Recorder(folder, role="draft", queue_bytes=1 << 20, strict=True) as recorder:
        for _ in range(20):
            recorder.received(keys(100), token=1, features=torch.ones(100, 1000))
            assert recorder.flush()
    assert recorder.account["received"].recorded == 2000


def test_bad_input_costs_its_own_rows_only(folder: Path, caplog: Any) -> None:
    with caplog.at_level(logging.ERROR), Recorder(folder, role="draft") as recorder:
        recorder.received(keys(2), token=[1, 2], features=torch.ones(2, 6))
        recorder.received(keys(2), token=[1, 2, 3], features=torch.ones(2, 6))  # too many tokens
        recorder.received(keys(2), token=[1, 2], features=torch.ones(3, 6))  # too many features
        recorder.received(keys(2), token=[1, 2], features=torch.ones(2, 6), slot_width=4)
        recorder.received(keys(2), token=[1, 2**40], features=torch.ones(2, 6))
        recorder.received(keys(2), token="nonsense")
        recorder.received(Keys(request=[1, 2], pass_=[1, 2, 3], position=0), token=0)
        recorder.received(keys(2), token=[3, 4], features=torch.ones(2, 6))
        recorder.flush()
        recorder.sampled_away("no family", 3)
    account = recorder.account["received"]
    assert (account.recorded, account.failed, account.dropped) == (4, 13, 0)
    assert Trace.open(folder).rows("received")["token"].tolist() == [1, 2, 3, 4]
    assert recorder.failure is not None and "2 received rows lost" in recorder.failure
    assert len(caplog.records) == 1


def test_strict_raises_where_it_happened(folder: Path) -> None:
    recorder = Recorder(folder, role="draft", queue_bytes=1, strict=True)
    with pytest.raises(RecordingFailed, match="queue is full"):
        recorder.received(keys(2), token=[1, 2])
    recorder.close()
    recorder = Recorder(folder, role="draft", rank=1, strict=True)
    recorder.received(keys(2), token=[1, 2, 3])
    recorder.flush()
    with pytest.raises(RecordingFailed, match="one value per key"):
        recorder.received(keys(2), token=[1, 2])
    with pytest.raises(RecordingFailed, match="one value per key"):
        recorder.close()
    assert seal_trace(folder) == []


def test_closing_twice_and_recording_after_it_are_harmless(folder: Path) -> None:
    recorder = Recorder(folder, role="draft")
    recorder.received(keys(2), token=[1, 2])
    first = recorder.close()
    assert recorder.close() == first and first["received"].recorded == 2
    recorder.received(keys(2), token=[1, 2])
    assert recorder.account["received"].failed == 2
    assert recorder.flush() and Trace.open(folder).verify() == []


def test_the_folder_may_vanish(folder: Path, caplog: Any) -> None:
    recorder = Recorder(folder, role="draft", batch_secs=0.01)
    recorder.received(keys(2), token=[1, 2])
    assert recorder.flush()
    shutil.rmtree(folder)
    with caplog.at_level(logging.ERROR):
        recorder.received(keys(2), token=[1, 2])
        account = recorder.close()
    assert (account["received"].recorded, account["received"].failed) == (2, 2)
    assert "deleted" in (recorder.failure or "")


def test_rows_sampled_away_are_not_missing(folder: Path) -> None:
    with Recorder(folder, role="draft", strict=True) as recorder:
        recorder.sampled_away("received", 5)
        recorder.received(keys(2), token=[1, 2])
    opened = Trace.open(folder)
    assert opened.account()["received"].to_json() == {
        "expected": 7,
        "recorded": 2,
        "sampled_away": 5,
        "dropped": 0,
        "failed": 0,
        "torn": 0,
    }
    assert opened.verify() == []


def test_small_calls_are_merged_and_large_ones_split_so_that_a_row_costs_little_to_read(folder: Path) -> None:
    with Recorder(folder, role="draft", batch_secs=30, strict=True) as recorder:
        for _ in range(50):
            recorder.received(keys(2), token=[1, 2], features=torch.ones(2, 6))
        recorder.received(keys(100), token=1, features=torch.ones(100, 5000))
    trace = Trace.open(folder)
    sizes = [len(batch) for batch in trace.batches("received", "features")]
    assert sizes == [100, 52, 48]
    assert sizes[1] * 5000 * 4 <= 1 << 20 < (sizes[1] + 1) * 5000 * 4


def test_light_does_not_copy_what_it_neither_stores_nor_hashes(folder: Path) -> None:
    with Recorder(folder, role="draft", level=Level.LIGHT, queue_bytes=10_000, strict=True) as recorder:
        recorder.drafted(keys(2), token=[1, 2], hidden=torch.ones(2, 100_000))
    assert recorder.account["drafted"].recorded == 2


def test_recording_may_come_from_many_threads(folder: Path) -> None:
    def work(request: int) -> None:
        for _ in range(50):
            recorder.received(keys(2, request), token=[1, 2], features=torch.full((2, 3), float(request)))

    with Recorder(folder, role="draft", strict=True, batch_secs=0.001) as recorder:
        threads = [threading.Thread(target=work, args=(request,)) for request in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    rows = Trace.open(folder).rows("received")
    assert len(rows) == 400
    assert np.array_equal(rows.tensor("features").numpy()[:, 0], rows["request"])


def test_facts_are_kept_and_the_recorders_own_are_not_overwritten(folder: Path) -> None:
    with Recorder(folder, role="draft", facts={"resolved_ids": [2, 9]}):
        pass
    assert Trace.open(folder).writers["draft-0"]["resolved_ids"] == [2, 9]
    with pytest.raises(UserError, match=r"\['role'\]"):
        Recorder(folder, role="target", facts={"role": "x"})


def test_the_tracer_works_without_torch_and_under_its_own_name(whole: Path) -> None:
    """Light work imports no torch, and no module of ours is ever loaded under a bare name."""
    code = (
        "import sys, json\n"
        "from spectrace.tracer import Trace\n"
        "from spectrace.cli import check, info\n"
        f"rows = Trace.open({str(whole)!r}).rows('received', depth=0)\n"
        "rows.payload('features'), info.info, check.check\n"
        "print(json.dumps([name in sys.modules for name in ('torch', 'ray', 'tracer', 'engine', 'cli', 'replay')]))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(out) == [False] * 6


def test_an_unfinished_writer_keeps_the_trace_unsealed(folder: Path) -> None:
    with Recorder(folder, role="target", strict=True) as done:
        done.received(keys(6), token=1)
    with Recorder(folder, role="draft", strict=True) as running:
        running.received(keys(6), token=1)
        assert seal_trace(folder) == ["draft-0"]
        assert running.flush()
        opened = Trace.open(folder)
        assert not opened.sealed and len(opened.rows("received")) == 12
    assert seal_trace(folder) == [] and Trace.open(folder).sealed

"""A recording is sealed before the engine kills its processes, and only that engine's."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spectrace.tracer.attach import TRACE
from spectrace.tracer.attach.ending import ask_to_end
from spectrace.tracer.ledger import read_ledger
from spectrace.tracer.manifest import create_trace

RECORDS = """
import sys, time
from spectrace.tracer.attach.hooks import Hooks
from spectrace.tracer.attach.session import Tally
tally = Tally(Hooks())
tally.counted.rounds = 7
print("here", flush=True)
time.sleep(300)
"""


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = create_trace(tmp_path / "trace", {})
    monkeypatch.setenv(TRACE, str(folder))
    return folder


def recording(monkeypatch: pytest.MonkeyPatch, group: str) -> subprocess.Popen[str]:
    monkeypatch.setenv("SPECTRACE_ENGINE", group)
    child = subprocess.Popen([sys.executable, "-c", RECORDS], stdout=subprocess.PIPE, text=True)
    assert child.stdout and child.stdout.readline() == "here\n"
    child.stdout.close()
    return child


def sealed(writer: Path) -> bool:
    return read_ledger((writer / "ledger").read_bytes()).sealed


def test_whoever_asks_has_the_recordings_of_its_engine_sealed(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, others = recording(monkeypatch, "a"), recording(monkeypatch, "b")
    monkeypatch.setenv("SPECTRACE_ENGINE", "a")
    ask_to_end(30.0)
    assert sealed(trace / "engine-0") and not sealed(trace / "engine-0.1")
    assert json.loads((trace / "engine-0" / "status.json").read_text("utf-8"))["counted"]["rounds"] == 7
    assert ours.poll() is None and not list(trace.glob("ENDING*")), "it goes on, and nothing is left of the question"
    for child in (ours, others):
        child.kill()
        child.wait(30)


def test_nobody_waits_for_a_process_that_is_gone(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = recording(monkeypatch, "a")
    child.kill()
    child.wait(30)
    started = time.monotonic()
    ask_to_end(30.0)
    assert time.monotonic() - started < 20 and not sealed(trace / "engine-0")

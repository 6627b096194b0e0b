"""A recording is sealed before the engine kills its processes, and only that engine's."""

from __future__ import annotations

import json
import os
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


def recording() -> subprocess.Popen[str]:
    child = subprocess.Popen([sys.executable, "-c", RECORDS], stdout=subprocess.PIPE, text=True)
    assert child.stdout and child.stdout.readline() == "here\n"
    child.stdout.close()
    return child


def sealed(writer: Path) -> bool:
    return read_ledger((writer / "ledger").read_bytes()).sealed


def writer_of(child: subprocess.Popen[str], trace: Path) -> Path:
    told = {json.loads(path.read_bytes())["pid"]: path.parent for path in trace.glob("*/manifest.json")}
    return told[child.pid]


def test_recordings_of_the_processes_that_are_about_to_be_killed_are_sealed(trace: Path) -> None:
    asked, other = recording(), recording()
    ask_to_end([asked.pid], 30.0)
    writer = writer_of(asked, trace)
    assert sealed(writer) and not sealed(writer_of(other, trace)), "another engine's goes on"
    assert json.loads((writer / "status.json").read_text("utf-8"))["counted"]["rounds"] == 7
    assert asked.poll() is None and not list(trace.glob("ENDING*")), "nothing is left of the question"
    ask_to_end([os.getpid()], 30.0)
    assert sealed(writer_of(other, trace)), "what is asked of a process is asked of its children"
    for child in (asked, other):
        child.kill()
        child.wait(30)


def test_nobody_waits_for_a_process_that_is_gone(trace: Path) -> None:
    child = recording()
    child.kill()  # and is a zombie until somebody waits for it
    time.sleep(0.5)
    started = time.monotonic()
    ask_to_end([child.pid], 30.0)
    assert time.monotonic() - started < 20 and not sealed(writer_of(child, trace))
    child.wait(30)

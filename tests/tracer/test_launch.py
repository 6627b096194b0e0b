"""A command is started with nothing changed but its environment, and its end is the recording's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spectrace.tracer.errors import UserError
from spectrace.tracer.launch import record
from spectrace.tracer.rows import Level
from spectrace.tracer.trace import Trace

RECORDS = """
import os
from spectrace.tracer.keys import Keys
from spectrace.tracer.recorder import Recorder
facts = {"run": {"engine": os.environ["SPECTRACE_LEVEL"]}}
with Recorder(os.environ["SPECTRACE_TRACE"], role="target", facts=facts) as one:
    one.emitted(Keys(request=[0], pass_=0, position=0), token=[1])
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_what_a_command_records_is_sealed_when_it_ends(tmp_path: Path) -> None:
    done = record(python(RECORDS), tmp_path / "trace", level=Level.FULL)
    assert (done.exit_code, done.writers, done.unsealed) == (0, ("target-0",), ())
    trace = Trace.open(tmp_path / "trace")
    assert trace.sealed and len(trace.rows("emitted")) == 1
    assert trace.manifest["engine"] == "full" and trace.manifest["command"][0] == sys.executable


def test_a_writer_that_did_not_end_is_told_and_what_it_wrote_is_there(tmp_path: Path) -> None:
    code = RECORDS.replace("with ", "one = ").replace(" as one:", "").replace("    one.", "one.")
    done = record(python(f"{code}\none.flush(); import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
                  tmp_path / "trace", level=Level.LIGHT)  # fmt: skip
    assert (done.exit_code, done.unsealed) == (128 + signal.SIGKILL, ("target-0",))
    assert len(Trace.open(tmp_path / "trace").rows("emitted")) == 1


@pytest.mark.parametrize("code", [0, 3])
def test_the_command_s_exit_code_is_kept(code: int, tmp_path: Path) -> None:
    done = record(python(f"raise SystemExit({code})"), tmp_path / "trace", level=Level.LIGHT)
    assert (done.exit_code, done.writers) == (code, ())


def test_a_list_of_plugins_that_leaves_ours_out_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "plugins"
    tell = python(f"import os; open({str(out)!r}, 'w').write(os.environ.get('VLLM_PLUGINS', 'all'))")
    for at, (given, told) in enumerate(
        ((None, "all"), ("", "spectrace"), ("a,b", "a,b,spectrace"), ("spectrace", "spectrace"))
    ):
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
        if given is not None:
            monkeypatch.setenv("VLLM_PLUGINS", given)
        record(tell, tmp_path / f"trace-{at}", level=Level.LIGHT)
        assert out.read_text("utf-8") == told


def test_what_cannot_be_started_and_what_is_taken_are_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no-such-server: No such file.*after --"):
        record(["no-such-server"], tmp_path / "trace", level=Level.LIGHT)
    assert record(python(""), tmp_path / "trace", level=Level.LIGHT).exit_code == 0, "the folder is free again"
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(UserError, match="not an empty folder"):
        record(python(""), tmp_path / "taken", level=Level.LIGHT)


def test_a_signal_that_would_end_us_ends_the_command_and_the_trace_is_sealed(tmp_path: Path) -> None:
    child = f"""{RECORDS}
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
open({str(tmp_path / "up")!r}, "w")
time.sleep(60)
"""
    us = f"""
import sys
from pathlib import Path
from spectrace.tracer.launch import record
from spectrace.tracer.rows import Level
sys.exit(record([sys.executable, "-c", {child!r}], Path({str(tmp_path / "trace")!r}), level=Level.LIGHT).exit_code)
"""
    process = subprocess.Popen(python(us))
    deadline = time.monotonic() + 60
    while not (tmp_path / "up").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(timeout=60) == 5
    assert Trace.open(tmp_path / "trace").sealed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_alone_ends_the_command(number: int, tmp_path: Path) -> None:
    """Without a terminal nobody else tells it: a service manager, a script, a container."""
    asked, trace = python("import time; print(1, flush=True); time.sleep(300)"), str(tmp_path / "trace")
    launch = (
        "from pathlib import Path; from spectrace.tracer.launch import record\n"
        "from spectrace.tracer.rows import Level\n"
        f"print(record({asked!r}, Path({trace!r}), level=Level.LIGHT).exit_code)"
    )
    started = subprocess.Popen(
        [sys.executable, "-c", launch], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert started.stdout and started.stdout.readline() == "1\n"
    os.kill(started.pid, number)
    told = started.communicate(timeout=60)[0]
    assert told.strip() in ("1", "130", "143") and not (tmp_path / "trace").exists()

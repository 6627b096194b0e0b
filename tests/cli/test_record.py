"""`spectrace record` ends as its command does, and never lets an empty trace pass for a recording."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from spectrace.cli.record import record
from spectrace.tracer.errors import UserError

RECORDS = """
import os, sys
from spectrace.tracer.keys import Keys
from spectrace.tracer.recorder import Recorder
with Recorder(os.environ["SPECTRACE_TRACE"], role="target") as one:
    one.emitted(Keys(request=[0], pass_=0, position=0), token=[1])
sys.exit(int(sys.argv[1]))
"""


def test_the_command_s_options_are_its_own_and_its_exit_code_is_kept(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        record, ["--out", str(tmp_path / "trace"), "--", sys.executable, "-c", RECORDS, "3", "--out"]
    )
    assert done.exit_code == 3 and (tmp_path / "trace" / "SEAL").exists()
    assert "emitted" in done.stderr and done.stdout == ""


def test_where_nothing_attached_itself_that_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing was recorded: no process of .* loaded spectrace's plugin"):
        CliRunner().invoke(record, ["--out", str(tmp_path / "trace"), sys.executable, "-c", ""], catch_exceptions=False)
    assert not (tmp_path / "trace").exists(), "nothing that could pass for a trace"


def test_a_command_that_fails_before_it_serves_keeps_its_exit_code(tmp_path: Path) -> None:
    done = CliRunner().invoke(record, ["--out", str(tmp_path / "trace"), sys.executable, "-c", "raise SystemExit(7)"])
    assert done.exit_code == 7 and "ended with exit code 7 before it served" in done.stderr
    assert not (tmp_path / "trace").exists()

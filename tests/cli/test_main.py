"""The command line itself: what is not installed is named, and help is there at once."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from spectrace.tracer.manifest import create_trace, seal_trace


@pytest.mark.parametrize("missing", ["ray", "transformers"])
def test_a_missing_extra_is_named_and_not_a_traceback(
    spectrace: Callable[..., object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str
) -> None:
    def absent(*_: object, **__: object) -> None:
        raise ModuleNotFoundError(f"No module named '{missing}'", name=missing)

    monkeypatch.setattr("spectrace.engine.deployment.check_target", absent)
    (tmp_path / "prompts").write_text("hello", "utf-8")
    said = spectrace("run", "--target", tmp_path, "--prompts", tmp_path / "prompts", "--out", tmp_path / "trace")
    assert said.code == 2 and f"needs {missing}: pip install 'spectrace[engine]'" in said.complaint


def test_help_loads_no_torch() -> None:
    code = "import sys; from spectrace.cli.main import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True)
    assert said.stdout.splitlines()[-1] == "False" and "replay" in said.stdout


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A trace under a name that Latin-1 does not have."""
    folder = create_trace(tmp_path / "\u65e5\u672c", {"of": "x" * 200_000})  # more than a pipe holds
    seal_trace(folder)
    return folder


def _shell(line: str, trace: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `$0` as spectrace and `$1` as the trace."""
    start = f"run() {{ {sys.executable} -c 'from spectrace.cli.main import main; main()' \"$@\"; }}; "
    return subprocess.run(
        ["bash", "-c", start + line, "bash", trace], capture_output=True, text=True, env=os.environ | environment
    )


@pytest.mark.parametrize("options", ["", "--json"])
@pytest.mark.parametrize(
    ("end", "says"),
    [
        ("| (exec <&-; sleep 0)", "stdout: closed before all was written"),
        (">&-", "stdout: closed, and there is nowhere to write to"),
        (">/dev/full", "No space left on device"),
    ],
)
def test_output_that_nobody_takes_is_no_named_fault_and_no_success(
    trace: Path, options: str, end: str, says: str
) -> None:
    said = _shell(f'run info "$1" {options} {end}; exit "${{PIPESTATUS[0]}}"', trace)
    assert said.returncode == 2 and says in said.stderr and len(said.stderr.splitlines()) == 1


def test_a_reader_of_the_first_lines_sees_no_traceback(trace: Path) -> None:
    said = _shell('run info "$1" --json | head -n 1', trace)
    assert said.stdout == "{\n" and "Traceback" not in said.stderr and "Exception" not in said.stderr


@pytest.mark.parametrize("command", ["info", "check"])
def test_a_character_that_the_terminal_has_not_is_printed_in_another_way(trace: Path, command: str) -> None:
    said = _shell(f'run {command} "$1"', trace, PYTHONIOENCODING="latin-1")
    assert said.returncode == 0 and "\\u65e5\\u672c" in said.stdout and not said.stderr

"""The command line itself: what is not installed is named, and help is there at once."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


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

"""An edit judged by doing it: on a copy of the folder that is wrong, which has to read as the right one then."""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from spectrace.engine.checkpoint import read_draft
from spectrace.engine.spec import DraftSpec
from spectrace.replay.diagnosis import Cause
from spectrace.tracer.errors import SpectraceError

__all__ = ["is_misread", "mends"]

_CODE = "python -c "
_TIMEOUT_SECS = 60.0


def is_misread(wrong: Path, right: Path) -> bool:
    """Whether the configs of two drafts mean different things."""
    return _reading(wrong) != _reading(right)


def mends(cause: Cause, wrong: Path, right: Path) -> bool:
    """Whether a cause's command makes the wrong folder mean what the right one does; it is run on a copy."""
    if not cause.command.startswith(_CODE) or f"{wrong}/" not in cause.command:
        return False
    with tempfile.TemporaryDirectory(prefix="mended-") as folder:
        copy = _copied(wrong, Path(folder) / "draft")
        return _run(cause.command.replace(f"{wrong}/", f"{copy}/")) and not is_misread(copy, right)


def _copied(folder: Path, to: Path) -> Path:
    """The weights are not copied: a command that writes into them would be no edit of a config."""
    to.mkdir()
    for path in folder.iterdir():
        if path.suffix == ".json":
            shutil.copy(path, to)
        else:
            (to / path.name).symlink_to(path.absolute())
    return to


def _run(command: str) -> bool:
    """Through a shell, as a user would: the quoting is part of the edit."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    shell = ["bash", "-c", command]
    try:
        ran = subprocess.run(
            shell, env={**os.environ, "PATH": path}, capture_output=True, timeout=_TIMEOUT_SECS, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return ran.returncode == 0


def _reading(folder: Path) -> tuple[DraftSpec, tuple[int, ...]] | str:
    """What a draft's config means, or why it cannot be read.

    A theta and a scale of the embedding count to six digits, since they may come by a factor or a root.
    """
    try:
        found = read_draft(folder)
    except SpectraceError as error:
        return type(error).__name__
    spec, rope = found.spec, found.spec.rope
    spec = replace(spec, rope=replace(rope, theta=_to_six(rope.theta)), embedding_scale=_to_six(spec.embedding_scale))
    return spec, found.wiring.boundaries if found.wiring else ()


def _to_six(number: float) -> float:
    return float(f"{number:.6g}")

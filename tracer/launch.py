"""Starting a server that records: the environment of its processes is all that is changed."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from spectrace.tracer.attach import LEVEL, TRACE
from spectrace.tracer.errors import UserError
from spectrace.tracer.manifest import MANIFEST, create_trace, seal_trace, writer_folders
from spectrace.tracer.rows import Level

__all__ = ["Recorded", "record"]

_PLUGINS: Final = "VLLM_PLUGINS"
_OURS: Final = "spectrace"
_FORWARDED = (signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Recorded:
    """How the command ended, as a shell says it, and what was recorded: writers, and those that did not seal."""

    exit_code: int
    writers: tuple[str, ...]
    unsealed: tuple[str, ...]


def record(command: Sequence[str], folder: Path, *, level: Level) -> Recorded:
    """Run a command until it ends; whatever serves within it records into a new trace, which is sealed then.

    Where nothing did, nothing is left in the folder.

    Signals that end this process are passed on, and the command is waited for. Raises UserError for a command that
    cannot be started, and where the folder is taken.
    """
    is_ours = not folder.exists()
    create_trace(
        folder, {"command": list(command), "machine": {"platform": platform.platform(), "cpus": os.cpu_count()}}
    )
    environment = _environment(os.environ, folder.absolute(), level)
    try:
        child = subprocess.Popen(list(command), env=environment)
    except OSError as error:
        _take_back(folder, is_ours=is_ours)
        raise UserError(f"{command[0]}: {error.strerror}; give the command that starts the server after --") from error
    with _passing_on(child):
        code = child.wait()
    writers = tuple(path.name for path in writer_folders(folder))
    if not writers:  # a trace of nothing would pass for a whole one
        _take_back(folder, is_ours=is_ours)
        return Recorded(_as_shells_say(code), (), ())
    unsealed = seal_trace(folder)
    return Recorded(_as_shells_say(code), writers, tuple(unsealed))


def _take_back(folder: Path, *, is_ours: bool) -> None:
    """Leave nothing of a trace that holds nothing, nor its folder if it was made for it."""
    (folder / MANIFEST).unlink()
    if is_ours:
        with suppress(OSError):  # somebody else's file is in it
            folder.rmdir()


def _as_shells_say(code: int) -> int:
    """What a child that a signal ended returns."""
    return code if code >= 0 else 128 - code


def _environment(own: Mapping[str, str], folder: Path, level: Level) -> dict[str, str]:
    """The same, with where to record to; a list of plugins that leaves ours out gets it, too."""
    found = {**own, TRACE: str(folder), LEVEL: level.name.lower()}
    listed = own.get(_PLUGINS)
    if listed is not None and _OURS not in listed.split(","):
        found[_PLUGINS] = ",".join(filter(None, (*listed.split(","), _OURS)))
    return found


def _in_foreground() -> bool:
    """Whether a terminal's Ctrl-C goes to this process and its child alike."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


@contextmanager
def _passing_on(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Signals to this process go to the child; a terminal's Ctrl-C reaches it by itself, and is waited out once."""
    waited_out = False

    def pass_on(number: int, _frame: FrameType | None) -> None:
        nonlocal waited_out
        if number == signal.SIGINT and not waited_out and _in_foreground():
            waited_out = True
        else:
            child.send_signal(number)

    before = {one: signal.signal(one, pass_on) for one in (*_FORWARDED, signal.SIGINT)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)

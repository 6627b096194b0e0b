"""Ends what a dead driver leaves of the Ray cluster that it started.

Ray's processes die with their driver, all but two agents: for a minute these try to report to the cluster that is gone.
Run as a script with nothing installed, this file waits for its standard input to close and ends what is left by then.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

__all__ = ["Reaper", "descendants"]

Processes = dict[int, str]
"""Process ids, each with the time it started, since ids are used again."""


def descendants(pid: int) -> Processes:
    """Every process below one, at any depth."""
    parents: dict[int, tuple[int, str]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended meanwhile
            fields = _stat(path)
            parents[int(path.parent.name)] = int(fields[1]), fields[19]
    found: Processes = {}
    new = {pid}
    while new := {child for child, (parent, _) in parents.items() if parent in new} - found.keys():
        found |= {child: parents[child][1] for child in new}
    return found


def _stat(path: Path) -> list[str]:
    """The fields of /proc/PID/stat from the third on, behind the name, which may hold anything."""
    text = path.read_text("utf-8", "replace")
    return text[text.rindex(")") + 2 :].split()


class Reaper:
    """A process that outlives this one for as long as it takes to end what this one has started until now."""

    def __init__(self) -> None:
        left = [f"{pid}:{started}" for pid, started in descendants(os.getpid()).items()]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *left], stdin=subprocess.PIPE, start_new_session=True
        )

    def dismiss(self) -> None:
        """Let it go: the cluster has been stopped in order."""
        self._process.kill()
        self._process.communicate()


def _reap(left: Processes) -> None:
    for pid, started in left.items():
        with suppress(OSError):
            if _stat(Path(f"/proc/{pid}/stat"))[19] == started:
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    _reap({int(pid): started for pid, _, started in (one.partition(":") for one in sys.argv[1:])})

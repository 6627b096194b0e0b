"""How recordings end: with their process, or before it, where the engine is about to kill it.

An engine that shuts down may give its processes no time. Whoever does so asks for the end first: a file in the trace's
folder, named for a process, says it to that process and to its children.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Collection
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Final

from spectrace.tracer.attach import TRACE
from spectrace.tracer.ledger import LAYOUT, RECORD_BYTES, Kind
from spectrace.tracer.manifest import LEDGER, MANIFEST, writer_folders

__all__ = ["ask_to_end", "close_at_end"]

_EVERY_SECS: Final = 0.1
_FIRST: Final = 0  # of what a process that ends still does, before its threads are gone
_closers: list[Callable[[], object]] = []


def close_at_end(close: Callable[[], object]) -> None:
    """Have this called when the process ends, or when the end is asked for; it may be called twice."""
    Finalize(None, close, exitpriority=_FIRST)
    if not _closers:
        endings = [_ending(os.getpid()), _ending(os.getppid())]
        threading.Thread(target=_watch, args=(endings,), name="spectrace-ending", daemon=True).start()
    _closers.append(close)


def ask_to_end(processes: Collection[int], patience_secs: float) -> None:
    """Ask these and their children, and wait until those of them that live and record have sealed, or for so long."""
    deadline = time.monotonic() + patience_secs
    endings = [_ending(process) for process in processes]
    try:
        for ending in endings:
            ending.touch()
        while time.monotonic() < deadline and any(_records(writer, processes) for writer in _writers()):
            time.sleep(_EVERY_SECS)
    finally:
        for ending in endings:
            ending.unlink(missing_ok=True)


def _watch(endings: list[Path]) -> None:
    """Until the end is asked for; then there is nothing to close any more, until something new is."""
    while not any(ending.exists() for ending in endings):
        time.sleep(_EVERY_SECS)
    while _closers:
        _closers.pop(0)()


def _ending(process: int) -> Path:
    return Path(os.environ[TRACE]) / f"ENDING-{process}"


def _writers() -> list[Path]:
    return writer_folders(Path(os.environ[TRACE]))


def _records(writer: Path, processes: Collection[int]) -> bool:
    """Whether a writer is of one of these processes or of a child of one, is not sealed yet, and lives."""
    try:
        facts = json.loads((writer / MANIFEST).read_bytes())
        ours = not {facts["pid"], facts["parent_pid"]}.isdisjoint(processes)
        return ours and not _sealed(writer / LEDGER) and _lives(facts["pid"])
    except (OSError, ValueError, KeyError):
        return False


def _sealed(ledger: Path) -> bool:
    """By its last record: a ledger may be long."""
    with ledger.open("rb") as file:
        size = file.seek(0, os.SEEK_END) // RECORD_BYTES * RECORD_BYTES
        file.seek(max(size - RECORD_BYTES, 0))
        last = file.read(RECORD_BYTES)
    return len(last) == RECORD_BYTES and last[LAYOUT.fields["kind"][1]] == Kind.SEAL  # type: ignore[index]


def _lives(process: int) -> bool:
    """Whether it is there, and has not just died."""
    os.kill(process, 0)
    try:
        state = Path(f"/proc/{process}/stat").read_text("utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state not in ("Z", "X")

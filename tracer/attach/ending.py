"""How recordings end: with their process, or before it, where the engine is about to kill it.

An engine that shuts down may give its processes no time. Whoever does so asks for the end first: a file in the trace's
folder says it to every process of the same engine that records there.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Final

from spectrace.tracer.attach import TRACE
from spectrace.tracer.ledger import read_ledger
from spectrace.tracer.manifest import LEDGER, MANIFEST, writer_folders

__all__ = ["ask_to_end", "close_at_end", "engine_group"]

_GROUP: Final = "SPECTRACE_ENGINE"
_EVERY_SECS: Final = 0.1
_FIRST: Final = 0  # of what a process that ends still does, before its threads are gone
_closers: list[Callable[[], object]] = []


def engine_group() -> str:
    """What the processes of one engine have in common: they inherit it from the one that starts it."""
    return os.environ.setdefault(_GROUP, f"{socket.gethostname()}-{os.getpid()}")


def close_at_end(close: Callable[[], object]) -> None:
    """Have this called when the process ends, or when the end is asked for; it may be called twice."""
    Finalize(None, close, exitpriority=_FIRST)
    if not _closers:
        threading.Thread(target=_watch, args=(_ending(),), name="spectrace-ending", daemon=True).start()
    _closers.append(close)


def ask_to_end(patience_secs: float) -> None:
    """Ask every process of this engine that records, and wait until those that live have sealed, or for so long."""
    if not any(map(_records, _writers())):
        return
    ending, deadline = _ending(), time.monotonic() + patience_secs
    ending.touch()
    while time.monotonic() < deadline and any(map(_records, _writers())):
        time.sleep(_EVERY_SECS)
    ending.unlink(missing_ok=True)


def _watch(ending: Path) -> None:
    """Until the end is asked for; then there is nothing to close any more, until something new is."""
    while not ending.exists():
        time.sleep(_EVERY_SECS)
    while _closers:
        _closers.pop()()


def _ending() -> Path:
    return Path(os.environ[TRACE]) / f"ENDING-{engine_group()}"


def _writers() -> list[Path]:
    return writer_folders(Path(os.environ[TRACE]))


def _records(writer: Path) -> bool:
    """Whether a writer is this engine's, is not sealed yet, and lives."""
    try:
        facts = json.loads((writer / MANIFEST).read_bytes())
        if facts.get("engine_group") != engine_group() or read_ledger((writer / LEDGER).read_bytes()).sealed:
            return False
        os.kill(int(facts["pid"]), 0)
    except (OSError, ValueError):
        return False
    return True

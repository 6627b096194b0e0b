"""What one process of an engine records into: its writers, the thread that feeds them, its account of itself."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any, Final

from spectrace.tracer.attach import LEVEL, TRACE
from spectrace.tracer.attach.ending import close_at_end
from spectrace.tracer.attach.feeder import Feeder
from spectrace.tracer.attach.hooks import Hooks
from spectrace.tracer.attach.steps import Scribe, Step
from spectrace.tracer.recorder import Recorder, writer_name
from spectrace.tracer.rows import Level
from spectrace.tracer.status import HookAccount, RoundAccount, Status, StepAccount

__all__ = ["Session", "Tally", "level", "refuse"]

log = logging.getLogger("spectrace.attach")

_QUEUE_BYTES: Final = 512 << 20
_PATIENCE_SECS: Final = 10.0


def level() -> Level:
    """How much this process was told to keep."""
    return Level[os.environ.get(LEVEL, "features").upper()]


class Session:
    """One engine's steps, recorded from when its model is there until the process ends.

    `facts` are of each role that this process has, "target" among them; the rank that is not 0 keeps hashes alone.
    Raises UserError and OSError where nothing can be recorded.
    """

    def __init__(
        self,
        facts: Mapping[str, Mapping[str, Any]],
        *,
        rank: int,
        depth: int,
        hooks: Hooks,
        inside: tuple[str, ...],
        notes: tuple[str, ...] = (),
    ) -> None:
        self.steps = StepAccount()
        self._hooks, self._inside, self._notes = hooks, inside, notes
        self._feeder = Feeder(self._write, queue_bytes=_QUEUE_BYTES)
        incarnation = _incarnation("target", rank)
        self._recorders = {
            role: _recorder(role, rank, incarnation, told, self.status if role == "target" else None)
            for role, told in facts.items()
        }
        self._scribe = Scribe(
            self._recorders["target"],
            self._recorders.get("draft"),
            self._recorders.get("scheduler"),
            depth=depth,
            hash_only=rank > 0,
        )
        close_at_end(self.close)

    def room(self) -> bool:
        """Whether there is any for the tensors of another step."""
        return self._feeder.room()

    def note(self, text: str) -> None:
        """Tell whoever reads the trace, once."""
        if text not in self._notes:
            self._notes = (*self._notes, text)

    def put(self, step: Step, nbytes: int) -> None:
        """Hand over a step, to be written on another thread."""
        self._feeder.put(step, nbytes)

    def close(self) -> None:
        """Write what is left, with the requests that are under way, and seal; not if that takes too long."""
        if not self._feeder.close(_PATIENCE_SECS):
            log.error("spectrace: steps are not written after %.0f s: the trace stays unsealed", _PATIENCE_SECS)
            return
        self._scribe.end()
        for recorder in reversed(self._recorders.values()):
            recorder.close()

    def status(self) -> Status:
        """The account so far."""
        self.steps.failures, self.steps.failure = self._feeder.failures, self._feeder.failure
        return Status(dict(self._hooks.placed), self._inside, self.steps, None, self._notes)

    def _write(self, step: Step) -> None:
        self._scribe.write(step)
        self.steps.written += bool(step.groups)
        self.steps.thin += step.thin


class Tally:
    """What the engine counts itself, kept up by whoever hears of it; a writer without rows says it."""

    def __init__(self, hooks: Hooks) -> None:
        self.counted, self._hooks = RoundAccount(), hooks
        self._recorder = _recorder("engine", 0, _incarnation("engine", 0), {}, self.status)
        close_at_end(self.close)

    def status(self) -> Status:
        """The counts so far."""
        return Status(dict(self._hooks.placed), counted=self.counted)

    def close(self) -> None:
        """Seal."""
        self._recorder.close()


def refuse(what: str, error: BaseException) -> None:
    """Say in the trace that an engine could not be recorded; what cannot be said there is logged."""
    why = f"{type(error).__name__}: {error}"
    log.error("spectrace: %s cannot be recorded: %s; the server goes on", what, why)
    try:
        status = Status({what: HookAccount(refused=why)})
        recorder = _recorder("attach", 0, _incarnation("attach", 0), {}, lambda: status)
        close_at_end(recorder.close)
    except Exception as other:
        log.error("spectrace: nor can the trace be told: %s", other)


def _incarnation(role: str, rank: int) -> int:
    """The first that nobody has: a second engine under one launcher is another start."""
    folder = Path(os.environ[TRACE])
    return next(number for number in count() if not (folder / writer_name(role, rank, number)).exists())


def _recorder(
    role: str, rank: int, incarnation: int, facts: Mapping[str, Any], status: Callable[[], Status] | None
) -> Recorder:
    folder, told = Path(os.environ[TRACE]), {"parent_pid": os.getppid(), **facts}
    return Recorder(folder, role=role, rank=rank, incarnation=incarnation, level=level(), facts=told, status=status)

"""The recorder's thread and its bounded queue: takes items, merges small ones, writes, counts what is lost."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Final, Literal

from spectrace.tracer.account import Account, FamilyAccount
from spectrace.tracer.batching import Item, Prepared, prepare
from spectrace.tracer.ledger import Reason
from spectrace.tracer.manifest import render_json
from spectrace.tracer.rows import FAMILIES, Family
from spectrace.tracer.status import Status
from spectrace.tracer.writer import FolderWriter

__all__ = ["Pump"]

log = logging.getLogger("spectrace.tracer")

_LONGEST_PAUSE_SECS: Final = 30.0
_STATUS_SECS: Final = 2.0


@dataclass(slots=True)
class _Pending:
    """Prepared rows of one family, waiting to be worth a batch."""

    parts: list[Prepared] = field(default_factory=list)
    nbytes: int = 0
    born_secs: float = 0.0


@dataclass(frozen=True, slots=True)
class _Flush:
    done: threading.Event


class Pump:
    """Everything behind the verbs. `reserve`, `put`, `lose` and `fail` never block and may come from any thread."""

    def __init__(
        self,
        writer: FolderWriter,
        *,
        fixed: Mapping[str, object],
        queue_bytes: int,
        batch_bytes: int,
        batch_secs: float,
        status: Callable[[], Status] | None = None,
    ) -> None:
        self.failure: str | None = None
        self._writer = writer
        self._status, self._told_secs = status, -_STATUS_SECS
        self._fixed = fixed
        self._queue_bytes = queue_bytes
        self._batch_bytes = batch_bytes
        self._batch_secs = batch_secs
        self._queue: SimpleQueue[Item | _Flush | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._held_bytes = 0
        self._counts = {family.name: FamilyAccount() for family in FAMILIES}
        self._losses: dict[tuple[str, Reason], int] = {}
        self._pending = {family.name: _Pending() for family in FAMILIES}
        self._errors_in_a_row = 0
        self._not_before_secs = 0.0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="spectrace-recorder", daemon=True)
        self._thread.start()

    @property
    def account(self) -> Account:
        with self._lock:
            return Account(dict(self._counts))

    def reserve(self, family: str, rows: int, nbytes: int) -> bool:
        """Room for an item, or its rows are counted as dropped."""
        if self._closed:
            raise RuntimeError("the recorder is closed")
        with self._lock:
            if fits := self._held_bytes + nbytes <= self._queue_bytes:
                self._held_bytes += nbytes
        if not fits:
            first = not self._counts[family].dropped
            self.lose(family, Reason.DROPPED, rows)
            if first:
                log.error("the recorder's queue (%d bytes) is full: dropping %s rows", self._queue_bytes, family)
        return fits

    def release(self, nbytes: int) -> None:
        with self._lock:
            self._held_bytes -= nbytes

    def put(self, item: Item) -> None:
        self._queue.put(item)

    def lose(self, family: str, reason: Reason, rows: int) -> None:
        """Count rows that will not be here; the ledger hears of it with the next batch."""
        with self._lock:
            self._counts[family] = self._counts[family].minus(reason, rows)
            self._losses[family, reason] = self._losses.get((family, reason), 0) + rows

    def fail(self, family: str, rows: int, error: BaseException) -> None:
        """Count rows that an error cost, and log the first of its kind."""
        text = f"{rows} {family} rows lost: {type(error).__name__}: {error}"
        if self.failure is None:
            self.failure = text
            log.error("recording %s; later errors are counted, not logged", text)
        if family in self._counts:
            self.lose(family, Reason.FAILED, rows)

    def flush(self, timeout_secs: float) -> bool:
        if self._closed:
            return True
        done = threading.Event()
        self._queue.put(_Flush(done))
        return done.wait(timeout_secs)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (got := self._next()) is not None:
            try:
                self._handle(got)
            except Exception as error:
                self.fail("", 0, error)
        self._end()

    def _handle(self, got: Item | _Flush | Literal[False]) -> None:
        now_secs = time.monotonic()
        if self._status and now_secs - self._told_secs >= _STATUS_SECS:
            self._told_secs = now_secs
            with suppress(Exception):  # the next one may be told
                self._tell(self._status)
        if isinstance(got, Item):
            self._take(got)
        elif isinstance(got, _Flush):
            self._write_all()
            got.done.set()
        for family in FAMILIES:
            pending = self._pending[family.name]
            if pending.parts and now_secs - pending.born_secs >= self._batch_secs:
                self._write(family)
        self._settle()

    def _tell(self, status: Callable[[], Status]) -> None:
        self._writer.tell(render_json(status().to_json()))

    def _next(self) -> Item | _Flush | Literal[False] | None:
        """The next in the queue; False when a batch comes of age first."""
        born_secs = [pending.born_secs for pending in self._pending.values() if pending.parts]
        wait_secs = max(0.0, min(born_secs) + self._batch_secs - time.monotonic()) if born_secs else self._batch_secs
        try:
            return self._queue.get(timeout=wait_secs)
        except Empty:
            return False

    def _take(self, item: Item) -> None:
        try:
            part = prepare(item, self._fixed)
        except Exception as error:
            self.release(item.nbytes)
            self.fail(item.family.name, item.rows, error)
            return
        pending = self._pending[item.family.name]
        if pending.parts and item.nbytes >= self._batch_bytes:
            self._write(item.family)  # so that a large item is written from where it lies, not merged by a copy
        if not pending.parts:
            pending.born_secs = time.monotonic()
        pending.parts.append(part)
        pending.nbytes += item.nbytes
        if pending.nbytes >= self._batch_bytes:
            self._write(item.family)

    def _write_all(self) -> None:
        for family in FAMILIES:
            if self._pending[family.name].parts:
                self._write(family)
        self._settle()

    def _write(self, family: Family) -> None:
        """Write a family's pending rows; an error costs these rows and a growing pause, never the thread."""
        pending = self._pending[family.name]
        parts, nbytes = pending.parts, pending.nbytes
        pending.parts, pending.nbytes = [], 0
        rows = sum(part.rows for part in parts)
        try:
            self._attempt(family, parts)
        except Exception as error:
            self.fail(family.name, rows, error)
        else:
            with self._lock:
                self._counts[family.name] = self._counts[family.name].plus(recorded=rows)
        finally:
            self.release(nbytes)

    def _attempt(self, family: Family, parts: Sequence[Prepared]) -> None:
        if not any(part.rows for part in parts):
            return
        if time.monotonic() < self._not_before_secs:
            raise OSError("not tried again yet after the last error")
        try:
            self._writer.write(family, parts)
            self._errors_in_a_row = 0
        except Exception:
            self._errors_in_a_row += 1
            pause_secs = min(_LONGEST_PAUSE_SECS, self._batch_secs * 2**self._errors_in_a_row)
            self._not_before_secs = time.monotonic() + pause_secs
            raise

    def _settle(self) -> None:
        """Tell the ledger about losses; what it cannot take now stays owed."""
        if not self._losses and not self._writer.owes:
            return
        with self._lock:
            losses, self._losses = self._losses, {}
        for (family, reason), rows in losses.items():
            if rows:
                self._writer.lose(family, reason, rows)
        with suppress(OSError):
            self._writer.settle()

    def _end(self) -> None:
        self._not_before_secs = 0.0
        self._write_all()
        try:
            if self._status:
                self._tell(self._status)
            self._writer.seal()
        except Exception as error:
            self.failure = self.failure or f"the trace could not be sealed: {error}"
            log.error("%s: the trace stays unsealed", error)
        self._writer.release()

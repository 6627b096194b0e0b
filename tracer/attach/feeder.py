"""The thread between an engine and the recorder: takes captured steps in order, and never makes the engine wait."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

__all__ = ["Feeder"]

log = logging.getLogger("spectrace.attach")
Item = TypeVar("Item")


class Feeder(Generic[Item]):
    """`room` says whether what waits is less than it may be, in bytes. `failure` is the first error of `take`."""

    def __init__(self, take: Callable[[Item], None], *, queue_bytes: int) -> None:
        self.failure = ""
        self.failures = 0
        self._take, self._queue_bytes, self._closed = take, queue_bytes, False
        self._held_bytes, self._lock = 0, threading.Lock()
        self._queue: SimpleQueue[tuple[Item, int] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="spectrace-feeder", daemon=True)
        self._thread.start()

    def room(self) -> bool:
        return self._held_bytes < self._queue_bytes

    def put(self, item: Item, nbytes: int) -> None:
        """Hand over; what comes after the end is let go."""
        if self._closed:
            return
        with self._lock:
            self._held_bytes += nbytes
        self._queue.put((item, nbytes))

    def close(self, patience_secs: float = 60.0) -> bool:
        """Until everything is taken; whether it was, in so long."""
        self._closed = True
        self._queue.put(None)
        self._thread.join(patience_secs)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (got := self._queue.get()) is not None:
            item, nbytes = got
            try:
                self._take(item)
            except Exception as error:
                self.failures += 1
                if not self.failure:
                    self.failure = f"{type(error).__name__}: {error}"
                    log.exception("spectrace: a step could not be recorded; later ones are tried, failures counted")
            finally:
                with self._lock:
                    self._held_bytes -= nbytes

"""The shards as Ray actors. Hidden states go from one to the other by object reference, never through the driver.

A reference travels inside a list, because Ray replaces only bare ones by what they refer to. `ray.put` always places
a value in the object store; a small value that a method returned would be inlined in its answer to the driver.
"""

import os
from pathlib import Path
from typing import Any, TypeAlias

import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from spectrace.engine.draft_shard import DraftServing, DraftShard
from spectrace.engine.plan import Decision, DraftStep, DraftTree, TargetStep
from spectrace.engine.recording import Recording
from spectrace.engine.target_shard import TargetServing, TargetShard
from spectrace.tracer.errors import RunFailed, SpectraceError

__all__ = ["DraftActor", "Handed", "TargetActor", "answer", "start_cluster"]

_OBJECT_STORE_BYTES = 1 << 29
_AGAIN = "what was recorded before is readable, start again"

Handed: TypeAlias = list[Any]
"""A reference to a `LogitsProcessorOutput` or to `DraftProbs`, or nothing."""


class TargetActor:
    """A `TargetShard` in a process of its own."""

    def load(self, folder: Path, *, dtype: torch.dtype, threads: int) -> int:
        """Load the model; returns the process id."""
        self.shard = TargetShard(folder, dtype=dtype, threads=threads)
        return os.getpid()

    def serve(self, serving: TargetServing, recording: Recording | None) -> None:
        """Start a call."""
        self.shard.serve(serving, recording)

    def step(self, step: TargetStep, probs: Handed) -> tuple[Handed, list[Decision]]:
        """One pass, given what sampled drafts were drawn from: what it hands over, and a decision per group."""
        output, decisions = self.shard.step(step, ray.get(probs[0]) if probs else None)
        return [] if output is None else [ray.put(output)], decisions

    def finish(self) -> str | None:
        """End the call; returns what went wrong with the recording, if anything did."""
        return self.shard.finish()


class DraftActor:
    """A `DraftShard` in a process of its own."""

    def load(self, folder: Path, target: Path, *, dtype: torch.dtype, threads: int) -> int:
        """Load the model; returns the process id."""
        self.shard = DraftShard(folder, target, dtype=dtype, threads=threads)
        return os.getpid()

    def serve(self, serving: DraftServing, recording: Recording | None) -> None:
        """Start a call."""
        self.shard.serve(serving, recording)

    def step(self, handed: Handed, step: DraftStep) -> tuple[Handed, list[DraftTree]]:
        """Fetch what the target handed over and run every draft forward that it feeds.

        Returns what sampled drafts were drawn from, by reference, and a tree per request that asked for one.
        """
        probs, trees = self.shard.step(ray.get(handed[0]), step)
        return [] if probs is None else [ray.put(probs)], trees

    def finish(self) -> str | None:
        """End the call; returns what went wrong with the recording, if anything did."""
        return self.shard.finish()


def start_cluster() -> None:
    """A Ray cluster on this machine alone, without dashboard; its workers run as fast as the driver does."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray runs workers at nice 15, behind everything else
    options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
    try:
        ray.init(**options, object_store_memory=_OBJECT_STORE_BYTES)
    except Exception as error:  # Ray raises bare ones when a machine is too busy to start its processes in time
        raise RunFailed(f"Ray did not start: {_line(error)}") from error


def answer(reference: Any, who: str, *, secs: float) -> Any:
    """What an actor's method returned; its death, silence or error becomes one of our errors, in one line."""
    try:
        return ray.get(reference, timeout=secs)
    except RayTaskError as error:
        if isinstance(error.cause, SpectraceError):
            raise type(error.cause)(error.cause.message) from error
        if isinstance(error.cause, RayError):  # the owner of what it was to fetch is gone
            raise RunFailed(f"the {who} could not fetch what it was handed: {_line(error.cause)}; {_AGAIN}") from error
        raise RunFailed(f"the {who} failed: {_line(error.cause or error)}") from error
    except GetTimeoutError as error:
        raise RunFailed(f"the {who} did not answer within {secs:.0f} s; it may hang or be out of memory") from error
    except RayActorError as error:
        raise RunFailed(f"the {who} process died ({_line(error)}); {_AGAIN}") from error
    except RayError as error:
        raise RunFailed(f"the {who} could not be reached: {_line(error)}") from error


def _line(error: BaseException) -> str:
    """An error's first line, or its type where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__

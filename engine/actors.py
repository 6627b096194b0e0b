"""The shards as Ray actors, one for each rank. Hidden states go by object reference, never through the driver.

A reference travels inside a list, because Ray replaces only bare ones by what they refer to. `ray.put` always places
a value in the object store; a small value that a method returned would be inlined in its answer to the driver.
"""

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from spectrace.engine.cluster import first_line
from spectrace.engine.draft_shard import DraftServing, DraftShard
from spectrace.engine.parallel import Group, Place, join, listen, sharded
from spectrace.engine.plan import Decision, DraftStep, DraftTree, TargetStep
from spectrace.engine.recording import Recording
from spectrace.engine.target_shard import TargetServing, TargetShard
from spectrace.tracer.errors import RunFailed, SpectraceError

__all__ = ["ActorGroup", "DraftActor", "Handed", "Loaded", "TargetActor", "answers"]

_LAST_WORDS_SECS = 10.0
_AGAIN = "what was recorded before is readable, start again"

Handed: TypeAlias = list[Any]
"""A reference to a `LogitsProcessorOutput` or to `DraftProbs`, or nothing."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a rank says once it holds its part of the model: its process, its Ray node, and what is split how."""

    pid: int
    node: str
    sharded: Mapping[str, str]


class _Rank:
    """What the actors of both sides have in common: they meet their group before they load."""

    rank = 0
    _group: Group | None = None
    _meeting: socket.socket | None = None
    _met_at = "", 0

    def listen(self) -> tuple[str, int]:
        """Open the meeting; asked of rank 0 alone."""
        if self._group is None:
            self._meeting = listen(ray.util.get_node_ip_address())
            host, port = self._meeting.getsockname()
            self._met_at = host, port
        return self._met_at

    def _join(self, place: Place) -> Group | None:
        self.rank = place.rank
        if place.device == "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # transformers splits a model over GPUs wherever it sees one
        self._group = self._group or join(place, self._meeting)
        return self._group

    def _loaded(self, model: torch.nn.Module, group: Group | None) -> Loaded:
        return Loaded(os.getpid(), ray.get_runtime_context().get_node_id(), sharded(model, group))


class TargetActor(_Rank):
    """A `TargetShard` in a process of its own."""

    def load(self, folder: Path, place: Place, *, dtype: torch.dtype, threads: int, readers: int) -> Loaded:
        """Load this rank's part of the model; `readers` of the target's ranks have a rank of the draft to hand to."""
        group = self._join(place)
        self.shard = TargetShard(folder, dtype=dtype, threads=threads, device=place.device, group=group)
        self.hands_over = self.rank < readers
        return self._loaded(self.shard.model.model, group)

    def serve(self, serving: TargetServing, recording: Recording | None) -> None:
        """Start a call."""
        self.shard.serve(serving, recording)

    def step(self, step: TargetStep, probs: Handed) -> tuple[Handed, list[Decision]]:
        """One pass, given what sampled drafts were drawn from: what it hands over, and a decision per group."""
        output, decisions = self.shard.step(step, ray.get(probs[0]) if probs else None)
        if output is None or not self.hands_over:
            return [], decisions
        return [ray.put(replace(output, hidden_states=output.hidden_states.cpu()))], decisions

    def finish(self) -> str | None:
        """End the call; returns what went wrong with the recording, if anything did."""
        return self.shard.finish()


class DraftActor(_Rank):
    """A `DraftShard` in a process of its own."""

    def load(self, folder: Path, target: Path, place: Place, *, dtype: torch.dtype, threads: int) -> Loaded:
        """Load this rank's part of the model."""
        group = self._join(place)
        self.shard = DraftShard(folder, target, dtype=dtype, threads=threads, device=place.device, group=group)
        return self._loaded(self.shard.loaded, group)

    def serve(self, serving: DraftServing, recording: Recording | None) -> None:
        """Start a call."""
        self.shard.serve(serving, recording)

    def step(self, handed: Handed, step: DraftStep) -> tuple[Handed, list[DraftTree]]:
        """Fetch what the target handed over and run every draft forward that it feeds.

        Returns what sampled drafts were drawn from, by reference, and a tree per request that asked for one.
        """
        probs, trees = self.shard.step(ray.get(handed[0]), step)
        if probs is None or self.rank:
            return [], trees
        return [ray.put(replace(probs, probs=probs.probs.cpu(), ids=probs.ids.cpu()))], trees

    def finish(self) -> str | None:
        """End the call; returns what went wrong with the recording, if anything did."""
        return self.shard.finish()


class ActorGroup:
    """The ranks of the target or of the draft, called together. In messages one rank alone is simply the target."""

    def __init__(self, role: str, actors: Sequence[Any]) -> None:
        self.role, self.actors = role, tuple(actors)
        many = len(self.actors) > 1
        self.names = tuple(f"{role} rank {rank}" if many else role for rank in range(len(self.actors)))

    def __len__(self) -> int:
        return len(self.actors)

    def ask(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Call a method of every rank; returns references to the answers, by the rank's name."""
        return self.ask_each(method, [arguments] * len(self))

    def ask_each(self, method: str, arguments: Sequence[Sequence[Any]], **options: Any) -> dict[str, Any]:
        """As `ask`, with each rank's own arguments."""
        calls = zip(self.names, self.actors, arguments, strict=True)
        return {name: getattr(actor, method).remote(*own, **options) for name, actor, own in calls}

    def end(self) -> None:
        """Kill every rank, whatever it is doing."""
        for actor in self.actors:
            ray.kill(actor)


def answers(asked: Mapping[str, Any], *, secs: float) -> list[Any]:
    """What methods returned, all of them; a death, silence or error of any becomes one of our errors, in one line.

    When one rank dies, the others of its group fail or hang in the middle of a collective: so all are listened to at
    once, and of several errors the one that tells most is raised.
    """
    who = {reference: name for name, reference in asked.items()}
    waiting, told = list(who), {}
    failures: list[_Failure] = []
    until = time.monotonic() + secs
    while waiting and not any(failure.final for failure in failures):
        done, waiting = ray.wait(waiting, timeout=max(until - time.monotonic(), 0))
        if not done:
            break
        for reference in done:
            try:
                told[reference] = ray.get(reference, timeout=secs)
            except (RayError, SpectraceError) as error:
                failures.append(_explain(error, who[reference], secs))
                until = min(until, time.monotonic() + _LAST_WORDS_SECS)
    if failures:
        worst = max(failures, key=lambda failure: failure.final)
        if not worst.final and waiting:  # the others have lost patience with a rank that hangs
            raise RunFailed(f"the {who[waiting[0]]} does not answer, and {worst.error}") from worst.cause
        raise worst.error from worst.cause
    if waiting:
        raise RunFailed(f"the {who[waiting[0]]} did not answer within {secs:.0f} s; it may hang or be out of memory")
    return [told[reference] for reference in who]


@dataclass(frozen=True, slots=True)
class _Failure:
    """One rank's error in our words; a `final` one explains those of the other ranks."""

    error: SpectraceError
    cause: Exception
    final: bool


def _explain(error: Exception, who: str, secs: float) -> _Failure:
    cause = error.cause if isinstance(error, RayTaskError) else None
    if isinstance(cause, SpectraceError):
        return _Failure(type(cause)(cause.message), error, True)
    if isinstance(error, RayActorError):
        return _Failure(RunFailed(f"the {who} process died ({first_line(error)}); {_AGAIN}"), error, True)
    if isinstance(cause, RayError):  # the owner of what it was to fetch is gone
        text = f"the {who} could not fetch what it was handed: {first_line(cause)}; {_AGAIN}"
    elif isinstance(error, RayTaskError):
        text = f"the {who} failed: {first_line(cause or error)}"
    elif isinstance(error, GetTimeoutError):
        text = f"the {who} did not answer within {secs:.0f} s; it may hang or be out of memory"
    else:
        text = f"the {who} could not be reached: {first_line(error)}"
    return _Failure(RunFailed(text), error, False)

"""The deployment: target and draft in Ray actors of their own, and the loop that keeps both fed.

The driver schedules and sees tokens only; hidden states go from actor to actor by object reference. Depth, chunk,
concurrency, wiring and recording belong to a call, so one running deployment serves many configurations.
"""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from spectrace.engine.checkpoint import DraftCheckpoint, Wiring, default_wiring, read_draft
from spectrace.engine.draft_shard import DraftShard
from spectrace.engine.faults import find_faults
from spectrace.engine.plan import CaptureHiddenMode, TargetStep
from spectrace.engine.provenance import describe_run
from spectrace.engine.recording import Recording
from spectrace.engine.request_log import RequestLog
from spectrace.engine.scheduler import Request, Scheduler
from spectrace.engine.target import check_target
from spectrace.engine.target_shard import TargetServing, TargetShard
from spectrace.tracer.errors import RunFailed, SpectraceError, UserError
from spectrace.tracer.manifest import create_trace, seal_trace
from spectrace.tracer.rows import Level

__all__ = ["Deployment", "Served", "Serving"]

_ANSWER_SECS = 300.0
_FAREWELL_SECS = 30.0


@dataclass(frozen=True, slots=True)
class Serving:
    """One call's settings. `wiring` None takes the draft's own; `capture` lists boundaries to record as reference."""

    depth: int = 3
    max_new: int = 64
    concurrency: int = 8
    chunk: int | None = None
    wiring: tuple[int, ...] | None = None
    capture: tuple[int, ...] = ()
    level: Level = Level.FEATURES
    faults: tuple[str, ...] = ()
    ignore_end: bool = False


@dataclass(frozen=True, slots=True)
class Served:
    """The finished requests in order, the wall time of the call, and what recording lost (empty: nothing)."""

    requests: tuple[Request, ...]
    wall_secs: float
    losses: tuple[str, ...] = ()

    @property
    def secs_per_token(self) -> float:
        """Wall seconds per emitted token, prefill included."""
        return self.wall_secs / sum(len(request.output) for request in self.requests)


class Deployment:
    """A running pair. Use as a context manager: `with Deployment(target, draft) as pair: pair.serve(prompts, ...)`."""

    def __init__(
        self,
        target: Path,
        draft: Path | None,
        *,
        dtype: torch.dtype = torch.float32,
        threads: int | None = None,
        answer_secs: float = _ANSWER_SECS,
    ) -> None:
        self.target_folder, self.draft_folder, self.dtype = target, draft, dtype
        config = check_target(target)
        self.layers, self.end_tokens = int(config["num_hidden_layers"]), _end_tokens(config)
        self.checkpoint = read_draft(draft) if draft else None
        if self.checkpoint:
            _check_pair(self.checkpoint, target, config)
        self.threads = threads or os.cpu_count() or 1
        self.answer_secs = answer_secs

    def __enter__(self) -> "Deployment":
        import ray

        self._own_cluster = not ray.is_initialized()
        if self._own_cluster:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            os.environ.setdefault("RAY_worker_niceness", "0")  # Ray runs workers at nice 15, behind everything else
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="error", object_store_memory=1 << 29)
        remote = ray.remote(num_cpus=0, max_restarts=0)
        self.target = remote(TargetShard).remote(self.target_folder, dtype=self.dtype, threads=self.threads)
        self.draft = None
        if self.draft_folder:
            self.draft = remote(DraftShard).remote(
                self.draft_folder, self.target_folder, dtype=self.dtype, threads=self.threads
            )
        try:
            self._answer(self.target.ready.remote(), "target")
            if self.draft:
                self._answer(self.draft.ready.remote(), "draft")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the actors, and the cluster if this deployment started it."""
        import ray

        for actor in (self.target, self.draft):
            if actor is not None:
                with suppress(Exception):
                    ray.kill(actor)
        if self._own_cluster:
            ray.shutdown()

    def serve(self, prompts: Sequence[Sequence[int]], serving: Serving, *, trace: Path | None = None) -> Served:
        """Answer every prompt; with a `trace`, record into that new folder and seal it when nothing was lost.

        Raises UserError for settings that do not fit the pair, RunFailed when an actor dies or does not answer; what
        was recorded until then stays readable.
        """
        wiring, key = self._resolve(serving)
        recording = None
        if trace:
            create_trace(trace, self._manifest(serving, wiring, key))
            recording = Recording(trace.absolute(), serving.level, {"target": {"capture": serving.capture}})
        mode = CaptureHiddenMode.FULL if serving.depth else CaptureHiddenMode.NULL
        scheduler = Scheduler(
            depth=serving.depth,
            concurrency=serving.concurrency,
            chunk=serving.chunk,
            end_tokens=frozenset() if serving.ignore_end else self.end_tokens,
        )
        for number, prompt in enumerate(prompts):
            scheduler.add(Request(number, str(number), tuple(prompt), serving.max_new))
        log = RequestLog(scheduler, recording)
        try:
            self._answer(self.target.serve.remote(TargetServing(wiring, serving.capture, mode, serving.faults), recording), "target")
            if self.draft:
                self._answer(self.draft.serve.remote(recording), "draft")
            started = time.perf_counter()
            while (step := scheduler.plan()) is not None:
                self._advance(scheduler, step, log)
            wall_secs = time.perf_counter() - started
        finally:
            losses = self._finish(log)
        if trace:
            losses += [f"writer {writer} was not sealed" for writer in seal_trace(trace)]
        requests = tuple(sorted(scheduler.finished, key=lambda request: request.number))
        return Served(requests, wall_secs, tuple(losses))

    def _advance(self, scheduler: Scheduler, step: TargetStep, log: RequestLog) -> None:
        handed, decisions = self._answer(self.target.step.remote(step), "target")
        drafts = scheduler.apply(decisions)
        log.step(step, decisions)
        if drafts.groups:
            scheduler.take_drafts(self._answer(self.draft.step.remote(handed, drafts), "draft"))

    def _resolve(self, serving: Serving) -> tuple[tuple[int, ...], str]:
        """The wiring that will be served and where it came from, checked against the pair."""
        find_faults(serving.faults)
        if serving.depth and not self.checkpoint:
            raise UserError(f"depth {serving.depth} needs a draft; give --draft DIR or --depth 0")
        for name, boundaries in (("--wiring", serving.wiring or ()), ("--capture", serving.capture)):
            out = [boundary for boundary in boundaries if not 0 <= boundary <= self.layers]
            if out:
                raise UserError(f"{name}: boundary {out[0]} does not exist; this target has boundaries 0 to {self.layers}")
        slots = self.checkpoint.spec.slots if self.checkpoint else 0
        if serving.wiring is not None:
            if self.checkpoint and len(serving.wiring) != slots:
                raise UserError(f"--wiring: {len(serving.wiring)} boundaries, but fc of {self.draft_folder} takes {slots}")
            return serving.wiring, "--wiring"
        if self.checkpoint is None or not serving.depth:
            return (), "no draft"
        own = self.checkpoint.wiring
        if own is None:
            return default_wiring(self.layers), "default"
        out = [boundary for boundary in own.boundaries if not 0 <= boundary <= self.layers]
        if out:
            raise UserError(
                f"{self.draft_folder / 'config.json' if self.draft_folder else ''}: {own.key} names boundary {out[0]}, "
                f"but this target has boundaries 0 to {self.layers}; another target's draft, or ids of another convention?"
            )
        return own.boundaries, own.key

    def _manifest(self, serving: Serving, wiring: tuple[int, ...], key: str) -> dict[str, Any]:
        return describe_run(
            target=self.target_folder,
            draft=self.checkpoint,
            wiring=Wiring(wiring, key, wiring),
            dtype=str(self.dtype).removeprefix("torch."),
            serving={
                name: value.name.lower() if isinstance(value, Level) else value
                # A fault is the deployment's secret: a trace says only what a real engine would know.
                for name, value in asdict(serving).items()
                if name not in ("faults", "wiring")
            },
        )

    def _finish(self, log: RequestLog) -> list[str]:
        """Close every recorder that still can be; returns what was lost."""
        losses = [log.close()]
        for actor in (self.target, self.draft):
            if actor is not None:
                with suppress(SpectraceError):
                    losses.append(self._answer(actor.finish.remote(), "actor", secs=_FAREWELL_SECS))
        return [loss for loss in losses if loss]

    def _answer(self, reference: Any, who: str, *, secs: float | None = None) -> Any:
        """An actor's answer; its death, silence or error becomes one of our errors."""
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

        secs = secs or self.answer_secs
        try:
            return ray.get(reference, timeout=secs)
        except RayTaskError as error:
            if isinstance(error.cause, SpectraceError):
                raise type(error.cause)(error.cause.message) from error
            raise RunFailed(f"the {who} failed: {str(error.cause or error).strip()}") from error
        except GetTimeoutError as error:
            raise RunFailed(f"the {who} did not answer within {secs:.0f} s; it may hang or be out of memory") from error
        except RayActorError as error:
            raise RunFailed(
                f"the {who} process died ({str(error).splitlines()[0]}); what was recorded before is readable, start again"
            ) from error
        except RayError as error:
            raise RunFailed(f"the {who} could not be reached: {error}") from error


def _end_tokens(config: Mapping[str, Any]) -> frozenset[int]:
    ends = config.get("eos_token_id")
    return frozenset(ends if isinstance(ends, list) else [ends] if isinstance(ends, int) else [])


def _check_pair(checkpoint: DraftCheckpoint, target: Path, config: Mapping[str, Any]) -> None:
    """The draft must have been made for a target of this width and vocabulary."""
    spec = checkpoint.spec
    for what, wants, has in (
        ("width", spec.target_width, config["hidden_size"]),
        ("vocabulary", spec.target_vocab, config["vocab_size"]),
    ):
        if wants != has:
            raise UserError(
                f"{checkpoint.folder}: drafts for a target of {what} {wants}, but {target} has {what} {has}: "
                f"this is the draft of another target"
            )

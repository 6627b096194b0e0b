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

from spectrace.engine.checkpoint import DraftCheckpoint, read_draft
from spectrace.engine.dialect import Wiring
from spectrace.engine.draft_shard import DraftServing
from spectrace.engine.plan import CaptureHiddenMode, TargetStep
from spectrace.engine.provenance import describe_run
from spectrace.engine.recording import Recording
from spectrace.engine.request_log import RequestLog
from spectrace.engine.scheduler import Request, Scheduler
from spectrace.engine.serving import Serving, check_prompts, resolve_wiring
from spectrace.engine.target import check_target, end_tokens
from spectrace.engine.target_shard import TargetServing
from spectrace.tracer.errors import SpectraceError, UserError
from spectrace.tracer.manifest import create_trace, seal_trace
from spectrace.tracer.rows import Level

__all__ = ["Deployment", "Served", "Serving"]

_ANSWER_SECS = 300.0
_FAREWELL_SECS = 30.0


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
    """A running pair. Use as a context manager: `with Deployment(target, draft) as pair: pair.serve(prompts, ...)`.

    Raises UserError for folders that are no target or no draft of it.
    """

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
        self.layers, self.vocab = int(config["num_hidden_layers"]), int(config["vocab_size"])
        self.end_tokens = end_tokens(target)
        self.checkpoint = read_draft(draft) if draft else None
        if self.checkpoint:
            _check_pair(self.checkpoint, target, config)
        self.threads = threads or os.cpu_count() or 1
        self.answer_secs = answer_secs
        self.pids: dict[str, int] = {}

    def __enter__(self) -> "Deployment":
        import ray

        from spectrace.engine.actors import DraftActor, TargetActor, start_cluster

        self._own_cluster = not ray.is_initialized()
        if self._own_cluster:
            start_cluster()
        remote = ray.remote(num_cpus=0, max_restarts=0)
        options = {"dtype": self.dtype, "threads": self.threads}
        self.target: Any = remote(TargetActor).remote()
        self.draft: Any = remote(DraftActor).remote() if self.draft_folder else None
        try:
            loading = {"target": self.target.load.remote(self.target_folder, **options)}
            if self.draft:
                loading["draft"] = self.draft.load.remote(self.draft_folder, self.target_folder, **options)
            self.pids = {who: self._answer(answer, who) for who, answer in loading.items()}
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

    def check(self, serving: Serving) -> None:
        """Raises UserError for settings that do not fit the pair; nothing needs to run for it."""
        resolve_wiring(serving, self.checkpoint, layers=self.layers)

    def serve(self, prompts: Sequence[Sequence[int]], serving: Serving, *, trace: Path | None = None) -> Served:
        """Answer every prompt; with a `trace`, record into that new folder and seal it when nothing was lost.

        Raises UserError for prompts or settings that do not fit the pair, before anything is written; RunFailed when an
        actor dies or does not answer, and what was recorded until then stays readable.
        """
        check_prompts(serving, prompts, vocab=self.vocab)
        wiring = resolve_wiring(serving, self.checkpoint, layers=self.layers)
        recording = None
        if trace:
            create_trace(trace, self._manifest(serving, wiring))
            recording = Recording(trace.absolute(), serving.level, _facts(serving))
        scheduler = self._schedule(prompts, serving)
        log = RequestLog(scheduler, serving.sampling, recording)
        try:
            self._begin(serving, wiring, recording)
            started = time.perf_counter()
            probs: list[Any] = []
            while (step := scheduler.plan()) is not None:
                probs = self._advance(scheduler, step, probs, log)
            wall_secs = time.perf_counter() - started
        finally:
            losses = self._finish(log)
        if trace:
            losses += _seal(trace)
        requests = tuple(sorted(scheduler.finished, key=lambda request: request.number))
        return Served(requests, wall_secs, tuple(losses))

    def _schedule(self, prompts: Sequence[Sequence[int]], serving: Serving) -> Scheduler:
        scheduler = Scheduler(
            depth=serving.depth,
            concurrency=serving.concurrency,
            chunk=serving.chunk,
            end_tokens=frozenset() if serving.ignore_end else self.end_tokens,
            fixed_window=serving.fixed_window,
        )
        for number, (prompt, limit) in enumerate(zip(prompts, serving.limits(len(prompts)), strict=True)):
            scheduler.add(Request(number, str(number), tuple(prompt), limit))
        return scheduler

    def _begin(self, serving: Serving, wiring: Wiring, recording: Recording | None) -> None:
        mode = CaptureHiddenMode.FULL if serving.depth else CaptureHiddenMode.NULL
        settings = TargetServing(
            wiring.boundaries, serving.capture, mode, serving.sampling, serving.fixed_window, serving.faults
        )
        self._answer(self.target.serve.remote(settings, recording), "target")
        if self.draft:
            self._answer(self.draft.serve.remote(DraftServing(serving.shape, serving.sampling), recording), "draft")

    def _advance(self, scheduler: Scheduler, step: TargetStep, probs: list[Any], log: RequestLog) -> list[Any]:
        """A pass of the target and the draft forwards that it feeds; returns what the next pass is handed."""
        handed, decisions = self._answer(self.target.step.remote(step, probs), "target")
        drafts = scheduler.apply(decisions)
        log.step(step, decisions)
        if not drafts.groups:
            return []
        probs, trees = self._answer(self.draft.step.remote(handed, drafts), "draft")
        scheduler.take_drafts(trees)
        return probs

    def _manifest(self, serving: Serving, wiring: Wiring) -> dict[str, Any]:
        return describe_run(
            target=self.target_folder,
            draft=self.checkpoint,
            wiring=wiring,
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
        from spectrace.engine.actors import answer

        return answer(reference, who, secs=secs or self.answer_secs)


def _seal(trace: Path) -> list[str]:
    """Seal what can be sealed; returns what could not, since no answer may be lost to a full disk."""
    try:
        return [f"writer {writer} was not sealed" for writer in seal_trace(trace)]
    except OSError as error:
        return [f"the trace was not sealed: {error}"]


def _facts(serving: Serving) -> dict[str, dict[str, Any]]:
    """What each role says about itself in its writer's manifest: `expects` are the families it will bring rows of."""
    drafts = serving.depth > 0 and max(serving.limits(1)) > 1
    return {
        "target": {"capture": serving.capture, "expects": ["emitted", *(["reference"] if serving.capture else [])]},
        "draft": {"expects": ["received", "drafted"] if drafts else []},
        "scheduler": {"expects": ["requests", *(["verified"] if drafts else [])]},
    }


def _check_pair(checkpoint: DraftCheckpoint, target: Path, config: Mapping[str, Any]) -> None:
    """The draft must have been made for a target of this width and vocabulary."""
    spec, folder = checkpoint.spec, checkpoint.folder
    for what, wants, has in (
        ("width", spec.target_width, config["hidden_size"]),
        ("vocabulary", spec.target_vocab, config["vocab_size"]),
    ):
        if wants != has:
            raise UserError(
                f"{folder}: drafts for a target of {what} {wants}, but {target} has {what} {has}: "
                f"this is the draft of another target"
            )
    if (d2t := checkpoint.tensors.get("d2t")) is not None:
        ids = torch.arange(len(d2t)) + d2t.long()
        if wrong := ids[(ids < 0) | (ids >= spec.target_vocab)].tolist():
            raise UserError(
                f"{folder}: tensor d2t names token {wrong[0]}, but the vocabulary is 0 to {spec.target_vocab - 1}; "
                f"d2t holds offsets from the draft's id, are these ids?"
            )

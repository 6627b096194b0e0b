"""vLLM, unmodified: found through its entry point `vllm.general_plugins`, hooked where its Python stays Python.

`sample_tokens` of the V1 runner brackets a step: what the target computed is in `execute_model_state` before it, and
verification and drafting happen within it. The draft's own methods are hooked on the class that was loaded.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from spectrace.tracer.attach import LEVEL, TRACE
from spectrace.tracer.attach.feeder import Feeder
from spectrace.tracer.attach.hooks import Hooks, Watching
from spectrace.tracer.attach.steps import Forward, Group, Scribe, Step
from spectrace.tracer.attach.vllm_facts import draft_facts, run_facts
from spectrace.tracer.attach.vllm_weights import draft_weights, placements, shared_weights
from spectrace.tracer.recorder import Recorder
from spectrace.tracer.rows import Level
from spectrace.tracer.staging import Staged, bits_of, stage

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["attach"]

_QUEUE_BYTES = 512 << 20
_hooks = Hooks()
_loaded: dict[str, str] = {}
"""Fingerprints of the draft's weights, from before they were packed."""


def attach() -> None:
    """Hook what is known before a model is loaded: its loading."""
    from vllm.model_executor.model_loader import base_loader
    from vllm.v1.worker.gpu_worker import Worker

    _hooks.place(base_loader, "process_weights_after_loading", _process_weights, needs=("model",))
    _hooks.place(Worker, "load_model", _load_model)


def _process_weights(model: Any, _arguments: Mapping[str, Any]) -> Watching:
    if hasattr(model, "combine_hidden_states"):
        _loaded.update(draft_weights(model))
    yield


def _load_model(worker: Any, _arguments: Mapping[str, Any]) -> Watching:
    """Once the models are there it is known what there is to hook."""
    yield
    runner = worker.model_runner
    drafter: Any = getattr(runner, "drafter", None)
    capture, cls = _Capture(runner), type(runner)
    _hooks.place(cls, "execute_model", capture.execute_model, needs=("scheduler_output",))
    _hooks.place(cls, "sample_tokens", capture.sample_tokens)
    _hooks.place(cls, "_sample", capture.sample, needs=("logits",))
    if hasattr(drafter, "model"):
        needs = ("token_indices_to_sample", "common_attn_metadata")
        _hooks.place(type(drafter), "propose", capture.propose, needs=needs)
        model = type(drafter.model)
        _hooks.place(model, "combine_hidden_states", capture.combine_hidden_states, needs=("hidden_states",))
        _hooks.place(model, "forward", capture.forward, needs=("input_ids", "positions", "hidden_states"))
        _hooks.place(model, "compute_logits", capture.compute_logits)


def _rank() -> int:
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def _own(tensor: Tensor) -> Staged:
    """Of a tensor that nobody else holds: without another copy where it is on the host already."""
    return stage(tensor) if tensor.is_cuda else bits_of(tensor)


class _Capture:
    """The engine's side: one `Step` at a time, made of copies, handed to the scribe's thread when it is over."""

    def __init__(self, runner: Any) -> None:
        folder, level = Path(os.environ[TRACE]), Level[os.environ.get(LEVEL, "features").upper()]
        rank = _rank()
        drafter: Any = getattr(runner, "drafter", None)
        self.full, self.drafts = level is Level.FULL, hasattr(drafter, "model")
        self.step: Step | None = None
        self.steps = 0
        self.met: set[str] = set()
        self.left: set[str] = set()
        self.nbytes = 0
        self.features: tuple[Staged, Staged | None] | None = None

        def recorder(role: str, *expects: str, **facts: Any) -> Recorder:
            return Recorder(folder, role=role, rank=rank, level=level, facts={"expects": expects, **facts})

        after_drafts, facts = ("verified",) if self.drafts else (), run_facts(runner)
        if self.drafts:
            loaded = _loaded | shared_weights(drafter.model)
            facts["sharded"] = {"draft": placements(facts["tensor_parallel"]["draft"], loaded)}
        self.recorders = [recorder("target", "emitted", run=facts)]
        if self.drafts:
            self.recorders.append(recorder("draft", "received", "drafted", loaded=loaded, **draft_facts(drafter)))
        if rank == 0:
            self.recorders.append(recorder("scheduler", "requests", *after_drafts))
        by_role = {one.name.partition("-")[0]: one for one in self.recorders}
        scribe = Scribe(
            by_role["target"],
            by_role.get("draft"),
            by_role.get("scheduler"),
            depth=int(getattr(runner, "num_spec_tokens", 0)),
            hash_only=rank > 0,
        )
        self.feeder = Feeder(scribe.write, queue_bytes=_QUEUE_BYTES)
        atexit.register(self.close)

    def close(self) -> None:
        """Write what is left and seal."""
        self.feeder.close()
        for recorder in self.recorders:
            recorder.close()

    def _held(self, staged: Staged) -> Staged:
        self.nbytes += staged.nbytes
        return staged

    def _copy(self, tensor: Tensor) -> Staged:
        return self._held(stage(tensor))

    def _kept(self, tensor: Tensor) -> Staged:
        return self._held(_own(tensor))

    def execute_model(self, _runner: Any, arguments: Mapping[str, Any]) -> Watching:
        """Which requests the engine has let go of."""
        output = arguments["scheduler_output"]
        self.left |= set(output.finished_req_ids)
        if not output.total_num_scheduled_tokens and self.left:
            self.steps += 1
            self.feeder.put(Step(self.steps, time.time(), left=self._leaving()), 0)
        yield

    def _leaving(self) -> tuple[str, ...]:
        left, self.left = tuple(sorted(self.left)), set()
        self.met -= set(left)
        return left

    def sample_tokens(self, runner: Any, _arguments: Mapping[str, Any]) -> Watching:
        """A step, from what the target computed to the drafts of the next."""
        if runner.execute_model_state is None:
            return
        self.nbytes, self.features = 0, None
        self.step = step = self._computed(runner)
        try:
            yield
        finally:
            self.step = None
        self.feeder.put(step, self.nbytes)

    def _computed(self, runner: Any) -> Step:
        state = runner.execute_model_state
        names = list(runner.input_batch.req_ids)
        scheduled, verifies = state.scheduler_output, state.spec_decode_metadata
        rows = scheduled.total_num_scheduled_tokens
        drafts = verifies.num_draft_tokens if verifies else [0] * len(names)
        silent = runner.discard_request_mask.np[: len(names)].tolist()
        groups = [
            Group(name, scheduled.num_scheduled_tokens[name], count, silent=quiet)
            for name, count, quiet in zip(names, drafts, silent, strict=True)
        ]
        new = {name: _begins(runner.requests[name]) for name in names if name not in self.met}
        self.steps += 1
        step = Step(self.steps, time.time(), met=new, left=self._leaving(), groups=groups)
        step.thin = not self.feeder.room()
        self.met |= set(names)
        step.tokens = self._copy(runner.input_ids.gpu[:rows])
        step.positions = self._copy(_text_positions(runner._get_positions(rows)))
        if state.aux_hidden_states and not step.thin:
            import torch

            step.slot_width = int(state.aux_hidden_states[0].shape[-1])
            step.slots = self._kept(torch.cat([slot[:rows] for slot in state.aux_hidden_states], dim=-1))
        return step

    def sample(self, _runner: Any, arguments: Mapping[str, Any]) -> Watching:
        """The target's best tokens, read before sampling writes into its logits; and what was sampled."""
        step, logits = self.step, arguments["logits"]
        if step is None or logits is None:
            return
        step.targets = self._kept(logits.argmax(-1))
        output = yield
        step.sampled = self._copy(output.sampled_token_ids)

    def propose(self, _drafter: Any, arguments: Mapping[str, Any]) -> Watching:
        """Which rows the draft is fed, which of them answer, and the drafts that come out."""
        step = self.step
        if step is None:
            return
        fed = np.diff(arguments["common_attn_metadata"].query_start_loc_cpu.numpy()).tolist()
        step.groups = [replace(group, fed=count) for group, count in zip(step.groups, fed, strict=True)]
        if arguments["token_indices_to_sample"] is not None:
            step.last = self._copy(arguments["token_indices_to_sample"])
        step.drafts = self._copy((yield))

    def combine_hidden_states(self, _model: Any, arguments: Mapping[str, Any]) -> Watching:
        """What is delivered to the draft, and what fc makes of it."""
        if self.step is None or self.step.thin:
            return
        delivered = self._copy(arguments["hidden_states"])
        fused = yield
        self.features = delivered, self._copy(fused) if self.full else None

    def forward(self, _model: Any, arguments: Mapping[str, Any]) -> Watching:
        """One forward: its inputs are copied before it, since they lie in buffers that the next one writes into."""
        step = self.step
        if step is None or step.thin or arguments["input_ids"] is None:
            return
        first = not step.forwards
        rows = sum(group.fed for group in step.groups) if first else len(step.groups)
        forward = Forward(
            self._copy(arguments["input_ids"][:rows]), self._copy(_text_positions(arguments["positions"])[:rows])
        )
        if first and self.features:
            forward.inputs, forward.fused = self.features
        elif not first:
            forward.inputs = self._copy(arguments["hidden_states"][:rows])
        step.forwards.append(forward)
        hidden, state = yield
        forward.state = self._copy(state[:rows])
        if self.full:
            forward.hidden = self._copy(hidden[:rows])

    def compute_logits(self, model: Any, _arguments: Mapping[str, Any]) -> Watching:
        """The best id in the draft's own vocabulary; the engine spreads its logits over the target's."""
        step = self.step
        logits = yield
        if step is None or not step.forwards or logits is None:
            return
        table = getattr(model, "draft_id_to_target_id", None)
        if table is not None:
            logits = logits[:, table + _arange(table)]
        step.forwards[-1].draft_tokens = self._kept(logits.argmax(-1))


def _arange(like: Tensor) -> Tensor:
    import torch

    return torch.arange(len(like), device=like.device)


def _text_positions(positions: Tensor) -> Tensor:
    """Of multimodal RoPE's three rows, the first: text stands at the same place in all."""
    return positions[0] if positions.ndim == 2 else positions


def _begins(request: Any) -> dict[str, Any]:
    """What a `Story` knows of a request from the start."""
    sampling = request.sampling_params
    ends = {*(sampling.stop_token_ids or ()), *([] if sampling.eos_token_id is None else [sampling.eos_token_id])}
    return {
        "prompt": tuple(request.prompt_token_ids or ()),
        "max_new": int(sampling.max_tokens),
        "ends": frozenset(ends),
        "temperature": float(sampling.temperature),
        "seed": sampling.seed,
        "arrived_secs": time.time(),
    }

"""vLLM's V2 runner: `sample_tokens` brackets a step here, too, and verification and drafting happen within it.

A forward of the draft runs as Python, which is hooked as in V1, or as a CUDA graph: then the buffers that it reads and
writes are all there is to see of it, before it and after. Several depths may be one graph, and of those between the
first and the last nothing is seen. What lies on the device is copied there and never asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from spectrace.tracer.attach.capture import Capture, Spot, begins, draft_spots, fed
from spectrace.tracer.attach.hooks import Watching
from spectrace.tracer.attach.session import Session
from spectrace.tracer.attach.steps import Forward, Group, Step

__all__ = ["V2Capture", "v2_obstacles", "v2_spots"]

_NEEDS: Final = ("execute_model_state", "sampler", "rejection_sampler", "max_model_len")
_DRAFT_NEEDS: Final = ("input_buffers", "hidden_states", "last_token_indices", "num_speculative_steps")
_GRAPHS: Final = ("prefill_cudagraph_manager", "decode_cudagraph_manager")
_UNKNOWN: Final[Mapping[str, str]] = {
    "adaptive_verification": "adaptive verification is on: how many drafts each request has, the device alone knows",
    "pcp_manager": "prefill context parallelism is on: the draft is fed other rows than the target",
    "batch_sharder": "enable_batch_sharded_sampling is on: each rank samples for some requests only",
}


def v2_obstacles(runner: Any) -> Iterator[str]:
    """Why this runner cannot be recorded."""
    speculator = runner.speculator
    for owner, needs in ((runner, _NEEDS), (speculator, _DRAFT_NEEDS if hasattr(speculator, "model") else ())):
        if lacking := [need for need in needs if not hasattr(owner, need)]:
            yield f"{type(owner).__name__} has no {', '.join(lacking)}"
    yield from (why for name, why in _UNKNOWN.items() if getattr(runner, name, None) is not None)
    if getattr(getattr(runner, "model_state", None), "num_new_sampled_tokens_per_step", 1) != 1:
        yield "it samples several tokens a step without a draft"


def v2_spots(runner: Any) -> Iterator[Spot]:
    """What to hook of a runner that has its models and has captured its graphs.

    A step without a sampler, or a draft without a forward, is an error of the hook around it: so those are optional.
    """
    yield Spot(runner, "execute_model", ("scheduler_output", "dummy_run"))
    yield Spot(runner, "sample_tokens")
    yield Spot(runner, "sample")
    for sampler in (runner.sampler, runner.rejection_sampler):
        if sampler is not None:
            yield Spot(sampler, "__call__", ("logits",), by="best", optional=True)
    speculator = runner.speculator
    if hasattr(speculator, "model"):
        yield Spot(speculator, "propose")
        yield from draft_spots(speculator, optional=True)
        for manager in (getattr(speculator, name, None) for name in _GRAPHS):
            if manager is not None:
                yield Spot(manager, "run_fullgraph", optional=True)
            if (wrapper := getattr(manager, "breakable_cg_runner", None)) is not None:
                yield Spot(wrapper, "__call__", ("kwargs",), by="wrapped", optional=True)


class V2Capture(Capture):
    """The hooks of the V2 runner, its samplers and its speculator, by the names of what they hook."""

    def __init__(self, session: Session, *, full: bool) -> None:
        super().__init__(session, full=full)
        self.new: dict[str, dict[str, Any]] = {}
        self.speculator: Any = None
        self.deeper_graphs = 0

    def execute_model(self, runner: Any, arguments: Mapping[str, Any]) -> Watching:
        """Which requests the engine has let go of, and which come; one that was preempted comes again as if new."""
        if arguments["dummy_run"]:
            return
        output = arguments["scheduler_output"]
        computes = bool(output.total_num_scheduled_tokens)
        self.leave(output.finished_req_ids, goes_on=computes)
        self.session.steps.began += computes
        self.new |= {
            new.req_id: begins(new.prompt_token_ids or (), new.sampling_params, runner.max_model_len)
            for new in output.scheduled_new_reqs
        }
        yield

    def computed(self, runner: Any, step: Step) -> None:
        """Counts by request lie on the host; what was padded for a graph is left out of everything."""
        state = runner.execute_model_state
        batch, rows = state.input_batch, state.input_batch.num_tokens
        counts, drafts = batch.num_scheduled_tokens, batch.num_draft_tokens_per_req
        silent = batch.num_computed_prefill_tokens_np + counts < batch.prefill_len_np
        step.groups = [
            Group(name, int(count), int(drafted), silent=bool(quiet), filled=bool(starting))
            for name, count, drafted, quiet, starting in zip(
                batch.req_ids,
                counts,
                np.zeros_like(counts) if drafts is None else drafts,
                silent,
                batch.is_prefilling_np,
                strict=True,
            )
        ]
        new = {group.name: self.new.pop(group.name, None) for group in step.groups}
        step.met = {name: known for name, known in new.items() if known and name not in self.met}
        self.met |= set(new)
        step.tokens, step.positions = self.copy(batch.input_ids[:rows]), self.copy(batch.positions[:rows])
        if state.aux_hidden_states and not step.thin:
            import torch

            step.slot_width = int(state.aux_hidden_states[0].shape[-1])
            step.slots = self.kept(torch.cat([slot[:rows] for slot in state.aux_hidden_states], dim=-1))

    def best(self, _sampler: Any, arguments: Mapping[str, Any]) -> Watching:
        """The target's best tokens, at the outermost sampler."""
        step, logits = self.step, arguments["logits"]
        if step is not None and step.targets is None:
            step.targets, step.logits = self.kept(logits.argmax(-1)), self.logits(logits)
        yield

    def sample(self, _runner: Any, _arguments: Mapping[str, Any]) -> Watching:
        """What was sampled: vLLM says how many there are of each request, and leaves behind them what lay there."""
        import torch

        step = self.step
        if step is None:
            return
        output, counts, _ = yield
        sampled = output.sampled_token_ids
        columns = torch.arange(sampled.shape[1], device=sampled.device)
        step.sampled = self.kept(sampled.masked_fill(columns >= counts[:, None], -1))
        if step.targets is None:
            raise LookupError("no sampler was seen: it is not known what the target says")

    def propose(self, speculator: Any, arguments: Mapping[str, Any]) -> Watching:
        """The draft is fed all rows of the target; which of them answer, and the drafts that come out."""
        step = self.step
        if step is None:
            return
        step.groups = [replace(group, fed=group.rows) for group in step.groups]
        self.speculator, self.deeper_graphs = speculator, 0
        try:
            drafts = yield
            asked = arguments.get("num_speculative_tokens")
            depths = speculator.num_speculative_steps if asked is None else asked
            step.last = self.copy(speculator.last_token_indices[: len(step.groups)])
            step.drafts = self.copy(drafts[:, :depths])
            if not step.thin:
                self._unseen(step, max(depths, 1) - len(step.forwards))
        finally:
            self.speculator = None

    def run_fullgraph(self, manager: Any, _arguments: Mapping[str, Any]) -> Watching:
        """A forward as one graph, or all that follow the first: what lies ready before it.

        After the first there lies, of every request, the state that is fed on.
        """
        step, speculator = self.step, self.speculator
        if step is None or step.thin or speculator is None:
            return
        first = manager is speculator.prefill_cudagraph_manager
        if not (first or step.forwards):
            step.forwards.append(None)
        step.forwards.append(self._ready(step, first=first))
        self.deeper_graphs += not first
        yield
        if first and (forward := step.forwards[-1]):
            forward.state = self.copy(speculator.hidden_states[: len(step.groups)])

    def _ready(self, step: Step, *, first: bool) -> Forward:
        """What lies in the buffers that a forward reads: before it, and after the last one still."""
        rows, buffers = fed(step) if first else len(step.groups), self.speculator.input_buffers
        forward = Forward(self.copy(buffers.input_ids[:rows]), self.copy(buffers.positions[:rows]))
        if not first:
            forward.inputs = self.copy(self.speculator.hidden_states[:rows])
        elif self.features:
            forward.inputs, forward.fused = self.features
        return forward

    def _unseen(self, step: Step, missing: int) -> None:
        """Forwards within a graph of several: the last one's inputs are there still."""
        if missing > 0 and not self.deeper_graphs:
            raise LookupError(f"{missing} of the draft's {missing + len(step.forwards)} forwards were not seen")
        if missing > 0:
            step.forwards += [*[None] * (missing - 1), self._ready(step, first=False)]

"""vLLM's V1 runner: `sample_tokens` brackets a step.

What the target computed is in `execute_model_state` before it, and verification and drafting happen within it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from spectrace.tracer.attach.capture import Capture, Spot, begins, draft_spots, text_positions
from spectrace.tracer.attach.hooks import Watching
from spectrace.tracer.attach.steps import Group, Step

__all__ = ["V1Capture", "v1_obstacles", "v1_spots"]

_NEEDS: Final = (
    "execute_model_state", "input_batch", "requests", "discard_request_mask", "input_ids", "_get_positions",
    "max_model_len",
)  # fmt: skip


def v1_obstacles(runner: Any) -> Iterator[str]:
    """Why this runner cannot be recorded."""
    if lacking := [need for need in _NEEDS if not hasattr(runner, need)]:
        yield f"it has no {', '.join(lacking)}"
    if getattr(getattr(runner, "drafter", None), "needs_extra_input_slots", False):
        yield "its draft is fed more rows than the target (parallel drafting)"


def v1_spots(runner: Any) -> Iterator[Spot]:
    """What to hook of a runner that has its models."""
    yield Spot(runner, "execute_model", ("scheduler_output",))
    yield Spot(runner, "sample_tokens")
    yield Spot(runner, "_sample", ("logits",))
    drafter = getattr(runner, "drafter", None)
    if hasattr(drafter, "model"):
        yield Spot(drafter, "propose", ("token_indices_to_sample", "common_attn_metadata"))
        yield from draft_spots(drafter)


def _starting(scheduled: Any) -> frozenset[str]:
    """Requests that start in this step, anew or again: whatever drafts they have are filling."""
    new = [one.req_id for one in scheduled.scheduled_new_reqs]
    return frozenset([*new, *scheduled.scheduled_cached_reqs.resumed_req_ids])


class V1Capture(Capture):
    """The hooks of the V1 runner and its proposer, by the names of what they hook.

    `proposed` says whether the draft ran in the last step: where a text is too long for it, vLLM drafts zeros for all.
    """

    proposed = True

    def execute_model(self, _runner: Any, arguments: Mapping[str, Any]) -> Watching:
        """Which requests the engine has let go of."""
        output = arguments["scheduler_output"]
        computes = bool(output.total_num_scheduled_tokens)
        self.leave(output.finished_req_ids, goes_on=computes)
        self.session.steps.began += computes
        yield

    def computed(self, runner: Any, step: Step) -> None:
        """Requests, tokens, positions and slots."""
        state = runner.execute_model_state
        names = list(runner.input_batch.req_ids)
        scheduled, verifies = state.scheduler_output, state.spec_decode_metadata
        rows = scheduled.total_num_scheduled_tokens
        drafts = verifies.num_draft_tokens if verifies else [0] * len(names)
        silent = runner.discard_request_mask.np[: len(names)].tolist()
        starting = _starting(scheduled) if self.proposed else frozenset(names)
        self.proposed = False
        step.groups = [
            Group(name, scheduled.num_scheduled_tokens[name], count, silent=quiet, filled=name in starting)
            for name, count, quiet in zip(names, drafts, silent, strict=True)
        ]
        new = {name: runner.requests[name] for name in names if name not in self.met}
        step.met = {
            name: begins(one.prompt_token_ids or (), one.sampling_params, runner.max_model_len)
            for name, one in new.items()
        }
        self.met |= set(names)
        step.tokens = self.copy(runner.input_ids.gpu[:rows])
        step.positions = self.copy(text_positions(runner._get_positions(rows)))
        if state.aux_hidden_states and not step.thin:
            import torch

            step.slot_width = int(state.aux_hidden_states[0].shape[-1])
            step.slots = self.kept(torch.cat([slot[:rows] for slot in state.aux_hidden_states], dim=-1))

    def _sample(self, _runner: Any, arguments: Mapping[str, Any]) -> Watching:
        """The target's best tokens, read before sampling writes into its logits; and what was sampled."""
        step, logits = self.step, arguments["logits"]
        if step is None or logits is None:
            return
        step.targets, step.logits = self.kept(logits.argmax(-1)), self.logits(logits)
        output = yield
        step.sampled = self.copy(output.sampled_token_ids)

    def propose(self, _drafter: Any, arguments: Mapping[str, Any]) -> Watching:
        """Which rows the draft is fed, which of them answer, and the drafts that come out."""
        step, self.proposed = self.step, True
        if step is None:
            return
        fed = np.diff(arguments["common_attn_metadata"].query_start_loc_cpu.numpy()).tolist()
        step.groups = [replace(group, fed=count) for group, count in zip(step.groups, fed, strict=True)]
        if arguments["token_indices_to_sample"] is not None:
            step.last = self.copy(arguments["token_indices_to_sample"])
        step.drafts = self.copy((yield))

"""The target's side of the deployment: packed forwards, verification, the hand-off, and recording all three.

Shapes: T rows of a pass, A slots, F target width, V vocabulary.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from spectrace.engine.faults import find_faults
from spectrace.engine.packing import Int, PackedRows
from spectrace.engine.parallel import Group
from spectrace.engine.plan import (
    CaptureHiddenMode,
    Decision,
    DraftProbs,
    LogitsProcessorOutput,
    TargetGroup,
    TargetStep,
)
from spectrace.engine.recording import Recording, shut
from spectrace.engine.sampling import GREEDY, Sampling
from spectrace.engine.target import TargetModel, TargetRows
from spectrace.engine.verification import Greedy, Sampled
from spectrace.tracer.keys import Keys
from spectrace.tracer.recorder import Recorder
from spectrace.tracer.rows import Level

__all__ = ["TargetServing", "TargetShard"]

TOP_K = 16


@dataclass(frozen=True, slots=True)
class TargetServing:
    """How to serve one call: the boundaries to hand over, those to record as reference, and the faults switched on.

    In a fixed window rejected rows are handed over, too, behind the accepted ones of their group.
    """

    wiring: tuple[int, ...]
    capture: tuple[int, ...]
    mode: CaptureHiddenMode
    sampling: Sampling = GREEDY
    fixed_window: bool = False
    faults: tuple[str, ...] = ()


class TargetShard:
    """One process of the target. `step` is a pass; `serve` and `finish` bracket a call of the deployment."""

    def __init__(
        self, folder: Path, *, dtype: torch.dtype, threads: int, device: str = "cpu", group: Group | None = None
    ) -> None:
        torch.set_num_threads(threads)
        self.model = TargetModel(folder, dtype=dtype, device=device, group=group)
        self.group = group
        self.recorder: Recorder | None = None

    def serve(self, serving: TargetServing, recording: Recording | None) -> None:
        """Start a call with an empty cache, recording into a trace if there is one."""
        self.model.reset()
        self.serving = serving
        self.faults = find_faults(serving.faults)
        self.wiring = serving.wiring
        for fault in self.faults:
            self.wiring = fault.wiring(self.wiring, len(self.model.layers))
        sampled = serving.sampling.temperature > 0
        self.verifier = Sampled(serving.sampling, self.faults) if sampled else Greedy()
        self.recorder = recording.open("target", self.group) if recording else None
        self.level = recording.level if recording else Level.LIGHT

    def finish(self) -> str | None:
        """End the call; returns what went wrong with the recording, if anything did."""
        return shut(self.recorder)

    def step(
        self, step: TargetStep, probs: DraftProbs | None = None
    ) -> tuple[LogitsProcessorOutput | None, list[Decision]]:
        """One pass: returns the hidden states that are handed over, and a decision per group.

        `probs` is what sampled drafts of these groups were drawn from.
        """
        rows = _pack(step.groups)
        self.model.release(step.released)
        started = time.perf_counter()
        out = self.model.forward(rows, boundaries={*self.wiring, *self.serving.capture})
        targets = out.logits.argmax(-1)
        secs = time.perf_counter() - started
        decisions = self.verifier.decide(step.groups, out.logits, targets.tolist(), probs)
        self.model.settle(out.places[_accepted(step.groups, decisions)])
        features = None
        if self.serving.mode is not CaptureHiddenMode.NULL:
            features = torch.cat([out.boundaries[boundary] for boundary in self.wiring], dim=-1)
            for fault in self.faults:
                features = fault.capture(features, self.model.norm)
        if self.recorder:
            self._record(self.recorder, step, rows, out, targets, features, secs / len(rows))
        if features is None:
            return None, decisions
        for fault in self.faults:
            features = fault.hand_off(features)
        handed = _accepted(step.groups, decisions, with_rejected=self.serving.fixed_window)
        return LogitsProcessorOutput(features[torch.from_numpy(handed)], self.serving.mode), decisions

    def _record(
        self,
        recorder: Recorder,
        step: TargetStep,
        rows: PackedRows,
        out: TargetRows,
        targets: Tensor,
        features_TAF: Tensor | None,
        secs_per_row: float,
    ) -> None:
        keys = _keys(step, rows)
        full = self.level is Level.FULL
        top = out.logits.float().topk(min(TOP_K, self.model.vocab)) if full else None
        boundaries = {boundary: out.boundaries[boundary] for boundary in self.serving.capture}
        hash_only = bool(self.group and self.group.repeats(features_TAF, *boundaries.values(), *(top or ())))
        recorder.emitted(
            keys,
            token=rows.tokens,
            slots=features_TAF,
            slot_width=self.model.width,
            logits=(top.indices.int(), top.values) if top else None,
            target_token=targets,
            logsumexp=out.logits.float().logsumexp(-1) if full else None,
            forward_secs=secs_per_row,
            hash_only=hash_only,
        )
        if boundaries:
            recorder.reference(keys, token=rows.tokens, boundaries=boundaries, hash_only=hash_only)


def _pack(groups: Sequence[TargetGroup]) -> PackedRows:
    tokens: list[int] = []
    owners: list[int] = []
    positions: list[int] = []
    parents: list[int] = []
    for group in groups:
        first = len(tokens)
        tokens += group.tokens
        owners += [group.request] * len(group.tokens)
        positions += [group.position + level for level in group.levels]
        parents += [parent + first if parent >= 0 else parent for parent in group.parents]
    return PackedRows(*(np.asarray(column, np.int64) for column in (tokens, owners, positions, parents)))


def _keys(step: TargetStep, rows: PackedRows) -> Keys:
    def each(values: Sequence[int]) -> list[int]:
        return [v for v, group in zip(values, step.groups, strict=True) for _ in group.tokens]

    return Keys(
        request=rows.owners,
        pass_=each([group.pass_ for group in step.groups]),
        node=[node for group in step.groups for node in range(len(group.tokens))],
        position=rows.positions,
        phase=each([group.phase for group in step.groups]),
        round=each([group.round for group in step.groups]),
        step=step.number,
    )


def _accepted(groups: Sequence[TargetGroup], decisions: Sequence[Decision], *, with_rejected: bool = False) -> Int:
    """The rows of the pass that are accepted, in order; on demand the rejected ones of each group behind them."""
    rows: list[int] = []
    first = 0
    for group, decision in zip(groups, decisions, strict=True):
        rows += [first + node for node in (*decision.path, *(decision.rejected if with_rejected else ()))]
        first += len(group.tokens)
    return np.asarray(rows, np.int64)

"""The target's side of the deployment: packed forwards, verification, the hand-off, and recording all three.

Shapes: T rows of a pass, A slots, F target width, V vocabulary.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from spectrace.engine.fault import Capture, HandedGroup, HandOff, Tap, broken
from spectrace.engine.faults import find_faults
from spectrace.engine.packing import PackedRows
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
from spectrace.tracer.rows import TOP_K, Level, Phase

__all__ = ["TargetServing", "TargetShard"]


@dataclass(frozen=True, slots=True)
class TargetServing:
    """How to serve one call: the boundaries to hand over, those to record as reference, and the faults switched on.

    In a fixed window rejected rows are handed over, too, behind the accepted ones of their group. With `mode` LAST of
    a piece of a prompt only its last row is.
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
        faults = find_faults(serving.faults)
        self.wiring, self.tap = serving.wiring, Tap.BOUNDARY
        self.captures, self.hand_offs = broken(faults, Capture), broken(faults, HandOff)
        for capture in self.captures:
            self.wiring = capture.wiring(self.wiring, len(self.model.layers))
            self.tap = self.tap if capture.tap is Tap.BOUNDARY else capture.tap
        self.changes = [hand_off.features() for hand_off in self.hand_offs]
        sampled = serving.sampling.temperature > 0
        self.verifier = Sampled(serving.sampling, faults) if sampled else Greedy()
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
        out = self._forward(rows)
        targets = out.logits.argmax(-1)
        secs = time.perf_counter() - started
        decisions = self.verifier.decide(step.groups, out.logits, targets.tolist(), probs)
        accepted = _handed(step.groups, decisions, CaptureHiddenMode.FULL, with_rejected=False)
        self.model.settle(out.places[[row for group in accepted for row in group.rows]])
        features = None
        if self.serving.mode is not CaptureHiddenMode.NULL:
            features = self._capture(out)
        if self.recorder:
            self._record(self.recorder, step, rows, out, targets, features, secs / len(rows))
        if features is None:
            return None, decisions
        return LogitsProcessorOutput(self._hand_off(features, step.groups, decisions), self.serving.mode), decisions

    def _forward(self, rows: PackedRows) -> TargetRows:
        """One forward that gives what is captured and what is recorded as reference."""
        capture = self.serving.capture
        match self.tap:
            case Tap.BOUNDARY:
                return self.model.forward(rows, boundaries={*self.wiring, *capture})
            case Tap.BRANCH:
                return self.model.forward(rows, boundaries=capture, branches=self.wiring)
            case Tap.PART:
                return self.model.forward(rows, boundaries=capture, parts=self.wiring)

    def _capture(self, out: TargetRows) -> Tensor:
        """The wiring's slots of every row [T, A*F]."""
        slots = {Tap.BOUNDARY: out.boundaries, Tap.BRANCH: out.branches, Tap.PART: out.parts}[self.tap]
        features_TAF = torch.cat([slots[boundary] for boundary in self.wiring], dim=-1)
        for fault in self.captures:
            features_TAF = fault.slots(features_TAF, self.model.norm)
        return features_TAF

    def _hand_off(self, features_TAF: Tensor, groups: Sequence[TargetGroup], decisions: Sequence[Decision]) -> Tensor:
        """What the draft gets of the rows of a pass."""
        handed = _handed(groups, decisions, self.serving.mode, with_rejected=self.serving.fixed_window)
        for fault in self.hand_offs:
            rows = fault.rows(handed)
            handed = [replace(group, rows=tuple(own)) for group, own in zip(handed, rows, strict=True)]
        features = features_TAF[torch.tensor([row for group in handed for row in group.rows], dtype=torch.int64)]
        for change in self.changes:
            features = change(features)
        return features

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


def _handed(
    groups: Sequence[TargetGroup], decisions: Sequence[Decision], mode: CaptureHiddenMode, *, with_rejected: bool
) -> list[HandedGroup]:
    """The rows of the pass that are accepted, in order; on demand the rejected ones of each group behind them.

    With `mode` LAST of a piece of a prompt only its last row.
    """
    handed: list[HandedGroup] = []
    first = 0
    for group, decision in zip(groups, decisions, strict=True):
        verifies = group.phase is Phase.VERIFY
        path = decision.path if verifies or mode is CaptureHiddenMode.FULL else decision.path[-1:]
        nodes = (*path, *(decision.rejected if with_rejected else ()))
        handed.append(HandedGroup(first, tuple(first + node for node in nodes), len(path), verifies))
        first += len(group.tokens)
    return handed

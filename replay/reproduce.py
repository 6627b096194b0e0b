"""How well a configuration reproduces what was served, fed exactly what the served draft was fed.

Shapes: N answers, all depths.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from spectrace.replay.compare import Drawn, row_error
from spectrace.replay.configuration import Configuration
from spectrace.replay.inputs import DepthRows, DraftInputs, Int
from spectrace.replay.replay import DepthOutput, replay_inputs

__all__ = ["Reproduced", "Stage", "reproduce"]

Bool = npt.NDArray[np.bool_]
_PATTERN = 0.1
_Q_TOLERANCE = 0.01  # of a draft probability: what rounding does to one is far below


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of one depth: rows compared, and how many of them lie within rounding of what was recorded."""

    stage: str
    depth: int
    rows: int
    equal: int


@dataclass(frozen=True, slots=True)
class Reproduced:
    """Every served answer [N]: where it stands, and whether it was met. Stages are there if the trace keeps them."""

    request: Int
    depth: Int
    round: Int
    position: Int
    met: Bool
    stages: tuple[Stage, ...]

    @property
    def agreement(self) -> float:
        """The share of answers met; NaN of none."""
        return float(self.met.mean()) if len(self.met) else float("nan")

    def by_depth(self) -> tuple[float, ...]:
        """The share of answers met, depth by depth."""
        return tuple(float(self.met[self.depth == d].mean()) for d in np.unique(self.depth))

    def first_miss(self) -> tuple[int, int, int, int] | None:
        """Request, round, position and depth of the first answer that was not met, in the order of rounds."""
        missed = np.flatnonzero(~self.met)
        if not len(missed):
            return None
        first = missed[np.lexsort((self.depth[missed], self.request[missed], self.round[missed]))[0]]
        return int(self.request[first]), int(self.round[first]), int(self.position[first]), int(self.depth[first])

    def patterns(self) -> list[str]:
        """Whether misses depend on the round or on the position, in words; nothing where they do not."""
        found = []
        for name, values in (("round", self.round), ("position", self.position)):
            middle = np.median(values) if len(values) else 0
            early, late = self.met[values <= middle], self.met[values > middle]
            if len(early) and len(late) and abs(float(early.mean()) - float(late.mean())) > _PATTERN:
                shares = f"{float(early.mean()):.1%} of answers are met, later {float(late.mean()):.1%}"
                found.append(f"up to {name} {middle:.0f} {shares}")
        return found

    def first_stage(self) -> Stage | None:
        """The first stage, in the order of the data's path, that parts from the record on more than a row in twenty."""
        return next((stage for stage in self.stages if stage.equal < 0.95 * stage.rows), None)


def reproduce(
    configuration: Configuration, blocks: Iterable[DraftInputs], drawn: Drawn | None, *, tolerance: float
) -> Reproduced:
    """Replay some blocks of requests under a configuration. Drawn drafts are met where their probability is."""
    model = configuration.build()
    columns: dict[str, list[np.ndarray]] = {name: [] for name in ("request", "depth", "round", "position", "met")}
    stages: dict[tuple[int, str], list[int]] = {}
    for inputs in blocks:
        for rows, output in zip(inputs.depths, replay_inputs(model, inputs), strict=True):
            answering = rows.received.take(rows.answering)
            met, there = _met(rows, output, drawn)
            for name in ("request", "depth", "round", "position"):
                columns[name].append(answering[name].astype(np.int64)[there])
            columns["met"].append(met)
            for stage, count, equal in _stages(rows, output, tolerance):
                total = stages.setdefault((output.depth, stage), [0, 0])
                total[0], total[1] = total[0] + count, total[1] + equal
    found = {name: np.concatenate(parts) if parts else np.empty(0, np.int64) for name, parts in columns.items()}
    met = found.pop("met").astype(np.bool_)
    ordered = tuple(Stage(stage, depth, *counts) for (depth, stage), counts in sorted(stages.items(), key=_path))
    return Reproduced(**found, met=met, stages=ordered)


def _path(item: tuple[tuple[int, str], list[int]]) -> tuple[int, int]:
    (depth, stage), _ = item
    return depth, ("fused", "hidden", "state").index(stage)


def _met(rows: DepthRows, output: DepthOutput, drawn: Drawn | None) -> tuple[Bool, Int]:
    """Which answers were met, and which of the answering rows these are."""
    answering = rows.drafted.take(rows.answering)
    if drawn:
        there, errors = drawn.errors(rows, output)
        return (errors < _Q_TOLERANCE).numpy(), there
    chosen = output.logits.argmax(-1).cpu().numpy()
    own = answering["draft_token"].astype(np.int64)
    met = np.where(own >= 0, chosen == own, output.tokens.cpu().numpy() == answering["token"])
    return met, np.arange(len(met))


def _stages(rows: DepthRows, output: DepthOutput, tolerance: float) -> Iterable[tuple[str, int, int]]:
    for stage, replayed in (("fused", output.fused), ("hidden", output.hidden), ("state", output.state)):
        has = np.flatnonzero(rows.drafted.has(stage)) if replayed is not None else np.empty(0, np.int64)
        if len(has) and replayed is not None:
            recorded = rows.drafted.take(has).tensor(stage)
            errors = row_error(recorded, replayed[torch.from_numpy(has)])
            yield stage, len(has), int((errors <= tolerance).sum())

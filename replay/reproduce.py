"""How well a configuration reproduces what was served, fed exactly what the served draft was fed.

Shapes: N answers, V draft vocabulary.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spectrace.engine.draft import DraftModel
from spectrace.replay.compare import TOLERANCE, Drawn, stage_errors
from spectrace.replay.configuration import Configuration
from spectrace.replay.inputs import DepthRows, DraftInputs, Int
from spectrace.replay.likelihood import standing_for
from spectrace.replay.replay import DepthOutput, replay_inputs

__all__ = ["Reproduced", "Stage", "reproduce"]

Bool = npt.NDArray[np.bool_]
_PATTERN = 0.1
_ULPS = 2


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
    """Replay some blocks of requests under a configuration.

    An answer is met where it is the best, or so close to the best that rounding decides; one that was drawn, where its
    probability is met to within rounding.
    """
    model = configuration.build()
    columns: dict[str, list[np.ndarray]] = {name: [] for name in ("request", "depth", "round", "position", "met")}
    stages: dict[tuple[int, str], list[int]] = {}
    for inputs in blocks:
        for rows, output in zip(inputs.depths, replay_inputs(model, inputs), strict=True):
            answering = rows.received.take(rows.answering)
            met, there = _met(rows, output, drawn, model)
            met = _ended(rows, met, there, configuration.steps.end)
            for name in ("request", "depth", "round", "position"):
                columns[name].append(answering[name].astype(np.int64)[there])
            columns["met"].append(met)
            for stage, errors in stage_errors(rows, output):
                total = stages.setdefault((output.depth, stage), [0, 0])
                total[0], total[1] = total[0] + len(errors), total[1] + int((errors <= tolerance).sum())
    found = {name: np.concatenate(parts) if parts else np.empty(0, np.int64) for name, parts in columns.items()}
    met = found.pop("met").astype(np.bool_)
    ordered = tuple(Stage(stage, depth, *counts) for (depth, stage), counts in sorted(stages.items(), key=_path))
    return Reproduced(**found, met=met, stages=ordered)


def _path(item: tuple[tuple[int, str], list[int]]) -> tuple[int, int]:
    (depth, stage), _ = item
    return depth, ("fused", "hidden", "state").index(stage)


def _met(rows: DepthRows, output: DepthOutput, drawn: Drawn | None, model: DraftModel) -> tuple[Bool, Int]:
    """Which answers were met, and which of the answering rows these are."""
    there, errors = drawn.errors(rows, output) if drawn else _short_of_best(rows, output, model)
    return (errors <= _rounding(output.logits.dtype)).numpy(), there


def _ended(rows: DepthRows, met: Bool, there: Int, end: int | None) -> Bool:
    """Beyond the end of the draft's context its first id is what is to be met."""
    if end is None:
        return met
    answering = rows.drafted.take(rows.answering)
    beyond, first = (answering["position"] >= end)[there], (answering["draft_token"] == 0)[there]
    return np.where(beyond, first, met)


def _rounding(dtype: torch.dtype) -> float:
    """By how much rounding moves a logit, over the row's largest: two units in the last place of that one.

    Served and replayed, a logit is rounded to the nearest, which takes half a unit each; the rest is what the layers
    before have rounded. bfloat16 against float32, on smollm2 and three small pairs: within two units (1/64) are 99 % of
    |Δ log q| or more, and every gap between two tokens that changed places. In float32 other kernels do more than
    that, and `TOLERANCE` holds.
    """
    return max(TOLERANCE, _ULPS * torch.finfo(dtype).eps)


def _short_of_best(rows: DepthRows, output: DepthOutput, model: DraftModel) -> tuple[Int, Tensor]:
    """Every answering row, and by how much the logit of what was served falls short of the best, over the largest.

    Where only a token was seen, it is the best of the ids that stand for it.
    """
    answering, logits_NV = rows.drafted.take(rows.answering), output.logits.float().cpu()
    ids = answering["draft_token"].astype(np.int64)
    served_N = logits_NV[np.arange(len(ids)), np.maximum(ids, 0)]
    if len(unseen := np.flatnonzero(ids < 0)):
        at, of = standing_for(model.table().cpu().numpy(), answering["token"][unseen].astype(np.int64))
        none = torch.full((len(unseen),), -torch.inf)
        served_N[unseen] = none.scatter_reduce(0, torch.from_numpy(at), logits_NV[unseen[at], of], "amax")
    return np.arange(len(ids)), (logits_NV.amax(1) - served_N) / logits_NV.abs().amax(1)

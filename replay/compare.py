"""Replay against record, stage by stage: where the replayed draft and the served one part, and by how much.

An error is max|Δ| over max|recorded| of the row: element-wise relative error means nothing across batch shapes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from spectrace.replay.inputs import DepthRows, Int
from spectrace.replay.replay import DepthOutput
from spectrace.tracer.errors import UserError
from spectrace.tracer.trace import Trace

__all__ = [
    "STAGES",
    "TOLERANCE",
    "Comparison",
    "Drawn",
    "StageError",
    "row_error",
    "served_dtype",
    "stage_errors",
    "tolerance_of",
]

TOLERANCE, _COARSE_TOLERANCE = 1e-3, 0.1  # of a row's maximum, in fp32 and below: far beyond what rounding does
STAGES = ("fused", "hidden", "state", "logits", "probability")


@dataclass(frozen=True, slots=True)
class StageError:
    """The worst row of one stage of the draft: how many rows were compared, and max|Δ| over the row's max|recorded|."""

    stage: str
    rows: int
    max_error: float


@dataclass(frozen=True, slots=True)
class Drawn:
    """What verification says of drafts that were drawn: the probability they had, by (request, round, depth)."""

    temperature: Mapping[int, float]
    q: Mapping[tuple[int, int, int], float]

    def errors(self, rows: DepthRows, output: DepthOutput) -> tuple[Int, Tensor]:
        """Which of the answering rows verification met, and how far the logits of each are from its probability.

        That is |Δ log q| over the row's largest |logit|, both at the temperature: what rounds is a logit, by a share of
        its size, and a probability changes by as many percent as its logit by hundredths, however small it is.
        """
        answering = rows.drafted.take(rows.answering)
        keys = list(zip(answering["request"].tolist(), answering["round"].tolist(), strict=True))
        recorded = [self.q.get((*key, output.depth), -1.0) for key in keys]
        met = [at for at, q in enumerate(recorded) if q > 0 and keys[at][0] in self.temperature]
        temperatures = torch.tensor([self.temperature[int(answering["request"][at])] for at in met]).double()
        logits = output.logits[met].cpu().double() / temperatures[:, None]
        ids = torch.from_numpy(answering["draft_token"][met].astype(np.int64))
        replayed, q = logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0], torch.tensor([recorded[at] for at in met])
        return np.asarray(met, np.int64), (replayed - q.double().log()).abs() / logits.abs().amax(-1)


@dataclass(slots=True)
class Comparison:
    """Grows block by block. `rows` were replayed, `answers` compared by token, `tokens_equal` of them agreed.

    Tokens that were drawn are not to be met again: of these the draft's probability is compared, at `temperature`.
    """

    rows: int = 0
    answers: int = 0
    tokens_equal: int = 0
    secs: float = 0.0
    served_secs: float = 0.0
    drawn: Drawn | None = None
    _rows: dict[str, int] = field(default_factory=dict)
    _errors: dict[str, float] = field(default_factory=dict)

    def add(self, rows: DepthRows, output: DepthOutput) -> None:
        """Compare one depth of one block."""
        self.rows += len(rows.tokens)
        self.secs += output.secs
        self.served_secs += float(np.nansum(rows.drafted["forward_secs"]))
        if self.drawn:
            met, errors = self.drawn.errors(rows, output)
            self._merge("probability", len(met), errors)
        else:
            served = rows.drafted["token"][rows.answering]
            self.answers += len(served)
            self.tokens_equal += int((output.tokens.cpu().numpy() == served).sum())
        for stage, errors in stage_errors(rows, output):
            self._merge(stage, len(errors), errors)
        if len(rows.answering) and rows.drafted.take(rows.answering).has("logits").all():
            answering = rows.drafted.take(rows.answering)
            replayed = output.logits.float().cpu().gather(1, answering.tensor("logits", "ids").long())
            self._merge("logits", len(answering), row_error(answering.tensor("logits", "values"), replayed))

    @property
    def stages(self) -> tuple[StageError, ...]:
        """What was compared, in the order of the data's path; empty when the trace keeps no draft tensors."""
        return tuple(
            StageError(stage, self._rows[stage], self._errors[stage]) for stage in STAGES if stage in self._rows
        )

    @property
    def max_error(self) -> float | None:
        """The worst error of all stages, None when no tensor was there to compare with."""
        return max((stage.max_error for stage in self.stages), default=None)

    @property
    def rows_per_second(self) -> float:
        """Draft rows replayed per second of forward time."""
        return self.rows / self.secs

    @property
    def served_rows_per_second(self) -> float | None:
        """The same rows per second of the engine's own draft-forward time, None if that was not recorded."""
        return self.rows / self.served_secs if self.served_secs else None

    def _merge(self, stage: str, rows: int, errors: Tensor) -> None:
        if not rows:
            return
        self._rows[stage] = self._rows.get(stage, 0) + rows
        # NaN must win: a comparison that met one has not found the rows equal.
        worst = float(torch.nan_to_num(errors, nan=torch.inf, posinf=torch.inf).max())
        self._errors[stage] = max(self._errors.get(stage, 0.0), worst)


def served_dtype(trace: Trace) -> torch.dtype:
    """The precision in which an engine served, by the trace's manifest; UserError where it names none of torch's."""
    name = str(trace.manifest.get("dtype", "float32"))
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UserError(f"{trace.folder}: dtype {name!r} in its manifest; expected one of torch's")
    return found


def tolerance_of(dtype: torch.dtype) -> float:
    """How far two ways to compute one row may part, of the row's maximum."""
    return TOLERANCE if dtype == torch.float32 else _COARSE_TOLERANCE


def stage_errors(rows: DepthRows, output: DepthOutput) -> Iterator[tuple[str, Tensor]]:
    """Stage by stage, the errors of the rows of which the trace keeps it."""
    for stage, replayed in (("fused", output.fused), ("hidden", output.hidden), ("state", output.state)):
        has = np.flatnonzero(rows.drafted.has(stage))
        if len(has) and replayed is not None:
            yield stage, row_error(rows.drafted.take(has).tensor(stage), replayed[torch.from_numpy(has)])


def row_error(recorded: Tensor, replayed: Tensor) -> Tensor:
    """max|Δ| ÷ max|recorded| of each row [rows]; 0 for a row that is zero on both sides."""
    recorded, replayed = recorded.float(), replayed.float().cpu()
    scale = recorded.abs().amax(-1)
    difference = (recorded - replayed).abs().amax(-1)
    return torch.where(difference == 0, difference, difference / scale)

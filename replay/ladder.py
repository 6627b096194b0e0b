"""Trained accuracy against the same measure on a trace: by each trainer's own definition, rung by rung.

Trainers mean different things by accuracy (`DEFINITIONS`). All of them feed the true tokens at every step; none counts
as serving does, over the places where rounds start. So a trained accuracy is measured again by its own definition, on
true features and with the draft's own table, and what serving would make of it is another rung.

Shapes: R requests, S starts of a text, K steps (0 is the first drafted token), M base rows of a block, V draft
vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from spectrace.engine.draft import DraftModel
from spectrace.replay.branches import Branches
from spectrace.replay.configuration import ADVANCING, Steps
from spectrace.replay.features import Fed, became_text
from spectrace.replay.inputs import Int
from spectrace.replay.metric import Counting
from spectrace.replay.metrics import METRICS, cumulative_of, length_of
from spectrace.replay.statistics import Interval, ratio_interval
from spectrace.replay.texts import Text, read_texts
from spectrace.tracer.errors import UserError
from spectrace.tracer.trace import Trace

__all__ = [
    "DEFINITIONS",
    "Answers",
    "Counting",
    "Definition",
    "Ladder",
    "Rung",
    "TargetChoices",
    "TeacherForced",
    "Trained",
    "compare",
    "target_choices",
    "teacher_forced",
]

Bool = npt.NDArray[np.bool_]
Float = npt.NDArray[np.float64]
_SHORT = 0.03  # of accuracy, by which a draft may fall short of its training and still reach it
_SURE = 0.95  # of all steps at once
_WIDE = 0.15  # of accuracy: an interval that reaches further up tells of no shortfall, nor that there is none
_FEW_REQUESTS = 6  # of fewer, intervals over requests do not hold; and answers of one request are not independent
_FEW_ANSWERS = 30


@dataclass(frozen=True, slots=True)
class Definition:
    """One trainer's accuracy. `restricted` takes the target's choice within the draft's vocabulary: nothing outside it
    is a miss.
    """

    counting: Counting
    restricted: bool
    says: str


_METRICS = {
    "eagle": "eagle.acc", "specforge": "specforge.acc", "speculators_full": "speculators.full_acc",
    "speculators_cond": "speculators.cond_acc", "restricted": "modelopt.acc",
}  # fmt: skip
DEFINITIONS: Mapping[str, Definition] = {
    name: Definition(meant.counting, bool(meant.restricted), meant.says)
    for name, meant in ((name, METRICS[key]) for name, key in _METRICS.items())
}
"""By the names that `--accuracy-definition` takes; `restricted` is ModelOpt's."""


@dataclass(frozen=True, slots=True)
class Trained:
    """Accuracy per step as a trainer reported it, by one of `DEFINITIONS`. Raises UserError for what cannot be one."""

    accuracies: tuple[float, ...]
    definition: str = "eagle"

    def __post_init__(self) -> None:
        if self.definition not in DEFINITIONS:
            known = ", ".join(DEFINITIONS)
            raise UserError(f"accuracy definition {self.definition!r} is not known; expected one of {known}")
        if not self.accuracies or not all(0 <= one <= 1 for one in self.accuracies):
            raise UserError(f"trained accuracies {self.accuracies}: expected shares from 0 to 1, such as 0.747,0.71")
        steps = zip(self.accuracies, self.accuracies[1:], strict=False)
        if self.counting is Counting.CUMULATIVE and any(later > one for one, later in steps):
            raise UserError(
                f"trained accuracies {self.accuracies} rise, but by {self.definition} a later step includes all before "
                f"it; by another definition?"
            )

    @property
    def counting(self) -> Counting:
        return DEFINITIONS[self.definition].counting

    @property
    def expected_length(self) -> float:
        """The acceptance length these come to if every start were alike: 1 + the sum of cumulative accuracies.

        Marginal and conditional accuracies multiply up, cumulative ones are sums already. Rounds start at harder tokens
        than the average, or at easier ones, so a real walk may differ from it by more than many faults cost.
        """
        return length_of(self.accuracies if self.counting is Counting.CUMULATIVE else cumulative_of(self.accuracies))


@dataclass(frozen=True, slots=True)
class TargetChoices:
    """The target's choice at every output token of a text, over its whole vocabulary and within the draft's.

    -1 where it is not known: within the draft's, that takes logits (level full) wherever the whole choice lies outside.
    """

    full: Int
    within: Int


class Answers(NamedTuple):
    """One request: what the draft hits and what there is to hit [S, K], over the whole vocabulary and `within` the
    draft's; and how many tokens the text has left at each start [S].
    """

    hits: Bool
    there: Bool
    within_hits: Bool
    within_there: Bool
    left: Int


@dataclass(frozen=True, slots=True)
class TeacherForced:
    """What a draft hits with true features and true tokens, request by request; every definition counts from it."""

    answers: tuple[Answers, ...]
    steps: int
    temperature: float = 0.0

    def counts(self, meant: Definition) -> tuple[Float, Float]:
        """Hits and answers of every request and step, [R, K] each."""
        pairs = [_counted(one, meant) for one in self.answers]
        hits, answers = (np.array(x, np.float64).reshape(-1, self.steps) for x in zip(*pairs, strict=True))
        return hits, answers

    def unknown(self) -> float:
        """The share of answers for which the target's choice within the draft's vocabulary is not known."""
        there = sum(int(one.there.sum()) for one in self.answers)
        known = sum(int(one.within_there.sum()) for one in self.answers)
        return (there - known) / there if there else 0.0

    def expected_length(self) -> float | None:
        """1 + drafts hit in a row, mean over all starts into which every step fits."""
        runs = np.concatenate([np.cumprod(one.hits[one.there.all(1)], 1).sum(1) for one in self.answers])
        return 1 + float(runs.mean()) if len(runs) else None

    def walked_length(self) -> float | None:
        """1 + correct drafts over rounds of the walk t <- t + n + 1; a round that the text's end cuts is left out.

        None at a temperature, where a draft is right when it is the token that came, not the target's choice.
        """
        runs = [run for one in self.answers for run in _walked(one)]
        return 1 + sum(runs) / len(runs) if runs and not self.temperature else None


def _counted(one: Answers, meant: Definition) -> tuple[Int, Int]:
    hits, there = (one.within_hits, one.within_there) if meant.restricted else (one.hits, one.there)
    if meant.counting is Counting.MARGINAL:
        return (hits & there).sum(0), there.sum(0)
    all_there, right = np.cumprod(there, 1).astype(bool), np.cumprod(hits & there, 1).astype(bool)
    if meant.counting is Counting.CUMULATIVE:
        return right.sum(0), all_there.sum(0)
    before = np.concatenate([np.ones_like(right[:, :1]), right[:, :-1]], axis=1)
    return right.sum(0), (before & all_there).sum(0)


def _walked(one: Answers) -> list[int]:
    """Correct drafts of every round that ends within the text."""
    runs, left = np.cumprod(one.hits & one.there, 1).sum(1).tolist(), one.left.tolist()
    at, found = 0, []
    while at < len(runs):
        if runs[at] < left[at]:
            found.append(runs[at])
        at += runs[at] + 1
    return found


@torch.inference_mode()
def teacher_forced(
    model: DraftModel,
    features_blocks: Sequence[Sequence[Fed]],
    depth: int,
    *,
    choices: Mapping[int, TargetChoices] | None = None,
    steps: Steps = ADVANCING,
) -> TeacherForced:
    """Whether the draft hits the target's choice at every start of every text, `depth` steps deep.

    `choices` are the target's by request, from `target_choices`; None takes the tokens that came, which are its choices
    where decoding was greedy. `steps` is how positions move.
    """
    answers: list[Answers] = []
    warmest = max((one.text.temperature for block in features_blocks for one in block), default=0.0)
    if warmest and choices is None:
        raise UserError("at a temperature the tokens that came are not the target's choices: give those, too")
    for block in features_blocks:
        answers += _block(model, block, depth, choices, steps)
    return TeacherForced(tuple(answers), depth, warmest)


def _block(
    model: DraftModel, block: Sequence[Fed], depth: int, choices: Mapping[int, TargetChoices] | None, steps: Steps
) -> list[Answers]:
    branches = Branches(model, block, steps)
    counts = [len(starts) for _, starts, _ in branches.starts()]
    table = model.table().cpu().numpy()
    wanted = [choices[one.request] if choices else _own_choices(one.text, table) for one in block]
    fed_MK = branches.windows([one.text.output for one in block], depth)
    full_MK = branches.windows([one.full for one in wanted], depth)
    within_MK = branches.windows([one.within for one in wanted], depth)
    chosen_MK = np.stack([table[logits.argmax(-1).cpu().numpy()] for logits in branches.forced(fed_MK)], axis=1)
    left_M = np.concatenate(
        [len(one.text.output) - 1 - np.arange(count) for one, count in zip(block, counts, strict=True)]
    )
    found = (chosen_MK == full_MK, full_MK >= 0, chosen_MK == within_MK, within_MK >= 0, left_M)
    parts = zip(*(np.split(x, np.cumsum(counts)[:-1]) for x in found), strict=True)
    return [Answers(*part) for part in parts]


def _own_choices(text: Text, table_V: Int) -> TargetChoices:
    """Of a greedy text: the tokens that came."""
    full = np.asarray(text.output, np.int64)
    return TargetChoices(full, np.where(np.isin(full, table_V), full, -1))


def target_choices(trace: Trace, model: DraftModel) -> dict[int, TargetChoices]:
    """The target's best token after every row that became text, of every finished request.

    At a temperature they are other than what came. Within the draft's vocabulary they are read from the recorded best
    logits; where there are none (below level full), or none of those is in it, they are known only if the best one is.
    """
    emitted = trace.rows("emitted", live=True, rank=0)
    emitted = emitted.take(became_text(emitted, trace.rows("verified", accepted=True)))
    table = model.table().cpu().numpy()
    full = emitted["target_token"].astype(np.int64)
    within = np.where(np.isin(full, table), full, -1)
    scored = np.flatnonzero(emitted.has("logits") & (within < 0))
    if len(scored):
        ids = emitted.take(scored).payload("logits", "ids").astype(np.int64)  # best first
        inside = np.isin(ids, table)
        within[scored] = np.where(inside.any(1), ids[np.arange(len(ids)), inside.argmax(1)], -1)
    order = np.argsort(emitted["request"], kind="stable")
    requests, first = np.unique(emitted["request"][order], return_index=True)
    mine = dict(zip(requests.tolist(), np.split(order, first[1:]), strict=True))
    position, found = emitted["position"].astype(np.int64), {}
    for request, text in read_texts(trace).items():
        rows = mine.get(request, order[:0])
        at = position[rows] + 1 - len(text.prompt)
        into = (at >= 0) & (at < len(text.output))
        both = [np.full(len(text.output), -1, np.int64) for _ in range(2)]
        for column, values in zip(both, (full, within), strict=True):
            column[at[into]] = values[rows[into]]
        found[request] = TargetChoices(*both)
    return found


@dataclass(frozen=True, slots=True)
class Rung:
    """One step: trained and measured accuracy, over how many answers, and the interval of what was measured.

    The intervals of all steps hold together in 95 % of traces; there is none where requests are too few for one.
    """

    step: int
    trained: float
    measured: float | None
    answers: int
    low: float | None
    high: float | None

    @property
    def difference(self) -> float | None:
        """Measured less trained: negative where the draft falls short."""
        return None if self.measured is None else self.measured - self.trained

    @property
    def reaches(self) -> bool | None:
        """Whether the draft does what training said, or falls short by less than 0.03.

        None with too few answers, and where the interval is so wide that a shortfall would not show.
        """
        if self.measured is None or self.high is None or self.answers < _FEW_ANSWERS:
            return None
        if self.measured >= self.trained - _SHORT:
            return True
        if self.trained > self.high:
            return False
        return True if self.high - self.measured <= _WIDE else None


@dataclass(frozen=True, slots=True)
class Ladder:
    """Trained against measured, step by step, by the trainer's definition; then the same draft by other measures.

    `marginal` and `conditional` count over the whole vocabulary. Acceptance lengths: `trained_length` as if every start
    were alike, `expected_length` measured over all starts, `walked_length` over those of rounds, as serving counts.
    """

    definition: str
    says: str
    rungs: tuple[Rung, ...]
    marginal: tuple[float | None, ...]
    conditional: tuple[float | None, ...]
    trained_length: float
    expected_length: float | None
    walked_length: float | None
    notes: tuple[str, ...] = field(default=())

    @property
    def reaches(self) -> bool | None:
        """Whether the draft reaches its trained accuracy on these texts; None if that is not decided.

        It does where it does at the first step, and is not known to fall short at a deeper one: few answers reach that.
        """
        told = [rung.reaches for rung in self.rungs]
        return False if False in told else told[0]

    def to_json(self) -> dict[str, Any]:
        rungs = [
            {**{name: getattr(rung, name) for name in rung.__slots__}, "difference": rung.difference}
            for rung in self.rungs
        ]
        held = {name: getattr(self, name) for name in self.__slots__ if name != "rungs"}
        return {**held, "rungs": rungs, "reaches": self.reaches}


def compare(trained: Trained, measured: TeacherForced) -> Ladder:
    """Hold a trained accuracy against what the draft does on a trace's texts, by the same definition."""
    meant = DEFINITIONS[trained.definition]
    hits, answers = measured.counts(meant)
    sure = 1 - (1 - _SURE) / len(trained.accuracies)  # of each step: with more of them chance has no more tries
    rungs = [_rung(k, one, hits[:, k], answers[:, k], sure=sure) for k, one in enumerate(trained.accuracies)]
    return Ladder(
        trained.definition,
        meant.says,
        tuple(rungs),
        _rates(*measured.counts(Definition(Counting.MARGINAL, False, ""))),
        _rates(*measured.counts(Definition(Counting.CONDITIONAL, False, ""))),
        trained.expected_length,
        measured.expected_length(),
        measured.walked_length(),
        tuple(_notes(trained, measured, rungs)),
    )


def _rates(hits_RK: Float, answers_RK: Float) -> tuple[float | None, ...]:
    pairs = zip(hits_RK.sum(0).tolist(), answers_RK.sum(0).tolist(), strict=True)
    return tuple(hit / count if count else None for hit, count in pairs)


def _rung(step: int, trained: float, hits_R: Float, answers_R: Float, *, sure: float) -> Rung:
    hits, answers = float(hits_R.sum()), float(answers_R.sum())
    measured, asked = hits / answers if answers else None, answers_R > 0
    if asked.sum() < _FEW_REQUESTS:
        return Rung(step, trained, measured, int(answers), None, None)
    low, high = _wilson(hits, answers, sure)  # which also holds where all or none of the answers are hits
    over_requests = ratio_interval(hits_R[asked], answers_R[asked], sure=sure)
    low, high = max(min(low, over_requests[0]), 0.0), min(max(high, over_requests[1]), 1.0)
    return Rung(step, trained, measured, int(answers), low, high)


def _wilson(hits: float, answers: float, sure: float) -> Interval:
    """The interval of a share of independent answers (Wilson, 1927)."""
    z, share = NormalDist().inv_cdf((1 + sure) / 2), hits / answers
    middle = (share + z**2 / (2 * answers)) / (1 + z**2 / answers)
    half = z / (1 + z**2 / answers) * sqrt(share * (1 - share) / answers + z**2 / (4 * answers**2))
    return middle - half, middle + half


def _notes(trained: Trained, measured: TeacherForced, rungs: Sequence[Rung]) -> list[str]:
    notes = []
    if undecided := [str(rung.step) for rung in rungs if rung.reaches is None]:
        notes.append(
            f"{len(measured.answers)} requests are too few to tell whether the draft reaches its trained accuracy at "
            f"step {', '.join(undecided)}: record more, {_FEW_REQUESTS} at the very least"
        )
    if DEFINITIONS[trained.definition].restricted and (unknown := measured.unknown()):
        notes.append(
            f"{unknown:.1%} of answers left out: the target's choice within the draft's vocabulary was not recorded"
        )
    if measured.temperature:
        notes.append(f"temperature {measured.temperature:g}: compared with the target's best token, not with what came")
    return notes

"""The readings that are searched for: what the engine did, and what the draft was trained for.

Both begin at the configured reading and take the best step of many, again and again while each is worth it, since
faults stack. What the engine did is judged by the served answers; what the draft was trained for, by the text.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from spectrace.replay.compare import Drawn
from spectrace.replay.configuration import Configuration
from spectrace.replay.foretell import Foreteller, Foretold, acceptance_length
from spectrace.replay.hypotheses import Hypothesis
from spectrace.replay.inputs import DraftInputs
from spectrace.replay.reproduce import Reproduced, reproduce
from spectrace.replay.statistics import Interval, paired_interval
from spectrace.replay.truth import TrueText

__all__ = ["SURPRISED", "Clock", "EngineReading", "Told", "TrainedReading", "read_engine", "read_training"]

Bool = npt.NDArray[np.bool_]
Float = npt.NDArray[np.float64]
Around = Callable[[Configuration], Iterable[Hypothesis]]
Told = Callable[[str, int, int], None]

_STACK = 4
_EXPLAINED, _EXPLAINED_COARSE = 0.98, 0.93
_GAIN = 0.02  # of answers met: less is no step
_FEW_ROWS = 160  # that tell whether a hypothesis is far worse
_WALKED = 6  # screened hypotheses that are walked
_SCREENED_SURE, _TRAINED_SURE = 2.0, 0.99
SURPRISED = 0.5  # nats: drafts run as trained, on data as trained, came to -0.8 to 0, on other data to 0.6 to 1.7
_WORTH = 0.02  # of an acceptance length: less is no cause


class Clock:
    """What is left of the budget; `told` hears of progress."""

    def __init__(self, budget_secs: float, told: Told | None = None) -> None:
        self.ends, self._told = time.monotonic() + budget_secs, told
        self.tried = self.skipped = 0

    def each(self, what: str, hypotheses: Sequence[Hypothesis]) -> Iterator[Hypothesis]:
        """The hypotheses in order, as long as there is time."""
        for number, hypothesis in enumerate(hypotheses):
            if time.monotonic() > self.ends:
                self.skipped += len(hypotheses) - number
                return
            self.tell(what, number, len(hypotheses))
            self.tried += 1
            yield hypothesis

    def tell(self, what: str, done: int, total: int) -> None:
        if self._told:
            self._told(what, done, total)


@dataclass(frozen=True, slots=True)
class EngineReading:
    """What the engine did: the steps from the configured reading, and how well the result reproduces it.

    `steps` is empty where the configured reading does, and where nothing tried does: `explained` tells which. `rivals`
    are hypotheses that the answers cannot tell from the steps taken.
    """

    configuration: Configuration
    steps: tuple[Hypothesis, ...]
    configured: Reproduced
    reproduced: Reproduced
    explained: bool
    rivals: tuple[Hypothesis, ...] = ()


def read_engine(
    configured: Configuration,
    around: Around,
    blocks: Sequence[DraftInputs],
    drawn: Drawn | None,
    *,
    likely: Collection[str] = (),
    coarse: bool,
    tolerance: float,
    clock: Clock,
) -> EngineReading:
    """Find the steps under which replay gives the answers that were served.

    Of steps that explain them alike, one is taken whose fault is `likely`: the trace shows it by itself.
    """
    enough = _EXPLAINED_COARSE if coarse else _EXPLAINED

    def run(configuration: Configuration) -> Reproduced:
        return reproduce(configuration, blocks, drawn, tolerance=tolerance)

    base = run(configured)
    at, found, steps, rivals = configured, base, list[Hypothesis](), list[Hypothesis]()
    while found.agreement < enough and len(steps) < _STACK:
        tried = [
            (one, (there := one.apply(at)), run(there))
            for one in clock.each("what the engine did", _fresh(around(at), steps))
        ]
        if not tried:
            break
        best, there, result = max(tried, key=lambda each: (each[2].agreement, each[0].fault in likely))
        if result.agreement < found.agreement + _GAIN:
            break
        rivals += [one for one, _, other in tried if one is not best and bool((other.met == result.met).all())]
        at, found = there, result
        steps.append(best)
    if found.agreement < enough:
        return EngineReading(configured, (), base, base, False)
    return EngineReading(at, tuple(steps), base, found, True, tuple(rivals))


def _fresh(hypotheses: Iterable[Hypothesis], steps: Sequence[Hypothesis]) -> list[Hypothesis]:
    """Those that do not undo what was decided; a wiring may be found slot by slot, a number ever closer."""
    taken = {step.link for step in steps} - {"wiring", "rope theta"}
    return [one for one in hypotheses if one.link not in taken]


@dataclass(frozen=True, slots=True)
class TrainedReading:
    """What the draft was trained for: the steps from the configured reading, and the acceptance lengths of both.

    `gain` is the 99 % interval of what the steps add to the mean run length on requests that did not choose them;
    `surprise` is that of the draft so run (`Foreteller.surprise`). `undecided` is a step that foretells the text better
    on both halves, but not surely so: the text is too short, or unlike what the draft was trained on.
    """

    configuration: Configuration
    steps: tuple[Hypothesis, ...]
    configured: float | None
    best: float | None
    surprise: float
    gain: Interval | None = None
    rivals: tuple[Hypothesis, ...] = field(default=())
    undecided: Hypothesis | None = None


def read_training(
    configured: Configuration,
    around: Around,
    foreteller: Foreteller,
    chosen_on: Sequence[TrueText],
    confirmed_on: Sequence[TrueText],
    *,
    clock: Clock,
) -> TrainedReading:
    """Find the steps under which the draft foretells the text best: chosen on one half, confirmed on the other.

    Text of other data may by chance be foretold better by a draft that is run wrongly. But then it is not as sure as it
    is right, as little as when it is run rightly: such steps are not taken.
    """
    at, steps, rivals = configured, list[Hypothesis](), list[Hypothesis]()
    base = foreteller.walks(at, confirmed_on)
    plain = foreteller.surprise(at, confirmed_on)
    best, gain, undecided = base, None, None
    while len(steps) < _STACK:
        step = _best_step(at, _fresh(around(at), steps), foreteller, chosen_on, clock)
        if step is None:
            break
        there = step[0].apply(at)
        walked = foreteller.walks(there, confirmed_on)
        # That a link is wrong has to be sure; how it was right is then the best guess.
        again = step[0].link in {one.link for one in steps}
        interval = paired_interval(_runs(walked), _runs(best), sure=_TRAINED_SURE)
        better = _worth_it(walked, best)
        if not (better and (interval[0] > 0 or again)):
            undecided = step[0] if better and not steps else None
            break
        at, best, gain = there, walked, gain if again else interval
        steps.append(step[0])
        rivals += step[1]
    surprise = foreteller.surprise(at, confirmed_on)
    if steps and not surprise <= SURPRISED:
        undecided = steps[0] if surprise <= plain / 2 else None
        at, steps, rivals, best, gain, surprise = configured, [], [], base, None, plain
    lengths = acceptance_length(base), acceptance_length(best)
    return TrainedReading(at, tuple(steps), *lengths, surprise, gain, tuple(rivals), undecided)


def _best_step(
    at: Configuration,
    hypotheses: Sequence[Hypothesis],
    foreteller: Foreteller,
    texts: Sequence[TrueText],
    clock: Clock,
) -> tuple[Hypothesis, list[Hypothesis]] | None:
    """The step that walks furthest on these texts, and those that walk just as it does; None when none gets further."""
    own = foreteller.walks(at, texts)
    walked = [
        (one, foreteller.walks(one.apply(at), texts)) for one in _screened(at, hypotheses, foreteller, texts, clock)
    ]
    better = [(one, result) for one, result in walked if _worth_it(result, own)]
    if not better:
        return None
    best, result = max(better, key=lambda each: acceptance_length(each[1]) or 0.0)
    same = [one for one, other in better if one is not best and _same(other, result)]
    return best, same


def _screened(
    at: Configuration,
    hypotheses: Sequence[Hypothesis],
    foreteller: Foreteller,
    texts: Sequence[TrueText],
    clock: Clock,
) -> list[Hypothesis]:
    """The few whose first drafts are right more often; those that show at deeper drafts only are all kept.

    Most are far worse, which a few rows tell: only the others are run over all texts.
    """
    few = texts[: next((n for n, rows in enumerate(_rows(texts), 1) if rows >= _FEW_ROWS), len(texts))]
    own_few, own = (foreteller.hits(at, some) for some in (few, texts))
    scored: list[tuple[float, int, Hypothesis]] = []
    for number, one in enumerate(clock.each("what the draft was trained for", hypotheses)):
        if one.deeper:
            scored.append((np.inf, -number, one))
            continue
        there = one.apply(at)
        if _mcnemar(foreteller.hits(there, few), own_few) <= -_SCREENED_SURE:
            continue
        score = _mcnemar(foreteller.hits(there, texts), own)
        if score >= _SCREENED_SURE:
            scored.append((score, -number, one))
    scored.sort(key=lambda each: each[:2], reverse=True)
    deeper = [one for score, _, one in scored if score == np.inf]
    return deeper + [one for score, _, one in scored if score != np.inf][:_WALKED]


def _rows(texts: Sequence[TrueText]) -> Iterator[int]:
    return accumulate(len(text.text.tokens) for text in texts)


def _mcnemar(new: Bool, old: Bool) -> float:
    """McNemar's statistic of two paired rows of hits: only starts at which the two differ say anything."""
    up, down = float((new > old).sum()), float((new < old).sum())
    return (up - down) / float(np.sqrt(up + down)) if up + down else 0.0


def _runs(walked: Sequence[Foretold]) -> list[Float]:
    return [one.runs for one in walked]


def _worth_it(new: Sequence[Foretold], old: Sequence[Foretold]) -> bool:
    before, after = acceptance_length(old), acceptance_length(new)
    return before is not None and after is not None and after - before > _WORTH * before


def _same(one: Sequence[Foretold], other: Sequence[Foretold]) -> bool:
    return all(bool((a.runs == b.runs).all()) for a, b in zip(one, other, strict=True))

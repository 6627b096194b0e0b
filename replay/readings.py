"""The readings that are searched for: what the engine did, and what the draft was trained for.

Both begin at the configured reading and take the best step of many, again and again while each is worth it, since
faults stack. What the engine did is judged by the served answers; what the draft was trained for, by the text.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from spectrace.replay.compare import Drawn
from spectrace.replay.configuration import Configuration
from spectrace.replay.foretell import Foreteller, Foretold, acceptance_length
from spectrace.replay.hypothesis import Hypothesis
from spectrace.replay.inputs import DraftInputs
from spectrace.replay.likelihood import Likelihood, likelihood, surprise
from spectrace.replay.reproduce import Reproduced, reproduce
from spectrace.replay.statistics import Interval, chance_of, paired_interval
from spectrace.replay.truth import TrueText

__all__ = ["SURPRISED", "Clock", "EngineReading", "Told", "TrainedReading", "read_engine", "read_training", "rivals_of"]

Float = npt.NDArray[np.float64]
Around = Callable[[Configuration], Iterable[Hypothesis]]
Told = Callable[[str, int, int], None]

_STACK = 4
_EXPLAINED, _EXPLAINED_COARSE = 0.98, 0.93
_GAIN = 0.02  # of answers met: less is no step
_BY_CHANCE = 0.01  # as seldom may chance alone miss as many answers, or find a step that meets as many more
_FEW_STARTS = 64  # that tell whether a hypothesis is far worse
_TRIED = 6  # screened hypotheses that are tried at every depth
_SCREENED_SURE, _TRAINED_SURE = 2.0, 0.99
SURPRISED = 0.5  # nats: drafts run as trained, on data as trained, came to -0.8 to 0, on other data to 0.6 to 1.7
_WORTH = 0.02  # of an acceptance length: less is no cause


class Clock:
    """What is left of the budget; `told` hears of progress."""

    def __init__(self, budget_secs: float, told: Told | None = None) -> None:
        self.budget_secs, self.ends, self._told = budget_secs, time.monotonic() + budget_secs, told
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
    are, step by step, the hypotheses that the answers cannot tell from it.
    """

    configuration: Configuration
    steps: tuple[Hypothesis, ...]
    configured: Reproduced
    reproduced: Reproduced
    explained: bool
    rivals: tuple[tuple[Hypothesis, ...], ...] = ()


def read_engine(
    configured: Configuration,
    around: Around,
    blocks: Sequence[DraftInputs],
    drawn: Drawn | None,
    *,
    likely: Collection[str] = (),
    seen: Sequence[Hypothesis] = (),
    coarse: bool,
    tolerance: float,
    clock: Clock,
) -> EngineReading | None:
    """Find the steps under which replay gives the answers that were served.

    Those that were `seen`, in what was loaded, are taken first, whatever they explain. Of others that explain alike,
    one is taken whose fault is `likely`: the trace shows it by itself. Where so few are missed that chance may have
    missed them, or would find a step that meets them, there is no reading; nor of none.
    """
    enough = _EXPLAINED_COARSE if coarse else _EXPLAINED

    def run(configuration: Configuration) -> Reproduced:
        return reproduce(configuration, blocks, drawn, tolerance=tolerance)

    base = run(configured)
    if not len(base.met):
        return None
    at, steps, rivals = configured, list(seen), list[tuple[Hypothesis, ...]]([()] * len(seen))
    for step in steps:
        at = step.apply(at)
    found = run(at) if steps else base
    promising = False
    while found.agreement < enough and len(steps) - len(seen) < _STACK:
        tried = [
            (one, (there := one.apply(at)), run(there))
            for one in clock.each("what the engine did", _likely_first(_fresh(around(at), steps), likely))
        ]
        if not tried:
            break
        best, there, result = max(tried, key=lambda each: (each[2].agreement, each[0].fault in likely))
        if result.agreement < found.agreement + _GAIN:
            break
        if not _surely_better(result, found, len(tried)):
            promising = result.agreement >= enough
            break
        rivals.append(tuple(o for o, _, other in tried if o is not best and bool((other.met == result.met).all())))
        at, found = there, result
        steps.append(best)
    unsure = promising or not _surely_missed(found, 1 - enough)
    if found.agreement >= enough or (steps and unsure):
        return EngineReading(at, tuple(steps), base, found, True, tuple(rivals))
    return None if unsure else EngineReading(configured, (), base, base, False)


def _likely_first(hypotheses: Iterable[Hypothesis], likely: Collection[str]) -> list[Hypothesis]:
    """Time may end before all are tried."""
    return sorted(hypotheses, key=lambda one: one.fault not in likely)


def _surely_missed(found: Reproduced, share: float) -> bool:
    """Whether more answers are missed than the share that rounding may come to, and not by chance."""
    return chance_of(int((~found.met).sum()), len(found.met), each=share) < _BY_CHANCE


def _surely_better(new: Reproduced, old: Reproduced, tried: int) -> bool:
    """The sign test of answers that only one of two meets, for the best of many hypotheses tried."""
    gained, lost = int((new.met & ~old.met).sum()), int((old.met & ~new.met).sum())
    return tried * chance_of(gained, gained + lost, each=0.5) < _BY_CHANCE


def _fresh(hypotheses: Iterable[Hypothesis], steps: Sequence[Hypothesis]) -> list[Hypothesis]:
    """Those that do not undo what was decided; a wiring may be found slot by slot, a number ever closer."""
    taken = {step.link for step in steps} - {"wiring", "rope theta"}
    return [one for one in hypotheses if one.link not in taken]


@dataclass(frozen=True, slots=True)
class TrainedReading:
    """What the draft was trained for: the steps from the configured reading, and the acceptance lengths of both.

    `gain` is the 99 % interval of the nats by which all steps together make a token that came likelier, on requests
    that did not choose them; `surprise` is that of the draft so run. `rivals` are, step by step, what the text cannot
    tell from it. `undecided` is a step that makes tokens likelier on both halves, but not surely so: the text is too
    short, or unlike what the draft was trained on.
    """

    configuration: Configuration
    steps: tuple[Hypothesis, ...]
    configured: float | None
    best: float | None
    surprise: float
    gain: Interval | None = None
    rivals: tuple[tuple[Hypothesis, ...], ...] = ()
    undecided: Hypothesis | None = None


def rivals_of(reading: EngineReading | TrainedReading, step: Hypothesis) -> tuple[Hypothesis, ...]:
    """What the data cannot tell from a step of a reading."""
    return next((rivals for one, rivals in zip(reading.steps, reading.rivals, strict=True) if one == step), ())


def read_training(
    configured: Configuration,
    around: Around,
    foreteller: Foreteller,
    chosen_on: Sequence[TrueText],
    confirmed_on: Sequence[TrueText],
    *,
    clock: Clock,
) -> TrainedReading:
    """Find the steps under which the draft holds the text likeliest: chosen on one half, confirmed on the other.

    Text of other data may be likelier to a draft that is run wrongly. But then it is not as sure as it is right, as
    little as when it is run rightly: such steps are not taken. Nor are steps that are not worth acceptance.
    """
    search = _Search(around, foreteller, clock)
    both = [*chosen_on, *confirmed_on]
    at, steps, rivals = configured, list[Hypothesis](), list[tuple[Hypothesis, ...]]()
    plain, undecided = surprise(at, confirmed_on), None
    while len(steps) < _STACK:
        way, there, interval = search.way(at, steps, chosen_on, confirmed_on)
        if not way:
            break
        worth_it = _worth_it(*(foreteller.walks(one, both) for one in (there, at)))
        if not (worth_it and _is_sure(interval, way[0][0], steps)):
            no_better = sum(interval) <= 0  # of too few texts there is no interval, and nothing is decided
            if worth_it and not no_better and not steps:
                undecided = _could_be(way[0][0], surprise(there, confirmed_on), plain)
            break
        at = there
        steps += [step for step, _ in way]
        rivals += [others for _, others in way]
    surprised = surprise(at, confirmed_on) if steps else plain
    if steps and not surprised <= SURPRISED:
        undecided = _could_be(steps[0], surprised, plain)
        at, steps, rivals, surprised = configured, [], [], plain
    gain = search.gain(at, configured, confirmed_on) if steps else None
    before, after = (acceptance_length(foreteller.walks(one, confirmed_on)) for one in (configured, at))
    return TrainedReading(at, tuple(steps), before, after, surprised, gain, tuple(rivals), undecided)


def _is_sure(interval: Interval, step: Hypothesis, steps: Sequence[Hypothesis]) -> bool:
    """That a link is wrong has to be sure; how it was right is then the best guess."""
    again = step.link in {one.link for one in steps}
    return interval[0] > 0 or (again and sum(interval) > 0)


def _could_be(step: Hypothesis, surprised: float, plain: float) -> Hypothesis | None:
    """A step of which nothing is sure, unless it leaves the draft about as surprised by the text as it was."""
    return step if surprised <= max(SURPRISED, plain / 2) else None


@dataclass(frozen=True, slots=True)
class _Search:
    """Looks around a configuration for the step that makes a text likeliest."""

    around: Around
    foreteller: Foreteller
    clock: Clock

    def best(
        self, at: Configuration, steps: Sequence[Hypothesis], texts: Sequence[TrueText]
    ) -> tuple[Hypothesis, tuple[Hypothesis, ...]] | None:
        """The step, and those that draft just as it does; None where no step makes the text likelier."""
        own = self._of(at, texts)
        screened = self._screened(at, _fresh(self.around(at), steps), own.sharpness, texts)
        tried = [(one, self._of(one.apply(at), texts)) for one in screened]
        better = [(one, new.nats) for one, new in tried if _sureness(new.nats, own.nats) >= _SCREENED_SURE]
        if not better:
            return None
        best, _ = max(better, key=lambda each: float(np.concatenate(each[1]).mean()))
        walked = self.foreteller.walks(best.apply(at), texts)
        others = (one for one, _ in better if one is not best)
        return best, tuple(one for one in others if _same(self.foreteller.walks(one.apply(at), texts), walked))

    def way(
        self,
        at: Configuration,
        steps: Sequence[Hypothesis],
        chosen_on: Sequence[TrueText],
        confirmed_on: Sequence[TrueText],
    ) -> tuple[list[tuple[Hypothesis, tuple[Hypothesis, ...]]], Configuration, Interval]:
        """The best step, where it leads, and its gain; of a link that takes several steps as many as make it sure."""
        way, there, interval = list[tuple[Hypothesis, tuple[Hypothesis, ...]]](), at, (np.nan, np.nan)
        while len(steps) + len(way) < _STACK:
            found = self.best(there, [*steps, *(step for step, _ in way)], chosen_on)
            if found is None or (way and found[0].link != way[0][0].link):
                break
            way.append(found)
            there = found[0].apply(there)
            interval = self.gain(there, at, confirmed_on)
            if _is_sure(interval, way[0][0], steps):
                break
        return way, there, interval

    def gain(self, there: Configuration, at: Configuration, texts: Sequence[TrueText]) -> Interval:
        """By how many nats a token that came is likelier there than here."""
        new, old = (self._of(one, texts).nats for one in (there, at))
        return paired_interval(new, old, sure=_TRAINED_SURE)

    def _of(self, configuration: Configuration, texts: Sequence[TrueText]) -> Likelihood:
        return likelihood(configuration, texts, depth=self.foreteller.shape.depth)

    def _screened(
        self, at: Configuration, hypotheses: Sequence[Hypothesis], sharpness: float, texts: Sequence[TrueText]
    ) -> list[Hypothesis]:
        """The few that make first drafts likelier; those that show at deeper drafts only are all kept.

        Most are far worse, which a few starts tell: only the others are run over all texts.
        """
        few = texts[: next((n for n, starts in enumerate(_starts(texts), 1) if starts >= _FEW_STARTS), len(texts))]
        own_few, own = (likelihood(at, some, sharpness=sharpness).nats for some in (few, texts))
        scored: list[tuple[float, int, Hypothesis]] = []
        for number, one in enumerate(self.clock.each("what the draft was trained for", hypotheses)):
            if one.deeper:
                scored.append((np.inf, -number, one))
                continue
            there = one.apply(at)
            if _sureness(likelihood(there, few, sharpness=sharpness).nats, own_few) <= -_SCREENED_SURE:
                continue
            score = _sureness(likelihood(there, texts, sharpness=sharpness).nats, own)
            if score >= _SCREENED_SURE:
                scored.append((score, -number, one))
        scored.sort(key=lambda each: each[:2], reverse=True)
        deeper = [one for score, _, one in scored if score == np.inf]
        return deeper + [one for score, _, one in scored if score != np.inf][:_TRIED]


def _starts(texts: Sequence[TrueText]) -> Iterator[int]:
    return accumulate(len(text.text.output) - 1 for text in texts)


def _sureness(new: Sequence[Float], old: Sequence[Float]) -> float:
    """Mean difference of two paired rows of numbers over its standard error, were all of them independent."""
    difference = np.concatenate(new) - np.concatenate(old)
    if len(difference) < 2:
        return 0.0
    error = difference.std(ddof=1) / np.sqrt(len(difference))
    return float(difference.mean() / error) if error else 0.0


def _worth_it(new: Sequence[Foretold], old: Sequence[Foretold]) -> bool:
    before, after = _length(old), _length(new)
    return before is not None and after is not None and after - before > _WORTH * before


def _length(walked: Sequence[Foretold]) -> float | None:
    """The acceptance length; where no round is counted, as if there were one at every start."""
    runs = np.concatenate([np.empty(0), *(one.runs for one in walked)])
    return acceptance_length(walked) or (1 + float(runs.mean()) if len(runs) else None)


def _same(one: Sequence[Foretold], other: Sequence[Foretold]) -> bool:
    return all(bool((a.runs == b.runs).all()) for a, b in zip(one, other, strict=True))

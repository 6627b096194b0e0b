"""What was served beside what replay makes of the same inputs at the same places: the rest is the engine's doing.

Shapes: S starts of a text.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spectrace.replay.diff.given import CommonText
from spectrace.replay.foretell import Foretold, acceptance_length
from spectrace.replay.statistics import Interval, paired_interval
from spectrace.tracer.trace import Trace

__all__ = ["ServedRounds", "excludes_zero", "served_rounds"]


@dataclass(frozen=True, slots=True)
class ServedRounds:
    """One side's acceptance length as served and as replayed with all its own inputs, in the shape it was served in.

    The residue is what its engine did beyond its inputs: weights in memory, KV, verification. Of `rounds` served,
    `unlike` got as far as no replay from the same place. `interval` is that of the difference a round.
    """

    served: float | None
    replayed: float
    rounds: int
    unlike: int
    interval: Interval

    @property
    def residue(self) -> float | None:
        """Tokens a round that were served and no input explains."""
        return None if self.served is None else self.served - self.replayed

    @property
    def apart(self) -> bool:
        """Whether the engine did more than its inputs explain, beyond what chance does."""
        return excludes_zero(self.interval)


def served_rounds(
    trace: Trace, numbers: Sequence[int], texts: Sequence[CommonText], replayed: Sequence[Foretold]
) -> ServedRounds:
    """The rounds that were served, of those that begin where replay can start; each beside the replay from there."""
    runs, begins = Counter[tuple[int, int]](), dict[tuple[int, int], int]()
    verified = trace.rows("verified", rank=0, request=list(numbers))
    names = ("request", "round", "node", "position", "accepted")
    for request, round_, node, position, accepted in zip(*(verified[name].tolist() for name in names), strict=True):
        if node == 0:
            begins[request, round_] = position
        runs[request, round_] += accepted and node > 0
    found, beside = [], []
    for number, one, walk in zip(numbers, texts, replayed, strict=True):
        starts = [(key, at - len(one.text.prompt)) for key, at in begins.items() if key[0] == number]
        within = [(runs[key], at) for key, at in starts if 0 <= at < one.starts]
        found.append(np.array([run for run, _ in within], np.float64))
        beside.append(walk.runs[[at for _, at in within]])
    rounds, correct = sum(map(len, found)), sum(float(one.sum()) for one in found)
    return ServedRounds(
        served=1 + correct / rounds if rounds else None,
        replayed=acceptance_length(replayed) or 1.0,
        rounds=rounds,
        unlike=sum(int((one != other).sum()) for one, other in zip(found, beside, strict=True)),
        interval=paired_interval(found, beside),
    )


def excludes_zero(interval: Interval) -> bool:
    """Whether a difference is more than chance; nothing is told of too few values, whose interval is NaN."""
    return interval[0] > 0 or interval[1] < 0

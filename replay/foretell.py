"""What a configuration would have been accepted for, on true features: the draft runs free over the recorded texts.

Shapes: S starts of a text.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from spectrace.engine.draft import DraftModel
from spectrace.engine.tree import Tree, TreeShape
from spectrace.replay.configuration import Configuration, Steps
from spectrace.replay.expected import chances, drafts_were_drawn, emitted_probabilities, expected
from spectrace.replay.features import blocks
from spectrace.replay.freerun import free_run
from spectrace.replay.texts import Text, read_texts
from spectrace.replay.trees import served_shape
from spectrace.replay.truth import TrueText, Wired
from spectrace.replay.walk import walk
from spectrace.tracer.trace import Trace

__all__ = ["Foreteller", "Foretold", "acceptance_length"]

Float = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Foretold:
    """One request: the run length at every start [S], and the rounds and correct drafts of the walk over them.

    All three are expectations where drafts are drawn. Rounds that the end of the text cuts are left out. Where drafts
    are drawn and the target's probabilities were not recorded, runs are those of the likeliest drafts, which still tell
    two configurations apart, and no round is counted: acceptance is not foretold.
    """

    request: int
    runs: Float
    rounds: float
    correct: float


def acceptance_length(foretold: Iterable[Foretold]) -> float | None:
    """1 + correct drafts / rounds; None where no round is left."""
    pairs = [(one.rounds, one.correct) for one in foretold]
    rounds, correct = sum(r for r, _ in pairs), sum(c for _, c in pairs)
    return 1 + correct / rounds if rounds else None


class Foreteller:
    """Runs configurations free in the shape in which a trace was served."""

    def __init__(self, trace: Trace) -> None:
        self.shape: TreeShape = served_shape(trace)
        self.drawn = drafts_were_drawn(trace)
        self.emitted = emitted_probabilities(trace.rows("verified"), read_texts(trace)) if self.drawn else None

    def walks(self, configuration: Configuration, texts: Sequence[TrueText]) -> list[Foretold]:
        """Every request that is long enough, in order."""
        model = configuration.build()
        wired = [text.wired(configuration.wiring) for text in texts]
        found: list[Foretold] = []
        for block in blocks([one for one in wired if len(one) > len(one.text.prompt)]):
            run = self._drawn if self.emitted else self._chosen
            found += run(model, block, configuration.steps)
        foretold = self.emitted or not self.drawn
        return found if foretold else [replace(one, rounds=0.0, correct=0.0) for one in found]

    def _chosen(self, model: DraftModel, block: Sequence[Wired], steps: Steps) -> list[Foretold]:
        trees = free_run(model, block, self.shape, steps)
        return [_walked(one.request, one.text, trees[one.request]) for one in block]

    def _drawn(self, model: DraftModel, block: Sequence[Wired], steps: Steps) -> list[Foretold]:
        assert self.emitted
        held = chances(model, block, self.emitted, self.shape.depth, steps)
        return [
            Foretold(one.request, np.cumprod(each, 1).sum(1), *expected(each, to_the_end=True))
            for one, each in zip(block, held, strict=True)
        ]


def _walked(request: int, text: Text, drafts: Mapping[int, Tree]) -> Foretold:
    runs = np.array([drafts[t].run(text.output[t:]) for t in sorted(drafts)], np.float64)
    one = walk(drafts, text.output)
    whole = [run for run, cut in zip(one.runs, one.cut, strict=True) if not cut]
    return Foretold(request, runs, float(len(whole)), float(sum(whole)))

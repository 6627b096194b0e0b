"""Which input makes one run's draft accept less than another's: each swapped alone, through replay.

The draft runs free over the text that both runs share, in the shape of A's trees. Rounds count where a whole one fits
into that text, so that its end cuts none; what was served is counted at the same places.

Shapes: S starts of a text.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Final

import numpy as np
import torch

from spectrace.engine.draft import DraftModel
from spectrace.engine.tree import TreeShape
from spectrace.replay.compare import served_dtype
from spectrace.replay.diff.alignment import Alignment
from spectrace.replay.diff.given import Common, Factor, common_texts, steps_of
from spectrace.replay.diff.served import ServedRounds, excludes_zero, served_rounds
from spectrace.replay.expected import drafts_were_drawn
from spectrace.replay.features import blocks
from spectrace.replay.foretell import Foretold, acceptance_length
from spectrace.replay.freerun import free_run
from spectrace.replay.statistics import Interval, paired_interval
from spectrace.replay.trees import served_shape
from spectrace.tracer.errors import UserError
from spectrace.tracer.trace import Trace

__all__ = ["Attribution", "Factor", "Swap", "attribute"]

_PLACES: Final = 2000
_MOST: Final = 0.5


@dataclass(frozen=True, slots=True)
class Swap:
    """Acceptance lengths when some inputs alone change sides; None where no replay can do that.

    `lost` tokens a round go when A is given B's, `regained` ones come back when B is given A's. `share` is the mean of
    both over the whole difference, None where none can be told. `same` inputs are equal in both runs. `told` says why
    there is nothing to swap.
    """

    factors: tuple[Factor, ...]
    a_with_b: float | None
    b_with_a: float | None
    lost: float | None
    regained: float | None
    share: float | None
    same: bool
    told: str


@dataclass(frozen=True, slots=True)
class Attribution:
    """Replayed acceptance lengths `a` and `b`, and how much of their difference goes with which input.

    `interval` is that of A's run lengths over B's, place by place, at 99 %. `culprit` is None where it holds 0, or
    where no input alone makes half of the difference either way; `together` are two that do. `left_out` counts
    requests by reason.
    """

    requests: int
    places: int
    left_out: Mapping[str, int]
    a: float
    b: float
    interval: Interval
    swaps: tuple[Swap, ...]
    culprit: Factor | None
    together: Swap | None
    served: tuple[ServedRounds, ServedRounds]
    notes: tuple[str, ...]

    @property
    def difference(self) -> float:
        """Tokens that B loses a round by its inputs."""
        return self.a - self.b

    @property
    def differs(self) -> bool:
        """Whether the inputs make a difference that chance does not."""
        return excludes_zero(self.interval)

    def __str__(self) -> str:
        """What was found, in a sentence."""
        if not self.differs:
            found = "no difference between the inputs of A and B can be told"
        elif self.culprit:
            found = f"most of the difference comes with {self.culprit} alone"
        elif self.together:
            two = " and ".join(self.together.factors)
            found = f"most of the difference comes with {two} together, and with neither alone"
        else:
            found = "most of the difference comes with no input alone, and with no two together"
        parts = [f"{found}: acceptance length {self.a:.3f} with A's, {self.b:.3f} with B's"]
        parts += [
            f"{name}'s engine did something beyond its inputs: {one.served:.3f} served, {one.replayed:.3f} replayed"
            for name, one in zip("AB", self.served, strict=True)
            if one.apart
        ]
        return "; ".join(parts)


def attribute(
    a: Trace, b: Trace, alignment: Alignment, drafts: tuple[DraftModel, DraftModel], *, most_places: int = _PLACES
) -> Attribution:
    """Swap every input alone between two aligned traces; `drafts` are theirs, best handed over in float32.

    Requests are taken in order until there are `most_places` places at which a round may start. Raises UserError where
    nothing can be compared: drafts that were drawn, no features, none of a whole text, or another draft's.
    """
    traces, notes = (a, b), list[str]()
    shapes = _shapes(traces, notes)
    texts, left_out = common_texts(alignment, traces, depth=max(one.depth for one in shapes), most=most_places)
    steps = [steps_of(trace) for trace in traces]
    for name, (_, even) in zip("AB", steps, strict=True):
        if not even:
            notes.append(f"positions of {name}'s rows below the text move unevenly: all are replayed as most move")
    common = Common(traces, texts, _in_one_dtype(traces, drafts, notes), (steps[0][0], steps[1][0]))
    common.check()
    replays = _Replays(common, shapes[0])
    swaps = tuple(replays.swap([factor]) for factor in Factor)
    alone, together = replays.most(swaps), None
    if replays.differ and not alone:
        differing = [factor for factor in Factor if factor not in common.same]
        together = replays.most(replays.swap(two) for two in combinations(differing, 2))
    return Attribution(
        requests=len(texts),
        places=sum(one.starts for one in texts),
        left_out=left_out,
        a=replays.lengths[0],
        b=replays.lengths[1],
        interval=replays.interval,
        swaps=swaps,
        culprit=alone.factors[0] if alone else None,
        together=together,
        served=(
            served_rounds(a, [one.pair.a for one in texts], texts, replays.walks(())),
            served_rounds(b, [one.pair.b for one in texts], texts, replays.walks(Factor, shapes[1])),
        ),
        notes=tuple(notes),
    )


@dataclass(slots=True)
class _Replays:
    """Free runs for every mix of both sides' inputs, each done once."""

    common: Common
    shape: TreeShape
    _found: dict[tuple[frozenset[Factor], TreeShape], list[Foretold]] = field(default_factory=dict)

    def walks(self, of_b: Iterable[Factor], shape: TreeShape | None = None) -> list[Foretold]:
        """Every text, when these inputs are B's and the others A's."""
        key = frozenset(of_b) - self.common.same, shape or self.shape
        if key not in self._found:
            self._found[key] = self._run(*key)
        return self._found[key]

    def _run(self, of_b: frozenset[Factor], shape: TreeShape) -> list[Foretold]:
        sides, found = {factor: int(factor in of_b) for factor in Factor}, list[Foretold]()
        model, steps = self.common.drafts[sides[Factor.DRAFT]], self.common.steps[sides[Factor.POSITIONS]]
        for block in blocks([one.given(sides) for one in self.common.texts]):
            trees = free_run(model, block, shape, steps)
            for one in block:
                runs = [tree.run(one.text.output[t:]) for t, tree in sorted(trees[one.request].items())]
                found.append(_walked(one.request, runs))
        return found

    @property
    def lengths(self) -> tuple[float, float]:
        """With A's inputs, and with B's."""
        return _length(self.walks(())), _length(self.walks(Factor))

    @property
    def interval(self) -> Interval:
        """Of A's run lengths over B's."""
        return paired_interval(*([one.runs for one in walks] for walks in (self.walks(()), self.walks(Factor))))

    @property
    def differ(self) -> bool:
        return excludes_zero(self.interval)

    def swap(self, factors: Sequence[Factor]) -> Swap:
        """These inputs alone, from B to A and from A to B."""
        (a, b), widths, same = self.lengths, self.common.widths, self.common.same >= set(factors)
        # One side's features need its own draft where the other's takes another width.
        apart = widths[0] != widths[1] and (Factor.FEATURES in factors) != (Factor.DRAFT in factors)
        if apart:
            told = f"its features and its draft go together only: A's features are {widths[0]} wide, B's {widths[1]}"
            return Swap(tuple(factors), None, None, None, None, None, same, told)
        a_with_b = _length(self.walks(factors))
        b_with_a = _length(self.walks(frozenset(Factor) - set(factors)))
        lost, regained = a - a_with_b, b_with_a - b
        share = (lost + regained) / 2 / (a - b) + 0.0 if self.differ and a != b else None
        told = "the same in both runs: it makes no difference" if same else ""
        return Swap(tuple(factors), a_with_b, b_with_a, lost, regained, share, same, told)

    def most(self, swaps: Iterable[Swap]) -> Swap | None:
        """The one with the largest share, of those that make half of a difference at least, either way."""
        whole = self.lengths[0] - self.lengths[1]
        ways = [(one, one.lost, one.regained) for one in swaps if one.share is not None]
        enough = [one for one, *each in ways if all(part is not None and part / whole >= _MOST for part in each)]
        return max(enough, key=lambda one: one.share or 0.0, default=None)


def _shapes(traces: tuple[Trace, Trace], notes: list[str]) -> tuple[TreeShape, TreeShape]:
    """The shape of each side's trees; UserError where drafts were drawn, or nothing was drafted."""
    for trace in traces:
        if drafts_were_drawn(trace):
            raise UserError(
                f"{trace.folder}: its drafts were drawn, so no walk says what an input is worth; "
                f"record both without --sample-drafts to attribute their difference"
            )
    a, b = (served_shape(trace) for trace in traces)
    for trace, shape in zip(traces, (a, b), strict=True):
        if not shape.depth:
            raise UserError(f"{trace.folder}: nothing was drafted in it; record a run with a depth of at least 1")
    if a != b:
        told = [f"{one.depth} deep, {one.topk} below each, {one.nodes} nodes" for one in (a, b)]
        notes.append(
            f"A's trees are {told[0]}, B's {told[1]}: inputs are swapped in A's shape, B was served in its own"
        )
    return a, b


def _in_one_dtype(
    traces: tuple[Trace, Trace], drafts: tuple[DraftModel, DraftModel], notes: list[str]
) -> tuple[DraftModel, DraftModel]:
    """Both drafts in the precision that both runs were served in, or in float32."""
    dtype, other = (served_dtype(trace) for trace in traces)
    if dtype != other:
        notes.append(f"A was served in {dtype}, B in {other}: both are replayed in float32")
        dtype = torch.float32
    a, b = (
        DraftModel.over(one.spec, {k: v.to(dtype) if v.is_floating_point() else v for k, v in one.state_dict().items()})
        for one in drafts
    )
    return a, b


def _length(walks: Sequence[Foretold]) -> float:
    return acceptance_length(walks) or 1.0


def _walked(request: int, runs: Sequence[int]) -> Foretold:
    """The rounds of a walk over the run lengths at every start [S]."""
    at = rounds = correct = 0
    while at < len(runs):
        at, rounds, correct = at + runs[at] + 1, rounds + 1, correct + runs[at]
    return Foretold(request, np.array(runs, np.float64), float(rounds), float(correct))

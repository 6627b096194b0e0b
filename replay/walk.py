"""Acceptance by walking: t <- t + n_t + 1 over the run lengths at the places where rounds really start.

Averages over positions are off by more than many bugs (0.3 to 1.5), because accepted runs are skipped in one round.
t counts the tokens emitted so far; a round that starts at t drafts output tokens t, t+1, ...; it is cut when its run
reaches the end of the output, since what would have come next is not known.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spectrace.engine.tree import Tree
from spectrace.tracer.acceptance import Acceptance, acceptance_of
from spectrace.tracer.errors import UserError

__all__ = ["MissingDrafts", "Walk", "walk", "walk_acceptance"]


class MissingDrafts(UserError):
    """A walk came to a place for which nothing was drafted."""


@dataclass(frozen=True, slots=True)
class Walk:
    """One request's rounds: where each starts, how many drafts were right, and whether the end of the text cut it."""

    starts: tuple[int, ...]
    runs: tuple[int, ...]
    cut: tuple[bool, ...]


def walk(drafts: Mapping[int, Tree], output: Sequence[int], *, first: int = 1) -> Walk:
    """Walk one request; `drafts[t]` is what was drafted for a round that starts at t.

    Raises MissingDrafts when it comes to a place for which there are none: the drafts are of other rounds, or torn.
    """
    starts: list[int] = []
    runs: list[int] = []
    cut: list[bool] = []
    t = first
    while t < len(output):
        if t not in drafts:
            raise MissingDrafts(f"no drafts for a round that starts after {t} output tokens: those rows are not there")
        run = drafts[t].run(output[t:])
        starts.append(t)
        runs.append(run)
        cut.append(t + run >= len(output))
        t += run + 1
    return Walk(tuple(starts), tuple(runs), tuple(cut))


def walk_acceptance(walks: Sequence[Walk], depth: int) -> Acceptance:
    """Acceptance over all rounds of some walks."""
    runs = [run for one in walks for run in one.runs]
    cut = [flag for one in walks for flag in one.cut]
    return acceptance_of(runs, cut, depth)

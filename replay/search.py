"""Rows that arrived with other hashes than were emitted for them: which emitted rows have the hashes they carry.

A row may be alike several others, so every explanation is asked of every row. One number stands for a row's hashes of
the slots that differ anywhere: a fault of one slot leaves the others as they were.

Shapes: E emitted rows, T received rows that were compared, N those of them that differ, A slots.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from spectrace.replay.inputs import Int, places
from spectrace.replay.pairing import Bool, Pairing, pass_numbers
from spectrace.tracer.rows import Phase

__all__ = ["Hash", "HashSearch"]

Hash = npt.NDArray[np.uint64]
_CONSTANT: Final = 0.9  # of the steps of several rows: so many have to hold one row only


@dataclass(frozen=True)
class HashSearch:
    """`mine` [T] are the compared rows among the received, with the hashes of both sides; `zero` that of a zero slot.

    Every method tells of the differing rows [N] which ones it explains.
    """

    pairing: Pairing
    mine: Int
    emitted_EA: Hash
    received_TA: Hash
    zero: int | None

    @cached_property
    def differs_TA(self) -> Bool:
        """Which slots of which compared rows."""
        return np.asarray(self.emitted_EA[self.pairing.sources[self.mine]] != self.received_TA)

    @cached_property
    def rows(self) -> Int:
        """The differing rows among the received ones."""
        return self.mine[self._which]

    @cached_property
    def slots(self) -> Int:
        """The slots in which some row differs."""
        return np.flatnonzero(self.differs_TA.any(0))

    @property
    def window(self) -> bool:
        """Whether rejected rows are handed over behind the accepted ones."""
        return self.pairing.padded

    def zeros(self) -> Bool:
        """Slots of zeros where they differ."""
        theirs, differs = self.received_TA[self._which], self.differs_TA[self._which]
        return _each((theirs == (self.zero or 0)) | ~differs) & (self.zero is not None)

    def constant(self) -> Bool:
        """The same hashes in all rows of a step, of nearly every step of rows that should not be alike."""
        steps, which = np.unique(self._steps[self.pairing.sources[self.mine]], return_inverse=True)
        which = which.reshape(-1)
        several = _differing(self._emitted[self.pairing.sources[self.mine]], which, len(steps))
        alike = several & ~_differing(self._received, which, len(steps))
        if not several.any() or alike.sum() < _CONSTANT * several.sum():
            return np.zeros(len(self.rows), np.bool_)
        values, counts = np.unique(self._received, return_counts=True)
        everywhere = self._mine == values[counts.argmax()] if 2 * counts.max() > counts.sum() else False
        return np.asarray(alike[which[self._which]] | everywhere)

    def same_slots(self) -> Bool:
        """The source row's own hashes, in another order."""
        ours, theirs = self._own_and_carried
        return _each(np.sort(ours, 1) == np.sort(theirs, 1))

    def own_slots(self) -> Bool:
        """The source row's own hashes, some of them twice."""
        ours, theirs = self._own_and_carried
        return _each((ours[:, :, None] == theirs[:, None]).any(1))

    def same_node(self) -> Bool:
        """The node of the pass that has the row's place among the accepted ones: nodes 0 to n-1 for the path."""
        emitted, received = self.pairing.emitted, self.pairing.received.take(self.rows)
        names = ("request", "pass", "node")
        at = places([emitted[name] for name in names], [received[name] for name in names])
        verified: Bool = emitted["phase"][self._sources] == Phase.VERIFY
        return self._stands_at(at) & verified

    def rejected(self) -> Bool:
        """A rejected node of the pass."""
        return self._among(self.pairing.judged & ~self.pairing.accepted, self._passes)

    def same_pass(self) -> Bool:
        """Some other row of the pass."""
        return self._among(np.ones(len(self._emitted), np.bool_), self._passes)

    def beside(self, offset: int) -> Bool:
        """The row so many places further in its step: as it was run, as it was handed over or in its pass."""
        found = np.zeros(len(self.rows), np.bool_)
        for ring in self._rings():
            found |= self._stands_at(ring.beside(self._sources, offset))
        return found

    def other_request(self) -> Bool:
        """A row of the same step and another request."""
        return self.same_step() & ~self._among(np.ones(len(self._emitted), np.bool_), self._steps, self._requests)

    def same_step(self) -> Bool:
        """Any row of the step."""
        return self._among(np.ones(len(self._emitted), np.bool_), self._steps)

    def earlier(self) -> Bool:
        """A row of an earlier step, and of none since."""
        order = np.argsort(self._emitted, kind="stable")
        values, first = np.unique(self._emitted[order], return_index=True)
        earliest = np.minimum.reduceat(self._steps[order], first)
        at = np.minimum(np.searchsorted(values, self._mine), len(values) - 1)
        before: Bool = (values[at] == self._mine) & (earliest[at] < self._steps[self._sources])
        return before & ~self.same_step()

    def step_before(self) -> Bool:
        """A row of the step before, as far as it was recorded."""
        steps = np.unique(self._steps)
        number = np.searchsorted(steps, self._steps)
        return np.isin(_mixed(self._mine, number[self._sources] - 1), _mixed(self._emitted, number))

    def nowhere(self) -> Bool:
        """No emitted row at all."""
        return ~np.isin(self._mine, self._emitted)

    @cached_property
    def _which(self) -> Int:
        return np.flatnonzero(self.differs_TA.any(1))

    @cached_property
    def _emitted(self) -> Hash:
        return _mixed(*self.emitted_EA[:, self.slots].T)

    @cached_property
    def _received(self) -> Hash:
        return _mixed(*self.received_TA[:, self.slots].T)

    @cached_property
    def _mine(self) -> Hash:
        return self._received[self._which]

    @cached_property
    def _sources(self) -> Int:
        return self.pairing.sources[self.rows]

    @cached_property
    def _passes(self) -> Int:
        return pass_numbers(self.pairing.emitted)

    @cached_property
    def _requests(self) -> Int:
        return self.pairing.emitted["request"].astype(np.int64)

    @cached_property
    def _steps(self) -> Int:
        return self.pairing.emitted["step"].astype(np.int64)

    @property
    def _own_and_carried(self) -> tuple[Hash, Hash]:
        return self.emitted_EA[self._sources], self.received_TA[self._which]

    def _stands_at(self, rows: Int) -> Bool:
        """Whether each row carries the hashes of this emitted row (-1: of none)."""
        return np.asarray((rows >= 0) & (self._emitted[rows] == self._mine))

    def _among(self, which: Bool, *columns: Int) -> Bool:
        """Whether one of these emitted rows, like the row's own source in the columns, has the hashes it carries."""
        known = _mixed(self._emitted[which], *(column[which] for column in columns))
        return np.isin(_mixed(self._mine, *(column[self._sources] for column in columns)), known)

    def _rings(self) -> Iterator["_Ring"]:
        """The orders in which a row may be mistaken for its neighbour, each step or pass closed to a ring."""
        accepted, index = self.pairing.accepted, np.arange(len(self._emitted))
        yield _Ring(index, self._steps)
        _, begins = np.unique(self._passes, return_index=True)
        place = np.where(accepted, self.pairing.order, len(index) + index)
        handed = np.lexsort([place, begins[self._passes], self._steps])
        yield _Ring(handed if self.window else handed[accepted[handed]], self._steps)
        yield _Ring(handed[accepted[handed]], self._passes)
        fed = np.isin(self._passes, self._passes[self.pairing.sources[self.mine]]) & (accepted | self.window)
        yield _Ring(handed[fed[handed]], self._steps)


class _Ring:
    """Rows in an order, of which those with one label follow each other and close to a ring."""

    def __init__(self, order: Int, labels: Int) -> None:
        ordered = labels[order]
        edges = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1], True]) if len(order) else np.zeros(1, np.int64)
        sizes = np.diff(edges)
        self.order = order
        self.starts, self.sizes = np.repeat(edges[:-1], sizes), np.repeat(sizes, sizes)
        self.places = np.full(len(labels), -1)
        self.places[order] = np.arange(len(order))

    def beside(self, rows: Int, offset: int) -> Int:
        """The row so many places further, -1 for a row that is not in the order."""
        at = self.places[rows]
        known = at >= 0
        start, size = self.starts[at[known]], self.sizes[at[known]]
        out = np.full(len(rows), -1)
        out[known] = self.order[start + (at[known] - start + offset) % size]
        return out


def _differing(values: Hash, groups: Int, count: int) -> Bool:
    """Which groups hold more than one value."""
    first = np.zeros(count, np.uint64)
    first[groups[::-1]] = values[::-1]
    return np.bincount(groups, values != first[groups], minlength=count) > 0


def _each(rows: np.ndarray) -> Bool:
    """Rows [N, A] that hold in every column."""
    return np.asarray(rows.all(1), np.bool_)


def _mixed(*columns: np.ndarray) -> Hash:
    """One number for the values of several columns, in order: unequal rows meet at odds of 2^-64."""
    out = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        out = (out ^ column.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        out ^= out >> np.uint64(29)
        out *= np.uint64(0xBF58476D1CE4E5B9)
        out ^= out >> np.uint64(32)
    return out

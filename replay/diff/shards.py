"""Ranks of one trace: which hold parts of a tensor, how these make up the whole, and where ranks first disagree.

Rows of rank 0 stand for all ranks where these agree, and of the others only hashes were recorded. Where the tensors of
other ranks were kept, the other trace's rows say what the whole is.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from spectrace.replay.compare import served_dtype
from spectrace.replay.diff.layout import Found, Layout, assemble, infer
from spectrace.replay.diff.placing import Side, columns
from spectrace.replay.diff.sites import Site
from spectrace.replay.diff.tensors import Group, Reads
from spectrace.replay.inputs import Int, places
from spectrace.replay.pairing import Bool
from spectrace.tracer.rowset import Rows
from spectrace.tracer.trace import Trace

__all__ = ["Apart", "Unsharded", "first_apart", "unshard"]

_KEY: Final = ("request", "pass", "depth", "node")
_SAMPLE: Final = 64
_TOLERANCE: Final = {torch.float32: 1e-4}
_COARSE: Final = 3e-2


@dataclass(frozen=True, slots=True)
class Unsharded:
    """How the ranks of trace `of` (A or B) hold a site, by so many rows."""

    of: str
    site: Site
    found: Found
    rows: int


@dataclass(frozen=True, slots=True)
class Sharded:
    """A tensor that lies in parts on all ranks, read whole; sites are made up as `found` says."""

    own: Reads
    others: tuple[Rows, ...]
    found: tuple[Found, ...]

    @property
    def name(self) -> str:
        return self.own.name

    def here(self, rows: Rows) -> Bool:
        """Of which rows of rank 0 every rank kept its part."""
        held = self.own.here(rows)
        for other in self.others:
            at = _same(other, rows)
            held &= (at >= 0) & self.own.here(other)[at]
        return held

    def read(self, rows: Rows) -> list[Tensor]:
        """The whole of each site [n, W]."""
        return [assemble(parts, found) for parts, found in zip(self.parts(rows), self.found, strict=True)]

    def parts(self, rows: Rows) -> list[tuple[Tensor, ...]]:
        """What every rank holds of each site."""
        ranks = [self.own.read(rows), *(self.own.read(other.take(_same(other, rows))) for other in self.others)]
        return list(zip(*ranks, strict=True))


@dataclass(frozen=True, slots=True)
class Apart:
    """The first row, in the order of the text, that a rank has otherwise than rank 0; `rows` of `of` are so."""

    family: str
    rank: int
    rows: int
    of: int
    request: int
    position: int

    def __add__(self, other: "Apart") -> "Apart":
        """Of the rows of both."""
        first = min(self, other, key=lambda one: (one.position < 0, one.position, one.request))
        return replace(first, rows=self.rows + other.rows, of=self.of + other.of)


def unshard(group: Group, traces: tuple[Trace, Trace]) -> tuple[Group, list[Unsharded]]:
    """The group, reading whole tensors on a side whose ranks hold parts of them, and how they do.

    Hashes of parts say nothing of the whole: all its rows are read.
    """
    told: list[Unsharded] = []
    for side, name in enumerate("AB"):
        if group.kinds is None or not (others := _others(group, side, traces[side])):
            continue
        sharded = Sharded(group.kinds[side], others, ())
        rows = (group.pairs.a, group.pairs.b)
        here = np.flatnonzero(sharded.here(rows[side]))[:_SAMPLE]
        if not len(here):
            continue
        there = group.kinds[1 - side].here(rows[1 - side])[here].all() and not _others(
            group, 1 - side, traces[1 - side]
        )
        wholes = group.kinds[1 - side].read(rows[1 - side].take(here)) if there else [None] * len(group.sites)
        found = tuple(
            _infer(parts, whole, traces[side], group)
            for parts, whole in zip(sharded.parts(rows[side].take(here)), wholes, strict=True)
        )
        told += [Unsharded(name, site, one, len(here)) for site, one in zip(group.sites, found, strict=True)]
        if any(one.layout not in (Layout.REPLICATED, Layout.UNKNOWN) for one in found):
            known = tuple(
                one if one.layout is not Layout.UNKNOWN else replace(one, layout=Layout.REPLICATED) for one in found
            )
            kinds = [*group.kinds]
            kinds[side] = replace(sharded, found=known)
            group = replace(group, kinds=(kinds[0], kinds[1]), equal=np.zeros_like(group.equal))
    return group, told


def first_apart(side: Side) -> Iterator[Apart]:
    """Of each family, in the data's order, and of each rank, the first row with other hashes than rank 0's."""
    for family, placed in side.families.items():
        column = "hashes"
        if column not in placed.rows.columns:
            continue
        everyone = side.trace.rows(family, live=True)
        for rank in np.unique(everyone["rank"][everyone["rank"] > 0]).tolist():
            other = everyone.where(rank=rank)
            at = places(columns(placed.rows, *_KEY), columns(other, *_KEY))
            other, at = other.take(at >= 0), at[at >= 0]
            differs = np.flatnonzero(_unequal(placed.rows.take(at)[column], other[column]))
            if len(differs):
                place = placed.place[at[differs]]
                first = differs[np.lexsort([other["request"][differs], np.where(place < 0, 1 << 40, place)])[0]]
                yield Apart(
                    family, rank, len(differs), len(other),
                    int(other["request"][first]), int(placed.place[at[first]]),
                )  # fmt: skip


def _infer(parts: tuple[Tensor, ...], whole: Tensor | None, trace: Trace, group: Group) -> Found:
    """By the whole, unless nothing made of the parts comes near it: then it is another, and shapes have to do."""
    said, tolerance = _declared(trace, group), _TOLERANCE.get(served_dtype(trace), _COARSE)
    found = infer(parts, whole=whole, declared=said, tolerance=tolerance)
    if found.layout is Layout.UNKNOWN and whole is not None:
        return infer(parts, whole=None, declared=said, tolerance=tolerance)
    return found


def _declared(trace: Trace, group: Group) -> Layout:
    """What the writer says of a tensor on its ranks, by `layouts` in its facts; replicated unless it says otherwise."""
    assert group.kinds
    stream = f"{group.sites[0].family}.{group.kinds[0].name}"
    told: list[Any] = [facts.get("layouts") or {} for facts in trace.writers.values()]
    return Layout(next((layouts[stream] for layouts in told if stream in layouts), "replicated"))


def _others(group: Group, side: int, trace: Trace) -> tuple[Rows, ...]:
    """The rows of every other rank that kept tensors of this kind."""
    assert group.kinds
    family = group.sites[0].family.split("/")[-1 if side else 0]
    rows = trace.rows(family, live=True)
    rows = rows.take(rows["rank"] > 0)
    rows = rows.take(group.kinds[side].here(rows)) if len(rows) else rows
    return tuple(rows.where(rank=rank) for rank in np.unique(rows["rank"]).tolist())


def _same(other: Rows, rows: Rows) -> Int:
    """Where another rank has the same rows, -1 where it has not."""
    return places(columns(other, *_KEY), columns(rows, *_KEY))


def _unequal(ours: np.ndarray, theirs: np.ndarray) -> Bool:
    """Rows with other hashes; of ragged ones, those of other lengths, too."""
    if ours.ndim == 2 and ours.shape == theirs.shape:
        return np.asarray((ours != theirs).any(1))
    return np.array([not np.array_equal(*both) for both in zip(ours, theirs, strict=True)], np.bool_)

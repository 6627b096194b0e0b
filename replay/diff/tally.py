"""What a comparison has come to so far, block of requests by block: so much is kept, however many rows there are."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from spectrace.replay.diff.alignment import Alignment, PairedRows
from spectrace.replay.diff.choices import Flips, Likeness, Split, find_flips, find_likeness, find_splits
from spectrace.replay.diff.floor import Floor
from spectrace.replay.diff.handed import handed_otherwise
from spectrace.replay.diff.measure import Distance
from spectrace.replay.diff.moved import Moved, find_moved
from spectrace.replay.diff.placing import Side
from spectrace.replay.diff.shards import Apart, Unsharded, first_apart, unshard
from spectrace.replay.diff.sites import Site, Where
from spectrace.replay.diff.tensors import Group, groups
from spectrace.replay.pairing import Bool
from spectrace.tracer.trace import Trace

__all__ = ["First", "Found", "Pairs", "Tally"]

_WORST: Final = 3


@dataclass(frozen=True, slots=True)
class First:
    """A row: its place in the order; its error, None where it was not read, or what each side has of what is exact."""

    order: tuple[int, ...]
    where: Where
    error: float | None
    values: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """One site. `handed` rows were emitted alike and received otherwise; `worst` are the rows with the largest errors.

    `differs`, `beyond` and `shifted` are the first row whose bits differ, that is beyond the floor, and that is beyond
    the floor's median; `otherwise` the first that was handed over otherwise.
    """

    site: Site
    distance: Distance
    handed: int = 0
    worst: tuple[First, ...] = ()
    differs: First | None = None
    beyond: First | None = None
    shifted: First | None = None
    otherwise: First | None = None

    def __add__(self, other: "Found") -> "Found":
        """Of the rows of both."""
        worst = sorted((*self.worst, *other.worst), key=lambda one: (-(one.error or 0.0), one.order))[:_WORST]
        firsts = {
            name: min((one for one in (getattr(self, name), getattr(other, name)) if one), key=_order, default=None)
            for name in ("differs", "beyond", "shifted", "otherwise")
        }
        distance, handed = self.distance + other.distance, self.handed + other.handed
        return Found(self.site, distance, handed, tuple(worst), **firsts)


@dataclass(slots=True)
class Pairs:
    """How many rows of a family pair, and how many of each side (a, b) do not, by reason."""

    rows: int = 0
    unpaired: tuple[dict[str, int], dict[str, int]] = field(default_factory=lambda: ({}, {}))

    def add(self, rows: int, *unpaired: Mapping[str, int]) -> None:
        self.rows += rows
        for mine, reasons in zip(self.unpaired, unpaired, strict=True):
            for reason, count in reasons.items():
                mine[reason] = mine.get(reason, 0) + count


@dataclass(slots=True)
class Tally:
    """Sums over the blocks of one comparison; `bare` leaves out all but the distances."""

    traces: tuple[Trace, Trace]
    floor: Floor
    bare: bool = False
    texts: int = 0
    found: dict[Site, Found] = field(default_factory=dict)
    pairs: dict[str, Pairs] = field(default_factory=dict)
    moved: dict[tuple[Site, str], Moved] = field(default_factory=dict)
    unsharded: dict[tuple[str, Site], Unsharded] = field(default_factory=dict)
    apart: tuple[dict[tuple[str, int], Apart], dict[tuple[str, int], Apart]] = field(default_factory=lambda: ({}, {}))
    flips: dict[int | None, Flips] = field(default_factory=dict)
    likeness: dict[int | None, Likeness] = field(default_factory=dict)
    splits: list[Split] = field(default_factory=list)

    def add(self, sides: tuple[Side, Side], alignment: Alignment, *, drawn: bool) -> None:
        """One block of requests, aligned; `drawn` says that drafts were, so that theirs are no choices."""
        for name, paired in alignment.families.items():
            self.pairs.setdefault(name, Pairs()).add(len(paired), *paired.unpaired)
        for given in groups(alignment, self.traces):
            group, told = unshard(given, self.traces)
            for one in told:
                if one.found.contradicts or (one.of, one.site) not in self.unsharded:
                    self.unsharded[one.of, one.site] = one
            self._compare(group, sides)
        if not self.bare:
            for side, known in zip(sides, self.apart, strict=True):
                for apart in first_apart(side):
                    key = apart.family, apart.rank
                    known[key] = known[key] + apart if key in known else apart
            self._choices(alignment, drawn=drawn)
        self.texts += len(alignment.texts)

    def _compare(self, group: Group, sides: tuple[Side, Side]) -> None:
        handed = handed_otherwise(group, *sides)
        suspicious = False
        for at, (site, measure) in enumerate(zip(group.sites, group.measure(self.traces), strict=True)):
            one = self._seen(group.pairs, site, measure.distance(), measure.errors, handed[:, at])
            suspicious |= bool(one.beyond or one.shifted or one.otherwise)
            self.found[site] = self.found[site] + one if site in self.found else one
        if suspicious and not self.bare:
            for moved in find_moved(group, *sides):
                known = self.moved.get((moved.site, moved.says))
                self.moved[moved.site, moved.says] = known + moved if known else moved

    def _seen(self, pairs: PairedRows, site: Site, distance: Distance, errors: np.ndarray, handed: Bool) -> Found:
        """One site of one block: its first rows of each kind, and its worst."""
        differs = ~(errors == 0)
        if not differs.any():
            return Found(site, distance)
        noise = self.floor.of(site)
        largest, median = noise.limits if noise else (0.0, 0.0)
        which = np.argsort(-np.nan_to_num(errors, nan=-1.0), kind="stable")[:_WORST]
        read = [at for at in which.tolist() if errors[at] > 0 and not site.exact]
        return Found(
            site,
            distance,
            int(handed.sum()),
            tuple(self._row(pairs, site, errors, at) for at in read),
            differs=self._first(pairs, site, errors, differs),
            beyond=self._first(pairs, site, errors, errors > largest),
            shifted=self._first(pairs, site, errors, errors > median),
            otherwise=self._first(pairs, site, errors, handed),
        )

    def _first(self, pairs: PairedRows, site: Site, errors: np.ndarray, which: Bool) -> First | None:
        rows = np.flatnonzero(which)
        if not len(rows):
            return None
        return self._row(pairs, site, errors, int(rows[np.lexsort([pairs.text[rows], pairs.place[rows]])[0]]))

    def _row(self, pairs: PairedRows, site: Site, errors: np.ndarray, at: int) -> First:
        order = (int(pairs.place[at]), *site.order, self.texts + int(pairs.text[at]))
        if site.exact:
            column = "token" if site.what == "answer" else site.what
            return First(order, pairs.where(at), None, (int(pairs.a[column][at]), int(pairs.b[column][at])))
        return First(order, pairs.where(at), None if np.isnan(errors[at]) else float(errors[at]))

    def _choices(self, alignment: Alignment, *, drawn: bool) -> None:
        """Tokens chosen otherwise, where both sides take the best: of what was drawn that says nothing."""
        self.splits += find_splits(alignment, self.floor.of(Site("emitted", "logits")))
        for depth, pairs in _by_depth(alignment):
            site = Site("emitted", "logits") if depth is None else Site("drafted", "logits", depth)
            if depth is None or not drawn:
                warm = [max(pair.text_a.temperature, pair.text_b.temperature) for pair in alignment.texts]
                greedy = np.array(warm)[pairs.text] == 0 if depth is None else None
                flips = find_flips(pairs, depth, self.floor.of(site), greedy)
                self.flips[depth] = self.flips[depth] + flips if depth in self.flips else flips
            if like := find_likeness(pairs, depth):
                self.likeness[depth] = self.likeness[depth] + like if depth in self.likeness else like


def _by_depth(alignment: Alignment) -> Iterator[tuple[int | None, PairedRows]]:
    """Rows that chose a token: the target's (None), and the draft's depth by depth."""
    if emitted := alignment.families.get("emitted"):
        yield None, emitted
    if drafted := alignment.families.get("drafted"):
        for depth in np.unique(drafted.a["depth"]).tolist():
            yield depth, drafted.take(drafted.a["depth"] == depth)


def _order(one: First) -> tuple[int, ...]:
    return one.order

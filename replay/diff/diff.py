"""Two traces side by side: planned, compared, held against a floor, and what it comes to.

Settings come first, then alignment, then hashes, and tensors only where hashes differ. A comparison of nothing is an
error, and a floor of zero is none.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

import numpy as np
import torch

from spectrace.replay.compare import served_dtype
from spectrace.replay.diff.alignment import Alignment, PairedRows, align
from spectrace.replay.diff.choices import (
    Flips,
    Likeness,
    Split,
    find_flips,
    find_likeness,
    find_splits,
)
from spectrace.replay.diff.floor import Floor, Noise, measured, tabled
from spectrace.replay.diff.handed import handed_otherwise
from spectrace.replay.diff.measure import Distance
from spectrace.replay.diff.moved import Moved, find_moved
from spectrace.replay.diff.placing import Side, read_side
from spectrace.replay.diff.settings import Setting, settings
from spectrace.replay.diff.shards import Apart, Unsharded, first_apart, unshard
from spectrace.replay.diff.sites import Site
from spectrace.replay.diff.tensors import Group, groups, slots_of
from spectrace.replay.expected import drafts_were_drawn
from spectrace.replay.finding import Finding
from spectrace.replay.handoff import hand_off
from spectrace.replay.pairing import Bool
from spectrace.tracer.acceptance import Acceptance, acceptance_of_rows
from spectrace.tracer.errors import UserError
from spectrace.tracer.trace import Trace

__all__ = ["Compared", "Decisions", "Diff", "FirstDivergence", "Verdict", "diff"]

_FEW: Final = 0.05
_CHOICES: Final = ("target_token", "draft_token", "answer")
_OUTCOME: Final = "accepted"
_BENIGN: Final = 100.0
"""How many times the table's floor a benign repeat may be apart from A."""


class Verdict(StrEnum):
    """Of a site, and of everything: bit-equal, no more than rounding does, or more; `UNREAD` differs by hash only."""

    EQUAL = "equal"
    WITHIN = "within the floor"
    DIFFERENT = "different"
    UNREAD = "different by hash, not recorded"


@dataclass(frozen=True, slots=True)
class Compared:
    """A site: its distance, the floor there, how many times that it is, and the verdict.

    `handed` rows differ though both targets emitted the same bits for them: these count however small they are.
    """

    site: Site
    distance: Distance
    noise: Noise | None
    above: float | None
    verdict: Verdict
    handed: int = 0


@dataclass(frozen=True, slots=True)
class FirstDivergence:
    """The first row, in the order of the text and then of the data's flow, that differs; by `a` and `b` as there.

    `beyond` says whether it is beyond the floor: where nothing is, it is the first row whose bits differ.
    """

    site: Site
    position: int
    request: tuple[int, int]
    pass_: tuple[int, int]
    node: tuple[int, int]
    error: float | None
    beyond: bool


@dataclass(frozen=True, slots=True)
class Decisions:
    """What the differences come to. Acceptance is over the requests that pair."""

    splits: tuple[Split, ...]
    flips: tuple[Flips, ...]
    likeness: tuple[Likeness, ...]
    acceptance: tuple[Acceptance, Acceptance] | None

    @property
    def tokens_lost(self) -> float | None:
        """Accepted tokens a round that A has and B has not."""
        lengths = [one.acceptance_length for one in self.acceptance or ()]
        return lengths[0] - lengths[1] if lengths and None not in lengths else None  # type: ignore[operator]


@dataclass(frozen=True, slots=True)
class Diff:
    """Everything that a comparison found.

    `hand_off` is what each trace (a, b) shows of its own hand-off by itself, where what drafts received differs.
    `unsharded` says how ranks hold tensors that several of them kept, `apart` where the ranks of each trace (a, b)
    first disagree; `lacking` names what could not be compared, and why.
    """

    a: Trace
    b: Trace
    settings: tuple[Setting, ...]
    alignment: Alignment
    floor: str
    compared: tuple[Compared, ...]
    first: FirstDivergence | None
    moved: tuple[Moved, ...]
    hand_off: tuple[tuple[Finding, ...], tuple[Finding, ...]]
    unsharded: tuple[Unsharded, ...]
    apart: tuple[tuple[Apart, ...], tuple[Apart, ...]]
    decisions: Decisions
    lacking: tuple[str, ...]
    verdict: Verdict

    @property
    def bytes_read(self) -> tuple[int, int]:
        return self.a.bytes_read, self.b.bytes_read


def diff(a: Trace, b: Trace, benign: Sequence[Trace] = ()) -> Diff:
    """Compare two traces of the same prompts; `benign` are repeats of A that do not matter, and give the floor.

    Raises UserError when nothing can be compared or the repeats give no floor.
    """
    sides = read_side(a), read_side(b)
    alignment = align(*sides)
    found, unsharded = _measure(alignment, (a, b))
    if not any(distance.rows for _, distance in found.values()):
        raise UserError(f"{a.folder} and {b.folder}: their texts pair, but no row of them has anything to compare")
    floor = _floor(sides[0], found, (a, b), benign)
    handed = {site: rows for site, rows in _handed(found, sides) if rows.any()}
    compared = _judged(found, floor, handed)
    flips = tuple(_flips(alignment, floor, (a, b)))
    compared = _choices_judged(compared, flips)
    beyond = [one.site for one in compared if one.verdict is Verdict.DIFFERENT]
    moved = [one for group, _ in found.values() if set(group.sites) & set(beyond) for one in find_moved(group, *sides)]
    return Diff(
        a=a,
        b=b,
        settings=tuple(settings(a, b)),
        alignment=alignment,
        floor=floor.origin,
        compared=compared,
        first=_first(compared, found, handed),
        moved=tuple({one.says: one for one in reversed(moved) if one.site in beyond}.values())[::-1],
        hand_off=(_own_hand_off(a, beyond), _own_hand_off(b, beyond)),
        unsharded=tuple(unsharded),
        apart=(tuple(first_apart(sides[0])), tuple(first_apart(sides[1]))),
        decisions=_decisions(alignment, (a, b), flips, floor),
        lacking=tuple(_lacking(sides, alignment, compared)),
        verdict=_verdict(compared),
    )


def _measure(
    alignment: Alignment, traces: tuple[Trace, Trace]
) -> tuple[dict[Site, tuple[Group, Distance]], list[Unsharded]]:
    """Every site's group and distance, in the data's order, and how ranks hold what was read from several."""
    found, unsharded = {}, []
    for given in groups(alignment, traces):
        group, told = unshard(given, traces)
        unsharded += told
        for site, measure in zip(group.sites, group.measure(traces), strict=True):
            found[site] = group, measure.distance()
    return dict(sorted(found.items(), key=lambda one: one[0].order)), unsharded


def _floor(
    side: Side, found: Mapping[Site, tuple[Group, Distance]], traces: tuple[Trace, Trace], benign: Sequence[Trace]
) -> Floor:
    """By repeats where there are any, else, and for sites that they lack, by the table."""
    dtype = max((served_dtype(trace) for trace in traces), key=lambda one: torch.finfo(one).eps)
    table = tabled(found, dtype, _held(found, traces))
    if not benign:
        return table
    repeats = []
    for trace in benign:
        one, _ = _measure(align(side, read_side(trace)), (side.trace, trace))
        repeats.append({site: distance for site, (_, distance) in one.items()})
        _check_benign(trace, repeats[-1], table)
    own = measured(repeats, (str(trace.folder) for trace in benign), dtype)
    return Floor(own.origin, {**table.sites, **own.sites})


def _check_benign(trace: Trace, repeat: Mapping[Site, Distance], table: Floor) -> None:
    """A repeat that was fed something else, or is far beyond what rounding does, is no floor; raises UserError."""
    for site, distance in repeat.items():
        noise = table.of(site)
        above = noise.above(distance) if noise else 0.0
        fed = site.exact and site.family == "received" and not distance.bit_equal
        if fed or above > _BENIGN:
            how = f"{above:.0f} times what rounding does" if above else f"in {distance.rows - distance.equal} rows"
            raise UserError(
                f"--benign {trace.folder}: it differs from A at {site}, {how}, so it is no benign repeat; give a run "
                "of A's configuration in another batch, in other chunks or on other threads"
            )


def _held(found: Mapping[Site, object], traces: tuple[Trace, Trace]) -> dict[Site, int]:
    """The boundary that a site is, by the engines' own accounts."""
    held = {site: site.slot for site in found if site.what == "boundary" and site.slot is not None}
    wiring = slots_of(traces[0]) or slots_of(traces[1])
    slots = {site: site.slot for site in found if site.what == "slot" and site.slot is not None}
    return held | {site: wiring[slot] for site, slot in slots.items() if slot < len(wiring)}


def _handed(found: Mapping[Site, tuple[Group, Distance]], sides: tuple[Side, Side]) -> Iterator[tuple[Site, Bool]]:
    """Which pairs [N] of each site were emitted alike and received otherwise."""
    for group in {id(group): group for group, _ in found.values()}.values():
        yield from zip(group.sites, handed_otherwise(group, *sides).T, strict=True)


def _judged(
    found: Mapping[Site, tuple[Group, Distance]], floor: Floor, handed: Mapping[Site, Bool]
) -> tuple[Compared, ...]:
    judged = []
    for site, (_, distance) in found.items():
        noise, otherwise = floor.of(site), int(handed[site].sum()) if site in handed else 0
        above = noise.above(distance) if noise and distance.max_error else None
        if distance.bit_equal:
            verdict = Verdict.EQUAL
        elif site.exact or otherwise or (above is not None and noise is not None and above > noise.factor):
            verdict = Verdict.DIFFERENT
        else:
            verdict = Verdict.UNREAD if distance.unread else Verdict.WITHIN
        judged.append(Compared(site, distance, noise, above, verdict, otherwise))
    return tuple(judged)


def _flips(alignment: Alignment, floor: Floor, traces: tuple[Trace, Trace]) -> list[Flips]:
    """Tokens chosen otherwise, where both sides take the best; of what was drawn that says nothing."""
    found = []
    if emitted := alignment.families.get("emitted"):
        warm = [max(pair.text_a.temperature, pair.text_b.temperature) for pair in alignment.texts]
        greedy = np.array(warm)[emitted.text] == 0
        found.append(find_flips(emitted, None, floor.of(Site("emitted", "logits")), greedy))
    if not any(drafts_were_drawn(trace) for trace in traces):
        for depth, pairs in _by_depth(alignment):
            found.append(find_flips(pairs, depth, floor.of(Site("drafted", "logits", depth))))
    return found


def _by_depth(alignment: Alignment) -> list[tuple[int, PairedRows]]:
    drafted = alignment.families.get("drafted")
    depths = np.unique(drafted.a["depth"]).tolist() if drafted else []
    return [(depth, drafted.take(drafted.a["depth"] == depth)) for depth in depths] if drafted else []


def _choices_judged(compared: Sequence[Compared], flips: Sequence[Flips]) -> tuple[Compared, ...]:
    """Tokens chosen otherwise are no difference of their own where they were ties, or few and nothing else differs.

    What verification accepted is none where all that led to it is not.
    """
    differ = {one.site.what for one in compared if one.verdict is Verdict.DIFFERENT}
    few = _FEW if not differ - {*_CHOICES, _OUTCOME} else 0.0
    excused = {one.depth for one in flips if one.flips - one.ties - one.open == 0 and one.open <= few * one.rows}
    drawn = {one.site.depth for one in compared if one.site.family == "drafted"} - {one.depth for one in flips}
    settled = tuple(
        _as(one, Verdict.WITHIN)
        if one.site.what in _CHOICES and (None if one.site.family == "emitted" else one.site.depth) in excused | drawn
        else one
        for one in compared
    )
    if any(one.verdict is Verdict.DIFFERENT for one in settled if one.site.what != _OUTCOME):
        return settled
    return tuple(_as(one, Verdict.WITHIN) if one.site.what == _OUTCOME else one for one in settled)


def _as(one: Compared, verdict: Verdict) -> Compared:
    """With this verdict, if it was a difference."""
    return replace(one, verdict=verdict) if one.verdict is Verdict.DIFFERENT else one


def _first(
    compared: Sequence[Compared], found: Mapping[Site, tuple[Group, Distance]], handed: Mapping[Site, Bool]
) -> FirstDivergence | None:
    """Among rows beyond the floor, else among rows whose bits differ."""
    beyond = [one for one in compared if one.verdict is Verdict.DIFFERENT]
    best: tuple[tuple[int, ...], FirstDivergence] | None = None
    for one in beyond or compared:
        group, distance = found[one.site]
        differs = np.flatnonzero(_counting(one, handed.get(one.site)) if beyond else ~(distance.errors == 0))
        if not len(differs):
            continue
        pairs, errors = group.pairs, distance.errors
        at = differs[np.lexsort([pairs.text[differs], pairs.place[differs]])[0]]
        key = (int(pairs.place[at]), *one.site.order, int(pairs.text[at]))
        if best is None or key < best[0]:
            best = key, _divergence(one.site, pairs.take(np.array([at])), float(errors[at]), bool(beyond))
    return best[1] if best else None


def _counting(one: Compared, handed: Bool | None) -> Bool:
    """Which rows of a site that differs count: those beyond the floor, if it is, and those handed over otherwise."""
    errors, noise = one.distance.errors, one.noise
    if noise is None:
        return np.asarray(errors > 0)
    beyond = (errors > noise.row_limit(one.distance)) & ((one.above or 0.0) > noise.factor)
    return np.asarray(beyond if handed is None else beyond | handed)


def _divergence(site: Site, pairs: PairedRows, error: float, beyond: bool) -> FirstDivergence:
    def both(name: str) -> tuple[int, int]:
        return int(pairs.a[name][0]), int(pairs.b[name][0])

    read = None if np.isnan(error) or site.exact else error
    return FirstDivergence(site, int(pairs.place[0]), both("request"), both("pass"), both("node"), read, beyond)


def _own_hand_off(trace: Trace, beyond: Sequence[Site]) -> tuple[Finding, ...]:
    """Whether this side's draft received what its target emitted, where the drafts received other things."""
    return hand_off(trace).findings if any(site.family == "received" for site in beyond) else ()


def _decisions(alignment: Alignment, traces: tuple[Trace, Trace], flips: tuple[Flips, ...], floor: Floor) -> Decisions:
    likeness = [find_likeness(alignment.families["emitted"], None)] if "emitted" in alignment.families else []
    likeness += [find_likeness(pairs, depth) for depth, pairs in _by_depth(alignment)]
    numbers = [pair.a for pair in alignment.texts], [pair.b for pair in alignment.texts]
    verified = [trace.rows("verified", request=of) for trace, of in zip(traces, numbers, strict=True)]
    acceptance = None
    if all(len(rows) for rows in verified):
        acceptance = acceptance_of_rows(verified[0]), acceptance_of_rows(verified[1])
    splits = find_splits(alignment, floor.of(Site("emitted", "logits")))
    return Decisions(tuple(splits), flips, tuple(one for one in likeness if one), acceptance)


def _lacking(sides: tuple[Side, Side], alignment: Alignment, compared: Sequence[Compared]) -> list[str]:
    """What one trace has and no comparison came to, and rows that differ by hash with no tensor to see how far."""
    held = [set(side.families) | ({"drafted"} if len(side.trace.rows("drafted")) else set()) for side in sides]
    crossed = {name for family in alignment.families for name in family.split("/") if "/" in family}
    lacking = [f"{name}: only in {'A' if name in held[0] else 'B'}" for name in sorted((held[0] ^ held[1]) - crossed)]
    sites = {one.site.family for one in compared}
    for name, pairs in alignment.families.items():
        if not len(pairs):
            lacking.append(f"{name}: no rows pair")
        elif name not in sites:
            lacking.append(f"{name}: rows pair, but nothing of them is of one shape in both")
        elif name in ("emitted", "received") and not any(
            one.site.family == name and one.site.what == "slot" for one in compared
        ):
            lacking.append(f"{name} slots: their numbers are not the same in both")
    unread = [one for one in compared if one.distance.unread]
    lacking += [
        f"{one.site}: {one.distance.unread} rows differ by hash, and a tensor was not recorded" for one in unread
    ]
    return lacking


def _verdict(compared: Sequence[Compared]) -> Verdict:
    found = {one.verdict for one in compared}
    if Verdict.DIFFERENT in found:
        return Verdict.DIFFERENT
    read = [one for one in compared if one.distance.max_error is not None and not one.site.exact]
    if Verdict.UNREAD in found and not any(one.verdict is Verdict.WITHIN for one in read):
        return Verdict.UNREAD
    return Verdict.EQUAL if found == {Verdict.EQUAL} else Verdict.WITHIN

"""Two traces side by side: planned, compared, held against a floor, and what it comes to.

Settings come first, then alignment, then hashes, and tensors only where hashes differ; requests block by block, so that
memory does not grow with the traces. A comparison of nothing is an error, and a floor of zero is none.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

import torch

from spectrace.replay.compare import served_dtype
from spectrace.replay.decisions import decisions
from spectrace.replay.diff.alignment import Alignment, align, no_common_text
from spectrace.replay.diff.choices import Flips, Likeness, Split
from spectrace.replay.diff.floor import Floor, Noise, Table, measured
from spectrace.replay.diff.measure import Distance
from spectrace.replay.diff.moved import Moved
from spectrace.replay.diff.placing import FAMILIES, Side, held_families, read_side
from spectrace.replay.diff.settings import Setting, settings
from spectrace.replay.diff.shards import Apart, Unsharded
from spectrace.replay.diff.sites import Site, Where
from spectrace.replay.diff.tally import First, Found, Pairs, Tally
from spectrace.replay.diff.tensors import boundaries_of, slots_of
from spectrace.replay.diff.texts import TextPair, pair_texts, texts_so_far
from spectrace.replay.expected import drafts_were_drawn
from spectrace.replay.finding import Finding
from spectrace.replay.handoff import hand_off
from spectrace.tracer.acceptance import Acceptance, acceptance_of_rows
from spectrace.tracer.errors import UserError
from spectrace.tracer.trace import Trace

__all__ = [
    "Compared", "Decisions", "Diff", "FirstDivergence", "Plan", "Verdict", "diff", "plan", "rows_that_count",
]  # fmt: skip

_FEW: Final = 0.05
_CHOICES: Final = ("target_token", "draft_token", "answer")
_OUTCOME: Final = "accepted"
_BLOCK_TOKENS: Final = 1 << 15


class Verdict(StrEnum):
    """Of a site, and of everything: bit-equal, no more than rounding does, or more; `UNREAD` differs by hash only.

    `PART` is of everything: nothing that was compared differs, but a slot that was served was compared with nothing.
    """

    EQUAL = "equal"
    WITHIN = "within the floor"
    DIFFERENT = "different"
    UNREAD = "different by hash, not recorded"
    PART = "within the floor as far as compared, but not all slots were"


@dataclass(frozen=True, slots=True)
class Plan:
    """Which requests pair, which of each side (a, b) do not, and how many rows of each family pair or do not."""

    texts: tuple[TextPair, ...]
    alone: tuple[tuple[int, ...], tuple[int, ...]]
    families: Mapping[str, Pairs]

    def __str__(self) -> str:
        lines = [f"{len(self.texts)} requests pair; {len(self.alone[0])} only in A, {len(self.alone[1])} only in B"]
        for name, pairs in self.families.items():
            lines.append(f"{name}: {pairs.rows} rows pair")
            for side, reasons in zip("AB", pairs.unpaired, strict=True):
                lines += [f"  {count} only in {side}: {reason}" for reason, count in reasons.items()]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Compared:
    """A site: its distance, the floor there, how many times that it is, and the verdict.

    `handed` rows differ though both targets emitted the same bits for them: these count however small they are.
    `worst` are the rows with the largest errors.
    """

    site: Site
    distance: Distance
    noise: Noise | None
    above: float | None
    verdict: Verdict
    handed: int
    worst: tuple[First, ...]


@dataclass(frozen=True, slots=True)
class FirstDivergence:
    """The first row, in the order of the text and then of the data's flow, that differs.

    `beyond` says whether it is beyond the floor: where nothing is, it is the first row whose bits differ.
    """

    site: Site
    where: Where
    error: float | None
    values: tuple[int, int] | None
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

    `earlier` is a row before the first that differs by its hash, and how far is not known. `hand_off` is what each
    trace (a, b) shows of its own hand-off by itself, where what drafts received differs, and `verification` of its own
    verification, where what was accepted does. `unsharded` says how ranks hold tensors that several of them kept,
    `apart` where the ranks of each trace first disagree; `lacking` names what could not be compared, and why.
    """

    a: Trace
    b: Trace
    settings: tuple[Setting, ...]
    plan: Plan
    floor: str
    compared: tuple[Compared, ...]
    first: FirstDivergence | None
    earlier: FirstDivergence | None
    moved: tuple[Moved, ...]
    hand_off: tuple[tuple[Finding, ...], tuple[Finding, ...]]
    verification: tuple[tuple[Finding, ...], tuple[Finding, ...]]
    unsharded: tuple[Unsharded, ...]
    apart: tuple[tuple[Apart, ...], tuple[Apart, ...]]
    decisions: Decisions
    lacking: tuple[str, ...]
    verdict: Verdict

    def beginning(self) -> Alignment:
        """The first requests that pair, aligned."""
        block = next(_blocks(self.plan.texts, _BLOCK_TOKENS))
        return align(*_sides((self.a, self.b), block, (held_families(self.a), held_families(self.b))), block)

    @property
    def bytes_read(self) -> tuple[int, int]:
        return self.a.bytes_read, self.b.bytes_read


def diff(a: Trace, b: Trace, benign: Sequence[Trace] = (), *, block_tokens: int = _BLOCK_TOKENS) -> Diff:
    """Compare two traces of the same prompts; `benign` are repeats of A that do not matter, and give the floor.

    Requests are compared in blocks of about so many tokens. Raises UserError when nothing can be compared or the
    repeats give no floor.
    """
    texts = _pairs(a, b)
    floor = _floor((a, b), benign, block_tokens)
    tally = _tally((a, b), texts, floor, block_tokens)
    if not any(one.distance.rows for one in tally.found.values()):
        raise UserError(_nothing((a, b), tally))
    found = {site: tally.found[site] for site in sorted(tally.found, key=lambda site: site.order)}
    judged = [_judged(one, floor) for one in found.values()]
    accepted = any(one.site.what == _OUTCOME and one.verdict is Verdict.DIFFERENT for one in judged)
    verification = (decisions(a).findings, decisions(b).findings) if accepted else ((), ())
    compared = _choices_judged(judged, tally.flips, disobeyed=any(not one.doubt for of in verification for one in of))
    beyond = {one.site for one in compared if one.verdict is Verdict.DIFFERENT}
    moved = {one.says: one for one in reversed(tally.moved.values()) if one.site in beyond}
    first = _first(compared, found)
    received = any(site.family == "received" for site in beyond)
    return Diff(
        a=a,
        b=b,
        settings=tuple(settings(a, b)),
        plan=_plan((a, b), texts, tally.pairs),
        floor=floor.origin,
        compared=compared,
        first=first,
        earlier=_earlier(compared, found, first),
        moved=tuple(moved.values())[::-1],
        hand_off=(hand_off(a).findings, hand_off(b).findings) if received else ((), ()),
        verification=verification,
        unsharded=tuple(tally.unsharded.values()),
        apart=(tuple(tally.apart[0].values()), tuple(tally.apart[1].values())),
        decisions=_decisions((a, b), texts, tally),
        lacking=tuple(_lacking((a, b), tally, compared)),
        verdict=_verdict(compared, lacks_slots=any(True for _ in _uncovered((a, b), tally))),
    )


def plan(a: Trace, b: Trace, *, block_tokens: int = _BLOCK_TOKENS) -> Plan:
    """Which rows would be compared, by narrow files alone; raises UserError where no texts pair."""
    texts, pairs, families = _pairs(a, b), dict[str, Pairs](), (held_families(a), held_families(b))
    for block in _blocks(texts, block_tokens):
        alignment = align(*_sides((a, b), block, families), block)
        for name, paired in alignment.families.items():
            pairs.setdefault(name, Pairs()).add(len(paired), *paired.unpaired)
    return _plan((a, b), texts, pairs)


def _nothing(traces: tuple[Trace, Trace], tally: Tally) -> str:
    """Why no row has anything to compare, as far as the manifests tell."""
    a, b = traces
    said = f"{a.folder} and {b.folder}: their texts pair, but no row of them has anything to compare"
    crossed = [name for name in tally.pairs if "/" in name]
    engine = traces[0 if crossed and crossed[0].endswith("/reference") else 1]
    if crossed and not slots_of(engine):
        return f"{said}: {engine.folder} does not say which boundaries its slots hold; import it with --ids"
    return f"{said}: no family with slots of one number, or boundaries of one name, is in both"


def _pairs(a: Trace, b: Trace) -> list[TextPair]:
    """The requests of both that pair; raises UserError where none does."""
    texts = texts_so_far(a), texts_so_far(b)
    pairs = pair_texts(*texts)
    if not pairs:
        raise UserError(no_common_text((a, texts[0]), (b, texts[1])))
    return pairs


def _blocks(texts: Sequence[TextPair], tokens: int) -> Iterator[list[TextPair]]:
    block, held = list[TextPair](), 0
    for pair in texts:
        if block and held > tokens:
            yield block
            block, held = [], 0
        block.append(pair)
        held += max(len(pair.text_a.tokens), len(pair.text_b.tokens))
    yield block


def _sides(
    traces: tuple[Trace, Trace], block: Sequence[TextPair], families: tuple[Sequence[str], Sequence[str]]
) -> tuple[Side, Side]:
    """Some requests of each trace, with the rows of the families that it has."""
    a, b = (trace.only([getattr(pair, name) for pair in block]) for trace, name in zip(traces, "ab", strict=True))
    return read_side(a, families[0]), read_side(b, families[1])


def _tally(
    traces: tuple[Trace, Trace], texts: Sequence[TextPair], floor: Floor, block_tokens: int, *, bare: bool = False
) -> Tally:
    tally, drawn = Tally(traces, floor, bare), any(drafts_were_drawn(trace) for trace in traces)
    families = held_families(traces[0]), held_families(traces[1])
    for block in _blocks(texts, block_tokens):
        sides = _sides(traces, block, families)
        tally.add(sides, align(*sides, block), drawn=drawn)
    return tally


def _plan(traces: tuple[Trace, Trace], texts: Sequence[TextPair], pairs: Mapping[str, Pairs]) -> Plan:
    """What the blocks came to, and the rows of requests that are in none of them."""
    for name in (name for name in FAMILIES if name in pairs):
        rest = []
        for trace, unpaired in zip(traces, pairs[name].unpaired, strict=True):
            rows = trace.rows(name)
            alone = int(((rows["rank"] == 0) & rows["live"]).sum()) - pairs[name].rows - sum(unpaired.values())
            rest.append({"its request has no partner": alone} if alone else {})
        pairs[name].add(0, *rest)
    numbers = {pair.a for pair in texts}, {pair.b for pair in texts}
    alone_a, alone_b = (
        tuple(sorted(texts_so_far(trace).keys() - known)) for trace, known in zip(traces, numbers, strict=True)
    )
    return Plan(tuple(texts), (alone_a, alone_b), pairs)


def _floor(traces: tuple[Trace, Trace], benign: Sequence[Trace], block_tokens: int) -> Floor:
    """By repeats of A where there are any, else by the table for the coarser of both precisions."""
    dtype = max((served_dtype(trace) for trace in traces), key=lambda one: torch.finfo(one).eps)
    table = Table(dtype, (slots_of(traces[0]), slots_of(traces[1])))
    if not benign:
        return table
    repeats = []
    for trace in benign:
        tally = _tally((traces[0], trace), _pairs(traces[0], trace), table, block_tokens, bare=True)
        repeats.append({site: one.distance for site, one in tally.found.items()})
    return measured(repeats, [str(trace.folder) for trace in benign], table)


def _judged(one: Found, floor: Floor) -> Compared:
    noise, distance = floor.of(one.site), one.distance
    above = noise.above(distance) if noise and distance.max_error else None
    if distance.bit_equal:
        verdict = Verdict.EQUAL
    elif one.site.exact or one.handed or (above is not None and noise is not None and above > noise.factor):
        verdict = Verdict.DIFFERENT
    else:
        verdict = Verdict.UNREAD if distance.unread else Verdict.WITHIN
    return Compared(one.site, distance, noise, above, verdict, one.handed, one.worst)


def _choices_judged(
    compared: Sequence[Compared], flips: Mapping[int | None, Flips], *, disobeyed: bool
) -> tuple[Compared, ...]:
    """Tokens chosen otherwise are no difference of their own where they were ties, or few and nothing else differs.

    What verification accepted is none where all that led to it is not, unless it `disobeyed` that.
    """
    differ = {one.site.what for one in compared if one.verdict is Verdict.DIFFERENT}
    few = _FEW if not differ - {*_CHOICES, _OUTCOME} else 0.0
    of = {one.site: flips.get(None if one.site.family == "emitted" else one.site.depth) for one in compared}
    excused = {
        site
        for site, one in of.items()
        if site.what in _CHOICES
        and (one is None or (one.flips == one.ties + one.open and one.open <= few * one.rows))  # None: drawn
    }
    settled = tuple(_as(one, Verdict.WITHIN) if one.site in excused else one for one in compared)
    if disobeyed or any(one.verdict is Verdict.DIFFERENT for one in settled if one.site.what != _OUTCOME):
        return settled
    return tuple(_as(one, Verdict.WITHIN) if one.site.what == _OUTCOME else one for one in settled)


def _as(one: Compared, verdict: Verdict) -> Compared:
    """With this verdict, if it was a difference."""
    return replace(one, verdict=verdict) if one.verdict is Verdict.DIFFERENT else one


def _first(compared: Sequence[Compared], found: Mapping[Site, Found]) -> FirstDivergence | None:
    """Among rows that count, of sites that differ; where none does, among rows whose bits differ."""
    beyond = [one for one in compared if one.verdict is Verdict.DIFFERENT]
    firsts = [
        (one.site, first) for one in beyond or compared for first in rows_that_count(one, found[one.site], bool(beyond))
    ]
    if not firsts:
        return None
    site, first = min(firsts, key=lambda one: one[1].order)
    return FirstDivergence(site, first.where, first.error, first.values, bool(beyond))


def _earlier(
    compared: Sequence[Compared], found: Mapping[Site, Found], first: FirstDivergence | None
) -> FirstDivergence | None:
    """The first row that differs by its hash alone, if it stands before the first that counts."""
    unread = [(one.site, row) for one in compared if one.verdict is Verdict.UNREAD and (row := found[one.site].differs)]
    if not (unread and first and first.beyond):
        return None
    site, row = min(unread, key=lambda one: one[1].order)
    before = (row.where.position, site.order) < (first.where.position, first.site.order)
    return FirstDivergence(site, row.where, None, None, False) if before else None


def rows_that_count(one: Compared, found: Found, beyond: bool) -> Iterator[First]:
    """The first row of a site of each kind that counts: all rows of one that differs by its median are shifted."""
    if not beyond:
        kinds = [found.differs]
    elif one.noise is None:
        kinds = [found.beyond]
    else:
        shifted = one.noise.shift(one.distance) > one.noise.factor
        kinds = [found.otherwise, found.shifted if shifted else found.beyond]
    yield from (first for first in kinds if first)


def _decisions(traces: tuple[Trace, Trace], texts: Sequence[TextPair], tally: Tally) -> Decisions:
    numbers = [pair.a for pair in texts], [pair.b for pair in texts]
    verified = [trace.only(of).rows("verified") for trace, of in zip(traces, numbers, strict=True)]
    acceptance = None
    if all(len(rows) for rows in verified):
        acceptance = acceptance_of_rows(verified[0]), acceptance_of_rows(verified[1])
    flips = tuple(one for one in tally.flips.values() if one.rows)
    return Decisions(tuple(tally.splits), flips, tuple(tally.likeness.values()), acceptance)


def _lacking(traces: tuple[Trace, Trace], tally: Tally, compared: Sequence[Compared]) -> Iterator[str]:
    """What one trace has and no comparison came to, and rows that differ by hash with no tensor to see how far."""
    held = [set(held_families(trace)) for trace in traces]
    crossed = {name for family in tally.pairs for name in family.split("/") if "/" in family}
    for name in sorted((held[0] ^ held[1]) - crossed):
        yield f"{name}: only in {'A' if name in held[0] else 'B'}"
    for name, pairs in tally.pairs.items():
        whats = {one.site.what for one in compared if one.site.family == name}
        if not pairs.rows:
            yield f"{name}: no rows pair"
        elif not whats:
            yield f"{name}: rows pair, but nothing of them is of one shape in both"
        elif name in ("emitted", "received") and "slot" not in whats:
            yield f"{name} slots: their numbers are not the same in both"
    yield from _uncovered(traces, tally)
    boundaries = [set(boundaries_of(trace)) for trace in traces]
    if "reference" in tally.pairs:
        for boundary in sorted(boundaries[0] ^ boundaries[1]):
            yield f"boundary {boundary}: only in {'A' if boundary in boundaries[0] else 'B'}"
    for one in compared:
        if one.distance.unread:
            yield f"{one.site}: {one.distance.unread} rows differ by hash, and a tensor was not recorded"


def _uncovered(traces: tuple[Trace, Trace], tally: Tally) -> Iterator[str]:
    """Slots beside true boundaries of the other trace, which does not have the one that they are said to hold."""
    crossed = [name for name in tally.pairs if "/" in name]
    if not crossed:
        return
    engine = 0 if crossed[0].endswith("/reference") else 1
    known = boundaries_of(traces[1 - engine])
    for slot, boundary in enumerate(slots_of(traces[engine])):
        if boundary not in known:
            yield f"slot {slot} of {'AB'[engine]}: it says boundary {boundary}, which {'AB'[1 - engine]} has not"


def _verdict(compared: Sequence[Compared], *, lacks_slots: bool) -> Verdict:
    found = {one.verdict for one in compared}
    if Verdict.DIFFERENT in found:
        return Verdict.DIFFERENT
    read = [one for one in compared if one.distance.max_error is not None and not one.site.exact]
    if Verdict.UNREAD in found and not any(one.verdict is Verdict.WITHIN for one in read):
        return Verdict.UNREAD
    if lacks_slots:
        return Verdict.PART
    return Verdict.EQUAL if found == {Verdict.EQUAL} else Verdict.WITHIN

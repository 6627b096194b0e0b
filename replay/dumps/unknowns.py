"""The four things that hidden-state files leave open, and how each was settled.

The last state with or without the final norm; which boundaries the slots are; whether row t is the state of token t;
and whether the mask's entry t is of token t. What a producer or a user says is a claim; what the data show is a
finding. A claim that a finding contradicts is loud; where there is no claim, the finding decides.

Shapes: A slots, T tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from spectrace.replay.configuration import Slot, View
from spectrace.replay.dumps.matching import Match, Measured
from spectrace.replay.dumps.sample import Convention, Dialect, Norm, Sample
from spectrace.tracer.errors import UserError

__all__ = ["NOWHERE", "Given", "Unknown", "Unknowns", "said", "settle"]

T = TypeVar("T")
NOWHERE = Slot(-1)
"""What a slot is that is no boundary of the target."""
_FORMAT = "the format"
_HIT, _MISS, _STARTS = 0.6, 0.2, 2
_RMS_OFF, _EVEN, _UNEVEN = 0.02, 0.25, 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a user says: the last state's norm, layer ids and what they name, the alignment of rows and of the mask."""

    norm: Norm | None = None
    ids: tuple[int, ...] | None = None
    convention: Convention | None = None
    shift: int | None = None
    mask_shift: int | None = None


@dataclass(frozen=True, slots=True)
class Unknown:
    """One of the four: what is claimed, by whom, what the data show, and by what evidence; None for nothing.

    `tested` is false where there was nothing to show it by.
    """

    name: str
    claimed: Any
    by: str
    found: Any
    evidence: str
    tested: bool = True

    @property
    def contradicted(self) -> bool:
        """Whether the data say otherwise; of several slots, any of them."""
        if self.claimed is None or self.found is None:
            return False
        if isinstance(self.claimed, tuple) and isinstance(self.found, tuple):
            return any(b is not None and a != b for a, b in zip(self.claimed, self.found, strict=True))
        return bool(self.claimed != self.found)

    @property
    def value(self) -> Any:
        """What is taken for true: the claim, which stands until somebody takes it back, else the finding."""
        return self.found if self.claimed is None else self.claimed

    @property
    def how(self) -> str:
        """How far it is known."""
        if self.contradicted:
            return f"CONTRADICTION: {self.by}, against the data"
        if self.claimed is None:
            return "by the data" if self.found is not None else "not known" if self.tested else "not tested"
        if self.found is not None:
            return f"{self.by}, as the data show"
        return f"{self.by}, and the data do not tell" if self.tested else f"{self.by}, not tested"

    def to_json(self) -> dict[str, Any]:
        """What the manifest and `--json` say."""
        said = {name: _plain(getattr(self, name)) for name in ("value", "claimed", "found")}
        return {**said, "how": self.how, "evidence": self.evidence, "contradicted": self.contradicted}

    def __str__(self) -> str:
        return f"{said(self.value)} ({self.how})"


@dataclass(frozen=True, slots=True)
class Unknowns:
    """All four; the values of `layers` are tuples [A] of slots, NOWHERE for none and None for what is not known."""

    norm: Unknown
    layers: Unknown
    rows: Unknown
    mask: Unknown

    @property
    def all(self) -> tuple[Unknown, ...]:
        return self.norm, self.layers, self.rows, self.mask

    @property
    def contradicted(self) -> list[Unknown]:
        return [one for one in self.all if one.contradicted]


def _plain(value: Any) -> Any:
    """A value as JSON has it: a boundary as its number, what else a slot holds in words."""
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Slot):
        return value.boundary if value.view is View.STREAM and value != NOWHERE else said(value)
    return value


def said(value: Any) -> str:
    """A value in words."""
    if isinstance(value, tuple):
        return ", ".join(map(said, value))
    return "no boundary" if value == NOWHERE else "not known" if value is None else str(value)


def settle(
    samples: Sequence[Sample], dialect: Dialect, given: Given, measured: Measured | None, *, of: int
) -> Unknowns:
    """What some texts of a number of them show, and what is claimed of them.

    Raises UserError where texts contradict each other, and where nothing in them is of the target.
    """
    shown = f"{len(samples)} of {of} texts"
    if measured:
        shown += f", {measured.rows} rows through the target"
        _check_target(samples, measured)
    return Unknowns(
        norm=_norm(samples, given, measured, shown),
        layers=_layers(samples, dialect, given, measured, shown),
        rows=_rows(given, measured, shown),
        mask=_mask(samples, given, measured, shown),
    )


def _check_target(samples: Sequence[Sample], measured: Measured) -> None:
    """Raises UserError where nothing at all is of the target."""
    every = [match for of_text in measured.slots for match in of_text] + [one for one in measured.last if one]
    if all(match.nowhere for match in every):
        best = min(every, key=lambda match: match.error)
        raise UserError(
            f"{samples[0].path}: found no tensor that is a boundary of the target (the nearest is {best.slot}, at an "
            f"error of {best.error:.2g} of a row's maximum); give the --target that these states are of, or none"
        )


def _agreed(samples: Sequence[Sample], what: str, values: Sequence[T | None]) -> T | None:
    """What all texts say that say anything; raises UserError where two say something else."""
    found = [(sample, value) for sample, value in zip(samples, values, strict=True) if value is not None]
    for sample, value in found[1:]:
        if value != found[0][1]:
            raise UserError(
                f"{what}: found {said(found[0][1])} in {found[0][0].name} and {said(value)} in {sample.name} "
                f"({sample.path}), expected one answer for all; import them apart"
            )
    return found[0][1] if found else None


def _held(match: Match) -> Slot | None:
    """The slot that a tensor is, NOWHERE where it is none; None where two come too close to be told apart."""
    return NOWHERE if match.nowhere else match.slot if match.told else None


def _norm(samples: Sequence[Sample], given: Given, measured: Measured | None, shown: str) -> Unknown:
    name = "last hidden state"
    if any(sample.last is None for sample in samples):
        return Unknown(name, None, "", None, "these files have none", tested=False)
    declared = _agreed(samples, name, [sample.norm for sample in samples])
    claimed, by = (given.norm, "--norm") if given.norm else (declared, _FORMAT)
    if measured is None:
        return Unknown(name, claimed and str(claimed), by, None, f"no --target; {_evenness(samples)}", tested=False)
    found = _agreed(samples, name, [_said_of_last(match, measured) for match in measured.last])
    if found is None and measured.rms_off is not None and measured.rms_off <= _RMS_OFF:
        found = str(Norm.POST)
    (norm, shift), (hits, tokens) = max(measured.heads.items(), key=lambda item: item[1][0] / max(item[1][1], 1))
    evidence = (
        f"{_fits([match for match in measured.last if match])}; without the norm's weights rows are within "
        f"{measured.rms_off:.2g} of RMS 1; the head names {hits} of {tokens} next tokens, at best, "
        f"taking it for {norm} and moving rows by {shift}; {shown}"
    )
    return Unknown(name, claimed and str(claimed), by, found, evidence)


def _said_of_last(match: Match | None, measured: Measured) -> str | None:
    held = _held(match) if match else None
    if held is None:
        return None
    if held.boundary == measured.layers:
        return str(Norm.POST if held.view is View.NORMED else Norm.PRE)
    return "no boundary" if held == NOWHERE else f"boundary {held.boundary}"


def _evenness(samples: Sequence[Sample]) -> str:
    """What the sizes of rows hint at: a norm makes them even, whatever the stream before it does."""
    sizes = [sample.last.float().square().mean(1).sqrt() for sample in samples if sample.last is not None]
    spread = max(float(one.std(correction=0) / one.mean()) if bool(one.any()) else 0.0 for one in sizes)
    says = "hints at a norm" if spread < _EVEN else "no norm leaves" if spread > _UNEVEN else "says little"
    return f"RMS of its rows varies by {spread:.0%}, which {says}"


def _layers(
    samples: Sequence[Sample], dialect: Dialect, given: Given, measured: Measured | None, shown: str
) -> Unknown:
    name, count = "slots", len(samples[0].slots)
    _agreed(samples, "number of slots", [len(sample.slots) for sample in samples])
    convention = given.convention or dialect.convention
    declared = _agreed(samples, name, [sample.boundaries for sample in samples])
    claimed, by = (declared, "the names of the files") if declared else (None, "")
    if given.ids is not None:
        claimed = tuple(convention.boundary(layer) for layer in given.ids)[:count]
        by = f"--ids as {convention} ids" + ("" if given.convention else f", as {dialect.name} has them")
    slots = None if claimed is None else tuple(Slot(boundary) for boundary in claimed)
    if measured is None:
        return Unknown(name, slots, by, None, f"no --target; {_growth(samples)}", tested=False)
    by_slot = list(zip(*measured.slots, strict=True))
    found = tuple(
        _agreed(samples, f"slot {at}", [_held(match) for match in matches]) for at, matches in enumerate(by_slot)
    )
    evidence = "; ".join(f"slot {at}: {_fits(matches)}" for at, matches in enumerate(by_slot))
    return Unknown(name, slots, by, found if any(found) else None, f"{evidence}; {shown}")


def _fits(matches: Sequence[Match]) -> str:
    worst = max(matches, key=lambda match: match.error)
    return f"{worst.slot} at {worst.error:.2g}, next {worst.next_slot} at {worst.next_error:.2g}"


def _growth(samples: Sequence[Sample]) -> str:
    """The sizes of the slots, which grow from layer to layer wherever branches are summed."""
    sizes = [float(slot.float().square().mean().sqrt()) for slot in samples[0].slots]
    growing = "they grow from slot to slot" if sizes == sorted(sizes) else "they do not grow from slot to slot"
    return f"RMS {', '.join(f'{size:.3g}' for size in sizes)}: {growing}"


def _rows(given: Given, measured: Measured | None, shown: str) -> Unknown:
    claimed, by = (given.shift, "--shift") if given.shift is not None else (0, _FORMAT)
    name = "rows"
    if measured is None:
        return Unknown(name, claimed, by, None, "no --target", tested=False)
    every = [match for of_text in measured.slots for match in of_text] + [one for one in measured.last if one]
    shifts = sorted({match.shift for match in every if match.aligned})
    evidence = f"{sum(match.aligned for match in every)} of {len(every)} tensors show it; {shown}"
    return Unknown(name, claimed, by, (shifts[0] if len(shifts) == 1 else tuple(shifts)) if shifts else None, evidence)


def _mask(samples: Sequence[Sample], given: Given, measured: Measured | None, shown: str) -> Unknown:
    name = "mask"
    if all(sample.mask is None for sample in samples):
        return Unknown(name, None, "", None, "these files have none: every token counts as prompt", tested=False)
    claimed, by = (given.mask_shift, "--mask-shift") if given.mask_shift is not None else (0, _FORMAT)
    if measured is None:
        return Unknown(name, claimed, by, None, f"no --target; {_last_counted(samples)}", tested=False)
    starts, scores = _starts(samples, measured)
    best = max(scores, key=lambda shift: scores[shift])
    alone = all(score <= _MISS for shift, score in scores.items() if shift != best)
    told = starts >= _STARTS and scores[best] >= _HIT and alone
    rates = ", ".join(f"{score:.0%} moved by {shift}" for shift, score in scores.items())
    evidence = (
        f"of {starts} answers, so many begin with a token that the target says behind one that it does not: {rates}; "
        f"{_last_counted(samples)}; {shown}"
    )
    return Unknown(name, claimed, by, best if told else None, evidence)


def _starts(samples: Sequence[Sample], measured: Measured) -> tuple[int, dict[int, float]]:
    """How many answers begin, and for what share of them one begins there, with the mask moved by so much.

    Answers that the target wrote itself begin where it starts to say the next token; prompts it does not foresee.
    """
    hits, count = {0: 0, -1: 0, 1: 0}, 0
    for sample, said_ in zip(samples, measured.said, strict=True):
        if sample.mask is None:
            continue
        mask = sample.mask[: len(said_)]
        for at in (mask[1:] & ~mask[:-1]).nonzero().flatten().tolist():
            first, count = at + 1, count + 1
            for shift in hits:
                place = first + shift
                hits[shift] += 0 < place < len(said_) and bool(said_[place]) and not bool(said_[place - 1])
    return count, {shift: hit / max(count, 1) for shift, hit in hits.items()}


def _last_counted(samples: Sequence[Sample]) -> str:
    counted = sum(bool(sample.mask[-1]) for sample in samples if sample.mask is not None)
    hint = ", which a mask that is one ahead cannot" if counted else ""
    return f"{counted} of {len(samples)} masks count the last token{hint}"

"""What will be recorded of some files, as a plan that can be read before anything is written.

Shapes: A slots, F target width.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from spectrace.engine.dialect import check_boundaries
from spectrace.replay.configuration import Slot, View
from spectrace.replay.dumps.formats import open_source
from spectrace.replay.dumps.matching import Target, measure
from spectrace.replay.dumps.sample import Convention, Dialect, Item, Norm, Sample
from spectrace.replay.dumps.unknowns import NOWHERE, Given, Unknown, Unknowns, said, settle
from spectrace.tracer.errors import UserError

__all__ = ["Family", "Plan", "plan_import"]

Family = Literal["reference", "emitted"]
_TEXTS = 3


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be recorded: of each slot [A] the boundary, None for what is left out; of the last state, too.

    `width`, `dtype` and what is `declared` are those of the first text, and of all the others, or they are refused.
    """

    source: Path
    dialect: Dialect
    items: Sequence[Item]
    family: Family
    unknowns: Unknowns
    boundaries: tuple[int | None, ...]
    last: int | None
    width: int
    dtype: torch.dtype
    declared: tuple[Norm | None, tuple[int, ...] | None]
    notes: tuple[str, ...]

    @property
    def recorded(self) -> list[int]:
        """The boundaries that the trace will have, in order; none of emitted slots."""
        known = {boundary for boundary in (*self.boundaries, self.last) if boundary is not None}
        return sorted(known) if self.family == "reference" else []

    def to_json(self) -> dict[str, Any]:
        """What the manifest says of the import."""
        return {
            "format": self.dialect.name,
            "source": str(self.source.absolute()),
            "texts": len(self.items),
            "as": self.family,
            "unknowns": {one.name: one.to_json() for one in self.unknowns.all},
            "contradictions": [one.name for one in self.unknowns.contradicted],
            "notes": list(self.notes),
        }


def plan_import(
    source: Path,
    *,
    format_: str | None = None,
    family: Family = "reference",
    given: Given,
    target: Target | None = None,
    requests: int | None = None,
    force: bool = False,
) -> Plan:
    """Find out what some files are; reads a few of them.

    Raises UserError for files that cannot be read, for slots whose boundary is neither claimed nor shown, and, but for
    `force`, where the data contradict a claim.
    """
    dialect, items = open_source(source, format_)
    items = items[:requests]
    picked = sorted({len(items) * at // max(_TEXTS - 1, 1) for at in range(_TEXTS - 1)} | {len(items) - 1})
    samples = [items[at].read() for at in picked]
    count, last = len(samples[0].slots), samples[0].last
    _check_given(given, samples, dialect, target)
    measured = measure(samples, target) if target else None
    unknowns = settle(samples, dialect, given, measured, of=len(items))
    if unknowns.contradicted and not force:
        raise UserError("; ".join(_contradiction(one, source) for one in unknowns.contradicted))
    boundaries = _boundaries(unknowns, count)
    if target and not force:
        check_boundaries("--ids", [one for one in boundaries if one is not None], target.layers)
    notes = list(_of_slots(unknowns, boundaries, source)) if family == "reference" else []
    top = _last(unknowns, given, dialect, target, count) if last is not None and family == "reference" else None
    if last is not None:
        notes += _said_of_last(unknowns, top, family)
    first = samples[0].slots[0]
    return Plan(
        source=source,
        dialect=dialect,
        items=items,
        family=family,
        unknowns=unknowns,
        boundaries=boundaries,
        last=top,
        width=first.shape[1],
        dtype=first.dtype,
        declared=(samples[0].norm, samples[0].boundaries),
        notes=tuple(notes),
    )


def _check_given(given: Given, samples: Sequence[Sample], dialect: Dialect, target: Target | None) -> None:
    """Raises UserError for something said of what the files do not have, and for ids that no layer has."""
    path, count, last = samples[0].path, len(samples[0].slots), samples[0].last is not None
    if given.norm and not last:
        raise UserError(f"--norm {given.norm}: {path} has no last hidden state that it could be said of; leave it out")
    if given.mask_shift is not None and all(sample.mask is None for sample in samples):
        raise UserError(f"--mask-shift {given.mask_shift}: {path} has no mask that it could be said of; leave it out")
    if given.convention and given.ids is None:
        raise UserError(f"--convention {given.convention}: found no ids that it could be said of; give --ids, too")
    if given.ids is not None and len(given.ids) not in ({count, count + 1} if last else {count}):
        raise UserError(
            f"--ids: found {len(given.ids)} ids, expected {count}, one for each slot of {path}"
            f"{', and one more for the last hidden state, if it is before the norm' if last else ''}"
        )
    told = [(given.convention or dialect.convention).boundary(layer) for layer in given.ids or ()]
    if wrong := [one for one in told if one < 0]:
        raise UserError(f"--ids: found an id that means boundary {wrong[0]}, expected boundaries from 0")
    if target and len(told) > count and told[count] != target.layers:
        raise UserError(
            f"--ids: found a last id that means boundary {told[count]}, expected {target.layers}, behind the target's "
            f"last layer; leave it out"
        )


def _contradiction(one: Unknown, source: Path) -> str:
    return (
        f"{source}: CONTRADICTION: {one.name}: {one.by} says {said(one.claimed)}, and the data say {said(one.found)}"
        f"{_by_one(one)} ({one.evidence}); say what is right, or --force to record it as it is said"
    )


def _by_one(one: Unknown) -> str:
    """Of slots that all are one boundary off, that the ids are read in the wrong convention."""
    if not isinstance(one.claimed, tuple) or not isinstance(one.found, tuple):
        return ""
    off = {b and a.boundary - b.boundary for a, b in zip(one.claimed, one.found, strict=True)}
    other = {frozenset({1}): Convention.INPUT, frozenset({-1}): Convention.OUTPUT}.get(frozenset(off))
    return f", as if they were {other} ids" if other else ""


def _boundaries(unknowns: Unknowns, count: int) -> tuple[int | None, ...]:
    """The boundary of each slot [A], None where it is none, or not known."""
    slots: tuple[Slot | None, ...] = unknowns.layers.value or (None,) * count
    told = [None if one is None or one == NOWHERE or one.view is not View.STREAM else one.boundary for one in slots]
    return tuple(told)


def _of_slots(unknowns: Unknowns, boundaries: Sequence[int | None], source: Path) -> Iterator[str]:
    """What to note of slots that are not recorded; raises UserError where one is not known, or none is left."""
    held: Sequence[Slot | None] = unknowns.layers.value or [None] * len(boundaries)
    unknown = [at for at, slot in enumerate(held) if slot is None]
    if unknown or all(one is None for one in boundaries):
        names = ", ".join(map(str, unknown or range(len(boundaries))))
        raise UserError(
            f"{source}: which boundaries slots {names} of {len(boundaries)} are is neither in the files nor told "
            f"({unknowns.layers.evidence}); give --ids with --convention, or --target to find out, or import them "
            f"--as emitted"
        )
    for at, boundary in enumerate(boundaries):
        if boundary is None:
            yield f"slot {at} is left out: {said(held[at])}"
        elif boundary in boundaries[:at]:
            yield f"slot {at} is left out: boundary {boundary}, as an earlier one"


def _last(unknowns: Unknowns, given: Given, dialect: Dialect, target: Target | None, count: int) -> int | None:
    """The boundary that the last state is: L before the final norm, nothing behind it; None where it is not known."""
    if unknowns.norm.value != str(Norm.PRE):
        return None
    if given.ids is not None and len(given.ids) > count:
        return (given.convention or dialect.convention).boundary(given.ids[count])
    return target.layers if target else None


def _said_of_last(unknowns: Unknowns, top: int | None, family: Family) -> list[str]:
    if top is not None:
        return []
    if family == "emitted":
        return ["the last hidden state is left out: no draft is fed it as a slot"]
    match unknowns.norm.value:
        case "post":
            return ["the last hidden state is left out: behind the final norm it is no boundary"]
        case "pre":
            return ["the last hidden state is left out: which number L has is not known without --target or an id"]
        case other:
            return [f"the last hidden state is left out: {other or 'whether a norm is behind it is not known'}"]

"""How the parts that the ranks of one tensor-parallel group hold make up the whole: read from the data.

Shapes say which layouts are possible, the data which of these it is; what was declared is checked, and believed only
where the data cannot tell. A layout is where each number belongs and can be right though values are not: see `error`.

Shapes: R ranks, T rows, W columns of the whole, S sampled rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

from spectrace.replay.compare import row_error
from spectrace.replay.diff.blocks import (
    NUMBERS,
    Match,
    blocks_of,
    cuts_of,
    match_blocks,
    numbers_of,
    sample_of,
    sampled,
)
from spectrace.tracer.errors import UserError

__all__ = ["Found", "Layout", "assemble", "infer", "possible"]

_SHOWN: Final = 32


class Layout(Enum):
    """What each rank holds of the whole."""

    REPLICATED = "replicated"  # all of it
    SHARDED = "sharded"  # columns, in the order of the ranks
    PERMUTED = "permuted"  # columns, in another order of ranks, or in blocks that take turns
    PARTIAL = "partial"  # a summand
    ROWS = "rows"  # rows, contiguous or in blocks
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Found:
    """The layout, and in one sentence what shows it.

    `order`: every part is cut into len(order) / R equal blocks, numbered rank after rank; in this order they are the
    whole. () is the order of the ranks. `error` is max|Δ| over the row's maximum of the assembled against the whole,
    in the worst row; None without a whole. `apart` are ranks that do not hold what the layout says. A declaration is
    contradicted by shapes, by another layout that fits, and by replicas that are not equal.
    """

    layout: Layout
    evidence: str
    order: tuple[int, ...] = ()
    error: float | None = None
    apart: tuple[int, ...] = ()
    contradicts: bool = False


@dataclass(frozen=True, slots=True)
class _Case:
    parts: tuple[Tensor, ...]
    whole: Tensor | None
    declared: Layout | None
    tolerance: float
    possible: tuple[Layout, ...]

    def undecided(self, alike: Sequence[Layout], why: str) -> Found:
        """What cannot be told apart: as declared, where that is one of them, fits and comes with its order."""
        others = ", ".join(layout.value for layout in alike if layout is not self.declared)
        named = self.declared if self.declared in alike and self.declared is not Layout.PERMUTED else None
        error = None if self.whole is None else _worst(self.error(Found(named or alike[0], "")))
        if named and (error is None or error <= self.tolerance):
            besides = f", though it may be {others}" if others else ""
            return Found(named, f"{named.value} as declared{besides}: {why}", error=error)
        return Found(Layout.UNKNOWN, f"cannot be told, may be {others or alike[0].value}: {why}", error=error)

    def error(self, found: Found) -> Tensor:
        """By row of the whole [T]."""
        assert self.whole is not None
        return row_error(self.whole, assemble(self.parts, found))


def possible(parts: Sequence[Tensor], shape: Sequence[int] | None) -> tuple[Layout, ...]:
    """The plan: which layouts the shapes allow, given the shape of the whole [T, W] if it is known."""
    rows, widths = [len(part) for part in parts], [part.shape[-1] for part in parts]
    level, even = len(set(rows)) == 1, len(set(widths)) == 1
    layouts: list[Layout] = []
    if level and even and (shape is None or tuple(shape) == (rows[0], widths[0])):
        layouts += [Layout.REPLICATED, Layout.PARTIAL]
    if level and (shape is None or tuple(shape) == (rows[0], sum(widths))):
        layouts += [Layout.SHARDED, Layout.PERMUTED]
    if even and (shape is None or tuple(shape) == (sum(rows), widths[0])):
        layouts += [Layout.ROWS]
    return tuple(layouts)


def infer(
    parts: Sequence[Tensor],
    *,
    whole: Tensor | None,
    declared: Layout | None,
    tolerance: float,
    shape: Sequence[int] | None = None,
) -> Found:
    """Find the layout of `parts`, each [T_r, W_r] and in the order of the ranks, and whether it is the declared one.

    `whole` are the same rows from elsewhere, `shape` is its shape where that alone is known. Numbers are alike within
    `tolerance` of the row's maximum; sums over ranks get as many times that as cancels out in them, at most R.
    """
    declared = None if declared is Layout.UNKNOWN else declared
    shape = shape if whole is None else whole.shape
    case = _Case(tuple(parts), whole, declared, tolerance, possible(parts, shape))
    found = _read(case, whole, shape)
    if declared is None or len(parts) < 2:
        return found
    other = declared not in case.possible or found.layout not in (declared, Layout.UNKNOWN)
    unequal = declared is Layout.REPLICATED and bool(found.apart)
    return replace(found, contradicts=found.contradicts or other or unequal)


def assemble(parts: Sequence[Tensor], found: Found) -> Tensor:
    """The whole from its parts; UserError where the layout is unknown."""
    if len(parts) == 1:
        return parts[0]
    if found.layout is Layout.UNKNOWN:
        raise UserError(f"the parts of {len(parts)} ranks make up no known whole: {found.evidence}; declare a layout")
    if found.layout is Layout.REPLICATED:
        return next(part for rank, part in enumerate(parts) if rank not in found.apart)
    if found.layout is Layout.PARTIAL:
        return _sum(parts).to(parts[0].dtype)
    axis = 0 if found.layout is Layout.ROWS else -1
    blocks = blocks_of(parts, max(len(found.order) // len(parts), 1), axis)
    return torch.cat([blocks[at] for at in found.order or range(len(blocks))], axis)


def _read(case: _Case, whole: Tensor | None, shape: Sequence[int] | None) -> Found:
    tensors = case.parts if whole is None else (*case.parts, whole)
    if not case.parts or not all(tensor.numel() for tensor in tensors):
        return Found(Layout.UNKNOWN, "nothing to compare: no ranks or no numbers")
    if not case.possible:
        shapes = ", ".join(str(list(part.shape)) for part in case.parts)
        told = f"no layout makes parts of shapes {shapes} a whole"
        return Found(Layout.UNKNOWN, told + (f" of {list(shape)}" if shape is not None else ""))
    if bad := [at for at, tensor in enumerate(tensors) if not tensor.isfinite().all()]:
        where = ", ".join(f"rank {at}" if at < len(case.parts) else "the whole" for at in bad)
        return Found(Layout.UNKNOWN, f"not compared: numbers that are not finite, in {where}")
    if len(case.parts) == 1:
        return case.undecided(case.possible, "there is one rank")
    if whole is None:
        return _among(case)
    return _same(case, whole) if Layout.REPLICATED in case.possible else _split(case, whole)


def _among(case: _Case) -> Found:
    """Without a whole: ranks that are equal are replicas; for all else there are only the shapes."""
    parts, layouts, told = case.parts, case.possible, ""
    if Layout.PARTIAL in possible(parts, None):
        equal = _agreeing(parts, case.tolerance)
        if equal and Layout.REPLICATED in layouts:
            return _replicas(case, equal)
        if len(equal) == len(parts):
            told = "; all ranks hold the same"
        elif Layout.REPLICATED in layouts:
            layouts = tuple(layout for layout in layouts if layout is not Layout.REPLICATED)
            off = max(_worst(row_error(parts[0], part)) for part in parts)
            told = f"; ranks differ by up to {off:.2g} of a row's maximum, as of replicas that disagree"
    if len({layout is Layout.ROWS for layout in layouts}) == 1 and Layout.PARTIAL not in layouts:
        layout = Layout.UNKNOWN if case.declared is Layout.PERMUTED else layouts[0]
        what = "rows" if layout is Layout.ROWS else "columns"
        return Found(layout, f"{what} are split over {len(parts)} ranks by shape, in which order is not tested{told}")
    found = case.undecided(layouts, f"no whole to compare with{told}")
    return replace(found, contradicts=case.declared is Layout.REPLICATED)


def _replicas(case: _Case, equal: Sequence[int]) -> Found:
    """Equal ranks are replicas, unless the parts of another layout would be equal too."""
    part, alike = case.parts[equal[0]], [Layout.REPLICATED]
    if not part.any() or numbers_of(part) < NUMBERS:
        alike = list(case.possible)
    else:
        if (part == part[:, :1]).all() and Layout.SHARDED in case.possible:
            alike += [Layout.SHARDED, Layout.PERMUTED]
        if (part == part[:1]).all() and Layout.ROWS in case.possible:
            alike += [Layout.ROWS]
    if len(alike) > 1:
        return case.undecided(alike, "ranks are equal, and so are all numbers of a row, or all rows, or they are few")
    exact = all(torch.equal(part, case.parts[rank]) for rank in equal)
    how = "bit for bit" if exact else f"within {case.tolerance:.2g} of each row's maximum"
    told = f"replicated, or one part given to all: the same {len(part)} rows are {_on(equal, case)}, {how}"
    return _but(case, Found(Layout.REPLICATED, told), equal)


def _same(case: _Case, whole: Tensor) -> Found:
    """Parts of the shape of the whole: copies of it or summands."""
    parts, tolerance = case.parts, case.tolerance
    equal = _agreeing(parts, tolerance)
    error = row_error(whole, parts[equal[0]]) if equal else torch.full((len(whole),), torch.inf)
    if numbers_of(whole) < NUMBERS or not (whole.any() or error.any()):
        unequal = len(equal) < len(parts)
        found = case.undecided((Layout.PARTIAL,) if unequal else case.possible, "the whole is zero or has few numbers")
        return replace(found, contradicts=unequal and case.declared is Layout.REPLICATED)
    if _hold(error, tolerance, whole):
        told = f"replicated: the whole is {_on(equal, case)}, {_fit(error, tolerance)}"
        return _but(case, Found(Layout.REPLICATED, told, error=_worst(error)), equal)
    total, allowed = _sum_error(parts, whole, tolerance)
    if _hold(total, allowed, whole) and not _miscounted(parts, whole):
        if len(equal) == len(parts):
            why = f"{len(parts)} equal parts sum to the whole, or are replicas that were divided by {len(parts)}"
            return case.undecided((Layout.PARTIAL, Layout.REPLICATED), why)
        told = f"partial: the sum over {len(parts)} ranks is the whole, {_fit(total, allowed)}"
        return Found(Layout.PARTIAL, told, error=_worst(total))
    if not equal:
        return _neither(case, whole, _worst(total))
    times = _multiple(parts[equal[0]], whole, tolerance)
    what = f"{round(times, 2):g} times the whole" if times else f"which is not the whole: {_fit(error, tolerance)}"
    twice = ", as a sum over the ranks that is taken twice" if times and round(times, 1) == len(parts) else ""
    told = f"replicated: the same is {_on(equal, case)}, {what}{twice}"
    return _but(case, Found(Layout.REPLICATED, told, error=_worst(error)), equal)


def _neither(case: _Case, whole: Tensor, total: float) -> Found:
    """Ranks that hold neither copies nor summands of the whole: what they come near to."""
    errors = [_worst(row_error(whole, part)) for part in case.parts]
    told = [f"neither replicated nor partial: rank 0 is {errors[0]:.2g} of a row's maximum off, the sum {total:.2g}"]
    copies = [rank for rank, error in enumerate(errors) if error <= case.tolerance]
    if copies:
        told.append(f"the whole is {_on(copies, case)}")
    if times := _multiple(_sum(case.parts), whole, case.tolerance):
        told.append(f"the sum is {round(times, 2):g} times the whole")
    rest = whole.float() - _sum(case.parts)
    for rank, part in enumerate(case.parts):
        if not copies and (times := _multiple(rest, part, case.tolerance)):
            told.append(f"the whole is the sum with rank {rank} taken {abs(round(1 + times, 2)):g} times")
    replicas = case.declared is Layout.REPLICATED
    return Found(Layout.UNKNOWN, "; ".join(told), error=errors[0] if replicas else total, contradicts=replicas)


def _split(case: _Case, whole: Tensor) -> Found:
    """Parts that side by side have the shape of the whole: the order in which they, or blocks of them, are it."""
    rows = Layout.ROWS in case.possible
    *parts_, whole_ = sampled(case.parts, whole, rows)
    cuts = cuts_of(parts_, whole_)
    plain = Found(Layout.ROWS if rows else Layout.SHARDED, "")
    if not cuts:
        return case.undecided(case.possible, f"a rank holds fewer than {NUMBERS} numbers to go by")
    best: Match | None = None
    for cut in cuts:  # a finer one has to be much better
        match = match_blocks(blocks_of(parts_, cut, -1), whole_, case.tolerance)
        if match and (best is None or 4 * match.misfit < best.misfit):
            best = match
        if best and best.misfit <= case.tolerance**2:
            break
    if best:
        return _arranged(case, best)
    error = case.error(plain)
    ends = accumulate(part.shape[-1] for part in parts_)
    places = [(part, whole_[:, end - part.shape[-1] : end]) for part, end in zip(parts_, ends, strict=True)]
    kept = [rank for rank, (part, place) in enumerate(places) if match_blocks([part], place, case.tolerance)]
    what = "rows" if rows else "columns"
    told = f"no order of the ranks' {what}, in up to {cuts[-1]} blocks each, is the whole; that of the ranks is met "
    told += _fit(error, case.tolerance)
    found = Found(plain.layout if len(kept) * 2 > len(parts_) else Layout.UNKNOWN, told, error=_worst(error))
    return _but(case, replace(found, evidence=f"{told}; their own are {_on(kept, case)}"), kept) if kept else found


def _arranged(case: _Case, match: Match) -> Found:
    order, ranks = match.order, len(case.parts)
    plain = order == tuple(range(len(order)))
    layout = Layout.ROWS if Layout.ROWS in case.possible else Layout.SHARDED if plain else Layout.PERMUTED
    if layout is Layout.SHARDED and not match.alone:
        return case.undecided(case.possible, "parts of some ranks fit the places of others as well")
    found = Found(layout, "", () if plain else order)
    error = case.error(found)
    how = "in rank order" if plain else _in_order(order, ranks)
    what = "rows" if layout is Layout.ROWS else "columns"
    loose = "" if match.alone else "; some are equal, and their order cannot be told"
    near = "the whole" if _worst(error) <= case.tolerance else "nearest to the whole"
    told = f"{layout.value}: {what} {how} are {near}, {_fit(error, case.tolerance)}{loose}"
    return replace(found, evidence=told, error=_worst(error))


def _in_order(order: tuple[int, ...], ranks: int) -> str:
    if order == (*range(0, 2 * ranks, 2), *range(2 * ranks - 1, 0, -2)):  # as evens out causal attention
        return f"in zigzag over {ranks} ranks"
    shown = ", ".join(map(str, order[:_SHOWN])) + (", ..." if len(order) > _SHOWN else "")
    return f"of ranks {shown}" if len(order) == ranks else f"in {len(order) // ranks} blocks a rank, taken as {shown}"


def _agreeing(parts: Sequence[Tensor], tolerance: float) -> tuple[int, ...]:
    """The ranks that hold the same if they are most, by a vote; () if not. A sample of rows may rule it out."""
    kept: list[int] = []
    at = sample_of(len(parts[0]))
    for held in ([part[at] for part in parts], parts):
        speaker, votes = 0, 0
        for rank, part in enumerate(held):
            speaker = speaker if votes else rank
            votes += 1 if _equal(held[speaker], part, tolerance) else -1
        kept = [rank for rank, part in enumerate(held) if _equal(held[speaker], part, tolerance)]
        if len(kept) * 2 <= len(parts):
            return ()
    idle = len(kept) < len(parts) and not parts[kept[0]].any()  # summands that are zero are no replicas
    return () if idle else tuple(kept)


def _equal(one: Tensor, other: Tensor, tolerance: float) -> bool:
    return torch.equal(one, other) or _worst(row_error(one, other)) <= tolerance


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].float().clone()
    for part in parts[1:]:
        total += part
    return total


def _sum_error(parts: Sequence[Tensor], whole: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """The error of the sum [T], and what rounding the parts allows: they may be larger than what they sum to."""
    sizes = _sum([part.float().abs() for part in parts]).amax(-1)
    cancels = torch.nan_to_num(sizes / whole.float().abs().amax(-1), nan=1.0).clamp(1, len(parts))
    return row_error(whole, _sum(parts)), tolerance * cancels


def _miscounted(parts: Sequence[Tensor], whole: Tensor) -> list[int]:
    """Ranks whose part the whole holds not at all or twice, which is less than rounding where it is small."""
    at = sample_of(len(whole))
    sampled = [part[at].float() for part in parts]
    rest = whole[at].float() - _sum(sampled)
    shares = [float((rest * part).sum() / part.square().sum().clamp_min(1e-30)) for part in sampled]
    return [rank for rank, share in enumerate(shares) if abs(share) > 0.5]


def _multiple(one: Tensor, other: Tensor, tolerance: float) -> float | None:
    """k, where one is k times the other in all rows."""
    one, other = one.float(), other.float()
    times = float((one * other).sum() / other.square().sum().clamp_min(1e-30))
    return times if one.any() and _worst(row_error(one, times * other)) <= tolerance else None


def _but(case: _Case, found: Found, kept: Sequence[int]) -> Found:
    """Names the ranks that do not hold what the others do."""
    apart = tuple(rank for rank in range(len(case.parts)) if rank not in kept)
    told = [found.evidence]
    for rank in apart:
        part = case.parts[rank]
        twin = next((at for at in kept if torch.equal(case.parts[at], part)), None)
        told.append(f"not on rank {rank}" + ("" if twin is None else f", which holds what rank {twin} does"))
        if found.layout is Layout.REPLICATED:
            told[-1] += f": {_fit(row_error(case.parts[kept[0]], part), case.tolerance)}"
    return replace(found, evidence="; ".join(told), apart=apart)


def _hold(errors: Tensor, allowed: Tensor | float, whole: Tensor) -> bool:
    """Whether most rows do, of those that are not zero on both sides."""
    shows = (whole != 0).any(-1) | (errors > 0)
    return int(((errors <= allowed) & shows).sum()) * 2 > int(shows.sum())


def _worst(errors: Tensor) -> float:
    return float(errors.max())


def _fit(errors: Tensor, allowed: Tensor | float) -> str:
    held = int((errors <= allowed).sum())
    return f"in {held} of {len(errors)} rows, the worst {_worst(errors):.2g} of its maximum off"


def _on(ranks: Sequence[int], case: _Case) -> str:
    if len(ranks) == len(case.parts):
        return f"on all {len(ranks)} ranks"
    return f"on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {len(case.parts)}"

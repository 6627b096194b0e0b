"""What a wrong wiring is called: the patterns in which wirings go wrong, each with the id of its fault."""

from collections.abc import Iterator, Sequence

from spectrace.engine.checkpoint import default_wiring
from spectrace.replay.configuration import Slot, View

__all__ = ["Named", "name_wiring"]

Named = tuple[str, str, str]
"""Fault id, variant, and what it is in words."""

_FAR = 4


def name_wiring(right: Sequence[Slot], wrong: Sequence[Slot], layers: int) -> tuple[Named, tuple[str, ...]]:
    """What has happened to a wiring, and the ids of other faults that would look the same."""
    found = list(_patterns(tuple(right), tuple(wrong), layers)) or [_loosely(tuple(right), tuple(wrong))]
    first = found[0]
    others = dict.fromkeys(fault for fault, _, _ in found[1:] if fault != first[0])
    return first, tuple(others)


def _patterns(right: tuple[Slot, ...], wrong: tuple[Slot, ...], layers: int) -> Iterator[Named]:
    yield from _views(right, wrong)
    was, now = (tuple(slot.boundary for slot in wiring) for wiring in (right, wrong))
    for by in range(1, _FAR + 1):
        amount, variant = ("one", "") if by == 1 else (str(by), str(by))
        if now == tuple(max(b - by, 0) for b in was):
            yield "W1", variant, f"every boundary is {amount} too early"
        if now == tuple(min(b + by, layers) for b in was):
            yield "W2", variant, f"every boundary is {amount} too late"
    if now != was and sorted(now) == sorted(was):
        yield "W5", "", "the slots are in another order"
    if len(was) > 1 and now[:-1] == was[1:]:
        yield "W3", "", "the first slot is missing, the others have moved up, and another boundary fills the last"
    if now == default_wiring(layers):
        yield "W4", "", "the boundaries are the engine's default"
    yield from _single(was, now)
    if len(set(now)) < len(set(was)):
        yield "W6", "", "one boundary is there twice"


def _loosely(right: tuple[Slot, ...], wrong: tuple[Slot, ...]) -> Named:
    """A wiring that fits no pattern, by the way its boundaries have gone."""
    moves = [w.boundary - r.boundary for r, w in zip(right, wrong, strict=True) if w != r]
    if max(moves) < 0:
        return "W1", "mixed", "boundaries are too early, by different amounts"
    if min(moves) > 0:
        return "W2", "mixed", "boundaries are too late, by different amounts"
    return "W4", "other", "the boundaries are others than the draft's"


def _views(right: tuple[Slot, ...], wrong: tuple[Slot, ...]) -> Iterator[Named]:
    for fault, view, title in (
        ("W7", View.NORMED, "a slot is taken after the final norm"),
        ("W8", View.BRANCH, "slots are taken without their residual"),
    ):
        if any(w.view is view and r.view is not view for r, w in zip(right, wrong, strict=True)):
            yield fault, "", title
        elif any(r.view is view and w.view is not view for r, w in zip(right, wrong, strict=True)):
            yield fault, "reverse", f"the draft was trained otherwise: {title} there"


def _single(was: tuple[int, ...], now: tuple[int, ...]) -> Iterator[Named]:
    """One slot alone has moved, by little."""
    moved = [(slot, n - w) for slot, (w, n) in enumerate(zip(was, now, strict=True)) if n != w]
    if len(moved) == 1 and abs(moved[0][1]) <= _FAR:
        [(slot, by)] = moved
        fault, way = ("W1", "early") if by < 0 else ("W2", "late")
        yield fault, f"slot{slot}", f"slot {slot} is {abs(by)} {'boundary' if abs(by) == 1 else 'boundaries'} too {way}"

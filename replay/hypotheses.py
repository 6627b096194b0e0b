"""What can go wrong with a draft, as data: small named steps from one configuration to another.

A new hypothesis is one entry in one of the lists below, or in `loading`; it says nothing of who is wrong, since the
same step explains an engine or a config.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, permutations

import torch
from torch import Tensor

from spectrace.engine.checkpoint import default_wiring, unscaled
from spectrace.engine.spec import DraftSpec, FuseNorm, MlaSpec, RopeKind, Stream
from spectrace.replay.configuration import ADVANCING, Configuration, Slot, Steps, View
from spectrace.replay.hypothesis import Hypothesis, replacing, switching
from spectrace.replay.loading import loading, plain_norm
from spectrace.replay.wirings import name_wiring

__all__ = ["computing", "ending", "feeding", "mapping", "moved", "moving", "served_table"]

_FAR, _THETAS = 4, tuple(float(f"{digit}e{power}") for power in range(2, 8) for digit in (1, 2, 2.5, 5))
_FEW_ROWS, _QUIET = 1024, 100.0  # of an embedding; of the norm's epsilon, which then is no more than a percent


def computing(
    at: Configuration, shared: Mapping[str, Tensor], others: Sequence[DraftSpec] = ()
) -> Iterator[Hypothesis]:
    """Every other way to compute the same draft: switches, RoPE, windows and weights.

    `shared` are the target's "embedding" and "head", as far as they are known; `others` are such
    drafts whose RoPE, windows, norms of the state or embedding scale may be the right ones.
    """
    yield from _switches(at)
    yield from _state_norms(at.spec, others)
    yield from _rope(at.spec, others)
    yield from _reaching(at.spec, others)
    yield from _embedding_scale(at, others)
    yield from loading(at, shared)


def _switches(at: Configuration) -> Iterator[Hypothesis]:
    spec = at.spec
    [residual], [feedback] = set(Stream) - {spec.residual}, set(Stream) - {spec.feedback}
    yield Hypothesis("residual", "N1", f"the residual is {residual}", switching(residual=residual))
    yield Hypothesis("feedback", "N3", f"what is fed back is {feedback}", switching(feedback=feedback), deeper=True)
    # A checkpoint that has norms has them for one of the two ways; one that has none may have lost either.
    both = (FuseNorm.WHOLE, FuseNorm.PER_SLOT)
    lost = [norm for norm in both if norm in at.spare] or both
    for norm in lost if spec.fuse_norm is FuseNorm.NONE else [FuseNorm.NONE]:
        yield Hypothesis("norm before fc", "N2", f"the norm before fc is {norm}", partial(_fused, norm))
    if spec.features_width == spec.width:
        yield Hypothesis("fc", "M2", "fc is skipped", switching(projects=not spec.projects))


def _state_norms(spec: DraftSpec, others: Sequence[DraftSpec]) -> Iterator[Hypothesis]:
    for twice in dict.fromkeys(other.normed_twice for other in others if other.normed_twice != spec.normed_twice):
        title = f"the state is normed {'twice' if twice else 'once'}"
        yield Hypothesis("state norms", "N5", title, switching(normed_twice=twice))


def _fused(norm: FuseNorm, at: Configuration) -> Configuration:
    """The same weights under another norm before fc; with gains of one where there are none."""
    spec = at.spec
    slots = {FuseNorm.NONE: 0, FuseNorm.WHOLE: 1, FuseNorm.PER_SLOT: spec.slots}[norm]
    gains = at.tensors["fc.weight"].new_ones(slots, spec.features_width // max(slots, 1))
    ones = {f"fuse_norms.{slot}.weight": plain_norm(one, spec) for slot, one in enumerate(gains)}
    rest = {name: tensor for name, tensor in at.tensors.items() if not name.startswith("fuse_norms.")}
    return replace(at, spec=replace(spec, fuse_norm=norm), tensors={**rest, **at.spare.get(norm, ones)})


def _rope(spec: DraftSpec, others: Sequence[DraftSpec]) -> Iterator[Hypothesis]:
    rope = spec.rope
    near = (rope.theta * factor for factor in (0.25, 0.5, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0, 4.0))
    flipped = replace(rope, interleaved=not rope.interleaved)
    pairs = "interleaved pairs" if flipped.interleaved else "halves"
    # Of equals the first: what somebody says is likelier than the other of two ways, and that than a number between.
    known = dict.fromkeys(one.rope.theta for one in others)
    yield from (_theta(spec, theta) for theta in known if theta != rope.theta)
    yield Hypothesis("rope pairs", "R5", f"RoPE rotates {pairs}", switching(rope=flipped), alike=("P5",))
    yield from (_theta(spec, theta) for theta in sorted({*_THETAS, *near} - {rope.theta, *known}))
    for other in others:
        if other.rope.kind is not RopeKind.DEFAULT and _scaled_as(other, spec) != spec:
            title = f"RoPE is scaled: {other.rope.kind} by {other.rope.factor:g}"
            yield Hypothesis("rope scaling", "R4", title, partial(_rescaled, other))
    if rope.kind is not RopeKind.DEFAULT:
        yield Hypothesis("rope scaling", "R4", "RoPE's scaling is dropped", _unscaled)
        if isinstance(spec.attention, MlaSpec) and spec.attention.softmax_scale != 1.0:
            title = "RoPE's scaling is dropped, the softmax scale kept"
            kept = switching(rope=unscaled(spec).rope)
            yield Hypothesis("rope scaling", "R4", title, kept, variant="softmax-kept")


def _theta(spec: DraftSpec, theta: float) -> Hypothesis:
    return Hypothesis("rope theta", "R3", f"RoPE's theta is {theta:g}", switching(rope=replace(spec.rope, theta=theta)))


def _unscaled(at: Configuration) -> Configuration:
    return replace(at, spec=unscaled(at.spec))


def _rescaled(other: DraftSpec, at: Configuration) -> Configuration:
    return replace(at, spec=_scaled_as(other, at.spec))


def _scaled_as(other: DraftSpec, spec: DraftSpec) -> DraftSpec:
    """A draft with the scaling of another, the softmax scale that comes with it, too."""
    rope = replace(other.rope, theta=spec.rope.theta, interleaved=spec.rope.interleaved)
    attention = spec.attention
    if isinstance(attention, MlaSpec) and isinstance(other.attention, MlaSpec):
        attention = replace(attention, softmax_scale=other.attention.softmax_scale)
    return replace(spec, rope=rope, attention=attention)


def _reaching(spec: DraftSpec, others: Sequence[DraftSpec]) -> Iterator[Hypothesis]:
    """Sliding windows dropped, as others have them, or by one position wider or narrower, as engines count them."""
    tried = dict.fromkeys(other.windows for other in others if len(other.windows) == spec.layers)
    if any(spec.windows):
        tried |= dict.fromkeys([(None,) * spec.layers])
        tried |= dict.fromkeys(tuple(w and w + by for w in spec.windows) for by in (1, -1))
    for windows in tried:
        if windows != spec.windows and all(window is None or window > 0 for window in windows):
            said = ", ".join("none" if window is None else str(window) for window in windows)
            title = "sliding windows are dropped" if not any(windows) else f"the window is {said}"
            yield Hypothesis("window", "A2", title, switching(windows=windows))


def _embedding_scale(at: Configuration, others: Sequence[DraftSpec]) -> Iterator[Hypothesis]:
    """No scale, others', and Gemma's, where the norm behind the embedding does not divide it out."""
    rows = at.tensors["embedding.weight"][:_FEW_ROWS].float().square().mean(1)
    gemma = [at.spec.width**0.5] if float(rows.median()) < _QUIET * at.spec.norm_eps else []
    for scale in dict.fromkeys((1.0, *(other.embedding_scale for other in others), *gemma)):
        if scale != at.spec.embedding_scale:
            title = "the embedding is not scaled" if scale == 1 else f"the embedding is multiplied by {scale:g}"
            step = switching(embedding_scale=scale)
            yield Hypothesis("embedding scale", "A1", title, step, variant="scale")


def mapping(at: Configuration, rebuilt: Tensor | None) -> Iterator[Hypothesis]:
    """Every other way to read the table from draft ids to tokens; `rebuilt` is the one that t2d says, if any."""
    table, own = at.tensors["d2t"], torch.arange(at.spec.draft_vocab, device=at.tensors["d2t"].device)
    named = {
        "not there, each id standing for itself": ("V1", torch.zeros_like(table), ("V5",)),
        "read as tokens, not as offsets": ("V2", table - own, ()),
        "one row late": ("V4", table.roll(-1), ()),
        "one row early": ("V4", table.roll(1), ()),
    }
    if rebuilt is not None:
        named["the one that t2d says"] = ("V3", rebuilt.to(table), ("V1", "V2", "V4", "V5"))
    for value, (fault, offsets, alike) in named.items():
        meant = (own + offsets) % at.spec.target_vocab - own
        if not torch.equal(meant, table):
            yield _mapped(fault, value, partial(_instead, meant), alike)


def _mapped(fault: str, value: str, make: Callable[[Configuration], Tensor], alike: tuple[str, ...] = ()) -> Hypothesis:
    step = replacing("vocabulary map", value, lambda at: {"d2t": make(at)})
    return Hypothesis("vocabulary map", fault, f"the table is {value}", step, alike=alike)


def _instead(new: Tensor, _at: Configuration) -> Tensor:
    return new


def served_table(ids: Tensor, tokens: Tensor, fault: str, title: str) -> Hypothesis:
    """The table as found: these ids stood for these tokens, the others for their own."""

    def make(at: Configuration) -> Tensor:
        table = at.tensors["d2t"]
        return table.index_put((ids,), (tokens - ids).to(table.dtype))

    return _mapped(fault, title, make)


def moving() -> Iterator[Hypothesis]:
    """Every other way to count positions below a row."""
    for steps, fault, title in (
        (Steps(2, 1), "R1", "positions are one too far from depth 1 on"),
        (Steps(0, 1), "R2", "positions stay for one depth"),
        (Steps(0, 0), "R2", "positions are not advanced"),
    ):
        yield Hypothesis("positions", fault, title, partial(_stepping, steps), deeper=True)


def moved(offsets: Sequence[int], fault: str, title: str) -> Hypothesis | None:
    """Positions as found: rows of depth 1, 2 and so on so far beyond the text; None where that is no counting."""
    first, gaps = offsets[0], {below - above for above, below in pairwise(offsets)} or {ADVANCING.later}
    if len(gaps) > 1:
        return None
    return Hypothesis("positions", fault, title, partial(_stepping, Steps(first, gaps.pop())), deeper=True)


def _stepping(steps: Steps, at: Configuration) -> Configuration:
    return replace(at, steps=replace(steps, end=at.steps.end))


def ending(end: int, told: str) -> Hypothesis:
    """Nothing is drafted from a position on, as found: `told` is what shows it."""
    title = f"nothing is drafted from position {end} on ({told})"
    return Hypothesis("context", "A3", title, lambda at: replace(at, steps=replace(at.steps, end=end)))


def feeding(at: Configuration, layers: int, known: Sequence[int]) -> Iterator[Hypothesis]:
    """Every other wiring near this one, over known boundaries."""
    for wiring in _wirings(at, layers, known):
        (fault, variant, title), alike = name_wiring(wiring, at.wiring, layers)
        yield Hypothesis("wiring", fault, title, partial(_wired, wiring), variant=variant, alike=alike)


def _wired(wiring: tuple[Slot, ...], at: Configuration) -> Configuration:
    return replace(at, wiring=wiring)


def _wirings(at: Configuration, layers: int, known: Sequence[int]) -> Iterator[tuple[Slot, ...]]:
    """Moved, permuted, defaulted, a slot dropped or replaced."""
    own, found = at.wiring, dict[tuple[Slot, ...], None]()
    numbers = tuple(slot.boundary for slot in own)
    for by in (*range(1, _FAR + 1), *range(-1, -_FAR - 1, -1)):
        found[_clamped([b + by for b in numbers], layers)] = None
        found[_clamped([b + by if b else 0 for b in numbers], layers)] = None  # an embedding that stayed where it was
        for place in range(len(own)):
            found[_clamped([b + by * (i == place) for i, b in enumerate(numbers)], layers)] = None
    for order in permutations(own) if len(own) <= _FAR else ():
        found[order] = None
    if len(own) == 3:
        found[_clamped(default_wiring(layers), layers)] = None
    found[_clamped((0, *numbers[:-1]), layers)] = None
    found[_clamped((*numbers[1:], layers - 3), layers)] = None
    for place in range(len(own)):
        for boundary in (0, *known):
            found[*own[:place], Slot(boundary), *own[place + 1 :]] = None
        if own[place].boundary == layers:
            found[*own[:place], Slot(layers, View.NORMED), *own[place + 1 :]] = None
    for place in range(len(own) - 1):
        if numbers[place] == numbers[place + 1]:  # one too many: another has fallen out behind
            rest = (*own[:place], *own[place + 1 :])
            found.update(dict.fromkeys((*rest, Slot(boundary)) for boundary in known))
    have = set(known)
    yield from (w for w in found if w != own and {slot.boundary for slot in w} <= have)


def _clamped(numbers: Sequence[int], layers: int) -> tuple[Slot, ...]:
    return tuple(Slot(min(max(b, 0), layers)) for b in numbers)

"""What can go wrong with a draft, as data: small named steps from one configuration to another, and how links read.

A new hypothesis is one entry in one of the lists below; it says nothing of who is wrong, since the same step explains
an engine or a config. A new link is one more of `LINKS`, and how an engine's profile edits it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, permutations

import torch
from torch import Tensor

from spectrace.engine.checkpoint import default_wiring, unscaled
from spectrace.engine.spec import DraftSpec, FuseNorm, MlaSpec, RopeKind, Stream
from spectrace.replay.configuration import ADVANCING, Configuration, Slot, Steps, View, listed
from spectrace.replay.wirings import name_wiring

__all__ = ["LINKS", "Hypothesis", "Link", "computing", "feeding", "mapping", "moved", "moving", "served_table"]

Apply = Callable[[Configuration], Configuration]
_FAR, _THETAS = 4, tuple(float(f"{digit}e{power}") for power in range(2, 8) for digit in (1, 2, 2.5, 5))
_NORMS = ("embedding_norm", "feature_norm", "mlp_norm", "output_norm")
_ADDERS = {"attention.o": "attention", "mlp.down": "mlp"}


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One step: the `link` that it changes, the fault it stands for, and the step itself.

    `deeper` hypotheses show at depth 1 and beyond only. `alike` are faults that no data tell from it.
    """

    link: str
    fault: str
    title: str
    apply: Apply
    variant: str = ""
    deeper: bool = False
    alike: tuple[str, ...] = ()


def _theta(at: Configuration) -> str:
    return f"{at.spec.rope.theta:g}"


def _scaling(at: Configuration) -> str:
    rope, attention = at.spec.rope, at.spec.attention
    scale = f", softmax scale {attention.softmax_scale:.3g}" if isinstance(attention, MlaSpec) else ""
    return "none" + scale if rope.kind is RopeKind.DEFAULT else f"{rope.kind} by {rope.factor:g}{scale}"


def _pairs(at: Configuration) -> str:
    return "interleaved" if at.spec.rope.interleaved else "halves"


@dataclass(frozen=True, slots=True)
class Link:
    """One thing that configuration, engine and training can each have their own way: how it reads, and as what value an
    edit writes it. `in_config` links are decided by a draft's config alone; profiles know how to edit them by name.
    """

    read: Callable[[Configuration], str]
    value: Callable[[Configuration], object] | None = None
    in_config: bool = False

    def to_write(self, at: Configuration) -> object:
        """What an edit makes of it."""
        return (self.value or self.read)(at)


def _said(link: str, otherwise: str) -> Link:
    return Link(lambda at: at.said.get(link, otherwise))


LINKS: Mapping[str, Link] = {
    "wiring": Link(lambda at: listed(at.wiring)),
    "fc": Link(lambda at: "applied" if at.spec.projects else "skipped"),
    "norm before fc": Link(lambda at: str(at.spec.fuse_norm), in_config=True),
    "residual": Link(lambda at: str(at.spec.residual), in_config=True),
    "feedback": Link(lambda at: str(at.spec.feedback), in_config=True),
    "rope theta": Link(_theta, lambda at: at.spec.rope.theta, in_config=True),
    "rope scaling": Link(_scaling, lambda at: at.spec.rope, in_config=True),
    "rope pairs": Link(_pairs, lambda at: at.spec.rope, in_config=True),
    "positions": Link(lambda at: f"+{at.steps.first} to depth 1, +{at.steps.later} to each deeper"),
    "weights": _said("weights", "the checkpoint's"),
    "gate and up": _said("gate and up", "the checkpoint's"),
    "head": _said("head", "the checkpoint's"),
    "embedding": _said("embedding", "the checkpoint's"),
    "vocabulary map": _said("vocabulary map", "the checkpoint's d2t, as offsets"),
}
"""By name, in the order of the data's path. Evidence, hypotheses, readings and profiles call them so."""


def computing(
    at: Configuration, shared: Mapping[str, Tensor], others: Sequence[DraftSpec] = ()
) -> Iterator[Hypothesis]:
    """Every other way to compute the same draft: switches, RoPE and weights.

    `shared` are the target's "embedding" and "head", as far as they are known; `others` are such
    drafts whose RoPE may be the right one.
    """
    yield from _switches(at)
    yield from _rope(at.spec, others)
    yield from _weights(at, shared)


def _switched(**changes: object) -> Apply:
    return lambda at: replace(at, spec=replace(at.spec, **changes))  # type: ignore[arg-type]


def _switches(at: Configuration) -> Iterator[Hypothesis]:
    spec = at.spec
    [residual], [feedback] = set(Stream) - {spec.residual}, set(Stream) - {spec.feedback}
    yield Hypothesis("residual", "N1", f"the residual is {residual}", _switched(residual=residual))
    yield Hypothesis("feedback", "N3", f"what is fed back is {feedback}", _switched(feedback=feedback), deeper=True)
    # A checkpoint that has norms has them for one of the two ways; one that has none may have lost either.
    others = [FuseNorm.NONE] if spec.fuse_norm is not FuseNorm.NONE else at.spare or [FuseNorm.WHOLE, FuseNorm.PER_SLOT]
    for norm in others:
        yield Hypothesis("norm before fc", "N2", f"the norm before fc is {norm}", partial(_fused, norm))
    if spec.features_width == spec.width:
        yield Hypothesis("fc", "M2", "fc is skipped", _switched(projects=not spec.projects))


def _fused(norm: FuseNorm, at: Configuration) -> Configuration:
    """The same weights under another norm before fc; with gains of one where there are none."""
    names = [name for name in at.tensors if name.startswith("fuse_norms.")]
    gains = at.spare.get(norm, at.tensors["fc.weight"].new_ones(at.spec.features_width))
    parts = {FuseNorm.NONE: [], FuseNorm.WHOLE: [gains], FuseNorm.PER_SLOT: list(gains.chunk(at.spec.slots))}[norm]
    rest = {name: tensor for name, tensor in at.tensors.items() if name not in names}
    norms = {f"fuse_norms.{slot}.weight": gain for slot, gain in enumerate(parts)}
    return replace(at, spec=replace(at.spec, fuse_norm=norm), tensors={**rest, **norms})


def _rope(spec: DraftSpec, others: Sequence[DraftSpec]) -> Iterator[Hypothesis]:
    rope = spec.rope
    near = (rope.theta * factor for factor in (0.25, 0.5, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0, 4.0))
    known = [one.rope.theta for one in others]  # first: of equals, what somebody says is likelier than a number between
    for theta in dict.fromkeys((*known, *sorted({*_THETAS, *near}))):
        if theta == rope.theta:
            continue
        changed = replace(rope, theta=theta)
        yield Hypothesis("rope theta", "R3", f"RoPE's theta is {theta:g}", _switched(rope=changed))
    flipped = replace(rope, interleaved=not rope.interleaved)
    pairs = "interleaved pairs" if flipped.interleaved else "halves"
    yield Hypothesis("rope pairs", "R5", f"RoPE rotates {pairs}", _switched(rope=flipped), alike=("P5",))
    for other in others:
        if other.rope.kind is not RopeKind.DEFAULT and _scaled_as(other, spec) != spec:
            title = f"RoPE is scaled: {other.rope.kind} by {other.rope.factor:g}"
            yield Hypothesis("rope scaling", "R4", title, partial(_rescaled, other))
    if rope.kind is not RopeKind.DEFAULT:
        yield Hypothesis("rope scaling", "R4", "RoPE's scaling is dropped", _unscaled)
        if isinstance(spec.attention, MlaSpec) and spec.attention.softmax_scale != 1.0:
            title = "RoPE's scaling is dropped, the softmax scale kept"
            kept = _switched(rope=unscaled(spec).rope)
            yield Hypothesis("rope scaling", "R4", title, kept, variant="softmax-kept")


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


def _weights(at: Configuration, shared: Mapping[str, Tensor]) -> Iterator[Hypothesis]:
    yield Hypothesis("gate and up", "P4", "gate and up are swapped", _swapped)
    for norm in _NORMS:
        if not bool((at.tensors[f"{norm}.weight"] == 1).all()):
            yield _put("weights", "P1", norm, "all ones", f"{norm}.weight", torch.ones_like, variant="norm")
    for name, part in _ADDERS.items():
        yield _put("weights", "P1", name, "zero", f"{name}.weight", torch.zeros_like, variant=part)
    head, embedding = shared.get("head"), shared.get("embedding")
    if head is not None and at.spec.own_head and head.shape[1] == at.spec.width and len(head) >= at.spec.draft_vocab:
        first = head[: at.spec.draft_vocab]
        yield _put("head", "P2", "the head", "the target's first rows", "head.weight", partial(_instead, first))
    if embedding is not None and at.spec.own_embedding and embedding.shape == at.tensors["embedding.weight"].shape:
        yield _put("embedding", "A1", "the embedding", "the target's", "embedding.weight", partial(_instead, embedding))


def _swapped(at: Configuration) -> Configuration:
    gate, up = "mlp.gate.weight", "mlp.up.weight"
    tensors = {**at.tensors, gate: at.tensors[up], up: at.tensors[gate]}
    return replace(at, tensors=tensors, said={**at.said, "gate and up": "swapped"})


def _put(
    link: str, fault: str, what: str, value: str, name: str, make: Callable[[Tensor], Tensor], *, variant: str = ""
) -> Hypothesis:
    """Another tensor of this name: `what` is `value`."""
    said = f"{what} {value}" if link == "weights" else value

    def apply(at: Configuration) -> Configuration:
        new = make(at.tensors[name]).to(at.tensors[name].dtype)
        told = ", ".join(filter(None, (at.said.get(link), said)))
        return replace(at, tensors={**at.tensors, name: new}, said={**at.said, link: told})

    return Hypothesis(link, fault, f"{what} is {value}", apply, variant=variant)


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
            one = _put("vocabulary map", fault, "the table", value, "d2t", partial(_instead, meant))
            yield replace(one, alike=alike)


def served_table(ids: Tensor, tokens: Tensor, fault: str, title: str) -> Hypothesis:
    """The table as found: these ids stood for these tokens, the others for their own."""

    def make(table: Tensor) -> Tensor:
        return table.index_put((ids,), (tokens - ids).to(table.dtype))

    return _put("vocabulary map", fault, "the table", title, "d2t", make)


def _instead(new: Tensor, _old: Tensor) -> Tensor:
    return new


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
    return replace(at, steps=steps)


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

"""In which ways an id of the catalogue can be seeded into a pair."""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from scoreboard import edits, tensors
from scoreboard.edits import Edit
from scoreboard.pairs import Pair

from spectrace.engine.checkpoint import default_wiring, read_draft, read_embedding, read_head
from spectrace.engine.deployment import Deployment
from spectrace.engine.faults import FAULTS
from spectrace.engine.spec import DraftSpec, FuseNorm, GqaSpec, MlaSpec, RopeKind

__all__ = ["Kind", "Option", "alike", "deployment_of", "options"]

Kind = Literal["engine", "config", "conversion", "clean"]

_USUAL_THETAS = (10_000.0, 50_000.0, 100_000.0, 500_000.0, 1_000_000.0)
_THETA_FACTORS = (1.6, 3.0)
_LOUD = 30.0


@dataclass(frozen=True, slots=True)
class Option:
    """A way in which an id can be seeded into a pair."""

    kind: Kind
    variant: str
    switched: tuple[str, ...] = ()
    edit: Edit | None = None


@cache
def deployment_of(target: Path, draft: Path, ranks: tuple[int, int] = (1, 1)) -> Deployment:
    """Not started: it says which settings fit."""
    return Deployment(target, draft, tp=ranks[0], draft_tp=ranks[1], threads=1)


def options(pair: Pair, id: str, rng: random.Random) -> list[Option]:
    """Every way that changes something; whether the pair's settings allow it is asked elsewhere."""
    wiring, layers = _wiring(pair)
    named = [fault for fault in FAULTS.values() if fault.id == id]
    idle = {fault.name for fault in named if id in _DELIVERED and fault.wiring(wiring, layers) == wiring}
    idle |= {"A1:scaled"} if _is_loud(pair.target, pair.draft) else set()
    found = [Option("engine", fault.name, (fault.name,)) for fault in named if fault.name not in idle]
    for edit in _edits(pair, id, rng):
        kinds: tuple[Kind, ...] = _KINDS.get(edit.what, ("config", "conversion"))
        found += [Option(kind, edit.what, edit=edit) for kind in kinds]
    return found


_KINDS: dict[str, tuple[Kind, ...]] = {
    "table of another run": ("conversion",),
    "norm's weights gone": ("conversion",),
    "scaling dropped": ("conversion",),
    "theta of another model": ("conversion",),
    "attention as before training": ("conversion",),
    "fc as before training": ("conversion",),
    "norm as before training": ("conversion",),
    "mlp as before training": ("conversion",),
    "head is the target's": ("conversion",),
    "embedding as before training": ("conversion",),
    "another step's": ("conversion",),
    "biases lost": ("conversion",),
    "scales lost": ("conversion",),
    "window lost": ("conversion",),
    "later norms as before training": ("conversion",),
    "later norms are the first one's": ("conversion",),
    "embedding is the target's": ("conversion",),
}
"""Where not both: the folder that is believed has to hold, somewhere, what the repair needs."""


def _wiring(pair: Pair) -> tuple[tuple[int, ...], int]:
    deployment = deployment_of(pair.target, pair.draft)
    assert deployment.checkpoint and deployment.checkpoint.wiring
    return deployment.checkpoint.wiring.boundaries, deployment.layers


@cache
def _is_loud(target: Path, draft: Path) -> bool:
    """Whether the embedding is far above what its norm adds to it, so that a scale in front of the norm is nothing."""
    checkpoint = read_draft(draft)
    own, spec = checkpoint.tensors.get("embedding.weight"), checkpoint.spec
    table = read_embedding(target) if own is None else own
    return bool(table.float().square().mean() > _LOUD * spec.norm_eps)


_DELIVERED: dict[str, Callable[[tuple[int, ...], int], tuple[int, ...]]] = {
    "W1": lambda wiring, _: edits.early(wiring),
    "W2": edits.late,
    "W3": edits.lose_first,
    "W4": lambda _, layers: default_wiring(layers),
    "W5": lambda wiring, _: wiring[::-1],
    "W6": lambda wiring, _: edits.first_twice(wiring),
}
"""Which boundaries a fault of the wiring delivers."""


def _edits(pair: Pair, id: str, rng: random.Random) -> Iterator[Edit]:
    """What can be done to the pair's folder to the same effect."""
    if id in _DELIVERED:
        yield from _wirings(pair, id, rng)
    elif id in ("N1", "N3"):
        field = {"N1": "norm_before_residual", "N3": "norm_output"}[id]
        yield Edit(f"{field} flipped", lambda draft: edits.flip(draft, field))
    else:
        yield from _of_spec(pair, id, rng)
        yield from _of_tensors(pair, id, rng.getrandbits(30))


def _wirings(pair: Pair, id: str, rng: random.Random) -> Iterator[Edit]:
    wiring, layers = _wiring(pair)
    wanted = {"as in the engine": _DELIVERED[id](wiring, layers)}
    if id in ("W1", "W2"):
        sign, by, slot = (-1 if id == "W1" else 1), rng.choice((2, 3, 4)), rng.randrange(len(wiring))
        wanted[f"by {by}"] = edits.early(wiring, by) if sign < 0 else edits.late(wiring, layers, by)
        wanted[f"slot {slot}"] = edits.move_slot(wiring, slot, sign)
    for what, moved in wanted.items():
        if moved != wiring and len(moved) == len(wiring) and all(0 <= b <= layers for b in moved):
            yield _rewiring(what, moved)
    if id == "W2" and max(wiring) < layers:
        yield Edit("ids under the other key", edits.output_ids)
    if id == "W4" and len(wiring) == 3:
        yield Edit("ids lost", edits.forget_wiring)


def _rewiring(what: str, wiring: tuple[int, ...]) -> Edit:
    return Edit(f"{what}: {wiring}", lambda draft: edits.rewire(draft, wiring))


def _of_spec(pair: Pair, id: str, rng: random.Random) -> Iterator[Edit]:
    spec = read_draft(pair.draft).spec
    theta, other = spec.rope.theta, {t for t in _USUAL_THETAS if t != spec.rope.theta}
    match id:
        case "N2" if spec.fuse_norm is not FuseNorm.NONE:
            yield Edit("norm not mentioned", lambda draft: edits.drop_fuse_norm(draft, keep_tensors=True))
            yield Edit("norm's weights gone", lambda draft: edits.drop_fuse_norm(draft, keep_tensors=False))
        case "R3":
            yield Edit("theta doubled", lambda draft: edits.set_theta(draft, 2 * theta))
            yield Edit("theta halved", lambda draft: edits.set_theta(draft, theta / 2))
            factor = math.exp(rng.uniform(*map(math.log, _THETA_FACTORS))) ** rng.choice((1, -1))
            yield Edit(f"theta times {factor:.3f}", lambda draft: edits.set_theta(draft, round(factor * theta, 1)))
            if theta in _USUAL_THETAS:
                yield Edit("another usual theta", lambda draft: edits.set_theta(draft, max(other)))
            if theta != 10_000:
                what = "theta lost" if theta in _USUAL_THETAS else "theta of another model"
                yield Edit(what, lambda draft: edits.set_theta(draft, None))
        case "R4" if spec.rope.kind is not RopeKind.DEFAULT:
            yield Edit("scaling dropped", edits.drop_scaling)
        case "R5" if isinstance(spec.attention, MlaSpec):
            yield Edit("rope_interleave flipped", lambda draft: edits.flip(draft, "rope_interleave", default=True))
        case "P7" if isinstance(spec.attention, GqaSpec) and spec.attention.qkv_bias:
            yield Edit("attention_bias flipped", lambda draft: edits.flip(draft, "attention_bias"))
        case "A1" if spec.embedding_scale != 1:
            yield Edit("embedding_scale lost", edits.lose_scale)
        case "A2" if any(spec.windows):
            yield Edit("use_sliding_window flipped", lambda draft: edits.flip(draft, "use_sliding_window"))
            yield Edit("window lost", edits.lose_window)


def _of_tensors(pair: Pair, id: str, drawn: int) -> Iterator[Edit]:
    spec = read_draft(pair.draft).spec
    mapped = spec.draft_vocab < spec.target_vocab
    match id:
        case "V3" if mapped:
            yield Edit("table of another run", lambda draft: tensors.stale_d2t(draft, drawn))
        case "V4" if mapped:
            yield Edit("table rolled", tensors.roll_d2t)
        case "V5" if mapped:
            yield Edit("table zero", tensors.zero_d2t)
        case "P1":
            for part in ("attention", "fc", "norm", "mlp"):
                yield _fresh(part, drawn)
        case "P2" if spec.own_head and spec.width == spec.target_width:
            yield Edit("head is the target's", lambda draft: tensors.target_head(draft, read_head(pair.target)))
        case "P3" if spec.own_embedding:
            yield Edit("embedding as before training", lambda draft: tensors.random_embedding(draft, drawn))
        case "P4":
            yield Edit("gate and up swapped", tensors.swap_gate_and_up)
        case "P5":
            yield Edit("rows of q and k reordered", tensors.reorder_rows)
        case "P6":
            yield _another_step(pair, drawn)
        case "P8" if pair.quantised:
            yield Edit("scales lost", tensors.lose_scales)
        case _:
            yield from _of_layers(pair, id, spec)


def _of_layers(pair: Pair, id: str, spec: DraftSpec) -> Iterator[Edit]:
    match id:
        case "P7" if isinstance(spec.attention, GqaSpec) and spec.attention.qkv_bias:
            yield Edit("biases lost", tensors.lose_bias)
        case "N4" if spec.layers > 1:
            yield Edit("later norms as before training", lambda draft: tensors.later_norms(draft, "plain"))
            yield Edit("later norms are the first one's", lambda draft: tensors.later_norms(draft, "first"))
        case "A1" if spec.own_embedding and spec.width == spec.target_width:
            table = read_embedding(pair.target)
            yield Edit("embedding is the target's", lambda draft: tensors.target_embedding(draft, table))
            if spec.own_head and spec.draft_vocab == spec.target_vocab:
                yield Edit("head is the target's", lambda draft: tensors.target_head(draft, read_head(pair.target)))


def _another_step(pair: Pair, drawn: int) -> Edit:
    """Of a draft that was stopped early, if there is one of the same shape."""
    other = pair.undertrained
    return Edit("another step's", lambda draft: edits.read(other) if other else tensors.moved(draft, drawn))


def _fresh(part: str, drawn: int) -> Edit:
    return Edit(f"{part} as before training", lambda draft: tensors.reinitialise(draft, part, drawn))


def alike(pair: Pair, id: str, option: Option) -> tuple[str, ...]:
    """Other ids that put the same boundaries into the slots of this pair."""
    wiring, layers = _wiring(pair)
    if id not in _DELIVERED:
        return ()
    delivered = FAULTS[option.switched[0]].wiring(wiring, layers) if option.switched else None
    if option.edit:
        checked = option.edit.apply(edits.read(pair.draft)).config
        delivered = tuple(checked.get("eagle_aux_hidden_state_layer_ids", ())) or None
    return tuple(other for other, by in _DELIVERED.items() if other != id and by(wiring, layers) == delivered)

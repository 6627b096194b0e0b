"""What is seeded: each fault of the catalogue into each pair where it applies, drawn by a seed.

A fault sits in the engine (switched on in it), in the config (the team believes a folder that is wrong), or in
conversion (what is served is not the folder that the team believes). Every draw hangs on seed, pair and id alone, so
that leaving others out changes nothing.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

from scoreboard import edits
from scoreboard.edits import Edit
from scoreboard.pairs import IDS, Pair, Prompts, draw_rng
from scoreboard.ways import Way, plain, served_as, ways

from spectrace.engine.checkpoint import default_wiring, read_draft, read_head
from spectrace.engine.deployment import Deployment
from spectrace.engine.faults import FAULTS
from spectrace.engine.serving import Serving
from spectrace.engine.spec import FuseNorm, MlaSpec, RopeKind
from spectrace.tracer.errors import UserError

__all__ = ["STACKS", "Kind", "Option", "Seed", "applies", "draw", "options"]

Kind = Literal["engine", "config", "conversion", "clean"]
Ranks = tuple[int, int]

STACKS = (("W3", "N3"), ("W3", "R1"), ("N3", "V4"), ("W2", "N1"), ("R3", "W5"))
_NEEDS_RANKS = {"W9", "Q1"}
_EVERY_KIND = {"smollm2", "toy"}  # where W3 is seeded in all three kinds
_USUAL_THETAS = (10_000.0, 50_000.0, 100_000.0, 500_000.0, 1_000_000.0)
_THETA_FACTORS = (1.6, 3.0)


@dataclass(frozen=True, slots=True)
class Seed:
    """One run to record: what is wrong (`faults`, none where it is clean), where, and how it is served.

    The engine runs with `switched` on; `edit` has been done to the served folder where `kind` is conversion, to the
    believed one as well where it is config or clean. The repair is the pair's own draft, nothing switched on. `alike`
    are ids that come to the very same run here.
    """

    faults: tuple[str, ...]
    variant: str
    pair: str
    number: int
    kind: Kind
    serving: Serving
    prompts: Prompts
    switched: tuple[str, ...] = ()
    edit: Edit | None = None
    draft: Path | None = None
    ranks: Ranks = (1, 1)
    dtype: str = "float32"
    alike: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """How it is called in lists, and what `--only` looks at."""
        return f"{self.pair}/{'+'.join(self.faults) or 'clean'}/{self.kind}/{self.variant}/{self.number}"

    @property
    def served(self) -> Serving:
        """The settings with what is switched on."""
        return replace(self.serving, faults=self.switched)

    @property
    def served_as(self) -> str:
        """How it is served, in words."""
        return served_as(self.serving, self.dtype)

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn or rounded, so that what a repair brings can be foretold exactly."""
        return Way(self.serving, self.dtype).greedy


@dataclass(frozen=True, slots=True)
class Option:
    """A way in which an id can be seeded into a pair."""

    kind: Kind
    variant: str
    switched: tuple[str, ...] = ()
    edit: Edit | None = None


@cache
def _deployment(target: Path, draft: Path, ranks: Ranks) -> Deployment:
    """Not started: it says which settings fit."""
    return Deployment(target, draft, tp=ranks[0], draft_tp=ranks[1], threads=1)


def applies(pair: Pair, serving: Serving, ranks: Ranks = (1, 1)) -> str:
    """Why these settings cannot be had on the pair, or nothing."""
    try:
        _deployment(pair.target, pair.draft, ranks).check(serving)
    except UserError as error:
        return str(error)
    return ""


def draw(number: int, pair: Pair) -> list[Seed]:
    """The seeded faults of a pair, single ones first."""
    single = [seed for id in IDS if id in pair.ids for seed in _single(number, pair, id)]
    stacks = [ids for ids in STACKS if {*ids} <= {*pair.ids}]
    chosen = draw_rng(number, pair, "stacks").sample(stacks, min(pair.stacked, len(stacks)))
    return single + [seed for ids in chosen if (seed := _stacked(number, pair, ids))]


def _single(number: int, pair: Pair, id: str) -> Iterator[Seed]:
    """One of an id, of W3 one of each kind where the pair has room for it."""
    rng = draw_rng(number, pair, id)
    served, found = _fitting(number, pair, id, options(pair, id, rng))
    kinds = sorted({option.kind for option in found}, key=("engine", "config", "conversion").index)
    if not (id == "W3" and pair.name in _EVERY_KIND):
        kinds = rng.choices(kinds, weights=[1 + (kind == "engine") for kind in kinds])[:1] if kinds else []
    for kind in kinds:
        option = rng.choice([option for option in found if option.kind == kind])
        yield Seed(
            (id,), option.variant, pair.name, number, kind, served.serving, _asked(number, pair, served),
            option.switched, option.edit, ranks=_ranks(pair, id), dtype=served.dtype, alike=_alike(pair, id, option),
        )  # fmt: skip


def _fitting(number: int, pair: Pair, id: str, wanted: list[Option]) -> tuple[Way, list[Option]]:
    """The first of an id's ways that costs it none of the options of the last, the plain one; and these options."""
    possible = [
        (served, [option for option in wanted if _is_possible(pair, option, served.serving, _ranks(pair, id))])
        for served in ways(number, pair, id)
    ]
    return next((served, found) for served, found in possible if len(found) == len(possible[-1][1]))


def _ranks(pair: Pair, id: str) -> Ranks:
    return pair.ranks if id in _NEEDS_RANKS else (1, 1)


def _is_possible(pair: Pair, option: Option, serving: Serving, ranks: Ranks) -> bool:
    return not applies(pair, replace(serving, faults=option.switched), ranks)


def _stacked(number: int, pair: Pair, ids: tuple[str, ...]) -> Seed | None:
    """Two at once, both in the engine."""
    served = Way(plain(number, pair, "stacks"))
    if applies(pair, replace(served.serving, faults=ids)):
        return None
    return Seed(ids, "stacked", pair.name, number, "engine", served.serving, _asked(number, pair, served), ids)


def _asked(number: int, pair: Pair, served: Way) -> Prompts:
    """The same prompts for all of a pair, so that repaired runs can be shared; more where chance has a say."""
    return pair.ask(draw_rng(number, pair, "prompts"), pair.count * (1 if served.greedy else max(pair.draws, 1)))


# In which ways an id can be seeded


def options(pair: Pair, id: str, rng: random.Random) -> list[Option]:
    """Every way that changes something; whether the pair's settings allow it is asked elsewhere."""
    wiring, layers = _wiring(pair)
    named = [fault for fault in FAULTS.values() if fault.id == id]
    idle = {fault.name for fault in named if id in _DELIVERED and fault.wiring(wiring, layers) == wiring}
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
}
"""Where not both: the folder that is believed has to hold, somewhere, what the repair needs."""


def _wiring(pair: Pair) -> tuple[tuple[int, ...], int]:
    deployment = _deployment(pair.target, pair.draft, (1, 1))
    assert deployment.checkpoint and deployment.checkpoint.wiring
    return deployment.checkpoint.wiring.boundaries, deployment.layers


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


def _of_tensors(pair: Pair, id: str, drawn: int) -> Iterator[Edit]:
    spec = read_draft(pair.draft).spec
    mapped = spec.draft_vocab < spec.target_vocab
    match id:
        case "V3" if mapped:
            yield Edit("table of another run", lambda draft: edits.stale_d2t(draft, drawn))
        case "V4" if mapped:
            yield Edit("table rolled", edits.roll_d2t)
        case "V5" if mapped:
            yield Edit("table zero", edits.zero_d2t)
        case "P1":
            for part in ("attention", "fc", "norm", "mlp"):
                yield _fresh(part, drawn)
        case "P2" if spec.own_head and spec.width == spec.target_width:
            yield Edit("head is the target's", lambda draft: edits.target_head(draft, read_head(pair.target)))
        case "P3" if spec.own_embedding:
            yield Edit("embedding as before training", lambda draft: edits.random_embedding(draft, drawn))
        case "P4":
            yield Edit("gate and up swapped", edits.swap_gate_and_up)


def _fresh(part: str, drawn: int) -> Edit:
    return Edit(f"{part} as before training", lambda draft: edits.reinitialise(draft, part, drawn))


def _alike(pair: Pair, id: str, option: Option) -> tuple[str, ...]:
    """Other ids that put the same boundaries into the slots of this pair."""
    wiring, layers = _wiring(pair)
    if id not in _DELIVERED:
        return ()
    delivered = FAULTS[option.switched[0]].wiring(wiring, layers) if option.switched else None
    if option.edit:
        checked = option.edit.apply(edits.read(pair.draft)).config
        delivered = tuple(checked.get("eagle_aux_hidden_state_layer_ids", ())) or None
    return tuple(other for other, by in _DELIVERED.items() if other != id and by(wiring, layers) == delivered)

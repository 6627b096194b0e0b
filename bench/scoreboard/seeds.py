"""What is seeded: each fault of the catalogue into each pair where it applies, drawn by a seed.

A fault sits in the engine (switched on in it), in the config (the team believes a folder that is wrong), or in
conversion (what is served is not the folder that the team believes). Every draw hangs on seed, pair and id alone, so
that leaving others out changes nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from scoreboard.edits import Edit
from scoreboard.options import Kind, Option, alike, deployment_of, options
from scoreboard.pairs import IDS, Pair, Prompts, draw_rng
from scoreboard.ways import Way, plain, served_as, ways

from spectrace.engine.serving import Serving
from spectrace.tracer.errors import UserError

__all__ = ["STACKS", "Seed", "applies", "draw"]

Ranks = tuple[int, int]

STACKS = (("W3", "N3"), ("W3", "R1"), ("N3", "V4"), ("W2", "N1"), ("R3", "W5"))
_NEEDS_RANKS = {"W9", "Q1"}
_EVERY_KIND = {"smollm2", "toy"}  # where W3 is seeded in all three kinds


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


def applies(pair: Pair, serving: Serving, ranks: Ranks = (1, 1)) -> str:
    """Why these settings cannot be had on the pair, or nothing."""
    try:
        deployment_of(pair.target, pair.draft, ranks).check(serving)
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
            option.switched, option.edit, ranks=_ranks(pair, id), dtype=served.dtype, alike=alike(pair, id, option),
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

"""The ways in which a pair is served, by the names that they have among a pair's cases."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from scoreboard.pairs import Pair, draw_rng

from spectrace.engine.sampling import Sampling
from spectrace.engine.serving import Serving

__all__ = ["Way", "plain", "redrawn", "served_as", "way", "ways"]

_OF_FAULTS = ("temperature 1", "drawn drafts", "trees", "fixed window", "bf16")
_SHARE = 0.5  # of the faults of a pair that can be served in any of these


@dataclass(frozen=True, slots=True)
class Way:
    """Settings, and the precision of target and draft."""

    serving: Serving
    dtype: str = "float32"

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn or rounded, so that what a repair brings can be foretold exactly."""
        return not self.serving.sampling.temperature and self.dtype == "float32"


def way(name: str, serving: Serving, rng: random.Random) -> Way:
    """These settings, served in one of the ways."""
    drawn = rng.getrandbits(30)
    match name:
        case "temperature 1":
            return Way(replace(serving, sampling=Sampling(1.0, drawn)))
        case "drawn drafts":
            return Way(replace(serving, sampling=Sampling(1.0, drawn, sampled_drafts=True)))
        case "trees":
            return Way(replace(serving, topk=rng.choice((2, 3, 4)), draft_tokens=rng.choice((6, 8, 10))))
        case "fixed window":
            return Way(replace(serving, fixed_window=True))
        case "bf16":
            return Way(serving, "bfloat16")
    return Way(serving)


def ways(number: int, pair: Pair, id: str) -> list[Way]:
    """How a fault is served, the first choice first: half of the time in a way of the pair; else, and last, plainly.

    All ids share what is drawn of a way, so that the repaired runs can be shared.
    """
    names = [name for name in _OF_FAULTS if name in pair.cases]
    rng = draw_rng(number, pair, f"{id} in ways")
    chosen = rng.choice(names) if names and rng.random() < _SHARE else None
    usual = Way(plain(number, pair, id))
    if not chosen:
        return [usual]
    return [way(chosen, plain(number, pair, id, at=0), draw_rng(number, pair, chosen)), usual]


def plain(number: int, pair: Pair, id: str, at: int | None = None) -> Serving:
    """Greedy chains: one of two drawn ways, the one `at` a place if given, with what the fault needs to be there."""
    rng = draw_rng(number, pair, "settings")
    drawn = [
        replace(pair.serving, concurrency=rng.choice((2, 3, 4, 6)), max_new=_about(rng, pair.serving.max_new))
        for _ in range(2)
    ]
    drawn[1] = replace(drawn[1], chunk=rng.choice((None, *pair.chunks)))
    serving = draw_rng(number, pair, f"{id} way").choice(drawn) if at is None else drawn[at]
    tree = {"topk": rng.choice((2, 3, 4)), "draft_tokens": rng.choice((6, 8, 10))}
    match id:
        case "T2":
            return replace(serving, chunk=rng.choice(pair.chunks))
        case "X1" | "M3":
            return replace(serving, concurrency=max(serving.concurrency, 3))
        case "X3":
            return replace(serving, fixed_window=True)
        case "X4":
            return replace(serving, topk=tree["topk"], draft_tokens=tree["draft_tokens"])
    return serving


def _about(rng: random.Random, limit: int | tuple[int, ...]) -> int:
    assert isinstance(limit, int)
    return int(limit * rng.uniform(0.85, 1.15))


def redrawn(serving: Serving, count: int) -> Sequence[Serving]:
    """The same with so many draws, its own first; one where nothing is drawn."""
    sampling = serving.sampling
    seeds = range(sampling.seed, sampling.seed + (count if sampling.temperature else 1))
    return [replace(serving, sampling=replace(sampling, seed=seed)) for seed in seeds]


def served_as(serving: Serving, dtype: str) -> str:
    """The way in words."""
    sampling = serving.sampling
    drafts = "drawn drafts" if sampling.sampled_drafts else "trees" if serving.topk > 1 else "chains"
    how = f"temperature {sampling.temperature:g}" if sampling.temperature else "greedy"
    more = ["fixed window"] * serving.fixed_window + [dtype] * (dtype != "float32")
    return ", ".join((drafts, how, *more))

"""A few of a seed's runs, quick enough for every change: each id once, on its cheapest pair, and some clean ones."""

from collections.abc import Sequence
from dataclasses import replace

from scoreboard.seeds import Seed

__all__ = ["quick"]

_CHEAPEST_FIRST = (
    "analytic", "toy", "fitted", "fitted_deep", "fitted_fp8", "toy_gqa", "toy_deep", "toy_fp8", "analytic_qwen3",
    "toy_one_slot", "fitted_one_slot", "smollm2",
)  # fmt: skip
_CLEAN = {
    ("analytic", "as it is"), ("analytic", "bf16"), ("analytic", "two ranks"), ("analytic", "one at a time"),
    ("analytic", "trees"), ("toy", "chunked prefill"), ("toy", "temperature 1"), ("toy", "drawn drafts"),
    ("toy", "undertrained"), ("toy", "fixed window"), ("smollm2", "as it is"),
}  # fmt: skip
_IDLE = {("R3", "analytic")}  # not every theta matters there
_SHARE, _FEWEST = 2, 10  # of the prompts one in so many, but not fewer


def quick(seeds: Sequence[Seed]) -> list[Seed]:
    """Single faults once each, W3 on SmolLM2 in all its kinds, one stack, and clean cases; with fewer prompts."""
    chosen = [seed for seed in seeds if not seed.faults and (seed.pair, seed.variant) in _CLEAN]
    for id in dict.fromkeys(seed.faults[0] for seed in seeds if len(seed.faults) == 1):
        chosen.append(min((seed for seed in seeds if seed.faults == (id,)), key=_cost))
    chosen += [seed for seed in seeds if seed.faults == ("W3",) and seed.pair == "smollm2"]
    chosen += [seed for seed in seeds if seed.faults == ("W3", "N3") and seed.pair == "toy"]
    return [replace(seed, prompts=_fewer(seed)) for seed in dict.fromkeys(chosen)]


def _fewer(seed: Seed) -> tuple[tuple[int, ...], ...]:
    return seed.prompts[: max(len(seed.prompts) // _SHARE, _FEWEST)]


def _cost(seed: Seed) -> tuple[bool, int]:
    return (seed.faults[0], seed.pair) in _IDLE, _CHEAPEST_FIRST.index(seed.pair)

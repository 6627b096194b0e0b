"""Runs with nothing wrong in them, of which a diagnosis must not name a fault."""

from dataclasses import replace

from scoreboard import tensors
from scoreboard.edits import Edit
from scoreboard.pairs import Pair, draw_rng
from scoreboard.seeds import Seed
from scoreboard.ways import way

__all__ = ["clean"]


def clean(number: int, pair: Pair) -> list[Seed]:
    """The clean cases of a pair, each with prompts of its own."""
    return [_case(number, pair, case) for case in pair.cases]


def _case(number: int, pair: Pair, case: str) -> Seed:
    rng = draw_rng(number, pair, f"clean {case}")
    ask = (pair.others or {}).get(case, pair.ask)
    served = way(case, pair.serving, rng)
    seed = Seed((), case, pair.name, number, "clean", served.serving, ask(rng, pair.count), dtype=served.dtype)
    serving = seed.serving
    match case:
        case "two ranks":
            return replace(seed, ranks=pair.ranks)
        case "one at a time":
            return replace(seed, serving=replace(serving, concurrency=1))
        case "eight at a time":
            return replace(seed, serving=replace(serving, concurrency=8))
        case "chunked prefill":
            return replace(seed, serving=replace(serving, chunk=rng.choice(pair.chunks)))
        case "longer context":
            half = seed.prompts[: len(seed.prompts) // 2]
            return replace(seed, prompts=half, serving=replace(serving, max_new=160))
        case "undertrained" if pair.undertrained:
            return replace(seed, draft=pair.undertrained)
        case "undertrained":
            share, drawn = rng.uniform(0.1, 0.3), rng.getrandbits(30)
            return replace(seed, edit=Edit(f"noise of {share:.2f}", lambda draft: tensors.noisy(draft, share, drawn)))
    return seed

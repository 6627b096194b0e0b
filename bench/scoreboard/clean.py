"""Runs with nothing wrong in them, of which a diagnosis must not name a fault."""

from dataclasses import replace

from scoreboard import edits
from scoreboard.edits import Edit
from scoreboard.pairs import Pair
from scoreboard.seeds import Seed, draw_rng

from spectrace.engine.sampling import Sampling

__all__ = ["clean"]


def clean(number: int, pair: Pair) -> list[Seed]:
    """The clean cases of a pair, each with prompts of its own."""
    return [_case(number, pair, case) for case in pair.cases]


def _case(number: int, pair: Pair, case: str) -> Seed:
    rng = draw_rng(number, pair, f"clean {case}")
    ask = (pair.others or {}).get(case, pair.ask)
    seed = Seed((), case, pair.name, number, "clean", pair.serving, ask(rng, pair.count))
    serving, drawn = pair.serving, rng.getrandbits(30)
    assert isinstance(serving.max_new, int)
    match case:
        case "bf16":
            return replace(seed, dtype="bfloat16")
        case "two ranks":
            return replace(seed, ranks=pair.ranks)
        case "one at a time":
            return replace(seed, serving=replace(serving, concurrency=1))
        case "eight at a time":
            return replace(seed, serving=replace(serving, concurrency=8))
        case "chunked prefill":
            return replace(seed, serving=replace(serving, chunk=rng.choice(pair.chunks)))
        case "temperature 1":
            return replace(seed, serving=replace(serving, sampling=Sampling(1.0, drawn)))
        case "drawn drafts":
            return replace(seed, serving=replace(serving, sampling=Sampling(1.0, drawn, sampled_drafts=True)))
        case "trees":
            shape = {"topk": rng.choice((2, 3, 4)), "draft_tokens": rng.choice((6, 8, 10))}
            return replace(seed, serving=replace(serving, **shape))
        case "fixed window":
            return replace(seed, serving=replace(serving, fixed_window=True))
        case "longer context":
            half = seed.prompts[: len(seed.prompts) // 2]
            return replace(seed, prompts=half, serving=replace(serving, max_new=160))
        case "undertrained" if pair.undertrained:
            return replace(seed, draft=pair.undertrained)
        case "undertrained":
            share = rng.uniform(0.1, 0.3)
            return replace(seed, edit=Edit(f"noise of {share:.2f}", lambda draft: edits.noisy(draft, share, drawn)))
    return seed

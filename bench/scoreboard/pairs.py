"""The pairs that faults are seeded into: a target, the draft that is right for it, prompts, and how they are served."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from analytic.codes import VOCAB as ANALYTIC_VOCAB
from analytic.pair import make_pair
from fitted.target import VOCAB as FITTED_VOCAB
from fitted.target import save_target
from fitted.train import FAMILY
from toy.language import Language

from spectrace.engine.prompts import read_prompts
from spectrace.engine.serving import Serving

__all__ = ["IDS", "PAIRS", "Pair", "Prompts", "draw_rng", "make_pairs"]

_MODELS = Path(__file__).resolve().parents[2] / "models"
_CODE = Path(__file__).resolve().parent / "code.jsonl"

IDS = (
    "W1", "W2", "W3", "W4", "W5", "W6", "W7", "W8", "W9", "M1", "M2", "M3", "V1", "V2", "V3", "V4", "V5", "N1", "N2",
    "N3", "R1", "R2", "R3", "R4", "R5", "T1", "T2", "X1", "X2", "X3", "X4", "P1", "P2", "P3", "P4", "D1", "Q1",
)  # fmt: skip
"""The catalogue's ids that are scored (faults.md)."""

Prompts = tuple[tuple[int, ...], ...]
Ask = Callable[[random.Random, int], Prompts]


@dataclass(frozen=True, slots=True)
class Pair:
    """`ask` draws so many prompts; `others` do so for other data. `ids` are the faults tried on it, where they apply.

    `ranks` are the tensor-parallel ranks (target, draft) of runs that need several; `undertrained` is a draft of the
    same shape that has learnt less, None to make one by noise. `chunks` are lengths to prefill in. What the real repair
    comes to at a temperature is the mean over so many `draws`, of so many times the prompts; 0 where answers are few,
    and say too little when they are not the very ones that were recorded, as with draws and in bfloat16: then it is not
    measured.
    """

    name: str
    target: Path
    draft: Path
    ask: Ask
    serving: Serving
    count: int
    chunks: tuple[int, ...]
    cases: tuple[str, ...]
    ids: tuple[str, ...] = IDS
    ranks: tuple[int, int] = (1, 1)
    others: Mapping[str, Ask] | None = None
    undertrained: Path | None = None
    stacked: int = 0
    draws: int = 4


def draw_rng(number: int, pair: Pair, what: str) -> random.Random:
    """What draws one thing of a pair, by the board's seed: other things are drawn apart from it."""
    return random.Random(f"{number} {pair.name} {what}")


_NORMLESS = tuple(id for id in IDS if id not in ("N1", "N3"))  # by construction no norm changes anything there
_FULL_CASES = (
    "as it is", "bf16", "one at a time", "eight at a time", "chunked prefill", "temperature 1", "drawn drafts", "trees",
    "fixed window",
)  # fmt: skip
_TOY = Serving(depth=4, max_new=64, concurrency=4)
_ANALYTIC = Serving(depth=3, max_new=48, concurrency=4)
_FITTED = Serving(depth=3, max_new=48, concurrency=4, ignore_end=True)


def _smollm2(_folder: Path) -> Pair:
    from smollm2.target import ensure_target

    target = ensure_target()
    chats = [p for name in ("demo", "heldout") for p in read_prompts(_MODELS / f"smollm2/prompts/{name}.jsonl", target)]
    code = read_prompts(_CODE, target)
    return Pair(
        "smollm2",
        target,
        _MODELS / "smollm2" / "draft",
        _some_of(chats),
        Serving(depth=3, max_new=32, concurrency=5),
        count=10,
        chunks=(11, 16, 23),
        cases=(*_FULL_CASES, "undertrained", "code"),
        others={"code": _some_of(code)},
        stacked=2,
        draws=0,
    )


def _some_of(prompts: list[tuple[int, ...]]) -> Ask:
    return lambda rng, count: tuple(rng.sample(prompts, min(count, len(prompts))))


def _toy(name: str, draft: str, ids: tuple[str, ...], cases: tuple[str, ...], stacked: int = 0) -> Pair:
    return Pair(
        name,
        _MODELS / "toy" / "target",
        _MODELS / "toy" / draft,
        _language,
        _TOY,
        count=24,
        chunks=(7, 10, 16),
        cases=cases,
        ids=ids,
        ranks=(2, 2),
        others={"other data": _letters},
        undertrained=_MODELS / "toy" / "undertrained" if draft == "draft" else None,
        stacked=stacked,
    )


def _language(rng: random.Random, count: int) -> Prompts:
    return tuple(map(tuple, Language.drawn().prompts(count, np.random.default_rng(rng.getrandbits(32)))))


def _letters(rng: random.Random, count: int) -> Prompts:
    """Letters of the language in no order at all, without its header."""
    letters = Language.drawn().letters.tolist()
    return tuple(tuple(rng.choices(letters, k=rng.randint(20, 32))) for _ in range(count))


def _random_tokens(vocab: int, shortest: int, longest: int) -> Ask:
    def ask(rng: random.Random, count: int) -> Prompts:
        return tuple(tuple(rng.choices(range(vocab), k=rng.randint(shortest, longest))) for _ in range(count))

    return ask


def _analytic(folder: Path, name: str, family: str, ids: tuple[str, ...], cases: tuple[str, ...], stacked: int) -> Pair:
    if not (folder / name / "draft").exists():
        make_pair(family, folder / name)
    target, draft = folder / name / "target", folder / name / "draft"
    ask = _random_tokens(ANALYTIC_VOCAB, 9, 20)
    return Pair(
        name, target, draft, ask, _ANALYTIC, count=16, chunks=(4, 5, 7), cases=cases, ids=ids, ranks=(2, 2),
        stacked=stacked,
    )  # fmt: skip


def _fitted(folder: Path, name: str, draft: str, ids: tuple[str, ...], cases: tuple[str, ...]) -> Pair:
    target = folder / "fitted" / "target"
    if not target.exists():
        save_target(target, FAMILY)
    ask = _random_tokens(FITTED_VOCAB, 8, 14)
    return Pair(
        name, target, _MODELS / "fitted" / draft, ask, _FITTED, count=24, chunks=(4, 6), cases=cases, ids=ids,
        ranks=(2, 2),
    )  # fmt: skip


PAIRS: Mapping[str, Callable[[Path], Pair]] = {
    "smollm2": _smollm2,
    "toy": lambda _: _toy(
        "toy", "draft", IDS, (*_FULL_CASES, "two ranks", "undertrained", "other data", "longer context"), 5
    ),
    "analytic": lambda folder: _analytic(folder, "analytic", "llama", _NORMLESS, (*_FULL_CASES, "two ranks"), 2),
    "analytic_qwen3": lambda folder: _analytic(
        folder, "analytic_qwen3", "qwen3", ("W7", "W1", "W2", "W8", "X1"),
        ("as it is", "chunked prefill", "trees", "two ranks"), 0,
    ),
    "toy_gqa": lambda _: _toy(
        "toy_gqa", "gqa", ("W7", "N2", "R3", "R4", "R5", "N3", "P4", "X4", "M1"),
        ("as it is", "bf16", "longer context", "trees"),
    ),
    "toy_one_slot": lambda _: _toy("toy_one_slot", "one-slot", ("M2", "W1", "W2", "R4", "D1"), ("as it is",)),
    "fitted": lambda folder: _fitted(
        folder, "fitted", "whole", ("W7", "N1", "N2", "V3", "P1", "P2", "T2"), ("as it is", "two ranks", "drawn drafts")
    ),
    "fitted_one_slot": lambda folder: _fitted(folder, "fitted_one_slot", "one-slot", ("M2", "M3"), ("as it is",)),
}  # fmt: skip


def make_pairs(folder: Path, names: tuple[str, ...] = ()) -> list[Pair]:
    """The pairs of some names, all of them by default; what has to be made is made in a folder."""
    return [make(folder) for name, make in PAIRS.items() if name in names or not names]

"""The pairs that faults are seeded into: a target, the draft that is right for it, prompts, and how they are served."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from analytic.codes import VOCAB as ANALYTIC_VOCAB
from analytic.pair import make_pair
from fitted.target import VOCAB as FITTED_VOCAB
from fitted.target import save_target
from fitted.train import FAMILY
from scoreboard import edits, tensors
from scoreboard.edits import Draft
from toy.language import Language

from spectrace.engine.prompts import read_prompts
from spectrace.engine.serving import Serving

__all__ = ["IDS", "PAIRS", "Pair", "Prompts", "draw_rng", "make_pairs"]

_MODELS = Path(__file__).resolve().parents[2] / "models"
_TOYS, _FITTED_ONES = _MODELS / "toy", _MODELS / "fitted"
_CODE = Path(__file__).resolve().parent / "code.jsonl"

IDS = (
    "W1", "W2", "W3", "W4", "W5", "W6", "W7", "W8", "W9", "M1", "M2", "M3", "V1", "V2", "V3", "V4", "V5", "N1", "N2",
    "N3", "N4", "R1", "R2", "R3", "R4", "R5", "T1", "T2", "X1", "X2", "X3", "X4", "P1", "P2", "P3", "P4", "P5", "P6",
    "P7", "P8", "A1", "A2", "A3", "D1", "Q1",
)  # fmt: skip
"""The catalogue's ids that are scored (faults.md)."""

Prompts = tuple[tuple[int, ...], ...]
Ask = Callable[[random.Random, int], Prompts]


@dataclass(frozen=True, slots=True)
class Pair:
    """`ask` draws so many prompts; `others` do so for other data. `ids` are the faults tried on it, where they apply.

    `ranks` are the tensor-parallel ranks (target, draft) of runs that need several; `undertrained` is a draft of the
    same shape that has learnt less, None to make one by noise; `quantised` says that the draft is stored in eight bits,
    with scales. `chunks` are lengths to prefill in. What the real repair comes to at a temperature is the mean over so
    many `draws`, of so many times the prompts; 0 where answers are few, and say too little when they are not the very
    ones that were recorded, as with draws and in bfloat16: then it is not measured.
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
    quantised: bool = False
    stacked: int = 0
    draws: int = 4


def draw_rng(number: int, pair: Pair, what: str) -> random.Random:
    """What draws one thing of a pair, by the board's seed: other things are drawn apart from it."""
    return random.Random(f"{number} {pair.name} {what}")


_USUAL = tuple(id for id in IDS if id != "A3")  # texts do not come near the context of most drafts
_NORMLESS = tuple(id for id in _USUAL if id not in ("N1", "N3"))  # by construction no norm changes anything there
_DEEP = ("W2", "N3", "N4", "R2", "P5", "P6", "P7", "A1", "A2", "A3", "X4")
_EIGHT_BITS = ("N3", "P8", "A1")
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
        ids=_USUAL,
        others={"code": _some_of(code)},
        stacked=2,
        draws=0,
    )


def _some_of(prompts: list[tuple[int, ...]]) -> Ask:
    return lambda rng, count: tuple(rng.sample(prompts, min(count, len(prompts))))


def _staged(folder: Path, name: str, draft: Path, change: Callable[[Draft], Draft]) -> Path:
    """A copy of a draft's folder with something done to it, as another team would have it."""
    staged = folder / name / "draft"
    if not staged.exists():
        edits.write(change(edits.read(draft)), staged)
    return staged


def _toy(name: str, draft: Path, ids: tuple[str, ...], cases: tuple[str, ...], stacked: int = 0) -> Pair:
    return Pair(
        name,
        _TOYS / "target",
        draft,
        _language,
        _TOY,
        count=24,
        chunks=(7, 10, 16),
        cases=cases,
        ids=ids,
        ranks=(2, 2),
        others={"other data": _letters},
        undertrained=_TOYS / "undertrained" if draft.name == "draft" and draft.parent == _TOYS else None,
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


def _fitted(folder: Path, name: str, draft: Path, ids: tuple[str, ...], cases: tuple[str, ...]) -> Pair:
    target = folder / "fitted" / "target"
    if not target.exists():
        save_target(target, FAMILY)
    ask = _random_tokens(FITTED_VOCAB, 8, 14)
    return Pair(
        name, target, draft, ask, _FITTED, count=24, chunks=(4, 6), cases=cases, ids=ids,
        ranks=(2, 2),
    )  # fmt: skip


def _toy_deep(folder: Path) -> Pair:
    """With a context that ends within what is served."""
    draft = _staged(folder, "toy_deep", _TOYS / "deep", lambda draft: edits.set_context(draft, 64))
    cases = ("as it is", "bf16", "chunked prefill", "temperature 1", "trees", "two ranks", "longer context")
    return _toy("toy_deep", draft, _DEEP, cases)


def _toy_fp8(folder: Path) -> Pair:
    draft = _staged(folder, "toy_fp8", _TOYS / "gqa", tensors.quantise)
    return replace(_toy("toy_fp8", draft, _EIGHT_BITS, ("as it is", "bf16")), quantised=True)


def _fitted_deep(folder: Path) -> Pair:
    """With a context that ends within what is served."""
    draft = _staged(folder, "fitted_deep", _FITTED_ONES / "deep", lambda draft: edits.set_context(draft, 32))
    return _fitted(folder, "fitted_deep", draft, _DEEP, ("as it is", "two ranks", "drawn drafts"))


def _fitted_fp8(folder: Path) -> Pair:
    draft = _staged(folder, "fitted_fp8", _FITTED_ONES / "quiet", tensors.quantise)
    return replace(_fitted(folder, "fitted_fp8", draft, _EIGHT_BITS, ("as it is",)), quantised=True)


PAIRS: Mapping[str, Callable[[Path], Pair]] = {
    "smollm2": _smollm2,
    "toy": lambda _: _toy(
        "toy", _TOYS / "draft", _USUAL, (*_FULL_CASES, "two ranks", "undertrained", "other data", "longer context"), 5
    ),
    "analytic": lambda folder: _analytic(folder, "analytic", "llama", _NORMLESS, (*_FULL_CASES, "two ranks"), 2),
    "analytic_qwen3": lambda folder: _analytic(
        folder, "analytic_qwen3", "qwen3", ("W7", "W1", "W2", "W8", "X1"),
        ("as it is", "chunked prefill", "trees", "two ranks"), 0,
    ),
    "toy_gqa": lambda _: _toy(
        "toy_gqa", _TOYS / "gqa", ("W7", "N2", "R3", "R4", "R5", "N3", "P4", "P5", "P6", "X4", "M1"),
        ("as it is", "bf16", "longer context", "trees"),
    ),
    "toy_one_slot": lambda _: _toy("toy_one_slot", _TOYS / "one-slot", ("M2", "W1", "W2", "R4", "D1"), ("as it is",)),
    "toy_deep": _toy_deep,
    "toy_fp8": _toy_fp8,
    "fitted": lambda folder: _fitted(
        folder, "fitted", _FITTED_ONES / "whole", ("W7", "N1", "N2", "V3", "P1", "P2", "T2"),
        ("as it is", "two ranks", "drawn drafts"),
    ),
    "fitted_one_slot": lambda folder: _fitted(
        folder, "fitted_one_slot", _FITTED_ONES / "one-slot", ("M2", "M3"), ("as it is",)
    ),
    "fitted_deep": _fitted_deep,
    "fitted_fp8": _fitted_fp8,
}  # fmt: skip


def make_pairs(folder: Path, names: tuple[str, ...] = ()) -> list[Pair]:
    """The pairs of some names, all of them by default; what has to be made is made in a folder."""
    return [make(folder) for name, make in PAIRS.items() if name in names or not names]

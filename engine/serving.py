"""One call's settings, held against the pair that is to serve it: what is wrong is said before anything runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spectrace.engine.checkpoint import DraftCheckpoint, configured_wiring
from spectrace.engine.dialect import Wiring, check_boundaries
from spectrace.engine.fault import Setting
from spectrace.engine.faults import find_faults
from spectrace.engine.sampling import GREEDY, Sampling
from spectrace.engine.tree import TreeShape
from spectrace.tracer.errors import UserError
from spectrace.tracer.rows import Level

_COLDEST = 1e-6

__all__ = ["Serving", "check_prompts", "resolve_wiring"]


@dataclass(frozen=True, slots=True)
class Serving:
    """One call's settings. `wiring` None takes the draft's own; `capture` lists boundaries to record as reference.

    A round drafts `depth` tokens deep, `topk` below each; `draft_tokens` nodes are verified, the root included (None: a
    chain's depth + 1). `max_new` is one limit for all requests, or one for each. `fixed_window` feeds the draft every
    row of a round, rejected ones as garbage behind the accepted.
    """

    depth: int = 3
    topk: int = 1
    draft_tokens: int | None = None
    max_new: int | tuple[int, ...] = 64
    concurrency: int = 8
    chunk: int | None = None
    wiring: tuple[int, ...] | None = None
    capture: tuple[int, ...] = ()
    level: Level = Level.FEATURES
    faults: tuple[str, ...] = ()
    ignore_end: bool = False
    sampling: Sampling = GREEDY
    fixed_window: bool = False

    @property
    def shape(self) -> TreeShape:
        """The shape of a round's tree."""
        return TreeShape(self.depth, self.topk, self.draft_tokens or self.depth + 1)

    def limits(self, requests: int) -> tuple[int, ...]:
        """`max_new` of each request."""
        return (self.max_new,) * requests if isinstance(self.max_new, int) else self.max_new


def check_prompts(serving: Serving, prompts: Sequence[Sequence[int]], *, vocab: int) -> None:
    """Raises UserError for prompts that a target of this vocabulary cannot answer, or limits that are none."""
    if not prompts:
        raise UserError("no prompts: give at least one")
    limits = serving.limits(len(prompts))
    if len(limits) != len(prompts):
        raise UserError(f"max_new: {len(limits)} limits for {len(prompts)} prompts; give one for each, or one for all")
    for name, value in (("max_new", min(limits)), ("concurrency", serving.concurrency), ("chunk", serving.chunk)):
        if value is not None and value < 1:
            raise UserError(f"{name} is {value}; expected at least 1")
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise UserError(f"prompt {number} is empty; a target needs at least one token to go on from")
        if wrong := [token for token in prompt if not 0 <= token < vocab]:
            raise UserError(f"prompt {number}: token {wrong[0]} is not in the target's vocabulary, 0 to {vocab - 1}")


def resolve_wiring(
    serving: Serving, draft: DraftCheckpoint | None, *, layers: int, tp: int = 1, draft_tp: int = 1
) -> Wiring:
    """The boundaries that will be served to `fc`, and where they came from, for a target of so many layers.

    Raises UserError for boundaries that the target does not have, too many or too few for `fc`, and for faults that
    do not exist, or cannot be had with these settings or on so many ranks.
    """
    if serving.depth < 0:
        raise UserError(f"depth is {serving.depth}; expected 0 (no draft) or more")
    if serving.depth and draft is None:
        raise UserError(f"depth {serving.depth} needs a draft; give --draft DIR or --depth 0")
    _check_tree(serving, draft)
    _check_sampling(serving)
    check_boundaries("--capture", serving.capture, layers)
    wiring = _wiring(serving, draft, layers)
    if serving.faults:
        _check_faults(serving, draft, wiring.boundaries, layers, (tp, draft_tp))
    return wiring


def _wiring(serving: Serving, draft: DraftCheckpoint | None, layers: int) -> Wiring:
    if serving.wiring is not None:
        if draft is None:
            raise UserError("--wiring feeds a draft, and there is none: give --draft DIR")
        check_boundaries("--wiring", serving.wiring, layers)
        if len(serving.wiring) != draft.spec.slots:
            given = len(serving.wiring)
            raise UserError(f"--wiring: {given} boundaries, but fc of {draft.folder} takes {draft.spec.slots}")
        return Wiring(serving.wiring, "--wiring", serving.wiring)
    if draft is None or not serving.depth:
        return Wiring((), "no draft", ())
    return configured_wiring(draft, layers)


def _check_tree(serving: Serving, draft: DraftCheckpoint | None) -> None:
    shape = serving.shape
    if shape.topk < 1 or (serving.depth and shape.nodes < 2):
        raise UserError(f"topk {shape.topk} and {shape.nodes} draft tokens are no tree; expected at least 1 and 2")
    if shape.topk > 1 and serving.draft_tokens is None:
        raise UserError(f"topk {shape.topk} needs --num-draft-tokens: how many nodes to verify, the root included")
    if serving.depth and shape.nodes - 1 > shape.candidates:
        raise UserError(
            f"{shape.nodes} draft tokens, the root included, but depth {shape.depth} and topk {shape.topk} give only "
            f"{shape.candidates} below the root; give --num-draft-tokens {shape.candidates + 1} at most"
        )
    if draft and shape.topk > draft.spec.draft_vocab:
        raise UserError(f"topk {shape.topk}, but the vocabulary of {draft.folder} is {draft.spec.draft_vocab} tokens")


def _check_sampling(serving: Serving) -> None:
    sampling = serving.sampling
    if sampling.temperature and not _COLDEST <= sampling.temperature < math.inf:
        raise UserError(f"temperature is {sampling.temperature}; expected 0 (greedy), or a number from {_COLDEST} on")
    if not 0 <= sampling.seed < 1 << 63:
        raise UserError(f"seed is {sampling.seed}; expected 0 to 2^63 - 1")
    if sampling.sampled_drafts and not sampling.temperature:
        raise UserError("sampled drafts need a temperature above 0; give --temperature")
    if sampling.sampled_drafts and serving.topk > 1:
        raise UserError(f"sampled drafts are chains: a tree's nodes are its best ones; topk is {serving.topk}, give 1")


def _check_faults(
    serving: Serving, draft: DraftCheckpoint | None, wiring: tuple[int, ...], layers: int, ranks: tuple[int, int]
) -> None:
    faults = find_faults(serving.faults)
    if draft is None or not (wiring and serving.depth):
        raise UserError(f"--fault {faults[0].name}: without a draft nothing is handed over that could be broken")
    found = [_setting(serving, draft, wiring, layers, ranks)]  # what each fault finds, as those before it leave it
    for fault in faults:
        if missing := fault.missing(found[-1]):
            if not fault.missing(found[0]):
                took = next(one.name for one, left in zip(faults, found[1:], strict=False) if fault.missing(left))
                missing = f"{took} before it takes away what it breaks; give one of the two"
            raise UserError(f"--fault {fault.name}: {missing}")
        left = fault.after(found[-1])
        if len(left.wiring) != len(wiring):
            made = len(left.wiring)
            raise UserError(f"--fault {fault.name}: makes {made} boundaries of {len(wiring)}; use another fault")
        check_boundaries(f"--fault {fault.name}", left.wiring, layers)
        found.append(left)


def _setting(
    serving: Serving, draft: DraftCheckpoint, wiring: tuple[int, ...], layers: int, ranks: tuple[int, int]
) -> Setting:
    return Setting(
        wiring=wiring,
        layers=layers,
        spec=draft.spec,
        table="d2t" in draft.tensors,
        sampling=serving.sampling,
        topk=serving.topk,
        chunk=serving.chunk,
        fixed_window=serving.fixed_window,
        tp=ranks[0],
        draft_tp=ranks[1],
        scaled=bool(draft.scales),
    )

"""Tensors with known truth: what a target and an EAGLE-3 draft would say of some requests, step by step.

A row's values are a function of its text and of nothing else, so two runs that batch, cut and order the same requests
differently hold equal rows. Whatever is wrong in a run is a `Flaw`.

Shapes: T rows of a forward, S slots, F target width.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "DEPTH",
    "SLOTS",
    "WIRING",
    "Flaw",
    "Forward",
    "Request",
    "Run",
    "Sizes",
    "Step",
    "accepted_rows",
    "simulate",
]

DEPTH, SLOTS, WIRING = 3, 3, (2, 8, 13)
_MASK, _VOCAB = (1 << 64) - 1, 32000
_TARGET, _GUESS, _WRONG, _DRAFT = range(4)
_FUSED = (0.25, 0.15, 0.1)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much there is, and how it is batched: prompts have `prompt` to 2 * `prompt` tokens."""

    requests: int = 24
    prompt: int = 24
    output: int = 24
    width: int = 1024
    seed: int = 0
    batch: int = 6
    chunk: int = 16
    backwards: bool = False


@dataclass(slots=True)
class Request:
    """A text as far as it has come; `contexts` [tokens] are hashes of its prefixes."""

    number: int
    prompt: list[int]
    text: list[int]
    contexts: list[int]
    passes: int = 0
    rounds: int = 0
    correct: int = 0
    done: int = 0
    drafts: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"request-{self.number}"

    @property
    def output(self) -> list[int]:
        return self.text[len(self.prompt) :]

    def append(self, token: int) -> None:
        self.contexts.append(_mix(self.contexts[-1] if self.contexts else 0, token))
        self.text.append(token)


@dataclass(frozen=True, slots=True)
class Run:
    """What one forward has of one request: `accepted` of its rows become text. A verify pass starts at its root."""

    request: Request
    pass_: int
    round: int
    verifies: bool
    position: int
    tokens: list[int]
    contexts: list[int]
    targets: list[int]
    accepted: int
    drafts: bool

    @property
    def behind(self) -> list[int]:
        """For each accepted row the token of the position behind its own."""
        return self.request.text[self.position + 1 : self.position + 1 + self.accepted]


@dataclass(slots=True)
class Forward:
    """Rows of one forward, with `inputs` [T, S, F] or [T, F]; of a draft also what came out. -1 is no answer.

    `best` [T, 4] are a draft's best tokens, and their logits are `logits`.
    """

    depth: int
    runs: list[Run]
    rows: list[int]
    tokens: list[int]
    positions: list[int]
    inputs: Tensor
    answers: list[int]
    hidden: Tensor | None = None
    state: Tensor | None = None
    best: Tensor | None = None
    logits: Tensor | None = None

    def spread(self, values: Sequence[int]) -> list[int]:
        """A value per run as one per row."""
        return [value for value, count in zip(values, self.rows, strict=True) for _ in range(count)]

    @property
    def nodes(self) -> list[int]:
        return [node for count in self.rows for node in range(count)]


@dataclass(slots=True)
class Step:
    """One pass of the target and the draft forwards that it fed; `finished` end with it."""

    number: int
    target: Forward
    drafts: list[Forward]
    finished: list[Request]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flaw:
    """Where a run can go wrong; by default nothing does.

    `deliver` has the accepted rows of a pass [T, S, F] on their way to the draft, a copy, and those of the step before;
    `feed` the tokens of a draft's depth-0 rows, those behind their own; `place` the depth and position of a draft row;
    `answer` a drafted token, and of it and those before in its chain whether the target will accept them.
    """

    layer_offset: int = 0
    deliver: Callable[[int, Sequence[Run], Tensor, Tensor], Tensor] = lambda step, runs, rows_TSF, before_TSF: rows_TSF
    feed: Callable[[Run, list[int]], list[int]] = lambda run, tokens: tokens
    place: Callable[[int, int], int] = lambda depth, position: position
    answer: Callable[[Run, int, int, list[bool]], int] = lambda run, depth, token, right: token


def simulate(sizes: Sizes, flaw: Flaw) -> Iterator[Step]:
    """Serve all requests with continuous batching; the last step is the one after which none is left."""
    waiting = [_request(number, sizes) for number in range(sizes.requests)]
    waiting = waiting[::-1] if sizes.backwards else waiting
    running: list[Request] = []
    number, before_TSF = 0, torch.empty(0, SLOTS, sizes.width, dtype=torch.bfloat16)
    while waiting or running:
        while waiting and len(running) < sizes.batch:
            running.append(waiting.pop(0))
        runs = [_pass(request, sizes) for request in running]
        target = _target_forward(runs, sizes, flaw.layer_offset)
        finished = [run.request for run in runs if not run.drafts and run.request.done >= len(run.request.prompt)]
        rows_TSF = target.inputs[accepted_rows(target)]
        delivered_TSF = flaw.deliver(number, runs, rows_TSF.clone(), before_TSF)
        yield Step(number, target, _draft_forwards(runs, delivered_TSF, sizes, flaw), finished)
        running = [request for request in running if request not in finished]
        number, before_TSF = number + 1, rows_TSF


def _request(number: int, sizes: Sizes) -> Request:
    drawn = np.random.default_rng([sizes.seed, number])
    length = int(drawn.integers(sizes.prompt, 2 * sizes.prompt + 1))
    prompt = drawn.integers(0, _VOCAB, length).tolist()
    request = Request(number, prompt, [], [])
    for token in prompt:
        request.append(token)
    return request


def _mix(context: int, token: int) -> int:
    """splitmix64 of both."""
    x = (context * 0x9E3779B97F4A7C15 + token + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _MASK
    return x ^ x >> 31


def _next(context: int) -> int:
    """What the target says behind a text."""
    return _mix(context, _TARGET) % _VOCAB


def _guess(context: int) -> int:
    """What the draft says: the same in three of four cases."""
    return _next(context) if _mix(context, _GUESS) % 4 else _mix(context, _WRONG) % _VOCAB


def _pass(request: Request, sizes: Sizes) -> Run:
    """The next chunk of the prompt, or the last token and its drafts, and what the target makes of it."""
    first, verifies = request.done, request.done >= len(request.prompt)
    if verifies:
        tokens, contexts = [request.text[-1], *request.drafts], [request.contexts[-1]]
        for token in request.drafts:
            contexts.append(_mix(contexts[-1], token))
    else:
        last = min(first + sizes.chunk, len(request.prompt))
        tokens, contexts = request.text[first:last], request.contexts[first:last]
    targets = [_next(context) for context in contexts]
    accepted = len(tokens)
    if verifies:
        accepted = 1 + next(
            (at for at, pair in enumerate(zip(tokens[1:], targets, strict=False)) if pair[0] != pair[1]), DEPTH
        )
    pass_, round_ = request.passes, request.rounds
    request.passes, request.done = pass_ + 1, first + accepted
    if request.done >= len(request.prompt):
        for token in targets[:accepted] if verifies else targets[-1:]:
            request.append(token)
    if verifies:
        request.rounds, request.correct = round_ + 1, request.correct + accepted - 1
    drafts = len(request.prompt) <= request.done and len(request.output) < sizes.output
    return Run(request, pass_, round_, verifies, first, tokens, contexts, targets, accepted, drafts)


@cache
def _scales(width: int) -> np.ndarray:
    """Channels of a residual stream are not alike."""
    return np.exp(np.random.default_rng(1).standard_normal(width, np.float32) * 0.5)


def _noise(context: int, rows: int, width: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(key=context)).standard_normal((rows, width), np.float32)


def _boundaries(context: int, width: int, offset: int) -> np.ndarray:
    """[S, F]: a residual stream at the wiring, or so many layers behind it, where it is nearly the same."""
    noise = _noise(context, SLOTS + (offset != 0), width)
    slots = np.cumsum(noise[:SLOTS], 0)
    if offset:
        slots = slots + 0.3 * np.stack([np.roll(noise[SLOTS], slot) for slot in range(SLOTS)])
    return slots * _scales(width)


def _target_forward(runs: list[Run], sizes: Sizes, offset: int) -> Forward:
    rows = np.stack([_boundaries(context, sizes.width, offset) for run in runs for context in run.contexts])
    return Forward(
        depth=0,
        runs=runs,
        rows=[len(run.tokens) for run in runs],
        tokens=[token for run in runs for token in run.tokens],
        positions=[run.position + at for run in runs for at in range(len(run.tokens))],
        inputs=torch.from_numpy(rows).bfloat16(),
        answers=[token for run in runs for token in run.targets],
    )


def accepted_rows(target: Forward) -> list[int]:
    """The rows of a pass that become text."""
    starts = np.cumsum([0, *target.rows[:-1]]).tolist()
    return [start + at for start, run in zip(starts, target.runs, strict=True) for at in range(run.accepted)]


def _draft_forwards(runs: list[Run], delivered_TSF: Tensor, sizes: Sizes, flaw: Flaw) -> list[Forward]:
    """The accepted rows, then the tokens drafted behind each text, one at a time."""
    above = Forward(
        depth=0,
        runs=runs,
        rows=[run.accepted for run in runs],
        tokens=[token for run in runs for token in flaw.feed(run, run.behind)],
        positions=[flaw.place(0, run.position + at) for run in runs for at in range(run.accepted)],
        inputs=delivered_TSF,
        answers=[],
    )
    contexts = [context for run in runs for context in run.contexts[: run.accepted]]
    forwards = [_drafted(above, contexts, sizes, flaw)]
    for depth in range(1, DEPTH):
        places = np.cumsum(above.rows) - 1
        chosen = [at for at, run in enumerate(above.runs) if run.drafts]
        if not chosen:
            break
        runs, places = [above.runs[at] for at in chosen], places[chosen].tolist()
        contexts = [_mix(contexts[at], above.tokens[at]) for at in places]
        above = Forward(
            depth=depth,
            runs=runs,
            rows=[1] * len(runs),
            tokens=[above.answers[at] for at in places],
            positions=[flaw.place(depth, run.position + run.accepted - 1 + depth) for run in runs],
            inputs=above.state[places],
            answers=[],
        )
        forwards.append(_drafted(above, contexts, sizes, flaw))
    return forwards


def _drafted(forward: Forward, contexts: list[int], sizes: Sizes, flaw: Flaw) -> Forward:
    """A draft's results: of its input, its token and its position; `contexts` are those of the tokens before."""
    at = zip(contexts, forward.tokens, forward.positions, strict=True)
    said, keys = [], []
    for context, token, position in at:
        said.append(_mix(context, token))
        keys.append(_mix(said[-1], position << 2 | _DRAFT))
    noise = torch.from_numpy(np.concatenate([_noise(key, 1, sizes.width) for key in keys]))
    fed = forward.inputs.float()
    fed = 0.5 * fed if fed.ndim == 2 else sum(weight * fed[:, slot] for slot, weight in enumerate(_FUSED))
    forward.state = (fed + noise).bfloat16()
    state = forward.state.float()
    forward.hidden = (state * state.square().mean(-1, keepdim=True).rsqrt()).bfloat16()
    forward.answers = [-1] * len(keys)
    for run, place in zip(forward.runs, (np.cumsum(forward.rows) - 1).tolist(), strict=True):
        if run.drafts:
            forward.answers[place] = _draft(run, forward.depth, flaw)
    forward.best = torch.tensor([[(_guess(key) + at) % _VOCAB for at in range(4)] for key in said], dtype=torch.int32)
    forward.logits = torch.tensor([9.0, 6.0, 5.0, 4.0]).repeat(len(keys), 1)
    return forward


def _draft(run: Run, depth: int, flaw: Flaw) -> int:
    """The next token of a chain. What a draft is fed changes its states, not its answers: texts stay comparable."""
    request = run.request
    if depth == 0:
        request.drafts = []
    context, right = request.contexts[-1], []
    for token in request.drafts:
        right.append(token == _next(context))
        context = _mix(context, token)
    token = _guess(context)
    request.drafts.append(flaw.answer(run, depth, token, [*right, token == _next(context)]))
    return request.drafts[-1]

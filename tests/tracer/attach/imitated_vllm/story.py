"""A story that any runner can tell: requests, what the target says to them, and a draft of a few numbers.

Shapes: B requests, T rows, A slots, F target width, H draft width, V vocabulary, D draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from imitated_vllm.wheel import Wheel
from torch import Tensor

__all__ = ["PROMPTS", "STALE", "STORY", "Batch", "H", "Host", "Plan", "Texts"]

A, F, H, V, D, STALE = 2, 4, 4, 40, 20, 10_000
PROMPTS = {"a": [5, 6, 7], "b": [8, 9, 10, 11, 12, 13], "c": [14]}
MAX_NEW = 9


@dataclass(frozen=True, slots=True)
class Plan:
    """A step: `prompts` are from where to where, `verifies` how many drafts the target agrees with; `left` are gone."""

    prompts: dict[str, tuple[int, int]] = field(default_factory=dict)
    verifies: dict[str, int] = field(default_factory=dict)
    left: tuple[str, ...] = ()


STORY = (
    Plan({"a": (0, 3)}),
    Plan({"b": (0, 4)}, {"a": 2}),
    Plan({"b": (4, 6)}, {"a": 0}),
    Plan({"c": (0, 1)}, {"a": 1, "b": 1}),
    Plan({}, {"a": 2, "c": 2}, left=("b",)),
    Plan({}, {"c": 0}, left=("a",)),
    Plan(left=("c",)),
)
"""A prompt, one in two pieces, rounds with and without rejections, one token filled up with drafts, an end, aborts."""


@dataclass(slots=True)
class Batch:
    """A step as any runner sees it."""

    names: list[str]
    counts: np.ndarray
    drafts: np.ndarray
    silent: list[bool]
    filled: list[bool]
    tokens: Tensor
    positions: Tensor
    slots: list[Tensor]
    logits: Tensor
    sampled: list[list[int]]
    following: list[int]
    new: list[str]
    left: tuple[str, ...]

    @property
    def rejected(self) -> Tensor:
        pairs = zip(self.silent, self.drafts.tolist(), self.sampled, strict=True)
        return torch.tensor([0 if quiet else count + 1 - len(kept) for quiet, count, kept in pairs])

    @property
    def last(self) -> Tensor:
        return torch.tensor(np.cumsum(self.counts) - 1) - self.rejected


class Texts:
    """What was said so far, and what is drafted to follow it."""

    def __init__(self, depth: int) -> None:
        self.depth, self.done = depth, dict[str, list[int]]()
        self.drafted: dict[str, list[int]] = {}

    def batch(self, plan: Plan) -> Batch:
        parts = [self._verify(name, agreed) for name, agreed in plan.verifies.items()]
        parts += [self._prompt(name, *piece) for name, piece in plan.prompts.items()]
        tokens, firsts, drafts, said, kept, following, silent, filled = zip(*parts, strict=True)
        counts = np.array([len(part) for part in tokens], np.int32)
        positions = torch.tensor(
            [first + at for first, part in zip(firsts, tokens, strict=True) for at in range(len(part))]
        )
        logits = torch.full((sum(map(len, said)), V), -1.0)
        logits[torch.arange(len(logits)), torch.tensor([one for part in said for one in part])] = 2.0
        return Batch(
            [*plan.verifies, *plan.prompts], counts, np.array(drafts, np.int32), list(silent), list(filled),
            torch.tensor([one for part in tokens for one in part], dtype=torch.int32), positions,
            [torch.sin(positions[:, None] * (1 + slot) + torch.arange(F)) for slot in range(A)],
            logits, list(kept), list(following),
            [name for name, piece in plan.prompts.items() if piece[0] == 0], plan.left,
        )  # fmt: skip

    def _verify(self, name: str, agreed: int) -> tuple[Any, ...]:
        text, drafts = self.done[name], self.drafted[name]
        agreed = min(agreed, len(drafts))
        said = [*drafts[:agreed], *((token + 1) % V for token in drafts[agreed:]), 3]
        first = len(text) - 1
        text += said[: agreed + 1]
        return [text[first], *drafts], first, len(drafts), said, said[: agreed + 1], said[agreed], False, False

    def _prompt(self, name: str, start: int, end: int) -> tuple[Any, ...]:
        prompt, fills = PROMPTS[name], self.depth if len(PROMPTS[name]) == 1 else 0
        self.done[name] = prompt[:]
        if end < len(prompt):
            return prompt[start:end], start, 0, [4], [], prompt[end], True, False
        self.done[name] += [20 + end]
        return (
            [*prompt[start:end], *[0] * fills],
            start,
            fills,
            [20 + end] * (1 + fills),
            [20 + end],
            20 + end,
            False,
            True,
        )


class Draft:
    """The arithmetic of a draft without attention."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.fc, self.embedding, self.head = torch.randn(A * F, H), torch.randn(V, H), torch.randn(H, D)
        self.offsets = torch.arange(D)

    def forward(self, given: Any) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(
            self.embedding[given.input_ids.long() % V] + given.hidden_states + given.positions[:, None] / 50
        )
        return hidden, hidden * 2

    def logits(self, given: Any) -> Tensor:
        spread = torch.full((len(given.hidden_states), V), float("-inf"))
        spread[:, torch.arange(D) + self.offsets] = given.hidden_states @ self.head
        return spread


class Host:
    """What both runners share: the story so far, the scheduler's words, and the draft."""

    def __init__(self, wheel: Wheel, depth: int) -> None:
        self.wheel, self.depth, self.texts, self.math = wheel, depth, Texts(depth), Draft()
        model = wheel.made(
            "model_executor/models/llama_eagle3.py", "Eagle3LlamaForCausalLM",
            combine_hidden_states=lambda _, given: given.hidden_states @ self.math.fc,
            forward=lambda _, given: self.math.forward(given),
            compute_logits=lambda _, given: self.math.logits(given),
        )  # fmt: skip
        self.model = model()
        self.model.draft_id_to_target_id = self.math.offsets

    def output(self, batch: Batch | None, left: tuple[str, ...]) -> SimpleNamespace:
        sampling = SimpleNamespace(stop_token_ids=[], eos_token_id=None, max_tokens=MAX_NEW, temperature=0.0, seed=None)
        made, file = self.wheel.record, "v1/core/sched/output.py"
        counts = dict(zip(batch.names, batch.counts.tolist(), strict=True)) if batch else {}
        return made(
            file, "SchedulerOutput", finished_req_ids=set(left), num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            scheduled_new_reqs=[
                made(file, "NewRequestData", req_id=name, prompt_token_ids=PROMPTS[name], sampling_params=sampling)
                for name in (batch.new if batch else ())
            ],
            scheduled_cached_reqs=made(file, "CachedRequestData", resumed_req_ids=set()),
        )  # fmt: skip

    def serve(self, story: tuple[Plan, ...]) -> None:
        for plan in story:
            self.batch = self.texts.batch(plan) if plan.prompts or plan.verifies else None
            self.runner.execute_model(self.output(self.batch, plan.left))
            if self.batch:
                self.runner.sample_tokens(None)

    runner: Any
    batch: Batch | None = None
    seen = True

"""Running pairs of tiny models, one Ray cluster for all, and what transformers alone would answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from spectrace.engine.deployment import Deployment

_LENGTHS = (1, 2, 23, 9, 5, 17, 12, 3)
_LIMITS = (40, 25, 9, 31, 18, 1, 40, 12)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Eight prompts of unequal length, all answered without an early loop."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 96, (length,), generator=generator).tolist() for length in _LENGTHS]


@pytest.fixture(scope="session")
def limits() -> tuple[int, ...]:
    """As many limits, unequal, so that requests leave one by one."""
    return _LIMITS


@pytest.fixture(scope="session")
def hf_model(target_of: Callable[..., Path], load_target: Callable[[Path], Any]) -> Callable[[str], Any]:
    """The target of a family as transformers loads it."""
    return cache(lambda family: load_target(target_of(family)))


@pytest.fixture(scope="session")
def alone(hf_model: Callable[[str], Any]) -> Callable[..., list[int]]:
    """`alone(family, prompt, max_new, ignore_end=)`: the greedy answer of the target alone, by transformers."""

    @cache
    def answer(family: str, prompt: tuple[int, ...], max_new: int, ignore_end: bool) -> list[int]:
        model, ids = hf_model(family), torch.tensor([prompt])
        ends = model.generation_config.eos_token_id
        model.generation_config.eos_token_id = None if ignore_end else ends
        try:
            out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new)
        finally:
            model.generation_config.eos_token_id = ends
        return [int(token) for token in out[0, len(prompt) :]]

    def ask(family: str, prompt: Sequence[int], max_new: int, *, ignore_end: bool = True) -> list[int]:
        return answer(family, tuple(prompt), max_new, ignore_end)

    return ask


@pytest.fixture(scope="session")
def pair_of(
    cluster: None, target_of: Callable[..., Path], draft_of: Callable[..., Path]
) -> Iterator[Callable[..., Deployment]]:
    """`pair_of(family, attention)`: a running deployment, started once; tests leave it running."""
    with ExitStack() as stack:

        def start(family: str, attention: str) -> Deployment:
            pair = Deployment(target_of(family), draft_of(family, attention), threads=1)
            return stack.enter_context(pair)

        yield cache(start)

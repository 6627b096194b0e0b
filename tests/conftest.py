"""Tiny random models (models/fitted) as fixtures."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from fitted.draft import draft_config, draft_tensors, fit_head, save_draft
from fitted.target import FAMILIES, load_alone, save_target
from torch import Tensor


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Each family that is served through the same code."""
    return str(request.param)


@pytest.fixture(scope="session")
def target_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a tiny target of a family, made once."""
    return cache(lambda family: save_target(tmp_path_factory.mktemp("target") / family, family))


@pytest.fixture(scope="session")
def draft_of(tmp_path_factory: pytest.TempPathFactory, target_of: Callable[..., Path]) -> Callable[..., Path]:
    """The folder of a tiny draft ("gqa" or "mla") that a target of a family sometimes agrees with, made once."""

    def make(family: str, attention: str) -> Path:
        config = draft_config(attention)
        folder = save_draft(tmp_path_factory.mktemp("draft") / attention, config, draft_tensors(config))
        return fit_head(folder, target_of(family))

    return cache(make)


@pytest.fixture(scope="session")
def new_target() -> Callable[..., Path]:
    """`new_target(folder, family, **changes)` saves a target for a test to break."""
    return save_target


@pytest.fixture(scope="session")
def load_target() -> Callable[[Path], Any]:
    """`load_target(folder)` is a saved target as transformers alone runs it."""
    return load_alone


@pytest.fixture(scope="session")
def new_draft() -> Callable[..., tuple[dict[str, Any], dict[str, Tensor]]]:
    """`new_draft(attention, layout=, seed=, **changes)` gives the config and tensors of a draft for a test to break."""

    def make(
        attention: str = "gqa", *, layout: str = "midlayer", seed: int = 0, **changes: Any
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        config = draft_config(attention, **changes)
        return config, draft_tensors(config, layout=layout, seed=seed)

    return make


@pytest.fixture(scope="session")
def write_draft() -> Callable[..., Path]:
    """`write_draft(folder, config, tensors)` saves a draft as a trainer would."""
    return save_draft

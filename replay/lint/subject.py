"""What is linted: a draft's folder, and where these are given its target and the engine that serves it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from spectrace.engine.checkpoint import DraftCheckpoint, read_embedding, read_head
from spectrace.engine.fields import Fields, read_config
from spectrace.engine.problem import DraftProblem
from spectrace.engine.stored import StoredTensors
from spectrace.replay.profiles.profile import Given, Profile, TargetFacts
from spectrace.replay.profiles.running import Running, facts_of
from spectrace.tracer.errors import UserError

__all__ = ["Subject", "Target"]


class Target:
    """A target's folder: its config, and its embedding and head when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts: TargetFacts = facts_of(folder)
        config = read_config(folder)
        nested = config.get("text_config")
        self.config: Mapping[str, Any] = {**config, **nested} if isinstance(nested, dict) else config
        self.fields = Fields(folder / "config.json", self.config)
        self.unread = ""

    @cached_property
    def embedding(self) -> Tensor | None:
        """Its embedding [V, H], as it is stored; None where the folder has none that can be read."""
        return self._read(read_embedding)

    @cached_property
    def head(self) -> Tensor | None:
        """Its head [V, H], or where it has none of its own, its embedding; None as for that."""
        return self._read(read_head)

    def _read(self, read: Callable[[Path], Tensor]) -> Tensor | None:
        try:
            return read(self.folder)
        except UserError as error:
            self.unread = error.message
            return None


@dataclass(frozen=True, slots=True)
class Subject:
    """A draft as it is linted; `problems` are what makes single tensors of no use."""

    draft: DraftCheckpoint
    stored: StoredTensors
    config: Mapping[str, Any]
    problems: tuple[DraftProblem, ...]
    target: Target | None = None
    profile: Profile | None = None
    given: Given | None = None
    running: Running | None = None

    @property
    def folder(self) -> Path:
        """Where it is."""
        return self.draft.folder

    @property
    def engine(self) -> str:
        """What the engine is called; engines in general where none is given."""
        return self.profile.title if self.profile else "an engine"

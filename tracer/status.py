"""A process's own account of how it records an engine: its hooks, its steps, and what the engine itself counts.

It is rewritten while the process records, next to its rows; the last one is covered by its ledger.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

__all__ = ["STATUS", "HookAccount", "RoundAccount", "Status", "StepAccount"]

STATUS: Final = "status.json"


@dataclass(slots=True)
class HookAccount:
    """One hook: `refused` says why it is not in place, `failure` what first went wrong in it.

    `secs` is the CPU time of the host's thread that it took, `host_secs` what the hooked method took by itself, hooks
    within it included. Of an `optional` one it is no news that it never fires.
    """

    refused: str = ""
    calls: int = 0
    failures: int = 0
    failure: str = ""
    secs: float = 0.0
    host_secs: float = 0.0
    optional: bool = False


@dataclass(slots=True)
class StepAccount:
    """Steps that the engine `began`, and those that were `written`; of `thin` ones the tensors are lost.

    `failures` are steps that could not be written, `failure` says why the first could not.
    """

    began: int = 0
    written: int = 0
    thin: int = 0
    failures: int = 0
    failure: str = ""


@dataclass(slots=True)
class RoundAccount:
    """What the engine counts: rounds with drafts, tokens drafted in them, and drafts that were correct."""

    rounds: int = 0
    drafted: int = 0
    correct_drafts: int = 0


@dataclass(slots=True)
class Status:
    """What is None is no business of this process. `inside` names the hooked methods that make up a step."""

    hooks: dict[str, HookAccount] = field(default_factory=dict)
    inside: tuple[str, ...] = ()
    steps: StepAccount | None = None
    counted: RoundAccount | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As `status.json` holds it."""
        return asdict(self)

    @staticmethod
    def read(data: bytes) -> Status:
        """Raises ValueError for what is no status."""
        try:
            told: Mapping[str, Any] = json.loads(data)
            return Status(
                {name: HookAccount(**hook) for name, hook in told["hooks"].items()},
                tuple(told["inside"]),
                None if told["steps"] is None else StepAccount(**told["steps"]),
                None if told["counted"] is None else RoundAccount(**told["counted"]),
                tuple(told["notes"]),
            )
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"no status: {error}") from error

    @property
    def share(self) -> float | None:
        """What hooks take of the CPU time of the engine's thread in its steps; None where no step was hooked."""
        whole = sum(self.hooks[name].host_secs for name in self.inside if name in self.hooks)
        outside = sum(self.hooks[name].secs for name in self.inside if name in self.hooks)
        return sum(hook.secs for hook in self.hooks.values()) / (whole + outside) if whole else None

    def failed_hooks(self) -> Iterator[str]:
        """A line for each hook that is not what it should be."""
        stepped = self.steps is not None and self.steps.written > 0
        for name, hook in self.hooks.items():
            if hook.refused:
                yield f"{name} is not hooked: {hook.refused}"
            elif hook.failures:
                yield f"the hook on {name} failed {hook.failures} of {hook.calls} times, first with {hook.failure}"
            elif not hook.calls and stepped and not hook.optional:
                yield f"the hook on {name} never fired"

    def lost_steps(self, *, over: bool) -> Iterator[str]:
        """What is missing of the steps; of a recording that is not `over`, those on their way are not."""
        steps = self.steps
        if steps is None:
            return
        if steps.failures:
            yield f"{steps.failures} steps could not be written, the first for {steps.failure}"
        missing = steps.began - steps.written - steps.failures
        if over and missing > 1:  # one may have been running when the end came
            yield f"the engine began {steps.began} steps, and {missing} of them never came to be recorded"

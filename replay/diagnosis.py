"""What a diagnosis comes to, as data: a verdict, its causes, and everything they rest on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

__all__ = ["Cause", "Diagnosis", "Identified", "Reading", "Verdict"]


class Verdict(StrEnum):
    """`WEAK_DRAFT` stands for other data, too, where no trained accuracy was given to tell them apart."""

    HEALTHY = "healthy"
    WEAK_DRAFT = "weak_draft"
    OTHER_DATA = "other_data"
    FAULT = "fault"
    ENGINE_STATE = "engine_state"
    INSUFFICIENT = "insufficient"


@dataclass(frozen=True, slots=True)
class Cause:
    """One broken link: `fault` is an id of the catalogue, `alike` the ids that the data cannot tell from it.

    `predicted_acceptance` is the acceptance length with this link alone repaired, None where it cannot be foretold.
    """

    fault: str
    variant: str
    title: str
    confidence: float
    evidence: tuple[str, ...]
    served_acceptance: float | None
    predicted_acceptance: float | None
    fix: str
    command: str = ""
    alike: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reading:
    """One link as configured, as the engine had it, and as the draft was trained; None where that is not decided."""

    configured: str
    engine: str | None
    trained: str | None


@dataclass(frozen=True, slots=True)
class Identified:
    """What a received slot held: the best match and the runner-up, each with its error (median over rows)."""

    slot: int
    configured: str
    best: str
    error: float
    runner_up: str
    runner_up_error: float


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The answer. `repaired_acceptance` is with every named cause repaired; `notes` say what was not decided."""

    verdict: Verdict
    causes: tuple[Cause, ...]
    readings: Mapping[str, Reading]
    identified: tuple[Identified, ...]
    served_acceptance: float | None
    repaired_acceptance: float | None
    worth: Mapping[str, Any] = field(default_factory=dict)
    coverage: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    next_command: str = ""

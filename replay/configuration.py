"""What a draft computes and what it is fed, as one value: the point from which every hypothesis is one step away.

Shapes: A slots.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from torch import Tensor

from spectrace.engine.draft import DraftModel
from spectrace.engine.spec import DraftSpec

__all__ = ["ADVANCING", "Configuration", "Slot", "Steps", "View", "listed"]


class View(StrEnum):
    """What of a boundary a slot holds: the stream, the stream after the final norm, or what the last MLP added."""

    STREAM = "stream"
    NORMED = "normed"
    BRANCH = "branch"


_SUFFIX = {View.STREAM: "", View.NORMED: " after the final norm", View.BRANCH: " without its residual"}


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """What one slot of the wiring holds."""

    boundary: int
    view: View = View.STREAM

    def __str__(self) -> str:
        return f"{self.boundary}{_SUFFIX[self.view]}"


def listed(slots: Iterable[Slot]) -> str:
    """A wiring as it is written: (0, 3, 16)."""
    return f"({', '.join(map(str, slots))})"


@dataclass(frozen=True, slots=True)
class Steps:
    """How far positions move from depth 0 to depth 1, and from each deeper one to the next.

    From position `end` on nothing is drafted but the draft's first token; None: there is no such end.
    """

    first: int = 1
    later: int = 1
    end: int | None = None

    def to(self, depth: int) -> int:
        """The step to this depth from the one above."""
        return self.first if depth == 1 else self.later


ADVANCING = Steps()


@dataclass(frozen=True, eq=False)
class Configuration:
    """A draft's switches, weights (by `DraftModel`'s names), wiring and steps.

    `said` names what was done to links that switches do not show, such as weights: link -> what it is now. `spare` are
    other tensors that may be in the place of these, or beside them, by what takes them: a norm or switch that the
    config does not mention (`FuseNorm`, `LaterNorm`, "qkv_bias"), "unscaled" what is stored without its scales,
    "served" what the folder that was served holds.
    """

    spec: DraftSpec
    tensors: Mapping[str, Tensor]
    wiring: tuple[Slot, ...]
    steps: Steps = ADVANCING
    said: Mapping[str, str] = field(default_factory=dict)
    spare: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)

    def build(self) -> DraftModel:
        """The draft, ready to run over these very tensors: nothing is copied."""
        return DraftModel.over(self.spec, self.tensors)

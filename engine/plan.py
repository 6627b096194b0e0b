"""What the scheduler, the target and the draft tell each other: small, plain records; tensors travel by reference."""

from dataclasses import dataclass, field
from enum import IntEnum

from torch import Tensor

from spectrace.engine.tree import Tree
from spectrace.engine.verify import Draws
from spectrace.tracer.rows import Phase

__all__ = [
    "CaptureHiddenMode", "Decision", "DraftGroup", "DraftProbs", "DraftStep", "DraftTree", "LogitsProcessorOutput",
    "TargetGroup", "TargetStep",
]  # fmt: skip


class CaptureHiddenMode(IntEnum):
    """Which rows of a pass deliver hidden states, as in SGLang."""

    NULL = 0
    LAST = 1
    FULL = 2


@dataclass(frozen=True, slots=True)
class LogitsProcessorOutput:
    """What the target hands to the draft: `hidden_states` [rows, A*F], the wiring's boundaries.

    These are the accepted rows of every group and, in a fixed window, the group's other rows behind them.
    """

    hidden_states: Tensor
    capture_hidden_mode: CaptureHiddenMode


@dataclass(frozen=True, slots=True)
class TargetGroup:
    """One request's rows in one target pass: a chunk of its prompt, or the tree of a round (node 0 is the root)."""

    request: int
    pass_: int
    phase: Phase
    round: int
    position: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    answers: bool

    @property
    def levels(self) -> tuple[int, ...]:
        """How deep each node lies below the first row; its position is `position + level`."""
        levels: list[int] = []
        for parent in self.parents:
            levels.append(0 if parent < 0 else levels[parent] + 1)
        return tuple(levels)


@dataclass(frozen=True, slots=True)
class TargetStep:
    """One packed forward of the target; `released` requests are gone since the last one."""

    number: int
    groups: tuple[TargetGroup, ...]
    released: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """What the target made of one group: its own token after every row, the rows it accepted, and the token it adds.

    On the accepted path the token after a row is the one emitted. `bonus` is None inside a prompt, `draws` when
    verification is greedy.
    """

    request: int
    target_tokens: tuple[int, ...]
    path: tuple[int, ...]
    bonus: int | None
    draws: Draws | None = field(default=None, compare=False)

    @property
    def rejected(self) -> tuple[int, ...]:
        """The rows that were not accepted, in order."""
        return tuple(node for node in range(len(self.target_tokens)) if node not in self.path)


@dataclass(frozen=True, slots=True)
class DraftGroup:
    """One request's draft rows of one pass: row i stands at `position + i` and takes `tokens[i]`, the token after it.

    Its feature is row `source + i` of what the target handed over. The first `live` rows are text, the others fill a
    fixed window with what verification rejected. `drafts` asks for a tree; without, only the draft's cache grows.
    """

    request: int
    pass_: int
    round: int
    position: int
    source: int
    tokens: tuple[int, ...]
    live: int
    drafts: bool


@dataclass(frozen=True, slots=True)
class DraftStep:
    """The draft forwards that one target pass feeds; released requests will not come back."""

    number: int
    groups: tuple[DraftGroup, ...]
    released: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DraftTree:
    """What was drafted for a request's next round."""

    request: int
    tree: Tree


@dataclass(frozen=True, slots=True)
class DraftProbs:
    """What sampled drafts were drawn from: `probs` [requests, depth, V], over the tokens `ids` [V]."""

    requests: tuple[int, ...]
    probs: Tensor
    ids: Tensor

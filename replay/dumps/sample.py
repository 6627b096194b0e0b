"""One text with its hidden states as a producer wrote them, and a producer as data.

A new producer is one more `Dialect`, in a file of its own, and one more entry of `formats`. Which boundaries the slots
are, which norm the last state has behind it, and how rows and mask are aligned, is decided later, in `unknowns`.

Shapes: T tokens, A slots, F target width.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from torch import Tensor

__all__ = ["Convention", "Dialect", "Item", "Norm", "Sample"]


class Norm(StrEnum):
    """Whether a last hidden state is the stream that leaves the last layer, or has the final norm behind it."""

    PRE = "pre"
    POST = "post"


class Convention(StrEnum):
    """What a layer id names: the layer that a stream enters, or the one that it leaves."""

    INPUT = "input"
    OUTPUT = "output"

    def boundary(self, layer: int) -> int:
        """The boundary that an id of this convention means."""
        return layer + (self is Convention.OUTPUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What a file says, taken at its word: row t of each slot and of `last` [T, F] is of the token `tokens[t]` [T].

    `mask` [T] is which tokens count in training; `norm` and `boundaries` are what the producer declares of the last
    state and of the slots, None where it declares nothing.
    """

    name: str
    path: Path
    tokens: Tensor
    slots: tuple[Tensor, ...]
    last: Tensor | None = None
    mask: Tensor | None = None
    norm: Norm | None = None
    boundaries: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Item:
    """A text that can be read, and read again."""

    name: str
    read: Callable[[], Sample]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """A producer's way to write hidden states: `name` is what `--format` calls it, `layout` how one is told.

    `convention` is that of the layer ids in the producer's own configuration. `knows` says whether a file, by its path
    and its fields, is one of these; `open` lists the texts of a file or folder, none of which has to be in memory.
    """

    name: str
    layout: str
    convention: Convention
    knows: Callable[[Path, Mapping[str, object]], bool]
    open: Callable[[Path], Sequence[Item]]

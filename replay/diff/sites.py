"""What is compared, in the order in which data flows: target, hand-off, draft, depth by depth."""

from dataclasses import dataclass
from typing import Final

__all__ = ["Site", "Where"]

_FLOW: Final = ("reference", "emitted", "received", "drafted", "verified")
_WITHIN: Final = (
    "boundary", "slot", "position", "token", "state", "fused", "hidden", "fed back", "logits", "logsumexp",
    "target_token", "draft_token", "answer", "accepted",
)  # fmt: skip
_EXACT: Final = ("position", "token", "target_token", "draft_token", "answer", "accepted")


@dataclass(frozen=True, slots=True)
class Where:
    """A pair of rows: its place in the text, and the request, pass and node that it has in a and in b."""

    position: int
    request: tuple[int, int]
    pass_: tuple[int, int]
    node: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Site:
    """One thing that the rows of a family have; `slot` counts those of a wiring, or is the number of a boundary.

    `depth` is that of a draft's rows, 0 elsewhere. `family` of rows of two families is `a/b`.
    """

    family: str
    what: str
    depth: int = 0
    slot: int | None = None

    @property
    def order(self) -> tuple[int, int, int, int, int]:
        """Its place in the data's flow: within a family as computed, a draft's depths one after another."""
        at = _FLOW.index(self.family.partition("/")[0])
        drafting = self.family in ("received", "drafted")
        return (2 if drafting else at, self.depth, at, _WITHIN.index(self.what), self.slot or 0)

    @property
    def exact(self) -> bool:
        """Whether any difference is one: a token or a position, which nothing rounds."""
        return self.what in _EXACT

    def __str__(self) -> str:
        slot = f" {self.slot}" if self.slot is not None else ""
        depth = f" at depth {self.depth}" if self.family in ("received", "drafted") else ""
        return f"{self.family} {self.what}{slot}{depth}"

"""One thing that is wrong with a trace, and whether it is damage or only something missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["Problem"]

# What an interrupted, overloaded or silent recorder leaves behind; every other kind means bytes were changed or lost.
_INCOMPLETE: Final = frozenset({"torn", "lost", "silent", "behind", "hook", "steps"})


@dataclass(frozen=True, slots=True)
class Problem:
    """Where (`segment` is a path inside the trace), what kind, and how many rows it costs, as far as known.

    Kinds of damage: manifest, seal, ledger, missing, cut, gap, trailing, stray, flipped. Not damage: torn (an
    unsealed tail nobody acknowledged), lost (dropped or failed while recording), silent (a writer's promised family
    never came), behind (a rank's rows that another rank of its role has), hook (one that is not in place, failed or
    never fired), steps (the engine counts other steps or rounds than were recorded).
    """

    segment: str
    offset: int
    kind: str
    rows_lost: int
    message: str

    @property
    def damage(self) -> bool:
        return self.kind not in _INCOMPLETE

    def to_json(self) -> dict[str, str | int]:
        return {"segment": self.segment, "offset": self.offset, "kind": self.kind, "rows_lost": self.rows_lost}

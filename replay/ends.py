"""The position from which on a draft answers its first token whatever it is fed: where an engine ends its context."""

from dataclasses import dataclass

import numpy as np

from spectrace.tracer.trace import Trace

__all__ = ["End", "find_end"]

_FEWEST_ROWS, _FEWEST_PLACES = 12, 4
_BY_CHANCE = 1e-6


@dataclass(frozen=True, slots=True)
class End:
    """From `position` on all of `rows` drafts are the draft's first id; before it this `share` of them is."""

    position: int
    rows: int
    share: float

    @property
    def told(self) -> str:
        """In words."""
        return f"all {self.rows} drafts from there on are its id 0, and {self.share:.1%} of those before"


def find_end(trace: Trace) -> End | None:
    """Where drafts end in a trace, as their ids show; None where they do not.

    That a draft has run out of what it was trained for looks the same, so a replay has to bear it out.
    """
    drafted = trace.rows("drafted", rank=0)
    drafted = drafted.take(drafted["draft_token"] >= 0)
    first, positions = drafted["draft_token"] == 0, drafted["position"].astype(np.int64)
    if first.all() or not len(drafted):
        return None
    position = int(positions[~first].max()) + 1
    beyond = positions >= position
    rows, places, share = int(beyond.sum()), len(np.unique(positions[beyond])), float(first[~beyond].mean())
    if rows < _FEWEST_ROWS or places < _FEWEST_PLACES or share**rows > _BY_CHANCE:
        return None
    return End(position, rows, share)

"""What a trace shows to be wrong by itself, before any hypothesis is tried: in hashes, tokens, positions, ranks."""

from dataclasses import dataclass

__all__ = ["Finding"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken link, by a fault's id, with what shows it: sentences that say of how many rows each holds.

    `alike` are ids that these data cannot tell from it. `masks` says that what lies behind cannot be judged from what
    was received: hypotheses about the draft's inputs are not tried on it. `offsets` say how far rows of depth 1, 2 and
    so on stand beyond the text, where that is what it is about. A `doubt` is no cause by itself, and no health either.
    `stage` is where in an engine's code it lies, if elsewhere than its link does.
    """

    fault: str
    title: str
    evidence: tuple[str, ...]
    variant: str = ""
    confidence: float = 1.0
    alike: tuple[str, ...] = ()
    masks: bool = False
    offsets: tuple[int, ...] = ()
    doubt: bool = False
    stage: str = ""

"""Whether the draft was fed as many slots as its fc takes."""

from collections.abc import Iterator

from spectrace.engine.checkpoint import DraftCheckpoint
from spectrace.replay.finding import Finding
from spectrace.tracer.trace import Trace

__all__ = ["ONE_SLOT", "fed_width", "one_slot"]

ONE_SLOT = "one slot"


def fed_width(trace: Trace) -> int | None:
    """How wide the features are that the draft received; None where none were kept."""
    rows = trace.rows("received", live=True, depth=0, rank=0)
    rows = rows.take(rows.has("features"))
    return int(rows.take(slice(0, 1)).payload("features").shape[1]) if len(rows) else None


def one_slot(trace: Trace, checkpoint: DraftCheckpoint) -> Iterator[Finding]:
    """One boundary in the place of all slots: fc has nothing to project, and is passed by."""
    spec, width = checkpoint.spec, fed_width(trace)
    if width != spec.target_width or width == spec.features_width:
        return
    told = f"what it received is {width} wide, one boundary of the target; fc takes {spec.features_width}"
    yield Finding("M2", "the draft is fed one boundary, and fc is passed by", (told,), variant=ONE_SLOT, masks=True)

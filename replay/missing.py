"""Tensors that a draft's folder does not hold, and what an engine that says nothing of it takes for them."""

from collections.abc import Iterator, Mapping
from typing import Final

from spectrace.engine.checkpoint import DraftCheckpoint, stored_names
from spectrace.replay.finding import Finding
from spectrace.replay.profiles import Profile
from spectrace.tracer.trace import Trace

__all__ = ["PARTS", "lost_in_copy", "missing_weights", "shipped_by_copy", "stand_in"]

PARTS: Final = {
    "fc": "fc", "fuse_norms": "norm", "embedding_norm": "norm", "feature_norm": "norm", "mlp_norm": "norm",
    "output_norm": "norm", "mlp": "mlp", "attention": "attention",
}  # fmt: skip
"""The kind of weights that a part of the draft is of, by the first word of its tensors' names."""
_FAULTS: Final = {"head": "P2", "embedding": "P3"}


def missing_weights(checkpoint: DraftCheckpoint, profile: Profile) -> Iterator[Finding]:
    """A finding for each part of a checkpoint that lacks tensors; its table is looked at elsewhere."""
    ours = {theirs: name for name, theirs in stored_names(checkpoint.report.missing_tensors, checkpoint.spec).items()}
    parts: dict[str, list[str]] = {}
    for theirs in checkpoint.report.missing_tensors:
        part = ours[theirs].split(".")[0]
        if part != "d2t":
            parts.setdefault(PARTS.get(part, part), []).append(theirs)
    for part, names in parts.items():
        listed = ", ".join(names)
        told = tuple(f"without {name}, {line}" for name in names if (line := stand_in(profile, ours[name])))
        title = f"the checkpoint has no {listed}"
        yield Finding(_FAULTS.get(part, "P1"), title, told or (title,), variant="checkpoint", stage="load")


def lost_in_copy(trace: Trace, checkpoint: DraftCheckpoint) -> Mapping[str, str]:
    """What the folder that was served lacks of a checkpoint's tensors: by our names, what they are called there."""
    served = (trace.manifest.get("draft") or {}).get("tensors")
    if not served:
        return {}
    theirs = stored_names(served, checkpoint.spec)
    return {name: theirs[name] for name in checkpoint.tensors if theirs[name] not in served}


def shipped_by_copy(trace: Trace, checkpoint: DraftCheckpoint, name: str) -> str:
    """What the folder that was served calls a tensor of its own which the checkpoint shares with its target."""
    served = (trace.manifest.get("draft") or {}).get("tensors") or {}
    theirs = stored_names(served, checkpoint.spec).get(name, "")
    return theirs if theirs in served and name not in checkpoint.tensors else ""


def stand_in(profile: Profile, name: str) -> str:
    """What the engine takes for a tensor that is not there; empty where that is not known."""
    part = name.split(".")[0]
    taken = profile.missing.get(part) or profile.missing.get(PARTS.get(part, ""), profile.missing.get("", ""))
    return taken and f"{profile.engine} takes {taken}"

"""Tensors that a draft's folder does not hold, and what an engine that says nothing of it takes for them."""

import re
from collections.abc import Iterator, Mapping
from typing import Final

from spectrace.engine.checkpoint import DraftCheckpoint, stored_names
from spectrace.replay.finding import Finding
from spectrace.replay.profiles.profile import Profile, StandIn
from spectrace.tracer.trace import Trace

__all__ = [
    "PARTS", "bias_of", "lost_in_copy", "missing_weights", "part_of", "shipped_by_copy", "stand_in", "stand_in_of",
]  # fmt: skip

PARTS: Final = {
    "fc": "fc", "fuse_norms": "norm", "embedding_norm": "norm", "feature_norm": "norm", "mlp_norm": "norm",
    "input_norm": "norm", "output_norm": "norm", "mlp": "mlp", "attention": "attention",
}  # fmt: skip
"""The kind of weights that a part of the draft is of, by the first word of its tensors' names."""
_FAULTS: Final = {"head": "P2", "embedding": "P3", "bias": "P7"}


def part_of(name: str) -> str:
    """The part of a layer, or of the draft, that a tensor belongs to."""
    return re.sub(r"^later\.\d+\.", "", name).split(".")[0]


def bias_of(name: str) -> str | None:
    """Of which variant of P7 a bias is: "" of q, k and v; None for other tensors."""
    if not name.endswith(".bias"):
        return None
    part = part_of(name)
    return {"attention": "o" if ".o." in name else ""}.get(part, part)


def missing_weights(checkpoint: DraftCheckpoint, profile: Profile) -> Iterator[Finding]:
    """A finding for each part of a checkpoint that lacks tensors; its table is looked at elsewhere."""
    ours = {theirs: name for name, theirs in checkpoint.names.items()}
    parts: dict[str, list[str]] = {}
    for theirs in checkpoint.report.missing_tensors:
        part = "bias" if bias_of(ours[theirs]) is not None else part_of(ours[theirs])
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
    """What the engine takes for a tensor that is not there, in words; empty where that is not known."""
    taken = stand_in_of(profile, name)
    return f"{profile.engine} takes {taken}" if taken else ""


def stand_in_of(profile: Profile, name: str) -> StandIn | None:
    """What the engine takes for a tensor that is not there; None where that is not known."""
    part = "norm" if re.search(r"_norms?(\.\d+)?\.weight$", name) else part_of(name)
    return profile.missing.get(part) or profile.missing.get(PARTS.get(part, ""), profile.missing.get(""))

"""The folder that was served, where it holds other weights than the one believed in: what it holds, and how far off.

Of a folder that was written since nothing is known.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from spectrace.engine.checkpoint import build_draft, read_draft
from spectrace.engine.draft import DraftModel
from spectrace.tracer.errors import UserError
from spectrace.tracer.fingerprint import file_fingerprints
from spectrace.tracer.trace import Trace

__all__ = ["how_far", "served_weights"]


def served_weights(trace: Trace, model: DraftModel, *, target: Path | None) -> dict[str, Tensor]:
    """The tensors of the folder that was served, by name, as `model` has them; empty where it is no such draft now."""
    told = trace.manifest.get("draft") or {}
    path, prints = told.get("path"), told.get("fingerprints")
    if not path or not prints or not Path(path).is_dir():
        return {}
    with suppress(UserError, OSError):
        if sorted(file_fingerprints(Path(path)).values()) != sorted(prints.values()):
            return {}
        weight = model.fc.weight
        served = build_draft(read_draft(Path(path)), target=target, dtype=weight.dtype, device=str(weight.device))
        found, ours = served.state_dict(), model.state_dict()
        if {name: one.shape for name, one in found.items()} == {name: one.shape for name, one in ours.items()}:
            return found
    return {}


def how_far(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> str:
    """By how much tensors of these names are apart: |Δ| over |ours|, by sums of squares: median and furthest."""
    apart = {name: _apart(ours[name], tensor) for name, tensor in theirs.items() if tensor.is_floating_point()}
    differing = {name: share for name, share in apart.items() if share}
    if not differing:
        return "none of them differs"
    furthest = max(differing, key=lambda name: differing[name])
    median = float(torch.tensor(sorted(differing.values())).median())
    return (
        f"{len(differing)} of {len(apart)} differ, by {median:.1%} of their size (root of sums of squares, median), "
        f"{furthest} most, by {differing[furthest]:.1%}"
    )


def _apart(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = ours.double(), theirs.double()
    return float((theirs - ours).norm() / ours.norm().clamp_min(torch.finfo(torch.float64).tiny))

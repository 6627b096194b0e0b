"""Tensors that a draft's files hold and its config does not use, and what they hold of quantised ones."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from spectrace.engine.checkpoint import DraftCheckpoint, read_tensor, stored_names
from spectrace.engine.draft import DraftModel
from spectrace.engine.spec import DraftSpec, FuseNorm, LaterNorm
from spectrace.replay.loading import BIASES, with_biases

__all__ = ["Spare", "as_stored", "shapes_of", "spare_tensors"]

Spare: TypeAlias = Mapping[str, Mapping[str, Tensor]]
"""Tensors by the names of a `DraftModel`, by what takes them; see `Configuration`."""


def spare_tensors(checkpoint: DraftCheckpoint, dtype: torch.dtype) -> Spare:
    """What lies in the folder unused, by the switch that would use it, and what is stored there without scales."""
    unused = frozenset(checkpoint.report.unused_tensors)
    found = {name: tensors for name, spec in _others(checkpoint.spec) if (tensors := _held(checkpoint, spec, unused))}
    if checkpoint.scales:
        found["unscaled"] = as_stored(checkpoint)
    return {what: {name: tensor.to(dtype) for name, tensor in held.items()} for what, held in found.items()}


def _others(spec: DraftSpec) -> Iterator[tuple[str, DraftSpec]]:
    """Switches, each alone the other way, by what it is called."""
    for fuse_norm in (FuseNorm.WHOLE, FuseNorm.PER_SLOT):
        yield fuse_norm, replace(spec, fuse_norm=fuse_norm)
    for later_norm in LaterNorm:
        yield later_norm, replace(spec, later_norm=later_norm)
    for switch in BIASES:
        yield switch, with_biases(spec, (switch,), has=True)


def _held(checkpoint: DraftCheckpoint, other: DraftSpec, unused: frozenset[str]) -> dict[str, Tensor]:
    """What another draft has beside this one, if all of it lies in the folder, in the shapes that it has to be of."""
    ours, own = checkpoint.names, shapes_of(checkpoint.spec)
    theirs = stored_names({*unused, *ours.values()}, other)
    shapes = {
        name: shape for name, shape in shapes_of(other).items() if name not in own or theirs.get(name) != ours.get(name)
    }
    if not shapes or not {theirs.get(name) for name in shapes} <= unused:
        return {}
    found = {name: read_tensor(checkpoint.folder, (theirs[name],)) for name in shapes}
    return found if all(found[name].shape == shape for name, shape in shapes.items()) else {}


def shapes_of(spec: DraftSpec) -> dict[str, torch.Size]:
    """The tensors that such a draft has, by name."""
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in DraftModel(spec).state_dict().items()}


def as_stored(checkpoint: DraftCheckpoint) -> dict[str, Tensor]:
    """What the files hold of tensors that are multiplied by a scale when they are read."""
    return {name: read_tensor(checkpoint.folder, (checkpoint.names[name],)).float() for name in checkpoint.scales}

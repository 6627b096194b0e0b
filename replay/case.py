"""What a diagnosis works on: a trace, the draft that the team believes it serves, and what both say of each other."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spectrace.engine.checkpoint import (
    DraftCheckpoint,
    build_draft,
    default_wiring,
    read_embedding,
    read_head,
    read_tensor,
)
from spectrace.engine.dialect import Wiring
from spectrace.engine.draft import DraftModel
from spectrace.engine.spec import DraftSpec, FuseNorm, GqaSpec, MlaSpec, RopeKind, RopeSpec, Stream
from spectrace.replay.compare import COARSE_TOLERANCE, TOLERANCE
from spectrace.replay.configuration import Configuration, Slot
from spectrace.replay.texts import Text, read_texts
from spectrace.tracer.errors import UserError
from spectrace.tracer.trace import Trace

__all__ = ["Case", "open_case"]

_STREAMS = {"residual": Stream, "feedback": Stream, "fuse_norm": FuseNorm}


@dataclass(frozen=True, slots=True)
class Case:
    """`model` is the believed draft in the served precision, None where its shared weights are nowhere to be had.

    `served_spec` and `served_wiring` are what the engine itself read from the folder it was given, None where the trace
    does not say. `shared` are the target's embedding and head, as far as they can be read.
    """

    trace: Trace
    checkpoint: DraftCheckpoint
    target: Path | None
    texts: Mapping[int, Text]
    layers: int | None
    model: DraftModel | None
    shared: Mapping[str, Tensor]
    served_spec: DraftSpec | None
    served_wiring: Wiring | None
    why_no_model: str = ""

    @property
    def dtype(self) -> torch.dtype:
        """The precision in which the engine served."""
        found: torch.dtype = getattr(torch, str(self.trace.manifest.get("dtype", "float32")))
        return found

    @property
    def coarse(self) -> bool:
        """Whether rounding is coarser than float32's, so that kernels part sooner."""
        return self.dtype != torch.float32

    @property
    def tolerance(self) -> float:
        """How far two ways to compute one row may part, of the row's maximum."""
        return COARSE_TOLERANCE if self.coarse else TOLERANCE

    @property
    def served_folder(self) -> Path | None:
        """The folder that the engine read its draft from, by its own account."""
        path = (self.trace.manifest.get("draft") or {}).get("path")
        return Path(path) if path else None

    @property
    def configured(self) -> Configuration | None:
        """The reading that the believed checkpoint and its config mean."""
        if self.model is None or not self.configured_wiring:
            return None
        wiring = tuple(Slot(boundary) for boundary in self.configured_wiring)
        spare = dict(_spare_norms(self.checkpoint, self.dtype))
        return Configuration(self.checkpoint.spec, self.model.state_dict(), wiring, spare=spare)

    @property
    def configured_wiring(self) -> tuple[int, ...]:
        """The config's boundaries, else the default that the engine takes."""
        if self.checkpoint.wiring:
            return self.checkpoint.wiring.boundaries
        return default_wiring(self.layers) if self.layers else ()


def open_case(trace: Trace, checkpoint: DraftCheckpoint, target: Path | None) -> Case:
    """Read everything that decides a diagnosis.

    Raises UserError for a target that does not fit the draft, and for a trace of several starts of an engine.
    """
    starts = np.unique(trace.rows("received", rank=0)["incarnation"])
    if len(starts) > 1:
        raise UserError(
            f"{trace.folder}: it holds {len(starts)} starts of the engine, each with requests numbered anew; expected "
            f"one: record again without a restart"
        )
    dtype = getattr(torch, str(trace.manifest.get("dtype", "float32")), None)
    if not isinstance(dtype, torch.dtype):
        raise UserError(
            f"{trace.folder}: dtype {trace.manifest.get('dtype')!r} in its manifest; expected one of torch's"
        )
    model, why = None, ""
    try:
        model = build_draft(checkpoint, target=target, dtype=dtype)
    except UserError as error:
        if target is not None or checkpoint.report.missing_tensors:
            raise
        why = error.message
    told = trace.manifest.get("draft") or {}
    return Case(
        trace=trace,
        checkpoint=checkpoint,
        target=target,
        texts=read_texts(trace),
        layers=_layers(trace),
        model=model,
        shared={} if target is None else dict(_shared(checkpoint.spec, target)),
        served_spec=_spec(told["spec"]) if told.get("spec") else None,
        served_wiring=_wiring(trace.manifest),
        why_no_model=why,
    )


def _spare_norms(checkpoint: DraftCheckpoint, dtype: torch.dtype) -> Iterator[tuple[FuseNorm, Tensor]]:
    """Gains of norms before fc that lie in the folder unused."""
    unused, slots = checkpoint.report.unused_tensors, checkpoint.spec.slots
    for norm, names in (
        (FuseNorm.WHOLE, ("input_norm.weight",)),
        (FuseNorm.PER_SLOT, tuple(f"fc_norm.{slot}.weight" for slot in range(slots))),
    ):
        if set(names) <= set(unused):
            gains = torch.cat([read_tensor(checkpoint.folder, (name,)) for name in names]).to(dtype)
            if len(gains) == checkpoint.spec.features_width:
                yield norm, gains


def _shared(spec: DraftSpec, target: Path) -> Iterator[tuple[str, Tensor]]:
    """What of the target could be in the place of something that is the draft's own."""
    with suppress(UserError):  # under names that are not known
        if spec.own_embedding:
            yield "embedding", read_embedding(target)
        if spec.own_head:
            yield "head", read_head(target)


def _layers(trace: Trace) -> int | None:
    """How many layers the target has, by the config in the manifest; a multimodal class nests its decoder's."""
    config = (trace.manifest.get("target") or {}).get("config") or {}
    for held in (config, config.get("text_config") or {}):
        if isinstance(held.get("num_hidden_layers"), int):
            return int(held["num_hidden_layers"])
    return None


def _wiring(manifest: Mapping[str, Any]) -> Wiring | None:
    """What the engine resolved the wiring to, and where it says it took it from."""
    told = (manifest.get("wiring") or {}).get("resolved")
    if not told or not told.get("boundaries"):
        return None
    return Wiring(tuple(told["boundaries"]), str(told["key"]), tuple(told["raw_ids"]))


def _spec(told: Mapping[str, Any]) -> DraftSpec:
    """A `DraftSpec` out of a manifest; switches that it does not know keep their defaults."""
    attention = told["attention"]
    rope = {**told["rope"], "kind": RopeKind(told["rope"]["kind"])}
    made = {
        "attention": MlaSpec(**attention) if "kv_rank" in attention else GqaSpec(**attention),
        "rope": RopeSpec(**rope),
        **{name: kind(told[name]) for name, kind in _STREAMS.items() if name in told},
    }
    known = {one.name for one in fields(DraftSpec)}
    plain = {name: value for name, value in told.items() if name in known and not isinstance(value, Enum)}
    return DraftSpec(**{**plain, **made})

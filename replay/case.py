"""What a diagnosis works on: a trace, the draft that the team believes it serves, and what both say of each other."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from spectrace.engine.checkpoint import (
    DraftCheckpoint,
    build_draft,
    configured_wiring,
    default_wiring,
    read_embedding,
    read_head,
)
from spectrace.engine.dialect import Wiring, read_spec, read_wiring, scaled_like
from spectrace.engine.draft import DraftModel
from spectrace.engine.fields import Fields, read_config
from spectrace.engine.spec import DraftSpec, FuseNorm, GqaSpec, IdMap, LaterNorm, MlaSpec, RopeKind, RopeSpec, Stream
from spectrace.replay.compare import served_dtype, tolerance_of
from spectrace.replay.configuration import Configuration, Slot
from spectrace.replay.diagnosis import Diagnosis
from spectrace.replay.profiles.profile import value_at
from spectrace.replay.rewriting import place_of
from spectrace.replay.spare import Spare, spare_tensors
from spectrace.replay.texts import Text, read_texts
from spectrace.tracer.acceptance import Acceptance, acceptance_of_rows
from spectrace.tracer.errors import UserError
from spectrace.tracer.trace import Trace

__all__ = ["Case", "on_its_traces", "open_case"]

Told = TypeVar("Told")


@dataclass(frozen=True, slots=True)
class Case:
    """`model` is the believed draft in the served precision, None where its shared weights are nowhere to be had.

    `served_spec` and `served_wiring` are what the engine itself read from the folder it was given, None where the trace
    does not say. `shared` are the target's embedding and head, as far as they can be read, `spare` the tensors that the
    checkpoint's files hold and its config does not use.
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
    spare: Spare = field(default_factory=dict)
    why_no_model: str = ""

    @property
    def dtype(self) -> torch.dtype:
        """The precision in which the engine served."""
        return served_dtype(self.trace)

    @property
    def coarse(self) -> bool:
        """Whether rounding is coarser than float32's, so that kernels part sooner."""
        return self.dtype != torch.float32

    @property
    def tolerance(self) -> float:
        """How far two ways to compute one row may part, of the row's maximum."""
        return tolerance_of(self.dtype)

    @property
    def others(self) -> tuple[DraftSpec, ...]:
        """The draft as it was served, and with RoPE as the target has it, as far as the trace says; with windows that
        its config mentions and does not apply; and of ModelOpt's, with the state normed as its trainer does.
        """
        spec, target = self.checkpoint.spec, _decoder_config(self.trace)
        found = [] if self.served_spec is None else [self.served_spec]
        with suppress(UserError):  # of a kind that no draft has
            found.append(scaled_like(spec, target, self.trace.folder))
        if windows := _mentioned(spec, read_config(self.checkpoint.folder)):
            found.append(replace(spec, windows=windows))
        if self.checkpoint.layout == "modelopt":
            found.append(replace(spec, normed_twice=True))
        return tuple(found)

    @property
    def longest(self) -> int:
        """How many positions a draft has to be for: as many as the target's config says, else as texts here have."""
        told = _decoder_config(self.trace).get("max_position_embeddings")
        return told if isinstance(told, int) else max((len(text.tokens) for text in self.texts.values()), default=0)

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
        return Configuration(self.checkpoint.spec, self.model.state_dict(), wiring, spare=self.spare)

    @property
    def configured_wiring(self) -> tuple[int, ...]:
        """The config's boundaries, else the default that the engine takes."""
        if self.checkpoint.wiring:
            return self.checkpoint.wiring.boundaries
        return default_wiring(self.layers) if self.layers else ()


def open_case(trace: Trace, checkpoint: DraftCheckpoint, target: Path | None) -> Case:
    """Read everything that decides a diagnosis.

    Raises UserError for a target that does not fit the draft, for a draft that takes boundaries which the target of the
    trace does not have, for a trace of several starts of an engine, and for one that says of the draft what cannot be
    read.
    """
    starts = np.unique(trace.rows("received", rank=0)["incarnation"])
    if len(starts) > 1:
        raise UserError(
            f"{trace.folder}: it holds {len(starts)} starts of the engine, each with requests numbered anew; expected "
            f"one: record again without a restart"
        )
    dtype = served_dtype(trace)
    if layers := _layers(trace):
        configured_wiring(checkpoint, layers)
    model, why = None, ""
    try:
        model = build_draft(_as_served(checkpoint), target=target, dtype=dtype)
    except UserError as error:
        if target is not None and not checkpoint.report.missing_tensors:
            raise
        why = error.message
    told = trace.manifest.get("draft") or {}
    return Case(
        trace=trace,
        checkpoint=checkpoint,
        target=target,
        texts=read_texts(trace),
        layers=layers,
        model=model,
        shared={} if target is None else dict(_shared(checkpoint.spec, target)),
        served_spec=_spec(trace, told["spec"]) if told.get("spec") else _configured_spec(told),
        served_wiring=_wiring(trace.manifest),
        spare=spare_tensors(checkpoint, dtype) if model is not None else {},
        why_no_model=why,
    )


def _as_served(checkpoint: DraftCheckpoint) -> DraftCheckpoint:
    """Without a table ids are tokens: there are engines that serve a draft so which lost it."""
    report, table = checkpoint.report, torch.zeros(checkpoint.spec.draft_vocab, dtype=torch.int64)
    if report.missing_tensors != ("d2t",):
        return checkpoint
    return replace(checkpoint, tensors={**checkpoint.tensors, "d2t": table}, report=replace(report, missing_tensors=()))


def on_its_traces(diagnosis: Diagnosis, trace: Trace, reference: Trace | None = None) -> Diagnosis:
    """The diagnosis, with what its traces leave unsure by themselves: what was lost, and what acceptance is of."""
    served = acceptance_of_rows(trace.rows("verified"))
    traces = {"trace": trace} | ({"reference": reference} if reference else {})
    rests_on = {f"{name} sealed": one.sealed for name, one in traces.items()}
    rounds = {"rounds": {"whole": served.rounds, "cut": served.rounds_cut}} if served.rounds_untrimmed else {}
    unsealed = [_unsealed(name, one) for name, one in traces.items() if not one.sealed]
    notes = (*diagnosis.notes, *unsealed, *([_cut(served)] if served.mostly_cut else []))
    return replace(diagnosis, coverage={**diagnosis.coverage, **rests_on, **rounds}, notes=notes)


def _unsealed(name: str, trace: Trace) -> str:
    return (
        f"the {name} {trace.folder} is unsealed: its recording was interrupted or is still running, and how much was "
        f"lost is not known"
    )


def _cut(served: Acceptance) -> str:
    return (
        f"of {served.rounds_untrimmed} rounds {served.rounds_cut} were cut by the end of their answers, those that got "
        f"far first: acceptance length is that of the other {served.rounds}, and too low to judge the draft by; record "
        f"longer answers"
    )


def _mentioned(spec: DraftSpec, config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Windows that are in a config, and of no effect there; empty where none are."""
    window, kinds = (value_at(config, place_of(config, key)) for key in ("sliding_window", "layer_types"))
    if any(spec.windows) or not isinstance(window, int) or window < 1:
        return ()
    if isinstance(kinds, list) and len(kinds) >= spec.layers and "sliding_attention" in kinds:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds[: spec.layers])
    return (window,) * spec.layers


def _shared(spec: DraftSpec, target: Path) -> Iterator[tuple[str, Tensor]]:
    """What of the target could be in the place of something that is the draft's own."""
    with suppress(UserError):  # under names that are not known
        if spec.own_embedding:
            yield "embedding", read_embedding(target)
        if spec.own_head:
            yield "head", read_head(target)


def _decoder_config(trace: Trace) -> Mapping[str, Any]:
    """The target's config in the manifest; of a multimodal class its decoder's, which it nests."""
    config: Mapping[str, Any] = (trace.manifest.get("target") or {}).get("config") or {}
    return config.get("text_config") or config


def _layers(trace: Trace) -> int | None:
    """How many layers the target has, where the manifest tells."""
    layers = _decoder_config(trace).get("num_hidden_layers")
    return layers if isinstance(layers, int) else None


def _wiring(manifest: Mapping[str, Any]) -> Wiring | None:
    """What the engine resolved the wiring to, and where it says it took it from."""
    told = (manifest.get("wiring") or {}).get("resolved")
    if not told or not told.get("boundaries"):
        return None
    return Wiring(tuple(told["boundaries"]), str(told["key"]), tuple(told["raw_ids"]))


def _spec(trace: Trace, told: Mapping[str, Any]) -> DraftSpec:
    """The switches that served, as the manifest has them."""
    try:
        return _read(DraftSpec, told)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{trace.folder}: draft.spec in its manifest cannot be read ({error}); expected what this version of "
            f"spectrace writes: diagnose with the version that recorded it, or record again"
        ) from error


def _configured_spec(told: Mapping[str, Any]) -> DraftSpec | None:
    """The switches that the folder which was served had, by its config and the shapes of its tensors."""
    config, shapes = told.get("config"), told.get("tensors")
    if not config or not shapes:
        return None
    fields = Fields(Path(told["path"]) / "config.json", config)
    with suppress(UserError):
        return read_spec(fields, shapes, read_wiring(fields))
    return None


def _read(kind: type[Told], told: Mapping[str, Any]) -> Told:
    """A dataclass out of a manifest: what it does not know is passed over, switches that are absent keep defaults."""
    known: Any = kind
    held = {one.name: told[one.name] for one in fields(known) if one.name in told}
    return kind(**{name: _MADE[name](value) if name in _MADE else value for name, value in held.items()})


def _attention(told: Mapping[str, Any]) -> GqaSpec | MlaSpec:
    return _read(MlaSpec, told) if "kv_rank" in told else _read(GqaSpec, told)


_MADE: Mapping[str, Callable[[Any], Any]] = {
    "attention": _attention,
    "rope": lambda told: _read(RopeSpec, told),
    "kind": RopeKind,
    "residual": Stream,
    "feedback": Stream,
    "head_reads": Stream,
    "fuse_norm": FuseNorm,
    "later_norm": LaterNorm,
    "windows": tuple,
    "id_map": IdMap,
}
"""What a field's value becomes; others are as they are told."""

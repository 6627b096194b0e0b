"""The rows of a plan, streamed file by file into a trace; whatever goes wrong, nothing stays that looks whole.

Shapes: T tokens, F target width.
"""

import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spectrace.replay.dumps.plan import Plan
from spectrace.replay.dumps.sample import Norm, Sample
from spectrace.tracer.errors import RunFailed, UserError
from spectrace.tracer.keys import Keys
from spectrace.tracer.manifest import create_trace, seal_trace
from spectrace.tracer.recorder import Recorder
from spectrace.tracer.rows import Level

__all__ = ["Imported", "record_dump"]

_BYTES_AT_ONCE, _WRITTEN_SECS = 32 << 20, 600.0


@dataclass(frozen=True, slots=True)
class Imported:
    """What was recorded."""

    texts: int
    rows: int


def record_dump(
    plan: Plan, out: Path, *, target: Mapping[str, Any] | None, progress: Callable[[int, int], None]
) -> Imported:
    """Record all texts of a plan into a new, sealed trace; `target` is what the manifest says of the model.

    Raises UserError for a file that is not as the first ones were, and whatever else happens leaves nothing behind.
    """
    there = out.is_dir()
    create_trace(out, _manifest(plan, target))
    expects = {"expects": [plan.family, "requests"]}
    captured = {"capture": plan.recorded} if plan.family == "reference" else {}
    recorder = Recorder(out.absolute(), role="target", level=Level.FULL, facts={**expects, **captured})
    rows = 0
    try:
        try:
            for number, item in enumerate(plan.items):
                progress(number, len(plan.items))
                rows += _write(recorder, plan, item.read(), number)
        finally:
            account = recorder.close()
        if recorder.failure or account.lost:
            raise RunFailed(f"{out}: rows were lost ({recorder.failure or account.lost}); is the disk full?")
        seal_trace(out)
    except BaseException:
        with suppress(OSError):
            shutil.rmtree(out)
            if there:
                out.mkdir()
        raise
    return Imported(len(plan.items), rows)


def _manifest(plan: Plan, target: Mapping[str, Any] | None) -> dict[str, Any]:
    """As of a reference; that there are `texts` in it says that nothing was answered here."""
    known = [one for one in plan.boundaries if one is not None]
    key = plan.unknowns.layers.by or plan.unknowns.layers.how
    wiring = {"boundaries": known, "key": key, "raw_ids": []} if len(known) == len(plan.boundaries) else None
    return {
        "engine": plan.dialect.name,
        "target": target,
        "draft": None,
        "wiring": {"configured": None, "resolved": wiring},
        "dtype": str(plan.dtype).removeprefix("torch."),
        "texts": {"from": str(plan.source.absolute())},
        "import": plan.to_json(),
    }


def _write(recorder: Recorder, plan: Plan, sample: Sample, number: int) -> int:
    """One text in pieces that the recorder has room for, then its request; returns how many rows were written."""
    _check_alike(plan, sample)
    shift, count = int(_one(plan.unknowns.rows.value)), len(sample.tokens)
    rows = range(max(-shift, 0), min(count, count - shift))
    states = _states(plan, sample)
    at_once = max(_BYTES_AT_ONCE // (len(states) * plan.width * plan.dtype.itemsize), 1)
    for start in range(rows.start, rows.stop, at_once):
        part = slice(start, min(start + at_once, rows.stop))
        places = range(part.start + shift, part.stop + shift)
        keys = Keys(request=[number] * len(places), pass_=0, node=places, position=places, step=number)
        tokens = sample.tokens[places.start : places.stop]
        if plan.family == "reference":
            recorder.reference(keys, token=tokens, boundaries={b: tensor[part] for b, tensor in states.items()})
        else:
            slots = torch.cat([tensor[part] for tensor in states.values()], dim=1)
            recorder.emitted(keys, token=tokens, slots=slots, slot_width=plan.width)
        if not recorder.flush(_WRITTEN_SECS):
            raise RunFailed(f"{recorder.name}: not written within {_WRITTEN_SECS:.0f} s; is the disk still there?")
    _request(recorder, sample, number, _first_answer(sample, int(plan.unknowns.mask.value or 0)))
    return len(rows)


def _one(value: Any) -> Any:
    """Of an alignment that the data show to differ between tensors, and nobody claims, there is none to record by."""
    return value[0] if isinstance(value, tuple) else value


def _check_alike(plan: Plan, sample: Sample) -> None:
    width, dtype = sample.slots[0].shape[1], sample.slots[0].dtype
    found = (len(sample.slots), width, dtype, sample.last is not None)
    expected = (len(plan.boundaries), plan.width, plan.dtype, found[3] if plan.last is None else True)
    declares = (sample.norm, sample.boundaries)
    if found != expected or declares != plan.declared:
        raise UserError(
            f"{sample.path}: found {_shown(*found[:3], *declares)}, expected {_shown(*expected[:3], *plan.declared)}, "
            f"as in {plan.items[0].name}; import it apart"
        )


def _shown(slots: int, width: int, dtype: torch.dtype, norm: Norm | None, boundaries: tuple[int, ...] | None) -> str:
    declared = f", the last state {norm}-norm" if norm else f", boundaries {list(boundaries)}" if boundaries else ""
    return f"{slots} slots of {width} columns in {str(dtype).removeprefix('torch.')}{declared}"


def _states(plan: Plan, sample: Sample) -> dict[int, Tensor]:
    """What is recorded of a text, [T, F] each: by boundary, or of emitted slots by place."""
    if plan.family == "emitted":
        return dict(enumerate(sample.slots))
    states: dict[int, Tensor] = {}
    for boundary, slot in zip((*plan.boundaries, plan.last), (*sample.slots, sample.last), strict=True):
        if boundary is not None and slot is not None:
            states.setdefault(boundary, slot)
    return dict(sorted(states.items()))


def _first_answer(sample: Sample, mask_shift: int) -> int:
    """Where the answer begins: at the first token that counts, behind one token at least; the end where none does."""
    counted = sample.mask.nonzero().flatten() if sample.mask is not None else torch.empty(0)
    return max(int(counted[0]) + mask_shift, 1) if len(counted) else len(sample.tokens)


def _request(recorder: Recorder, sample: Sample, number: int, first: int) -> None:
    tokens = sample.tokens.tolist()
    recorder.requests(
        Keys(request=[number], pass_=0, node=0, position=0, step=number),
        id=[sample.name],
        prompt_tokens=[tokens[:first]],
        output_tokens=[tokens[first:]],
        cached_prefix=0,
        temperature=0.0,
        finish_reason="given",
        rounds=0,
        correct_drafts=0,
        depth_limit=0,
    )

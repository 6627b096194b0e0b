"""A draft written in a published layout, whole or not at all, and read again: what reads back otherwise is an error.

Tensors are written bit for bit. What a layout has no words for is refused by name, never left out.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spectrace.engine.checkpoint import DraftCheckpoint, read_draft
from spectrace.engine.dialect import Wiring
from spectrace.engine.draft import DraftModel
from spectrace.engine.fields import read_config
from spectrace.engine.layouts.known import LAYOUTS, WRITABLE, writable
from spectrace.engine.layouts.layout import Layout, Verifier
from spectrace.engine.layouts.limits import OWN_KEYS
from spectrace.engine.layouts.names import published_names
from spectrace.engine.saving import save_tensors, whole_or_not
from spectrace.engine.spec import DraftSpec
from spectrace.engine.stored import StoredTensors
from spectrace.engine.tables import kept_tokens
from spectrace.tracer.errors import RunFailed, UserError

__all__ = ["WRITABLE", "Converted", "convert_draft", "verifier_at", "write_draft"]

_DESCRIBED = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Fields that engines look at and that say nothing of what a draft computes: they go along."""


@dataclass(frozen=True, slots=True)
class Converted:
    """A draft as it was read, and as the folder that was written reads; `files` are those with tensors."""

    source: DraftCheckpoint
    written: DraftCheckpoint
    files: tuple[str, ...]
    notes: tuple[str, ...] = ()


def convert_draft(
    source: Path, folder: Path, layout: str, *, target: Path | None = None, shard_bytes: int | None = None
) -> Converted:
    """Write the draft in `source` to a new `folder` in another layout, and hold what was written against it.

    `target` is what the draft is for, where a layout names that. Raises UserError for a draft that lacks tensors or is
    quantised, for a target that it cannot be for, for a layout that has no words for it, and for a folder that is there
    already or within the source; RunFailed as `write_draft` does.
    """
    _check_new(folder)
    if folder.resolve().is_relative_to(source.resolve()):
        raise UserError(f"{folder} lies within {source}: give a path beside the draft, not in it")
    draft = read_draft(source)
    if target:
        _check_target(draft, target)
    if draft.report.missing_tensors:
        missing = ", ".join(draft.report.missing_tensors)
        raise UserError(f"{source}: missing tensors {missing}; export the draft again, all of it")
    if draft.scales:
        raise UserError(
            f"{source}: {len(draft.scales)} of its weights are quantised, and no layout is written with scales here; "
            f"convert the draft as it was before it was quantised"
        )
    stored, tensors = StoredTensors(source), dict(draft.tensors)
    if "t2d" in stored:
        tensors["t2d"] = stored["t2d"]
    verifier = verifier_at(target) if target else _named_verifier(read_config(source))
    written = write_draft(
        folder, layout, draft.spec, draft.wiring, tensors,
        verifier=verifier, described=_described(draft), shard_bytes=shard_bytes,
    )  # fmt: skip
    files = tuple(sorted(path.name for path in folder.glob("*.safetensors")))
    return Converted(draft, written, files, tuple(_notes(draft, writable(layout), verifier)))


def write_draft(
    folder: Path,
    layout: str,
    spec: DraftSpec,
    wiring: Wiring | Sequence[int] | None,
    tensors: Mapping[str, Tensor],
    *,
    verifier: Verifier | None = None,
    described: Mapping[str, Any] | None = None,
    shard_bytes: int | None = None,
) -> DraftCheckpoint:
    """Write a draft to a new folder, read it again and return it as read.

    `tensors` are by the names of a `DraftModel`, in the types they are to be stored in; those that the draft shares
    with its target are left out, and "t2d" is made of d2t unless it is given. `described` are further fields of the
    config, beside widths and heads. Tensors are spread over several files where one would be larger than `shard_bytes`.

    Raises UserError for a layout that is not known, for one that has no words for this draft, for tensors that are not
    those of the spec, and for a folder that is there already; RunFailed where the folder reads back otherwise. In every
    case nothing is left behind.
    """
    _check_new(folder)
    chosen = writable(layout)
    boundaries = None if wiring is None else tuple(wiring.boundaries if isinstance(wiring, Wiring) else wiring)
    _check_words(chosen, spec, boundaries)
    own = _own(folder, spec, tensors)
    if "d2t" in own and "t2d" not in own and (kept := kept_tokens(own["d2t"], spec)) is not None:
        own["t2d"] = kept
    if chosen.whole_tables and spec.draft_vocab == spec.target_vocab:
        own = {"d2t": torch.zeros(spec.draft_vocab, dtype=torch.int64), **own}
        own.setdefault("t2d", torch.ones(spec.target_vocab, dtype=torch.bool))
    config = _config(chosen, spec, boundaries, verifier, {**_stored_type(own), **(described or {})})
    names = {**published_names(spec, chosen.first), "t2d": "t2d"}
    with whole_or_not(folder) as partial:
        save_tensors(partial, {names[name]: tensor for name, tensor in own.items()}, shard_bytes)
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        read = read_draft(partial)
        if differences := list(_differences(spec, boundaries, own, read)):
            raise RunFailed(
                f"{folder}: in the layout {layout} the draft does not read back as it is: {'; '.join(differences)}; "
                f"nothing was kept"
            )
    return replace(read, folder=folder)


def _check_new(folder: Path) -> None:
    if folder.exists():
        raise UserError(f"{folder} exists: give a new path for the draft, or remove it first")


def _check_target(draft: DraftCheckpoint, target: Path) -> None:
    config = read_config(target)
    nested = config.get("text_config")
    text = nested if isinstance(nested, dict) else config
    for name, ours in (("hidden_size", draft.spec.target_width), ("vocab_size", draft.spec.target_vocab)):
        theirs = text.get(name)
        if isinstance(theirs, int) and theirs != ours:
            raise UserError(
                f"{target}: {name} is {theirs}, and {draft.folder} is a draft for {ours}: it is another target's"
            )


def _check_words(layout: Layout, spec: DraftSpec, boundaries: tuple[int, ...] | None) -> None:
    if not (unsaid := layout.unsaid(spec, boundaries)):
        return
    able = sorted(one.name for one in LAYOUTS if one.config is not None and not one.unsaid(spec, boundaries))
    elsewhere = f"; layouts that have: {', '.join(able)}" if able else ""
    raise UserError(f"the layout {layout.name} has no words for {'; '.join(unsaid)}{elsewhere}")


def _own(folder: Path, spec: DraftSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that are the draft's own, as they are to be written."""
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in DraftModel(spec).state_dict().items()}
    shared = {
        name for name, own in (("embedding.weight", spec.own_embedding), ("head.weight", spec.own_head)) if not own
    }
    optional = {"t2d"} | ({"d2t"} if spec.draft_vocab == spec.target_vocab else set())
    if unknown := sorted(tensors.keys() - shapes.keys() - optional):
        raise UserError(f"{folder}: {', '.join(unknown)} are no tensors of this draft")
    if missing := sorted(shapes.keys() - tensors.keys() - shared - optional):
        raise UserError(f"{folder}: tensors {', '.join(missing)} of this draft are not given")
    for name, tensor in tensors.items():
        if name in shapes and tensor.shape != shapes[name]:
            raise UserError(f"{folder}: tensor {name} is {list(tensor.shape)}, expected {list(shapes[name])}")
    if "d2t" in tensors and "d2t" in optional and bool(tensors["d2t"].any()):
        raise UserError(f"{folder}: d2t leads elsewhere although the draft has all tokens; expected zeros, or none")
    return {name: tensor.detach() for name, tensor in tensors.items() if name not in shared}


def _stored_type(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    kinds = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values() if tensor.is_floating_point()}
    return {"dtype": kinds.pop()} if len(kinds) == 1 else {}


def _config(
    layout: Layout, spec: DraftSpec, boundaries: tuple[int, ...] | None, verifier: Verifier | None,
    described: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    assert layout.config is not None
    config = layout.config(spec, boundaries, verifier)
    body = config[layout.geometry] if layout.geometry else config
    body.update({name: value for name, value in described.items() if name not in body})
    return config


def _differences(
    spec: DraftSpec, boundaries: tuple[int, ...] | None, tensors: Mapping[str, Tensor], read: DraftCheckpoint
) -> Iterator[str]:
    """What reads back otherwise, by name."""
    for one in fields(DraftSpec):
        was, now = getattr(spec, one.name), getattr(read.spec, one.name)
        if was != now:
            yield f"{one.name} was {was} and is {now}"
    back = read.wiring.boundaries if read.wiring else None
    if back != boundaries:
        yield f"boundaries were {boundaries} and are {back}"
    held = dict(read.tensors)
    if "t2d" in tensors:
        held["t2d"] = StoredTensors(read.folder)["t2d"]
    for name in sorted(tensors.keys() | held.keys()):
        if name not in held or name not in tensors or not _same_bits(tensors[name], held[name]):
            yield f"tensor {name} is not what it was"
    report = read.report
    for what, names in (("unused", report.unused_tensors), ("missing", report.missing_tensors)):
        if names:
            yield f"tensors are {what}: {', '.join(names)}"


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(tensor.cpu().contiguous().flatten().view(torch.uint8) for tensor in (one, other)))


def _architectures(config: Mapping[str, Any]) -> tuple[str, ...]:
    told = config.get("architectures")
    return tuple(map(str, told)) if isinstance(told, list) else ()


def verifier_at(target: Path) -> Verifier:
    """The target in a folder, as layouts name it; raises UserError for a folder without a config."""
    return Verifier(str(target.absolute()), _architectures(read_config(target)))


def _named_verifier(config: Mapping[str, Any]) -> Verifier | None:
    """The target that a speculators draft names."""
    told = config.get("speculators_config")
    named = told.get("verifier") if isinstance(told, dict) else None
    if not isinstance(named, dict) or not isinstance(named.get("name_or_path"), str):
        return None
    return Verifier(named["name_or_path"], _architectures(named))


def _described(draft: DraftCheckpoint) -> dict[str, Any]:
    """Fields that go along, wherever the draft's layout has them."""
    config = read_config(draft.folder)
    layout = next(one for one in LAYOUTS if one.name == draft.layout)
    body = config.get(layout.geometry) if layout.geometry else config
    held = {**config, **(body if isinstance(body, dict) else {})}
    return {name: held[name] for name in _DESCRIBED if held.get(name) is not None}


def _notes(draft: DraftCheckpoint, layout: Layout, verifier: Verifier | None) -> Iterator[str]:
    """What there is to know of a folder in this layout."""
    spec = draft.spec
    if layout.geometry and verifier is None:
        yield "the target is not named (verifier.name_or_path): say it with --target, engines need it"
    ours = [limit.what for limit in OWN_KEYS if limit.met(spec, None)]
    if spec.window_from_text and not layout.window_from_text:
        ours.append("windows counted from the text's row")
    if ours:
        yield f"no engine reads the keys for {' and '.join(ours)}: engines compute another draft"
    if "d2t" in draft.tensors and bool((draft.tensors["d2t"].long().diff() < 0).any()):
        yield "draft ids are not in the order of their tokens: code that takes rows of a head by t2d permutes them"

"""A draft's folder turned into (`DraftSpec`, wiring, weights), with an account of everything that was not understood.

Silence is how drafts break, so every tensor that is not used, every tensor that is missing, every config field that
nobody reads and everything odd is named in the report.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spectrace.engine.dialect import Wiring, check_boundaries, read_spec, read_wiring
from spectrace.engine.draft import DraftModel
from spectrace.engine.fields import Fields, read_config
from spectrace.engine.layouts.known import layout_of
from spectrace.engine.layouts.layout import Layout
from spectrace.engine.layouts.names import stored_names
from spectrace.engine.problem import DraftProblem
from spectrace.engine.quantised import SCALES, check_quantisation, dequantised, is_quantised, what_is_no_weight
from spectrace.engine.spec import DraftSpec, MlaSpec, RopeKind
from spectrace.engine.stored import StoredTensors, files_passed_over
from spectrace.engine.strangers import refuse_files, refuse_strangers
from spectrace.engine.tables import broken_table, contradiction
from spectrace.tracer.errors import UserError
from spectrace.tracer.fingerprint import tensor_fingerprint

__all__ = [
    "DraftCheckpoint", "LoadReport", "build_draft", "configured_wiring", "default_wiring", "read_draft",
    "read_embedding", "read_head", "read_tensor", "stored_names", "survey_draft", "unscaled", "weight_fingerprints",
]  # fmt: skip

# Fields that say nothing about what is computed here.
_DESCRIPTIVE = frozenset({
    "_name_or_path", "architectures", "attention_dropout", "auto_map", "bos_token_id", "dtype", "eos_token_id",
    "initializer_range", "max_position_embeddings", "model_type", "num_key_value_heads", "pad_token_id",
    "pretraining_tp", "tie_word_embeddings", "torch_dtype", "transformers_version", "use_cache",
})  # fmt: skip
# Names on disk, multimodal classes included. A table is shared as it is stored: the sqrt(width) that Gemma's embedding
# multiplies it by is no weight, so a draft that was trained on scaled embeddings does not get what it was trained on.
_EMBEDDINGS = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
)
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")
_REDUNDANT = frozenset({"t2d"})  # says again what d2t says


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What reading the checkpoint left over: nothing in here was used to compute anything.

    `notes` are sentences about what was read though it is odd, or is read in more than one way.
    """

    unused_tensors: tuple[str, ...]
    missing_tensors: tuple[str, ...]
    unread_fields: tuple[str, ...]
    assumed: Mapping[str, object]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """A draft as its files describe it; `wiring` is None when the config names no layer ids.

    `names` are what the tensors of a `DraftModel` are called in its files, those that are not there included. `layout`
    is the name of the published layout, and `scales` holds, by the names of `tensors`, what those that are stored in
    eight bits have been multiplied by.
    """

    folder: Path
    spec: DraftSpec
    wiring: Wiring | None
    tensors: Mapping[str, Tensor]
    report: LoadReport
    names: Mapping[str, str]
    layout: str = "eagle"
    scales: Mapping[str, Tensor] = field(default_factory=dict)


def default_wiring(layers: int) -> tuple[int, ...]:
    """The boundaries that engines take when a draft names none: (2, L/2, L-3), as EAGLE hard-codes."""
    return (2, layers // 2, layers - 3)


def configured_wiring(draft: DraftCheckpoint, layers: int) -> Wiring:
    """The wiring that a draft's config means on a target of so many layers; UserError for one that is not there."""
    config = draft.folder / "config.json"
    if draft.wiring is None:
        wiring = default_wiring(layers)
        check_boundaries(f"{config} names no layer ids, and the default", wiring, layers)
        return Wiring(wiring, "default", wiring)
    where = f"{config}: {draft.wiring.key} {list(draft.wiring.raw_ids)}"
    hint = "; another target's draft, or ids of another convention?"
    check_boundaries(where, draft.wiring.boundaries, layers, hint)
    return draft.wiring


def unscaled(spec: DraftSpec) -> DraftSpec:
    """The switches that engines take when they pass `rope_scaling` over, the softmax scale that comes with it, too."""
    attention, rope = spec.attention, replace(spec.rope, kind=RopeKind.DEFAULT, cos_scale=1.0)
    if isinstance(attention, MlaSpec):
        attention = replace(attention, softmax_scale=1.0)
    return replace(spec, rope=rope, attention=attention)


def read_tensor(folder: Path, names: tuple[str, ...]) -> Tensor:
    """The first of some tensors that a checkpoint folder holds, in the order of `names`, without reading the rest."""
    stored = StoredTensors(folder)
    for name in names:
        if name in stored:
            return stored[name]
    raise UserError(f"{folder}: none of the tensors {', '.join(names)} in its *.safetensors")


def read_head(target: Path) -> Tensor:
    """A target's head, or where it has none of its own, its embedding."""
    return read_tensor(target, (*_HEADS, *_EMBEDDINGS))


def read_embedding(target: Path) -> Tensor:
    """A target's embedding, as it is stored."""
    return read_tensor(target, _EMBEDDINGS)


def read_draft(folder: Path) -> DraftCheckpoint:
    """Read an EAGLE-3 draft in any published layout.

    Raises UserError when the folder is no checkpoint, is no EAGLE-3 draft, or holds tensors that do not fit its config.
    """
    draft, problems = survey_draft(folder)
    if problems:
        raise problems[0]
    return draft


def survey_draft(folder: Path) -> tuple[DraftCheckpoint, list[DraftProblem]]:
    """The same, with everything that is wrong with its tensors; those that are wrong are left out.

    Raises UserError where its files or its config say too little for that.
    """
    refuse_files(folder)
    config = read_config(folder)
    stored = StoredTensors(folder)
    problems = [DraftProblem("files", text) for text in stored.wrong]
    refuse_strangers(folder, config, stored.shapes)
    fields = Fields(folder / "config.json", config)
    block = check_quantisation(folder, fields, stored)
    layout = layout_of(fields, stored)
    wiring = read_wiring(fields, ascending=layout.ascending)
    spec = read_spec(fields, stored.shapes, wiring)
    theirs = stored_names(stored, spec)
    expected = {theirs[name]: shape for name, shape in _expected_shapes(spec).items()}
    misshapen = [name for name, shape in expected.items() if name in stored and stored.shapes[name] != shape]
    problems += [
        DraftProblem(
            "tensor-shape",
            f"{folder}: tensor {name} is {stored.shapes[name]}, but its config.json makes it {expected[name]}",
            name,
        )
        for name in misshapen
    ]
    there = {name: their for name, their in theirs.items() if their in expected and their in stored}
    raw = {name: stored[their] for name, their in there.items() if their not in misshapen}
    tensors, scales = _multiplied_out(stored, theirs, raw, block, problems)
    for name, tensor in list(tensors.items()):
        if broken := broken_table(tensor, spec) if name == "d2t" else _broken_weights(tensor):
            told = f"{folder}: tensor {theirs[name]} {broken}; export the draft again"
            problems.append(DraftProblem("d2t-range" if name == "d2t" else "tensor-values", told, theirs[name]))
            del tensors[name]
    if spec.draft_vocab == spec.target_vocab and "d2t" in tensors and bool(tensors["d2t"].any()):
        fields.note("d2t is there although the draft has all tokens: trainers and vLLM pass it over, and so do we")
        del tensors["d2t"]
    used = {theirs[name] for name in tensors} | {*_REDUNDANT, *scales.values()} | {one.subject for one in problems}
    optional = {theirs[name] for name in _optional(spec)}
    report = LoadReport(
        unused_tensors=tuple(sorted(set(stored) - used)),
        missing_tensors=tuple(sorted(expected.keys() - stored.keys() - optional)),
        unread_fields=tuple(sorted(_unread(fields, layout))),
        assumed=fields.assumed(),
        notes=(*fields.notes(), *_notes(stored, spec, layout, fields, tensors)),
    )
    held = {name: stored[their] for name, their in scales.items()}
    return DraftCheckpoint(folder, spec, wiring, tensors, report, theirs, layout.name, held), problems


def _unread(fields: Fields, layout: Layout) -> set[str]:
    """Fields that hold something which nobody asked for, but for those that describe."""
    within = f"{layout.geometry}." if layout.geometry else ""
    return {name for name in fields.unread() if name.removeprefix(within) not in _DESCRIPTIVE | layout.describes}


def _multiplied_out(
    stored: StoredTensors,
    theirs: Mapping[str, str],
    raw: Mapping[str, Tensor],
    block: tuple[int, int],
    problems: list[DraftProblem],
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Weights times their scales, and what the scale of each that has one is called; those that are no weights are left
    out, and told.
    """
    tensors, scales = dict(raw), dict[str, str]()
    for name, tensor in raw.items():
        stem = theirs[name].removesuffix("weight")
        scale = next((stem + one for one in SCALES if stem + one in stored), None)
        if name != "d2t" and (why := what_is_no_weight(tensor)):
            problems.append(
                DraftProblem("tensor-values", f"{stored.folder}: tensor {theirs[name]} {why}", theirs[name])
            )
            del tensors[name]
        if not is_quantised(tensor) or scale is None:
            continue
        try:
            tensors[name], scales[name] = dequantised(tensor, stored[scale], block), scale
        except ValueError as error:
            told = f"{stored.folder}: tensor {scale} {error} for {theirs[name]}"
            problems.append(DraftProblem("tensor-shape", told, theirs[name]))
            del tensors[name]
    return tensors, scales


def _notes(
    stored: StoredTensors, spec: DraftSpec, layout: Layout, fields: Fields, tensors: Mapping[str, Tensor]
) -> Iterator[str]:
    """What is odd about files and tensors, and fields that are read in more than one way."""
    if passed := files_passed_over(stored.folder):
        yield f"{', '.join(passed)}: not read, the draft's tensors are in other files"
    if bare := [name for name, tensor in tensors.items() if is_quantised(tensor)]:
        yield f"{len(bare)} weights are of eight bits and have no scale: they are taken as they are"
    if any(name.endswith((".input_scale", ".k_scale", ".v_scale")) for name in stored):
        yield "engines may round activations, or cached keys and values, by the scales that are not used: not computed"
    if "t2d" in stored and "d2t" in tensors and (told := contradiction(tensors["d2t"], stored["t2d"], spec)):
        yield told
    if fields.peek("tie_word_embeddings") is True and spec.own_head:
        yield "tie_word_embeddings is true, and the head is lm_head.weight: SGLang takes rows of the target's embedding"
    if fields.peek("tie_word_embeddings") is True and not spec.own_head and spec.own_embedding:
        yield "tie_word_embeddings is true, and there is no head: the target's is taken, not the draft's embedding"
    yield from layout.remarks(fields, tensors)


def _broken_weights(tensor: Tensor) -> str:
    known = tensor.float() if tensor.element_size() == 1 else tensor  # isfinite is not there for all 8-bit types
    wrong = int((~known.isfinite()).sum())
    return f"has {wrong} of {tensor.numel()} values that are no finite number" if wrong else ""


def _expected_shapes(spec: DraftSpec) -> dict[str, list[int]]:
    with torch.device("meta"):
        return {name: list(tensor.shape) for name, tensor in DraftModel(spec).state_dict().items()}


def _optional(spec: DraftSpec) -> set[str]:
    """Tensors that a draft may leave out: those it shares with its target, and a d2t that is the identity."""
    absent = {"embedding.weight": spec.own_embedding, "head.weight": spec.own_head}
    absent["d2t"] = spec.draft_vocab < spec.target_vocab
    return {name for name, own in absent.items() if not own}


def build_draft(
    checkpoint: DraftCheckpoint, *, target: Path | None, dtype: torch.dtype, device: str = "cpu"
) -> DraftModel:
    """The draft ready to run; an embedding or head that it shares is read from the target's folder.

    Raises UserError when a tensor is missing, or when a shared one is needed and `target` does not fit or is not given.
    """
    spec = checkpoint.spec
    if checkpoint.report.missing_tensors:
        missing = ", ".join(checkpoint.report.missing_tensors)
        raise UserError(f"{checkpoint.folder}: missing tensors {missing}; export the draft again, all of it")
    tensors = {"d2t": torch.zeros(spec.draft_vocab), **checkpoint.tensors}
    if not spec.own_embedding:
        tensors["embedding.weight"] = _shared(checkpoint, "embedding", target, read_embedding)
    if not spec.own_head:
        tensors["head.weight"] = _shared(checkpoint, "head", target, read_head)
    dtypes = {name: torch.int64 if name == "d2t" else torch.float32 for name in tensors}
    model = DraftModel(spec)
    model.load_state_dict({name: tensor.to(dtypes[name]) for name, tensor in tensors.items()})
    for parameter in model.parameters():  # parameters alone: rotary frequencies stay float32 whatever the weights are
        parameter.data = parameter.data.to(dtype)
    return model.to(device).eval().requires_grad_(False)


def weight_fingerprints(model: DraftModel) -> dict[str, str]:
    """The hash of every tensor of a draft, as it stands in memory; of one that is split, of this rank's share."""
    tensors: dict[str, Any] = model.state_dict()
    return {
        name: tensor_fingerprint(tensor.to_local() if hasattr(tensor, "to_local") else tensor)
        for name, tensor in tensors.items()
    }


def _shared(checkpoint: DraftCheckpoint, what: str, target: Path | None, read: Callable[[Path], Tensor]) -> Tensor:
    spec, folder = checkpoint.spec, checkpoint.folder
    if target is None:
        raise UserError(f"{folder}: this draft shares the target's {what}; say where the target is (--target DIR)")
    tensor = read(target)
    expected = [spec.target_vocab, spec.width]
    if list(tensor.shape) != expected:
        raise UserError(
            f"{folder}: needs the target's {what} as {expected}, but {target} has {list(tensor.shape)}: "
            f"this is the draft of another target"
        )
    return tensor

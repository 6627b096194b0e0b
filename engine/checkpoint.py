"""A draft's folder turned into (`DraftSpec`, wiring, weights), with an account of everything that was not understood.

Silence is how drafts break, so every tensor that is not used, every tensor that is missing and every config field that
nobody reads is named in the report.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from spectrace.engine.dialect import Wiring, check_boundaries, read_spec, read_wiring
from spectrace.engine.draft import DraftModel
from spectrace.engine.fields import Fields, read_config
from spectrace.engine.spec import DraftSpec, FuseNorm, MlaSpec, RopeKind
from spectrace.tracer.errors import UserError
from spectrace.tracer.fingerprint import tensor_fingerprint

__all__ = [
    "DraftCheckpoint", "LoadReport", "build_draft", "configured_wiring", "default_wiring", "read_draft",
    "read_embedding", "read_head", "read_tensor", "stored_names", "unscaled", "weight_fingerprints",
]  # fmt: skip

# Fields that say nothing about what is computed here.
_DESCRIPTIVE = frozenset({
    "architectures", "attention_dropout", "bos_token_id", "dtype", "eos_token_id", "initializer_range",
    "max_position_embeddings", "model_type", "num_key_value_heads", "pad_token_id", "pretraining_tp",
    "tie_word_embeddings", "torch_dtype", "transformers_version", "use_cache",
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

_NAMES = {
    "fc.weight": "fc.weight",
    "embedding.weight": "embed_tokens.weight",
    "embedding_norm.weight": "{layer}.input_layernorm.weight",
    "feature_norm.weight": "{layer}.hidden_norm.weight",
    "mlp_norm.weight": "{layer}.post_attention_layernorm.weight",
    "mlp.gate.weight": "{layer}.mlp.gate_proj.weight",
    "mlp.up.weight": "{layer}.mlp.up_proj.weight",
    "mlp.down.weight": "{layer}.mlp.down_proj.weight",
    "attention.q.weight": "{layer}.self_attn.q_proj.weight",
    "attention.k.weight": "{layer}.self_attn.k_proj.weight",
    "attention.v.weight": "{layer}.self_attn.v_proj.weight",
    "attention.o.weight": "{layer}.self_attn.o_proj.weight",
    "attention.q_down.weight": "{layer}.self_attn.q_a_proj.weight",
    "attention.q_norm.weight": "{layer}.self_attn.q_a_layernorm.weight",
    "attention.q_up.weight": "{layer}.self_attn.q_b_proj.weight",
    "attention.kv_down.weight": "{layer}.self_attn.kv_a_proj_with_mqa.weight",
    "attention.kv_norm.weight": "{layer}.self_attn.kv_a_layernorm.weight",
    "attention.kv_up.weight": "{layer}.self_attn.kv_b_proj.weight",
    "output_norm.weight": "norm.weight",
    "head.weight": "lm_head.weight",
    "d2t": "d2t",
}


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What reading the checkpoint left over: nothing in here was used to compute anything."""

    unused_tensors: tuple[str, ...]
    missing_tensors: tuple[str, ...]
    unread_fields: tuple[str, ...]
    assumed: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """A draft as its files describe it; `wiring` is None when the config names no layer ids.

    `names` are what the tensors of a `DraftModel` are called in its files, those that are not there included.
    """

    folder: Path
    spec: DraftSpec
    wiring: Wiring | None
    tensors: Mapping[str, Tensor]
    report: LoadReport
    names: Mapping[str, str]


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
    files = _weight_files(folder)
    for name in names:
        for path in files:
            with _opened(path) as file:
                if name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                    tensor: Tensor = file.get_tensor(name)
                    return tensor
    raise UserError(f"{folder}: none of the tensors {', '.join(names)} in its *.safetensors")


def read_head(target: Path) -> Tensor:
    """A target's head, or where it has none of its own, its embedding."""
    return read_tensor(target, (*_HEADS, *_EMBEDDINGS))


def read_embedding(target: Path) -> Tensor:
    """A target's embedding, as it is stored."""
    return read_tensor(target, _EMBEDDINGS)


def _weight_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder}: no *.safetensors in it; convert pytorch_model.bin to safetensors first")
    return files


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not readable as safetensors ({error}); download or export it again") from error


def read_draft(folder: Path) -> DraftCheckpoint:
    """Read an EAGLE-3 draft in EAGLE's or SpecForge's layout.

    Raises UserError when the folder is no checkpoint, is no EAGLE-3 draft, or holds tensors that do not fit its config.
    """
    fields = Fields(folder / "config.json", read_config(folder))
    raw: dict[str, Tensor] = {}
    for path in _weight_files(folder):
        with _opened(path) as file:
            raw |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if "fc.weight" not in raw and not any(name.endswith(".hidden_norm.weight") for name in raw):
        raise UserError(f"{folder}: no tensor fc.weight, so this is not an EAGLE-3 draft (a target model was given?)")
    wiring = read_wiring(fields)
    spec = read_spec(fields, {name: list(tensor.shape) for name, tensor in raw.items()}, wiring)
    theirs = stored_names(raw, spec)
    expected = {theirs[name]: shape for name, shape in _expected_shapes(spec).items()}
    for name, shape in expected.items():
        if name in raw and list(raw[name].shape) != shape:
            raise UserError(f"{folder}: tensor {name} is {list(raw[name].shape)}, but its config.json makes it {shape}")
    optional = {theirs[name] for name in _optional(spec)}
    report = LoadReport(
        unused_tensors=tuple(sorted(raw.keys() - expected.keys() - _REDUNDANT)),
        missing_tensors=tuple(sorted(expected.keys() - raw.keys() - optional)),
        unread_fields=tuple(sorted(fields.unread() - _DESCRIPTIVE)),
        assumed=fields.assumed(),
    )
    tensors = {name: raw[their] for name, their in theirs.items() if their in expected and their in raw}
    for name, tensor in tensors.items():
        if broken := _broken_table(tensor, spec) if name == "d2t" else _broken_weights(tensor):
            raise UserError(f"{folder}: tensor {theirs[name]} {broken}; export the draft again")
    return DraftCheckpoint(folder, spec, wiring, tensors, report, theirs)


def _broken_weights(tensor: Tensor) -> str:
    known = tensor.float() if tensor.element_size() == 1 else tensor  # isfinite is not there for all 8-bit types
    wrong = int((~known.isfinite()).sum())
    return f"has {wrong} of {tensor.numel()} values that are no finite number" if wrong else ""


def _broken_table(d2t: Tensor, spec: DraftSpec) -> str:
    """What makes a table of no use, however it is read: as offsets, as it should be, or as tokens.

    One that can be misread is none of these: that is a fault, for a diagnosis to name.
    """
    if d2t.dtype is torch.bool or d2t.is_floating_point() or d2t.is_complex():
        return f"is of type {str(d2t.dtype).removeprefix('torch.')}, expected whole numbers: id k is token k + d2t[k]"
    offsets = d2t.long()
    read = torch.stack((offsets, offsets + torch.arange(len(offsets))))
    wrong = int(((read < 0) | (read >= spec.target_vocab)).all(0).sum())
    told = f"has {wrong} of {len(d2t)} values that lead to no token of 0 to {spec.target_vocab - 1}, neither"
    return f"{told} as offsets from the id nor as tokens" if wrong else ""


def stored_names(stored: Iterable[str], spec: DraftSpec) -> dict[str, str]:
    """What a `DraftModel`'s tensors are called in a checkpoint that stores these: one layout or the other."""
    layer = "midlayer" if any(name.startswith("midlayer.") for name in stored) else "layers.0"
    names = {ours: theirs.format(layer=layer) for ours, theirs in _NAMES.items()}
    if spec.fuse_norm is FuseNorm.WHOLE:
        return names | {"fuse_norms.0.weight": "input_norm.weight"}
    return names | {f"fuse_norms.{slot}.weight": f"fc_norm.{slot}.weight" for slot in range(spec.slots)}


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

"""A draft's folder turned into (`DraftSpec`, wiring, weights), with an account of everything that was not understood.

Layer ids are converted to boundaries here and nowhere else. Silence is how drafts break, so every tensor that is not
used, every tensor that is missing and every config field that nobody reads is named in the report.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from spectrace.engine.draft import DraftModel
from spectrace.engine.spec import DraftSpec, FuseNorm, GqaSpec, MlaSpec, RopeKind, RopeSpec, Stream
from spectrace.tracer.errors import UserError

__all__ = ["DraftCheckpoint", "LoadReport", "Wiring", "build_draft", "default_wiring", "read_config", "read_draft", "read_tensor"]

_DESCRIPTIVE = frozenset(
    "architectures model_type torch_dtype dtype transformers_version tie_word_embeddings bos_token_id eos_token_id "
    "pad_token_id hidden_act initializer_range use_cache pretraining_tp attention_dropout max_position_embeddings".split()
)
_TOP_IDS, _NESTED_IDS = "eagle_aux_hidden_state_layer_ids", "eagle_config.eagle_aux_hidden_state_layer_ids"

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
class Wiring:
    """The boundaries that feed `fc`, in order, and where they came from: `raw_ids` as written under `key`."""

    boundaries: tuple[int, ...]
    key: str
    raw_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What reading the checkpoint left over: nothing in here was used to compute anything."""

    unused_tensors: tuple[str, ...]
    missing_tensors: tuple[str, ...]
    unread_fields: tuple[str, ...]
    assumed: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """A draft as its files describe it; `wiring` is None when the config names no layer ids."""

    folder: Path
    spec: DraftSpec
    wiring: Wiring | None
    tensors: Mapping[str, Tensor]
    report: LoadReport


class _Fields:
    """A config that remembers which of its fields were read and which defaults were assumed."""

    def __init__(self, path: Path, values: dict[str, object]) -> None:
        self.path, self.values = path, values
        self.read: set[str] = set()
        self.assumed: dict[str, object] = {}

    def get(self, name: str, default: object = None) -> object:
        self.read.add(name)
        if self.values.get(name) is None:
            if default is not None:
                self.assumed[name] = default
            return default
        return self.values[name]

    def whole(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if not isinstance(value, int):
            raise UserError(f"{self.path}: field {name!r} is {value!r}, expected a whole number; is this a draft's config?")
        return value

    def real(self, name: str, default: float) -> float:
        value = self.get(name, default)
        if not isinstance(value, int | float):
            raise UserError(f"{self.path}: field {name!r} is {value!r}, expected a number")
        return float(value)


def read_config(folder: Path) -> dict[str, object]:
    """The config.json of a checkpoint folder; a UserError says what is not there."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; expected a checkpoint folder with config.json and *.safetensors")
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder}: no config.json in it, so this is not a checkpoint; expected config.json and *.safetensors")
    try:
        config = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}); expected a model config") from error
    if not isinstance(config, dict):
        raise UserError(f"{path}: holds a JSON {type(config).__name__}, expected an object")
    return config


def default_wiring(layers: int) -> tuple[int, ...]:
    """The boundaries that engines take when a draft names none: (2, L/2, L-3), as EAGLE hard-codes."""
    return (2, layers // 2, layers - 3)


def _weight_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder}: no *.safetensors in it; convert pytorch_model.bin to safetensors first")
    return files


def read_tensor(folder: Path, names: tuple[str, ...]) -> Tensor:
    """The first of some tensors that a checkpoint folder holds, without reading the rest."""
    for path in _weight_files(folder):
        with safe_open(path, "pt") as file:
            for name in names:
                if name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                    tensor: Tensor = file.get_tensor(name)
                    return tensor
    raise UserError(f"{folder}: none of the tensors {', '.join(names)} in its *.safetensors")


def read_draft(folder: Path) -> DraftCheckpoint:
    """Read an EAGLE-3 draft in EAGLE's or SpecForge's layout.

    Raises UserError when the folder is no checkpoint, is no EAGLE-3 draft, or holds tensors that do not fit its config.
    """
    fields = _Fields(folder / "config.json", read_config(folder))
    raw: dict[str, Tensor] = {}
    for path in _weight_files(folder):
        try:
            with safe_open(path, "pt") as file:
                raw |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except Exception as error:
            raise UserError(f"{path}: not readable as safetensors ({error}); download or export it again") from error
    if "fc.weight" not in raw:
        raise UserError(f"{folder}: no tensor fc.weight, so this is not an EAGLE-3 draft (a target model was given?)")
    wiring = _read_wiring(fields)
    spec = _read_spec(fields, raw, wiring)
    tensors, unused = _rename(raw)
    model = _skeleton(spec)
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for name, tensor in tensors.items():
        if name in expected and tensor.shape != expected[name]:
            raise UserError(
                f"{folder}: tensor {_NAMES.get(name, name)} is {list(tensor.shape)}, "
                f"but its config.json makes it {list(expected[name])}"
            )
    known = {name: tensor for name, tensor in tensors.items() if name in expected}
    shared = {"embedding.weight"} if not spec.own_embedding else set()
    shared |= {"head.weight"} if not spec.own_head else set()
    optional = {"d2t"} if spec.draft_vocab == spec.target_vocab else set()
    report = LoadReport(
        unused_tensors=tuple(sorted([*unused, *(name for name in tensors if name not in expected)])),
        missing_tensors=tuple(sorted(set(expected) - set(known) - shared - optional)),
        unread_fields=tuple(sorted(set(fields.values) - fields.read - _DESCRIPTIVE)),
        assumed=fields.assumed,
    )
    return DraftCheckpoint(folder, spec, wiring, known, report)


def _rename(raw: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    layer = "midlayer" if any(name.startswith("midlayer.") for name in raw) else "layers.0"
    ours = {theirs.format(layer=layer): name for name, theirs in _NAMES.items()}
    ours |= {f"fc_norm.{slot}.weight": f"fuse_norms.{slot}.weight" for slot in range(16)}
    ours["input_norm.weight"] = "fuse_norms.0.weight"
    # t2d says again what d2t says: it is checked by lint, never computed with.
    unused = [name for name in raw if name not in ours and name != "t2d"]
    return {ours[name]: tensor for name, tensor in raw.items() if name in ours}, unused


def _read_wiring(fields: _Fields) -> Wiring | None:
    top = fields.get(_TOP_IDS)
    nested_config = fields.get("eagle_config")
    nested = nested_config.get(_TOP_IDS) if isinstance(nested_config, dict) else None
    for ids, key, shift in ((top, _TOP_IDS, 0), (nested, _NESTED_IDS, 1)):
        if isinstance(ids, list) and ids and all(isinstance(i, int) for i in ids):
            return Wiring(tuple(i + shift for i in ids), key, tuple(ids))
        if ids is not None:
            raise UserError(f"{fields.path}: field {key} is {ids!r}, expected a list of layer ids")
    return None


def _read_spec(fields: _Fields, raw: Mapping[str, Tensor], wiring: Wiring | None) -> DraftSpec:
    width, layers = fields.whole("hidden_size"), fields.whole("num_hidden_layers", 1)
    if layers != 1:
        raise UserError(f"{fields.path}: {layers} draft layers; only drafts of one layer are read")
    target_width = fields.whole("target_hidden_size", width)
    slots = len(wiring.boundaries) if wiring else 3
    if raw["fc.weight"].shape != (width, slots * target_width):
        raise UserError(
            f"{fields.path}: fc.weight is {list(raw['fc.weight'].shape)}, expected [{width}, {slots} x {target_width}] "
            f"for {slots} boundaries; check the layer ids and target_hidden_size (EAGLE-1/2 drafts are not EAGLE-3)"
        )
    vocab = fields.whole("vocab_size")
    draft_vocab = fields.whole("draft_vocab_size", vocab)
    if draft_vocab < vocab and "d2t" not in raw:
        raise UserError(f"{fields.path}: draft_vocab_size {draft_vocab} < vocab_size {vocab}, but there is no tensor d2t")
    if draft_vocab < vocab and "lm_head.weight" not in raw:
        raise UserError(f"{fields.path}: draft_vocab_size {draft_vocab} < vocab_size {vocab}, but there is no tensor lm_head.weight")
    is_mla = fields.get("kv_lora_rank") is not None
    return DraftSpec(
        width=width,
        target_width=target_width,
        slots=slots,
        mlp_width=fields.whole("intermediate_size"),
        target_vocab=vocab,
        draft_vocab=draft_vocab,
        attention=_read_mla(fields) if is_mla else _read_gqa(fields, width),
        rope=_read_rope(fields, interleaved=is_mla),
        residual=Stream.POST_NORM if fields.get("norm_before_residual") else Stream.PRE_NORM,
        feedback=Stream.POST_NORM if fields.get("norm_output") else Stream.PRE_NORM,
        fuse_norm=_read_fuse_norm(fields),
        own_embedding="embed_tokens.weight" in raw,
        own_head="lm_head.weight" in raw,
        norm_eps=fields.real("rms_norm_eps", 1e-6),
    )


def _read_fuse_norm(fields: _Fields) -> FuseNorm:
    per_slot, whole = fields.get("fc_norm"), fields.get("norm_before_fc")
    if per_slot and whole:
        raise UserError(f"{fields.path}: fc_norm and norm_before_fc are both set; a draft has one norm before fc")
    return FuseNorm.PER_SLOT if per_slot else FuseNorm.WHOLE if whole else FuseNorm.NONE


def _read_gqa(fields: _Fields, width: int) -> GqaSpec:
    heads = fields.whole("num_attention_heads")
    return GqaSpec(heads, fields.whole("num_key_value_heads", heads), fields.whole("head_dim", width // heads))


def _read_mla(fields: _Fields) -> MlaSpec:
    q_rank = fields.get("q_lora_rank")
    scaling = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    scale = 1.0
    if isinstance(scaling, dict) and scaling.get("mscale_all_dim") and float(scaling.get("factor", 1)) > 1:
        scale = _yarn_mscale(float(scaling["factor"]), float(scaling["mscale_all_dim"])) ** 2
    return MlaSpec(
        heads=fields.whole("num_attention_heads"),
        q_rank=q_rank if isinstance(q_rank, int) else None,
        kv_rank=fields.whole("kv_lora_rank"),
        nope_dim=fields.whole("qk_nope_head_dim"),
        rope_dim=fields.whole("qk_rope_head_dim"),
        value_dim=fields.whole("v_head_dim"),
        softmax_scale=scale,
    )


def _yarn_mscale(factor: float, mscale: float) -> float:
    """DeepSeek's attention temperature, 0.1 * mscale * ln(factor) + 1 (YaRN, arXiv 2309.00071, eq. 25)."""
    return 0.1 * mscale * float(torch.tensor(factor).log()) + 1.0 if factor > 1 else 1.0


def _read_rope(fields: _Fields, *, interleaved: bool) -> RopeSpec:
    parameters = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(parameters, dict):
        raise UserError(f"{fields.path}: rope_scaling is {parameters!r}, expected an object or null")
    name = parameters.get("rope_type", parameters.get("type", "default"))
    if name not in {kind.value for kind in RopeKind}:
        raise UserError(f"{fields.path}: rope type {name!r} is not known; expected one of {', '.join(RopeKind)}")
    theta = parameters.get("rope_theta") or fields.real("rope_theta", 10000.0)
    kind, factor = RopeKind(name), float(parameters.get("factor", 1.0))
    cos_scale = 1.0
    if kind is RopeKind.YARN:
        mscale, all_dim = float(parameters.get("mscale", 1.0)), float(parameters.get("mscale_all_dim", 0.0))
        computed = _yarn_mscale(factor, mscale) / (_yarn_mscale(factor, all_dim) if all_dim else 1.0)
        cos_scale = float(parameters.get("attention_factor") or computed)
    context = parameters.get("original_max_position_embeddings") or fields.get("max_position_embeddings") or 0
    return RopeSpec(
        theta=float(theta),
        kind=kind,
        factor=factor,
        original_context=int(context) if isinstance(context, int | float) else 0,
        low_freq_factor=float(parameters.get("low_freq_factor", 1.0)),
        high_freq_factor=float(parameters.get("high_freq_factor", 4.0)),
        beta_fast=float(parameters.get("beta_fast", 32.0)),
        beta_slow=float(parameters.get("beta_slow", 1.0)),
        cos_scale=cos_scale,
        interleaved=bool(fields.get("rope_interleave", interleaved)) if interleaved else False,
    )


def _skeleton(spec: DraftSpec) -> DraftModel:
    with torch.device("meta"):
        return DraftModel(spec)


def build_draft(checkpoint: DraftCheckpoint, *, target: Path | None, dtype: torch.dtype, device: str = "cpu") -> DraftModel:
    """The draft ready to run; an embedding or head that it shares is read from the target's folder.

    Raises UserError when a tensor is missing, or when a shared one is needed and `target` does not fit or is not given.
    """
    spec, folder = checkpoint.spec, checkpoint.folder
    if checkpoint.report.missing_tensors:
        missing = ", ".join(_NAMES.get(name, name) for name in checkpoint.report.missing_tensors)
        raise UserError(f"{folder}: missing tensors {missing}; export the draft again, all of it")
    tensors = dict(checkpoint.tensors)
    embedding_names = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight", "language_model.model.embed_tokens.weight")
    for own, name, sources in (
        (spec.own_embedding, "embedding.weight", embedding_names),
        (spec.own_head, "head.weight", ("lm_head.weight", *embedding_names)),
    ):
        if own:
            continue
        if target is None:
            raise UserError(f"{folder}: this draft shares the target's {name.split('.')[0]}; say where the target is (--target DIR)")
        tensors[name] = read_tensor(target, sources)
        expected = [spec.target_vocab, spec.width] if name == "embedding.weight" else [spec.draft_vocab, spec.width]
        if list(tensors[name].shape) != expected:
            raise UserError(
                f"{folder}: needs the target's {name.split('.')[0]} as {expected}, but {target} has "
                f"{list(tensors[name].shape)}: this is the draft of another target"
            )
    tensors.setdefault("d2t", torch.zeros(spec.draft_vocab, dtype=torch.int64))
    model = DraftModel(spec)
    model.load_state_dict({name: tensor.to(torch.int64 if name == "d2t" else torch.float32) for name, tensor in tensors.items()})
    for parameter in model.parameters():  # parameters alone: rotary frequencies stay float32 whatever the weights are
        parameter.data = parameter.data.to(dtype)
    return model.to(device).eval().requires_grad_(False)

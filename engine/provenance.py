"""Everything that decides a run, as a trace's manifest says it: models, wiring, versions, switches."""

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from spectrace.engine.checkpoint import DraftCheckpoint
from spectrace.engine.dialect import Wiring
from spectrace.engine.fields import read_config
from spectrace.engine.stored import StoredTensors
from spectrace.tracer.fingerprint import file_fingerprints

__all__ = ["describe_run"]

_PACKAGES = ("spectrace", "torch", "transformers", "ray", "pyarrow", "numpy", "safetensors")
_SECRETS = ("TOKEN", "SECRET", "PASSWORD", "KEY", "CREDENTIAL")
_SWITCHES = (
    "SPECTRACE_",
    "CUDA_",
    "TORCH_",
    "PYTORCH_",
    "OMP_",
    "MKL_",
    "NCCL_",
    "GLOO_",
    "RAY_",
    "HF_",
    "TRANSFORMERS_",
)


def describe_run(
    *,
    target: Path,
    draft: DraftCheckpoint | None,
    wiring: Wiring,
    dtype: str,
    serving: Mapping[str, Any],
    tensor_parallel: Mapping[str, int],
    sharded: Mapping[str, Mapping[str, str]],
) -> dict[str, Any]:
    """The manifest of a run of the reference engine; `wiring` is what the engine resolved, by its own account.

    `tensor_parallel` is the number of ranks of each role, `sharded` how the weights that are split lie on them.
    """
    config = read_config(target)
    return {
        "engine": "spectrace",
        "target": {
            "path": str(target.absolute()),
            "architectures": config.get("architectures"),
            "config": config,
            "fingerprints": file_fingerprints(target),
        },
        "draft": None if draft is None else _describe_draft(draft),
        "wiring": {
            "configured": asdict(draft.wiring) if draft and draft.wiring else None,
            "resolved": asdict(wiring),
        },
        "capture_hidden_mode": "full" if serving["depth"] else "null",
        "dtype": dtype,
        "tensor_parallel": dict(tensor_parallel),
        "sharded": dict(sharded),
        "serving": dict(serving),
        "versions": {"python": platform.python_version(), **_versions()},
        "environment": _switches(),
        "machine": {"platform": platform.platform(), "cpus": os.cpu_count()},
    }


def _switches() -> dict[str, str]:
    """Environment switches that engines read; of one that may be a secret, only that it is set."""
    switches = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_SWITCHES)}
    return {name: "(set)" if any(word in name for word in _SECRETS) else value for name, value in switches.items()}


def _describe_draft(draft: DraftCheckpoint) -> dict[str, Any]:
    return {
        "path": str(draft.folder.absolute()),
        "spec": asdict(draft.spec),
        "report": {**{name: getattr(draft.report, name) for name in draft.report.__slots__}},
        "config": read_config(draft.folder),
        "tensors": StoredTensors(draft.folder).shapes,
        "fingerprints": file_fingerprints(draft.folder),
    }


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found

"""A draft that was trained, and its target, for tests to break."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

MODELS = Path(__file__).resolve().parents[3] / "models"


@dataclass
class Pair:
    """A draft's config and tensors, and a target's, in memory until they are saved; `files` are written as they are."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    target_config: dict[str, Any]
    target_tensors: dict[str, Tensor]
    files: dict[str, bytes] = field(default_factory=dict)

    def put(self, key: str, value: object) -> None:
        """Set a key of the draft's config, dotted where nested; None takes it away."""
        *outer, inner = key.split(".")
        held = self.config
        for part in outer:
            held = held.setdefault(part, {})
        if value is None:
            held.pop(inner, None)
        else:
            held[inner] = value

    def rename(self, old: str, new: str) -> None:
        """Every tensor whose name begins with `old` is called so from `new` on."""
        names = {name: name.replace(old, new, 1) for name in self.tensors if name.startswith(old)}
        self.tensors = {names.get(name, name): one for name, one in self.tensors.items()}

    def save(self, folder: Path) -> tuple[Path, Path]:
        """The two folders."""
        draft, target = folder / "draft", folder / "target"
        for place, config, tensors in (
            (draft, self.config, self.tensors), (target, self.target_config, self.target_tensors),
        ):  # fmt: skip
            place.mkdir(parents=True)
            (place / "config.json").write_text(json.dumps(config), "utf-8")
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, place / "model.safetensors")
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        return draft, target


def pair_of(draft: str) -> Pair:
    """A pair of the toys, the target said to be of a class that every engine captures of, with layers enough."""
    target, folder = MODELS / "toy" / "target", MODELS / "toy" / draft
    held = load_file(target / "model.safetensors")
    kept = {name: held[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    configs = [json.loads((place / "config.json").read_text("utf-8")) for place in (folder, target)]
    configs[1] |= {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 8}
    return Pair(configs[0], load_file(folder / "model.safetensors"), configs[1], kept)


@pytest.fixture
def toy() -> Callable[[str], Pair]:
    """`toy("gqa")` is a trained draft and its target."""
    return pair_of

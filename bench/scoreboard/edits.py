"""A draft's folder and what can be wrong in its config: pure functions from (config, tensors) to (config, tensors)."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

__all__ = [
    "Draft", "Edit", "drop_fuse_norm", "drop_scaling", "early", "first_twice", "flip", "forget_wiring", "late",
    "lose_first", "lose_scale", "lose_window", "move_slot", "output_ids", "read", "rewire", "set_context", "set_theta",
    "write",
]  # fmt: skip

_IDS, _NESTED = "eagle_aux_hidden_state_layer_ids", "eagle_config"
_FUSE_NORMS = {"fc_norm": "fc_norm.", "norm_before_fc": "input_norm."}

Wiring = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """What a draft's folder holds."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Edit:
    """One thing done to a draft's folder; `what` says it in a word or two."""

    what: str
    apply: Callable[[Draft], Draft]


def read(folder: Path) -> Draft:
    """A folder of one safetensors file."""
    return Draft(json.loads((folder / "config.json").read_text("utf-8")), load_file(folder / "model.safetensors"))


def write(draft: Draft, folder: Path) -> Path:
    """The folder, made anew."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(draft.config, indent=2) + "\n", "utf-8")
    save_file({name: tensor.contiguous() for name, tensor in draft.tensors.items()}, folder / "model.safetensors")
    return folder


# Wirings


def early(wiring: Wiring, by: int = 1) -> Wiring:
    """Every boundary earlier; none before 0."""
    return tuple(max(boundary - by, 0) for boundary in wiring)


def late(wiring: Wiring, layers: int, by: int = 1) -> Wiring:
    """Every boundary later; none after L."""
    return tuple(min(boundary + by, layers) for boundary in wiring)


def move_slot(wiring: Wiring, slot: int, by: int) -> Wiring:
    """One slot's boundary moved."""
    return tuple(boundary + by * (number == slot) for number, boundary in enumerate(wiring))


def lose_first(wiring: Wiring, layers: int) -> Wiring:
    """The first slot missing, L - 3 in the last one."""
    return (*wiring[1:], layers - 3)


def first_twice(wiring: Wiring) -> Wiring:
    """The first boundary in the first two slots."""
    return (wiring[0], *wiring[:-1])


# Config


def rewire(draft: Draft, wiring: Wiring) -> Draft:
    """Other layer ids, under the key or keys that the config has them under."""
    config = {**draft.config, _IDS: list(wiring)}
    if _NESTED in config:
        config[_NESTED] = {**config[_NESTED], _IDS: [boundary - 1 for boundary in wiring]}
    return replace(draft, config=config)


def forget_wiring(draft: Draft) -> Draft:
    """No layer ids: engines then take their default."""
    return replace(draft, config=_without(draft.config, _IDS, _NESTED))


def output_ids(draft: Draft) -> Draft:
    """The ids as they are, under the key whose convention is one off."""
    config = _without(draft.config, _IDS)
    return replace(draft, config={**config, _NESTED: {_IDS: list(draft.config[_IDS])}})


def flip(draft: Draft, field: str, *, default: bool = False) -> Draft:
    """A switch the other way round."""
    return replace(draft, config={**draft.config, field: not draft.config.get(field, default)})


def drop_fuse_norm(draft: Draft, *, keep_tensors: bool) -> Draft:
    """The norm before `fc` not mentioned, its weights left behind or gone."""
    config, tensors = _without(draft.config, *_FUSE_NORMS), dict(draft.tensors)
    if not keep_tensors:
        tensors = {name: value for name, value in tensors.items() if not name.startswith(tuple(_FUSE_NORMS.values()))}
    return Draft(config, tensors)


def set_theta(draft: Draft, theta: float | None) -> Draft:
    """Another RoPE base, or none at all."""
    config = _without(draft.config, "rope_theta")
    return replace(draft, config=config if theta is None else {**config, "rope_theta": theta})


def drop_scaling(draft: Draft) -> Draft:
    """RoPE as if the context had never been stretched."""
    return replace(draft, config=_without(draft.config, "rope_scaling", "rope_parameters"))


def lose_window(draft: Draft) -> Draft:
    """Every layer sees all rows, and nothing tells of another size."""
    return replace(draft, config=_without(draft.config, "sliding_window", "use_sliding_window", "layer_types"))


def lose_scale(draft: Draft) -> Draft:
    """The embedding as it is stored."""
    return replace(draft, config=_without(draft.config, "embedding_scale"))


def set_context(draft: Draft, positions: int) -> Draft:
    """Said to be for so many positions."""
    return replace(draft, config={**draft.config, "max_position_embeddings": positions})


def _without(config: Mapping[str, Any], *fields: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in fields}

"""What can be wrong in a draft's folder: pure functions from (config, tensors) to (config, tensors).

Tensors go by the names in which EAGLE and SpecForge publish them.

Shapes: K draft vocabulary, V target vocabulary, H draft width.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

__all__ = [
    "Draft", "Edit", "drop_fuse_norm", "drop_scaling", "early", "first_twice", "flip", "forget_wiring", "late",
    "lose_first", "move_slot", "noisy", "output_ids", "random_embedding", "read", "reinitialise", "rewire",
    "roll_d2t", "set_theta", "stale_d2t", "swap_gate_and_up", "target_head", "write", "zero_d2t",
]  # fmt: skip

_IDS, _NESTED = "eagle_aux_hidden_state_layer_ids", "eagle_config"
_FUSE_NORMS = {"fc_norm": "fc_norm.", "norm_before_fc": "input_norm."}
_PARTS = {"attention": "self_attn.o_proj.weight", "mlp": "mlp.down_proj.weight", "norm": "hidden_norm.weight"}
_FRESH_STD = 0.02

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


# Tensors


def zero_d2t(draft: Draft) -> Draft:
    """Every offset 0."""
    return _with(draft, d2t=torch.zeros_like(draft.tensors["d2t"]))


def roll_d2t(draft: Draft) -> Draft:
    """Every offset one row too late."""
    return _with(draft, d2t=draft.tensors["d2t"].roll(1))


def stale_d2t(draft: Draft, seed: int) -> Draft:
    """The table of another run, which had kept other tokens."""
    count, vocab = len(draft.tensors["d2t"]), int(draft.config["vocab_size"])
    kept = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))[:count].sort().values
    return _with(draft, d2t=kept - torch.arange(count))


def swap_gate_and_up(draft: Draft) -> Draft:
    """The MLP's two projections, each under the other's name."""
    gate, up = _name(draft, "mlp.gate_proj.weight"), _name(draft, "mlp.up_proj.weight")
    return _with(draft, **{gate: draft.tensors[up], up: draft.tensors[gate]})


def reinitialise(draft: Draft, part: str, seed: int) -> Draft:
    """One tensor as it was before training: a norm all ones, a projection small and random."""
    name = "fc.weight" if part == "fc" else _name(draft, _PARTS[part])
    old = draft.tensors[name]
    fresh = torch.ones_like(old) if old.ndim == 1 else _random_like(old, seed) * _FRESH_STD
    return _with(draft, **{name: fresh.to(old.dtype)})


def target_head(draft: Draft, head_VH: Tensor) -> Draft:
    """The first rows of the target's head in place of the draft's own."""
    old = draft.tensors["lm_head.weight"]
    return _with(draft, **{"lm_head.weight": head_VH[: len(old)].to(old.dtype)})


def random_embedding(draft: Draft, seed: int) -> Draft:
    """The draft's own embedding as it was before training."""
    old = draft.tensors["embed_tokens.weight"]
    return _with(draft, **{"embed_tokens.weight": (_random_like(old, seed) * _FRESH_STD).to(old.dtype)})


def noisy(draft: Draft, share: float, seed: int) -> Draft:
    """Noise on every matrix, so much of its own spread: a draft that has learnt less."""
    return replace(draft, tensors={
        name: (tensor.float() + share * tensor.float().std() * _random_like(tensor, seed + number)).to(tensor.dtype)
        if tensor.ndim == 2 else tensor
        for number, (name, tensor) in enumerate(sorted(draft.tensors.items()))
    })  # fmt: skip


def _random_like(tensor: Tensor, seed: int) -> Tensor:
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))


def _name(draft: Draft, ending: str) -> str:
    return next(name for name in draft.tensors if name.endswith(ending))


def _without(config: Mapping[str, Any], *fields: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in fields}


def _with(draft: Draft, **tensors: Tensor) -> Draft:
    return replace(draft, tensors={**draft.tensors, **tensors})

"""A draft's weights in vLLM, under the names that replay knows them by, and how they lie on the ranks.

They are fingerprinted before vLLM packs them for its kernels. It fuses q, k and v, and gate and up, by rows; rows of
embeddings and heads are padded, which is undone on one rank, and on several not understood.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from spectrace.tracer.fingerprint import tensor_fingerprint

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["draft_weights", "placements", "shared_weights"]

_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "model.fc.weight": ("fc.weight",),
    "model.fc.bias": ("fc.bias",),
    "model.input_norm.weight": ("fuse_norms.0.weight",),
    "model.norm.weight": ("output_norm.weight",),
    "draft_id_to_target_id": ("d2t",),
}
_FIRST: Final[Mapping[str, tuple[str, ...]]] = {
    "input_layernorm.weight": ("embedding_norm.weight",),
    "hidden_norm.weight": ("feature_norm.weight",),
}
_LATER: Final[Mapping[str, tuple[str, ...]]] = {"input_layernorm.weight": ("input_norm.weight",)}
"""What layers after the first apply to their input; their `hidden_norm` is there, and does nothing."""
_LAYER: Final[Mapping[str, tuple[str, ...]]] = {
    "self_attn.qkv_proj.weight": ("attention.q.weight", "attention.k.weight", "attention.v.weight"),
    "self_attn.qkv_proj.bias": ("attention.q.bias", "attention.k.bias", "attention.v.bias"),
    "self_attn.q_norm.weight": ("attention.q_norm.weight",),
    "self_attn.k_norm.weight": ("attention.k_norm.weight",),
    "self_attn.q_proj.weight": ("attention.q.weight",),
    "self_attn.fused_qkv_a_proj.weight": ("attention.q_down.weight", "attention.kv_down.weight"),
    "self_attn.q_a_layernorm.weight": ("attention.q_norm.weight",),
    "self_attn.q_b_proj.weight": ("attention.q_up.weight",),
    "self_attn.kv_a_proj_with_mqa.weight": ("attention.kv_down.weight",),
    "self_attn.kv_a_layernorm.weight": ("attention.kv_norm.weight",),
    "self_attn.kv_b_proj.weight": ("attention.kv_up.weight",),
    "self_attn.o_proj.weight": ("attention.o.weight",),
    "self_attn.o_proj.bias": ("attention.o.bias",),
    "post_attention_layernorm.weight": ("mlp_norm.weight",),
    "mlp.gate_up_proj.weight": ("mlp.gate.weight", "mlp.up.weight"),
    "mlp.gate_up_proj.bias": ("mlp.gate.bias", "mlp.up.bias"),
    "mlp.down_proj.weight": ("mlp.down.weight",),
    "mlp.down_proj.bias": ("mlp.down.bias",),
}
_LAYERS: Final = re.compile(r"model\.layers\.(\d+)\.(.+)")
_SPLIT: Final[Mapping[int, tuple[str, ...]]] = {
    0: (*(f"attention.{name}" for name in ("q", "k", "v", "q_up", "kv_up")), "mlp.gate", "mlp.up"),
    1: ("attention.o", "mlp.down"),
}
_VOCABULARIES: Final = {"model.embed_tokens": "embedding.weight", "lm_head": "head.weight"}


def draft_weights(model: Any) -> dict[str, str]:
    """Fingerprints of a draft that has just been loaded, but for embedding and head, which may yet be shared."""
    held = dict(model.named_parameters())
    return {
        ours: tensor_fingerprint(part) for name, tensor in held.items() for ours, part in _parts(model, name, tensor)
    }


def shared_weights(model: Any) -> dict[str, str]:
    """Fingerprints of the embedding and the head that a draft ends up with, where they are not packed by then."""
    found = {}
    for path, ours in _VOCABULARIES.items():
        module = model.get_submodule(path)
        rows = int(getattr(module, "org_vocab_size", 0))
        if module.weight.numel() and rows:
            found[ours] = tensor_fingerprint(module.weight[:rows])
    return found


def placements(ranks: int, found: Mapping[str, str]) -> dict[str, str]:
    """How the weights lie on so many ranks; of those of which no fingerprint can be had, that they are not compared."""
    split = {name: f"Shard({along})" for name in found if (along := _split(name)) is not None}
    unknown = {ours: "padded or packed" for ours in _VOCABULARIES.values() if ranks > 1 or ours not in found}
    return {**(split if ranks > 1 else {}), **unknown}


def _split(name: str) -> int | None:
    """Along which axis a tensor is split over ranks; what is split by columns has one bias, of which rank 0 has all."""
    module, _, kind = re.sub(r"^later\.\d+\.", "", name).rpartition(".")
    along = next((along for along, modules in _SPLIT.items() if module in modules), None)
    return None if along and kind == "bias" else along


def _parts(model: Any, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    ours = tuple(_ours(name))
    if not ours:
        return
    ends = list(accumulate(_rows(model.model.layers[0].self_attn, ours, tensor)))
    for one, start, end in zip(ours, [0, *ends], ends, strict=False):
        yield one, tensor[start:end]


def _rows(attention: Any, ours: tuple[str, ...], tensor: Tensor) -> list[int]:
    """How many rows of a tensor belong to each of these."""
    if len(ours) == 3:
        return [int(attention.q_size), int(attention.kv_size), int(attention.kv_size)]
    if any("q_down" in name for name in ours):
        return [int(attention.q_lora_rank), len(tensor) - int(attention.q_lora_rank)]
    return [len(tensor) // len(ours)] * len(ours)


def _ours(name: str) -> Iterator[str]:
    """What replay calls the parts of a tensor, in the order in which they lie in it."""
    slot, layer = re.fullmatch(r"model\.fc_norm\.(\d+)\.weight", name), _LAYERS.fullmatch(name)
    if slot:
        yield f"fuse_norms.{slot[1]}.weight"
    elif layer is None:
        yield from _NAMES.get(name, ())
    else:
        number = int(layer[1])
        within, held = (f"later.{number - 1}.", _LATER) if number else ("", _FIRST)
        yield from (f"{within}{one}" for one in held.get(layer[2], _LAYER.get(layer[2], ())))

"""A draft's weights in vLLM, under the names that replay knows them by, and how they lie on the ranks.

They are fingerprinted before vLLM packs them for its kernels. It fuses q, k and v, and gate and up, by rows; rows of
embeddings and heads are padded, which is undone on one rank, and on several not understood.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from spectrace.tracer.fingerprint import tensor_fingerprint

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["draft_weights", "placements", "shared_weights"]

_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "model.fc.weight": ("fc.weight",),
    "model.input_norm.weight": ("fuse_norms.0.weight",),
    "model.layers.0.input_layernorm.weight": ("embedding_norm.weight",),
    "model.layers.0.hidden_norm.weight": ("feature_norm.weight",),
    "model.layers.0.self_attn.qkv_proj.weight": ("attention.q.weight", "attention.k.weight", "attention.v.weight"),
    "model.layers.0.self_attn.o_proj.weight": ("attention.o.weight",),
    "model.layers.0.post_attention_layernorm.weight": ("mlp_norm.weight",),
    "model.layers.0.mlp.gate_up_proj.weight": ("mlp.gate.weight", "mlp.up.weight"),
    "model.layers.0.mlp.down_proj.weight": ("mlp.down.weight",),
    "model.norm.weight": ("output_norm.weight",),
    "draft_id_to_target_id": ("d2t",),
}
_BY_ROWS: Final = ("attention.q.weight", "attention.k.weight", "attention.v.weight", "mlp.gate.weight", "mlp.up.weight")
_BY_COLUMNS: Final = ("attention.o.weight", "mlp.down.weight")
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
    rows, columns = (dict.fromkeys(names, f"Shard({along})") for along, names in ((0, _BY_ROWS), (1, _BY_COLUMNS)))
    unknown = {ours: "padded or packed" for ours in _VOCABULARIES.values() if ranks > 1 or ours not in found}
    return {**(rows | columns if ranks > 1 else {}), **unknown}


def _parts(model: Any, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    slot = re.fullmatch(r"model\.fc_norm\.(\d+)\.weight", name)
    ours = (f"fuse_norms.{slot[1]}.weight",) if slot else _NAMES.get(name, ())
    if len(ours) == 3:
        attention = model.model.layers[0].self_attn
        queries, keys = int(attention.q_size), int(attention.kv_size)
        yield from zip(
            ours, (tensor[:queries], tensor[queries : queries + keys], tensor[queries + keys :]), strict=True
        )
    elif ours:
        yield from zip(ours, tensor.chunk(len(ours)), strict=True)

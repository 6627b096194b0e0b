"""A Hugging Face causal language model run on packed rows, with hooks at the canonical boundaries.

Boundary b is the residual stream entering layer b: 0 is the embedding output, L the last layer's output before the
final norm. We write no target model: whatever transformers can load and cache in full attention works.

Shapes: T new rows, S cached rows, F target width, V vocabulary.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spectrace.engine.checkpoint import read_config
from spectrace.engine.packing import Int, PackedRows, RowTable
from spectrace.tracer.errors import UserError

__all__ = ["TargetModel", "TargetRows", "check_target"]


@dataclass(frozen=True, slots=True)
class TargetRows:
    """What one forward gives: logits [T, V], the wanted boundaries [T, F] each, and where each row stands in the cache."""

    logits: Tensor
    boundaries: Mapping[int, Tensor]
    places: Int


def check_target(folder: Path) -> dict[str, Any]:
    """The target's text config; raises UserError for a folder that is no target or a model whose cache is not plain."""
    config = read_config(folder)
    text = config.get("text_config", config)
    if not isinstance(text, dict) or not isinstance(text.get("num_hidden_layers"), int):
        raise UserError(f"{folder / 'config.json'}: no num_hidden_layers, so this is not a language model")
    if "draft_vocab_size" in text or "eagle_config" in text:
        raise UserError(f"{folder}: this is a draft; --target wants the model that it drafts for")
    odd = sorted({kind for kind in text.get("layer_types") or () if kind != "full_attention"})
    if odd or text.get("use_sliding_window"):
        raise UserError(
            f"{folder}: layers of kind {', '.join(odd) or 'sliding_attention'}: rows of such a cache cannot be rolled "
            f"back, so hybrid and sliding-window targets are refused; use a full-attention target"
        )
    return text


class TargetModel:
    """The target and its key-value cache over all requests in flight."""

    def __init__(self, folder: Path, *, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM, DynamicCache

        check_target(folder)
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
        except (OSError, ValueError) as error:
            raise UserError(f"{folder}: transformers cannot load it as a causal language model: {error}") from error
        self.model: nn.Module = model.eval().requires_grad_(False)
        decoder: Any = model.get_decoder()
        self.layers: nn.ModuleList = decoder.layers
        self.norm: nn.Module = decoder.norm
        self.width = int(decoder.config.hidden_size)
        self.vocab = int(model.get_output_embeddings().weight.shape[0])
        self._new_cache = DynamicCache
        self._boundaries: dict[int, Tensor] = {}
        self._wanted: frozenset[int] = frozenset()
        for boundary, module in enumerate([*self.layers, self.norm]):
            module.register_forward_pre_hook(self._hook(boundary), with_kwargs=True)
        self.reset()

    def reset(self) -> None:
        """Forget every request."""
        self.cache = self._new_cache()
        self.table = RowTable()

    def _hook(self, boundary: int) -> Any:
        def keep(_module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            if boundary in self._wanted:
                self._boundaries[boundary] = (args[0] if args else kwargs["hidden_states"])[0]

        return keep

    @torch.inference_mode()
    def forward(self, rows: PackedRows, *, boundaries: Iterable[int]) -> TargetRows:
        """Run the new rows behind the cached ones; they stay on trial until `settle`."""
        self._wanted, self._boundaries = frozenset(boundaries), {}
        mask = torch.from_numpy(self.table.mask(rows))[None, None]
        output: Any = self.model(
            input_ids=torch.from_numpy(rows.tokens)[None],
            position_ids=torch.from_numpy(rows.positions)[None],
            attention_mask=mask,
            cache=self.cache,
            use_cache=True,
        )
        return TargetRows(output.logits[0], dict(sorted(self._boundaries.items())), self.table.append(rows))

    def settle(self, accepted: Int, finished: Iterable[int] = ()) -> None:
        """Commit the accepted rows of the last forward, drop its others, and all rows of finished requests."""
        self.table.settle(accepted)
        self.release(finished)

    def release(self, finished: Iterable[int]) -> None:
        """Drop all rows of finished requests."""
        self.table.release(list(finished))
        kept = self.table.compact()
        if kept is None:
            return
        index = torch.from_numpy(kept)
        for layer in self.cache.layers:
            layer.keys = layer.keys.index_select(-2, index)
            layer.values = layer.values.index_select(-2, index)

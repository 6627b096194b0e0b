"""A Hugging Face causal language model run on packed rows, with hooks at the canonical boundaries.

Boundary b is the residual stream entering layer b: 0 is the embedding output, L the last layer's output before the
final norm. We write no target model: whatever transformers can load and cache in full attention works.

Shapes: T new rows, S cached rows, F target width, V vocabulary.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from spectrace.engine.fields import read_config
from spectrace.engine.packing import Int, PackedRows, RowTable
from spectrace.tracer.errors import UserError

__all__ = ["TargetModel", "TargetRows", "check_target", "end_tokens"]


@dataclass(frozen=True, slots=True)
class TargetRows:
    """What one forward gives: logits [T, V], the wanted boundaries [T, F] each, and the rows' places in the cache."""

    logits: Tensor
    boundaries: Mapping[int, Tensor]
    places: Int


def check_target(folder: Path) -> dict[str, Any]:
    """The target's text config; raises UserError for a folder that is no target or a model whose cache is not plain."""
    config = read_config(folder)
    text = config.get("text_config", config)
    missing = [
        name
        for name in ("num_hidden_layers", "hidden_size", "vocab_size")
        if not (isinstance(text, dict) and isinstance(text.get(name), int))
    ]
    if not isinstance(text, dict) or missing:
        raise UserError(f"{folder / 'config.json'}: no {', '.join(missing)}, so this is not a language model")
    if "draft_vocab_size" in text or "eagle_config" in text or "eagle" in str(config.get("architectures")).lower():
        raise UserError(f"{folder}: this is a draft; --target wants the model that it drafts for")
    _check_cache(folder, text.get("layer_types"), sliding=bool(text.get("use_sliding_window")))
    return text


def _check_cache(folder: Path, layer_types: Sequence[str] | None, *, sliding: bool) -> None:
    """Raises UserError unless every layer attends to all that came before."""
    odd = sorted(set(layer_types or (["sliding_attention"] if sliding else [])) - {"full_attention"})
    if odd:
        raise UserError(
            f"{folder}: layers of kind {', '.join(odd)}: rows of such a cache cannot be rolled back, so hybrid and "
            f"sliding-window targets are refused; use a full-attention target"
        )


def end_tokens(folder: Path) -> frozenset[int]:
    """The tokens that end an answer: generation_config.json's, else the config's, as transformers chooses them."""
    path = folder / "generation_config.json"
    try:
        generation = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}); restore or remove it") from error
    config = read_config(folder)
    text = config.get("text_config")
    for source in (generation, config, text):
        ends = source.get("eos_token_id") if isinstance(source, dict) else None
        if ends is not None:
            return frozenset(ends if isinstance(ends, list) else [ends])
    return frozenset()


def _load(folder: Path, dtype: torch.dtype) -> Any:
    """The model as transformers loads it; raises UserError where it cannot, or where weights are missing."""
    from transformers import AutoConfig, AutoModelForCausalLM

    check_target(folder)
    try:
        config = AutoConfig.from_pretrained(folder).get_text_config()
        # The config class fills in what the file leaves out: some families are sliding-window by default.
        sliding = getattr(config, "sliding_window", None) is not None
        _check_cache(folder, getattr(config, "layer_types", None), sliding=sliding)
        model, found = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa", output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{folder}: transformers cannot load it as a causal language model: {error}") from error
    if found["missing_keys"]:
        missing = ", ".join(sorted(found["missing_keys"])[:4])
        raise UserError(f"{folder}: {len(found['missing_keys'])} weights are missing ({missing}); download it again")
    return model


class TargetModel:
    """The target and its key-value cache over all requests in flight."""

    def __init__(self, folder: Path, *, dtype: torch.dtype) -> None:
        from transformers import DynamicCache

        model = _load(folder, dtype)
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

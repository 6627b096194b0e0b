"""A Hugging Face language model run on packed rows, with hooks at the canonical boundaries.

Boundary b is the residual stream entering layer b: 0 is the embedding output (after its scaling, where a family scales
it), L the last layer's output before the final norm. We write no target model: whatever transformers can load and cache
row by row works, the text decoder of a multimodal class too. Layers with a sliding window keep every row and see few.

Shapes: T new rows, S cached rows, F target width, V vocabulary.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from spectrace.engine.fields import read_config
from spectrace.engine.packing import Int, PackedRows, RowTable
from spectrace.engine.parallel import Group
from spectrace.engine.taps import Taps
from spectrace.tracer.errors import UserError

__all__ = ["TargetModel", "TargetRows", "check_target", "empty_target", "end_tokens", "find_decoder"]

_FULL, _SLIDING, _CHUNKED = "full_attention", "sliding_attention", "chunked_attention"  # as transformers calls them
_ATTENTION = "sdpa"


@dataclass(frozen=True, slots=True)
class TargetRows:
    """What one forward gives: logits [T, V], what was wanted [T, F] each, and the rows' places in the cache.

    Branch b is what layer b-1's MLP adds to the stream, boundary b without its residual; branch 0 is boundary 0. Part b
    is what this rank has of boundary b before the ranks sum.
    """

    logits: Tensor
    boundaries: Mapping[int, Tensor]
    places: Int
    branches: Mapping[int, Tensor] = field(default_factory=dict)
    parts: Mapping[int, Tensor] = field(default_factory=dict)


def check_target(folder: Path) -> dict[str, Any]:
    """The text config, completed with its class's defaults.

    Raises UserError for a folder that is no target, or a target whose cached rows cannot be dropped one by one.
    """
    text: dict[str, Any] = _read(folder).get_text_config().to_dict()
    return text


def _read(folder: Path) -> Any:
    """The config as transformers understands it, multimodal or not; raises as `check_target`."""
    from transformers import AutoConfig

    raw = read_config(folder)
    if raw.keys() & {"draft_vocab_size", "eagle_config"} or "eagle" in str(raw.get("architectures")).lower():
        raise UserError(f"{folder}: this is a draft; --target wants the model that it drafts for")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        text = config.get_text_config()
    except Exception as error:  # every config class raises what it likes, and all of it is about the file
        raise UserError(f"{folder / 'config.json'}: transformers cannot read it: {_one_line(error)}") from error
    _windows(folder, text)
    _check_named(folder, raw, text)
    return config


def _check_named(folder: Path, raw: Mapping[str, object], text: Any) -> None:
    """Raises UserError where the target's size would be its class's default: the file is cut, or something else's."""
    nested = raw.get("text_config")
    named = nested.keys() if isinstance(nested, dict) else raw.keys()
    missing = [n for n in ("num_hidden_layers", "hidden_size") if not named & {n, text.attribute_map.get(n)}]
    if missing:
        raise UserError(f"{folder / 'config.json'}: no {', '.join(missing)}, so this is no language model to serve")


def _windows(folder: Path, text: Any) -> dict[str, int | None]:
    """How many positions back each kind of layer sees, itself included; None is all. Raises UserError for odd kinds."""
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None) or [_only_kind(text)]
    if odd := sorted(set(kinds) - ({_FULL, _SLIDING} if window else {_FULL})):
        raise _hybrid(folder, text, "layers of kind " + ", ".join(odd))
    return {kind: window if kind == _SLIDING else None for kind in sorted(set(kinds))}


def _only_kind(text: Any) -> str:
    """The kind of all layers of a family that names none: by its own fields, since a file may hold another family's."""
    for name, kind in (("sliding_window", _SLIDING), ("attention_chunk_size", _CHUNKED)):
        if hasattr(type(text), name) and getattr(text, name) is not None:
            return kind
    return _FULL


def _hybrid(folder: Path, text: Any, what: str) -> UserError:
    return UserError(
        f"{folder}: {text.model_type} has {what}: what it keeps of a text cannot be rolled back row by row, so hybrid "
        f"targets are refused; use one whose layers are all {_FULL} or {_SLIDING}"
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def end_tokens(folder: Path) -> frozenset[int]:
    """The tokens that end an answer: generation_config.json's, else the config's, as transformers chooses them.

    Raises UserError for a generation_config.json that is not JSON, and as `check_target`.
    """
    path = folder / "generation_config.json"
    try:
        generation = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}); restore or remove it") from error
    config = _read(folder)
    named = generation.get("eos_token_id") if isinstance(generation, dict) else None
    for ends in (named, *(getattr(c, "eos_token_id", None) for c in (config, config.get_text_config()))):
        if ends is not None:
            return frozenset(ends if isinstance(ends, list) else [ends])
    return frozenset()


def _class_of(folder: Path, config: Any) -> Any:
    """The class that loads a language model, alone or in a multimodal one; raises UserError for a recurrent one."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    alone = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if alone and getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "_is_stateful", False):
        raise _hybrid(folder, config, "a recurrent state")  # RWKV and xLSTM name no kinds of layers
    return AutoModelForCausalLM if alone else AutoModelForImageTextToText


def empty_target(folder: Path, *, dtype: torch.dtype) -> Any:
    """The model as it will be loaded, without its weights: they are on the meta device; buffers are computed.

    Raises UserError as `check_target`, and for a class that transformers cannot build from this config.
    """
    from accelerate import init_empty_weights

    config = _read(folder)
    try:
        with init_empty_weights():
            model = _class_of(folder, config).from_config(config, dtype=dtype, attn_implementation=_ATTENTION)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"{folder}: transformers cannot build its class: {_one_line(error)}") from error
    return model.eval().requires_grad_(False)


def _load(folder: Path, config: Any, dtype: torch.dtype, group: Group | None) -> Any:
    """The model, or this rank's part, as transformers loads it; a multimodal class whole, though only text runs in it.

    Raises UserError where it cannot be loaded, or where weights are missing.
    """
    from transformers.distributed import DistributedConfig

    auto = _class_of(folder, config)
    split = {"distributed_config": DistributedConfig(tp_size=group.size)} if group else {}
    try:
        model, found = auto.from_pretrained(
            folder, config=config, dtype=dtype, attn_implementation=_ATTENTION, output_loading_info=True, **split
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = _one_line(error)
        raise UserError(f"{folder}: transformers cannot load it as a causal language model: {reason}") from error
    if found["missing_keys"]:
        missing = ", ".join(sorted(found["missing_keys"])[:4])
        raise UserError(f"{folder}: {len(found['missing_keys'])} weights are missing ({missing}); download it again")
    return model


def find_decoder(model: Any, *, folder: Path) -> Any:
    """The module that holds `layers` and `norm`, however deep a class nests it; raises UserError where none does."""
    decoder = model
    while not (hasattr(decoder, "layers") and hasattr(decoder, "norm")):
        outer, decoder = decoder, decoder.get_decoder()
        if decoder is outer:
            name = type(model).__name__
            raise UserError(f"{folder}: {name} keeps no `layers` and `norm` to hook; use a decoder-only target")
    return decoder


class TargetModel:
    """The target and its key-value cache over all requests in flight.

    An `empty` model is taken as it is: whoever gives it brings the weights that a forward needs.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype,
        device: str = "cpu",
        group: Group | None = None,
        empty: Any = None,
    ) -> None:
        from transformers import DynamicCache

        model = empty if empty is not None else _load(folder, _read(folder), dtype, group)
        decoder = find_decoder(model, folder=folder)
        self.device = torch.device(device)
        if empty is None:
            model = model.to(self.device).eval().requires_grad_(False)
        self.model: nn.Module = model
        self.layers: nn.ModuleList = decoder.layers
        self.norm: nn.Module = decoder.norm
        self.width = int(decoder.config.hidden_size)
        self.vocab = int(decoder.config.vocab_size)
        self._windows = _windows(folder, decoder.config)
        self._new_cache = DynamicCache
        self.taps = Taps(self.layers, self.norm, group)
        self.reset()

    def reset(self) -> None:
        """Forget every request."""
        self.cache = self._new_cache()
        self.table = RowTable()

    @torch.inference_mode()
    def forward(
        self,
        rows: PackedRows,
        *,
        boundaries: Iterable[int],
        branches: Iterable[int] = (),
        parts: Iterable[int] = (),
    ) -> TargetRows:
        """Run the new rows behind the cached ones; they stay on trial until `settle`.

        Raises UserError for branches of layers without an MLP, and for parts where ranks do not sum into the stream.
        """
        with self.taps.taken(boundaries=boundaries, branches=branches, parts=parts) as taken:
            output: Any = self.model(
                input_ids=self._on_device(rows.tokens)[None],
                position_ids=self._on_device(rows.positions)[None],
                attention_mask=self._masks(rows),
                cache=self.cache,
                use_cache=True,
            )
        logits, places = output.logits[0], self.table.append(rows)
        return TargetRows(logits, taken.boundaries, places, taken.branches, taken.parts)

    def _masks(self, rows: PackedRows) -> Tensor | dict[str, Tensor]:
        """What each row sees, [1, 1, T, S + T]; one mask per kind of layer where there are two.

        A model whose layers are all alike takes its mask as it is, whether it knows kinds or not.
        """
        seen = self.table.mask(rows)
        masks = {
            kind: self._on_device(seen if window is None else seen & self.table.within(rows, window))[None, None]
            for kind, window in self._windows.items()
        }
        return masks if len(masks) > 1 else masks.popitem()[1]

    def _on_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

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
        index = self._on_device(kept)
        for layer in self.cache.layers:
            layer.keys = layer.keys.index_select(-2, index)
            layer.values = layer.values.index_select(-2, index)

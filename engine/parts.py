"""A target's checkpoint read part by part, into a model that holds no weights but those of the parts in use.

A part is the embedding, a decoder layer, or the head; what else the decoder has (its final norm) is small and always
there. Names on disk, tensors that are merged or split and types that stay float32 are transformers' own business: each
part goes through its loader. What belongs to no part (a vision tower) is never read.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from spectrace.engine.target import find_decoder
from spectrace.tracer.errors import UserError

__all__ = ["EMBEDDING", "HEAD", "Parts", "layer_part"]

EMBEDDING, HEAD, _AROUND = "embedding", "head", "around"
_INDEX = "model.safetensors.index.json"
_FEW = 4


def layer_part(layer: int) -> str:
    """The name of a decoder layer's part."""
    return f"layer {layer}"


class Parts:
    """The parts of the checkpoint in a folder, and a `model` whose parameters are on the meta device.

    Raises UserError for quantized weights, for a folder without safetensors, for files that are cut or not there though
    its index names them, and for weights of which there is nothing.
    """

    def __init__(self, folder: Path, model: Any, *, dtype: torch.dtype, device: torch.device) -> None:
        self.folder, self.model, self.dtype, self.device = folder, model, dtype, device
        _refuse_quantized(folder, model)
        self._prefixes = dict(_prefixes(model, find_decoder(model, folder=folder)))
        self._empty = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
        self._names = self._dealt({name: name for name in self._empty})
        self._files = _files(folder)
        made = self._made()
        self._tensors = self._dealt({name: targets[0] for name, targets in made.items()})
        self._twins = _both_ways(model.all_tied_weights_keys)
        self._check_there({target for targets in made.values() for target in targets})
        self.drop(*self._names)
        for name, computed in model.named_non_persistent_buffers():
            _put(model, name, computed.to(device))
        self.load(_AROUND)

    def load(self, part: str) -> None:
        """Bring a part's weights onto the device; raises UserError for tensors that are missing or do not fit."""
        missing = self._read(part)
        for name in sorted(missing):
            twin = self._twins.get(name)
            if twin is None or not self._tensors[self._part_of(twin)]:
                raise self._incomplete(missing)
            self._read(self._part_of(twin))
            _put(self.model, name, self.model.get_parameter(twin))

    def drop(self, *parts: str) -> None:
        """Let go of the weights of these parts."""
        for part in parts:
            for name in self._names[part]:
                _put(self.model, name, self._empty[name])

    def nbytes(self, part: str) -> int:
        """What a part's weights take on the device."""
        return sum(self._empty[name].nbytes for name in self._names[part])

    def _part_of(self, name: str) -> str:
        """The part that a tensor of the model belongs to, by the longest prefix; empty for none."""
        found = ""
        for at in range(len(name)):
            if name[at] == "." and name[: at + 1] in self._prefixes:
                found = self._prefixes[name[: at + 1]]
        return found

    def _dealt(self, names: Mapping[str, str]) -> dict[str, list[str]]:
        """Names by the part of what they name in the model; those of no part are left out."""
        dealt: dict[str, list[str]] = {part: [] for part in self._prefixes.values()}
        for name, in_model in names.items():
            if part := self._part_of(in_model):
                dealt[part].append(name)
        return dealt

    def _made(self) -> dict[str, list[str]]:
        """What each tensor on disk is called in the model, or becomes a piece of, or is split into."""
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        rules = self._rules()
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        targets = {source: rule.target_patterns for rule in converters for source in rule.source_patterns}
        prefix, made = self.model.base_model_prefix, dict[str, list[str]]()
        for name in self._files:
            target, source = rename_source_key(name, renamings, converters, prefix, self._empty)
            if target not in self._empty and name in self._empty:  # as its loader does
                target, source = rename_source_key(name, [], [], prefix, self._empty)
            first, *others = targets.get(source, [target])
            made[name] = [target, *(target.replace(first, other) for other in others)]
        return made

    def _rules(self) -> list[Any]:
        from transformers.conversion_mapping import get_model_conversion_mapping

        return list(get_model_conversion_mapping(self.model))

    def _read(self, part: str) -> set[str]:
        """Load what is on disk of a part; returns the names of what is not."""
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        how = LoadStateDictConfig(
            dtype=self.dtype,
            dtype_plan=self.model._get_dtype_plan(self.dtype),
            weight_mapping=self._rules(),
            device_map={"": self.device},
        )
        with ExitStack() as opened:
            files = {path: opened.enter_context(safe_open(path, "pt")) for path in self._files_of(part)}
            slices = {name: files[self._files[name]].get_slice(name) for name in self._tensors[part]}
            found, _ = convert_and_load_state_dict_in_model(self.model, slices, how)
        if found.mismatched_keys:
            name, has, wants = min(found.mismatched_keys, key=str)
            raise UserError(
                f"{self.folder}: {name} is {list(has)}, but by config.json it is {list(wants)}; which is it?"
            )
        if found.conversion_errors:
            name, why = min(found.conversion_errors.items())
            raise UserError(
                f"{self.folder}: {name} cannot be loaded: {why.strip().splitlines()[-1]}; download it again"
            )
        return {name for name in self._names[part] if name in found.missing_keys}

    def _files_of(self, part: str) -> set[Path]:
        return {self._files[name] for name in self._tensors[part]}

    def _check_there(self, made: Set[str]) -> None:
        """Of everything there is something on disk, or of what it is tied to: sooner said than after hours."""
        names = (name for of_part in self._names.values() for name in of_part)
        if missing := [name for name in names if not {name, self._twins.get(name)} & made]:
            raise self._incomplete(missing)

    def _incomplete(self, missing: Iterable[str]) -> UserError:
        names = sorted(missing)
        return UserError(
            f"{self.folder}: {len(names)} weights are missing ({', '.join(names[:_FEW])}); download it again"
        )


def _refuse_quantized(folder: Path, model: Any) -> None:
    if any(getattr(one, "quantization_config", None) for one in (model.config, model.config.get_text_config())):
        raise UserError(
            f"{folder / 'config.json'}: quantization_config: quantized weights cannot be read layer by layer; give a "
            f"copy of the target in bfloat16 or float32"
        )


def _prefixes(model: Any, decoder: nn.Module) -> Iterator[tuple[str, str]]:
    """Prefixes of the model's names, each with its part."""
    paths = {id(module): f"{name}." if name else "" for name, module in model.named_modules()}
    yield paths[id(decoder)] or "norm.", _AROUND
    yield paths[id(model.get_input_embeddings())], EMBEDDING
    layers: Any = decoder.layers
    for at, layer in enumerate(layers):
        yield paths[id(layer)], layer_part(at)
    yield paths[id(model.get_output_embeddings())], HEAD


def _both_ways(tied: Mapping[str, str]) -> dict[str, str]:
    return {**{source: target for target, source in tied.items()}, **tied}


def _files(folder: Path) -> dict[str, Path]:
    """The file of each tensor; raises UserError where there are none, or where one is cut or not there."""
    paths = sorted(folder.glob("*.safetensors"))
    index = folder / _INDEX
    if index.is_file():
        try:
            named: dict[str, str] = json.loads(index.read_text("utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{index}: no weight_map can be read from it ({error}); download it again") from error
        paths = sorted({folder / name for name in named.values()})
    elif (folder / "model.safetensors").is_file():
        paths = [folder / "model.safetensors"]  # beside it some publish the same once more, under other names
    if not paths:
        raise UserError(f"{folder}: no *.safetensors in it; layer by layer, no other kind of weights can be read")
    found = {name: path for path in paths for name in _tensors_in(path)}
    if index.is_file() and (missing := sorted(named.keys() - found.keys())):
        raise UserError(f"{folder}: {_INDEX} names {missing[0]}, and no file holds it; download it again")
    return found


def _tensors_in(path: Path) -> list[str]:
    try:
        with safe_open(path, "pt") as file:
            return list(file.keys())
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read ({error}); download it again") from error


def _put(model: Any, name: str, tensor: torch.Tensor) -> None:
    """Put a tensor in the place of a parameter or buffer."""
    owner, _, leaf = name.rpartition(".")
    module: nn.Module = model.get_submodule(owner)
    parameter = leaf in module._parameters and not isinstance(tensor, nn.Parameter)
    setattr(module, leaf, nn.Parameter(tensor, requires_grad=False) if parameter else tensor)

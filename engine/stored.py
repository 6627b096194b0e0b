"""The tensor files of a checkpoint folder: safetensors or pytorch_model.bin, whole or in shards; nothing in them runs.

Names and shapes are known without reading a tensor; a tensor is read when it is asked for.
"""

import json
import pickle
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from spectrace.tracer.errors import UserError

__all__ = ["StoredTensors", "files_passed_over", "weight_files"]

_AGAIN = "download or export it again"
_KINDS = (("*.safetensors", "model.safetensors.index.json"), ("pytorch_model*.bin", "pytorch_model.bin.index.json"))


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a checkpoint's tensors: safetensors where there are any; those of the index, if any.

    Raises UserError where there are none, and for an index that is none or names files that are not there.
    """
    return _files(folder)[0]


def files_passed_over(folder: Path) -> list[str]:
    """Files of tensors that nobody reads: those that the index does not name, and those of torch beside safetensors."""
    read = {path.name for path in weight_files(folder)}
    return sorted(path.name for pattern, _ in _KINDS for path in folder.glob(pattern) if path.name not in read)


def _files(folder: Path) -> tuple[list[Path], Path | None]:
    """The files, and the index that names them."""
    for pattern, name in _KINDS:
        index, found = folder / name, sorted(folder.glob(pattern))
        if index.is_file():
            return sorted({folder / file for file in _shards(index).values()}), index
        if found:
            return found, None
    others = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_file())[:6]) or "nothing"
    raise UserError(
        f"{folder}: no *.safetensors and no pytorch_model.bin in it, but {others}; expected a draft's tensors"
    )


def _shards(index: Path) -> Mapping[str, str]:
    """Which file each tensor is in, by an index."""
    try:
        read = json.loads(index.read_text("utf-8"))
    except (ValueError, OSError) as error:
        raise UserError(f"{index}: not valid JSON ({error}); {_AGAIN}") from error
    shards = read.get("weight_map") if isinstance(read, dict) else None
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        raise UserError(f"{index}: no weight_map from tensors to files in it; {_AGAIN}")
    for name in sorted(set(shards.values())):
        if Path(name).name != name:
            raise UserError(f"{index}: names {name!r}, expected a file of this folder; {_AGAIN}")
        if not (index.parent / name).is_file():
            held = sum(one == name for one in shards.values())
            raise UserError(f"{index}: names {name}, which is not there, for {held} tensors; {_AGAIN}")
    return shards


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of a folder by name, each read as it is stored, when it is asked for.

    `wrong` says what is wrong with how they lie there, in sentences: one that is in two files, of which the first
    counts, and one that an index puts where it is not. Raises UserError for files that cannot be read, or that hold
    anything but tensors.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shapes: dict[str, list[int]] = {}
        self.wrong: list[str] = []
        self._file: dict[str, Path] = {}
        self._loaded: dict[Path, Mapping[str, Tensor]] = {}
        files, index = _files(folder)
        places = {(name, path) for path in files for name in self._list(path)}
        for name, file in _shards(index).items() if index else ():
            if (name, folder / file) not in places:
                self.wrong.append(f"{index}: puts tensor {name} into {file}, where it is not; {_AGAIN}")

    def __getitem__(self, name: str) -> Tensor:
        path = self._file[name]
        if path.suffix != ".safetensors":
            return self._loaded[path][name]
        with _opened(path) as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file)

    def __len__(self) -> int:
        return len(self._file)

    def _list(self, path: Path) -> list[str]:
        """Take up the tensors of a file; returns their names."""
        shapes = self._shapes_in(path)
        for name, shape in shapes.items():
            if name not in self._file:
                self._file[name], self.shapes[name] = path, shape
                continue
            self.wrong.append(
                f"{self.folder}: tensor {name} is both in {self._file[name].name} and in {path.name}; which one counts "
                f"is not known: remove the files that are left over"
            )
        return list(shapes)

    def _shapes_in(self, path: Path) -> dict[str, list[int]]:
        if path.suffix != ".safetensors":
            self._loaded[path] = _unpickled(path)
            return {name: list(tensor.shape) for name, tensor in self._loaded[path].items()}
        with _opened(path) as file:
            return {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError, NotImplementedError) as error:
        raise UserError(f"{path}: not readable as safetensors ({error}); {_AGAIN}") from error


def _unpickled(path: Path) -> Mapping[str, Tensor]:
    """A file of torch.save, read as tensors alone: torch refuses everything else that a pickle could run."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of a pickle that is none of torch's, which is refused anyway
            held = _load(path)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path}: holds more than tensors, or is no whole file of torch.save; nothing in it was run: save the "
            f"draft as safetensors, or {_AGAIN}"
        ) from error
    except Exception as error:  # a broken file raises whatever it comes to
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path}: not readable as a file of torch.save ({reason}); {_AGAIN}") from error
    if not isinstance(held, dict) or not all(isinstance(one, Tensor) for one in held.values()):
        raise UserError(
            f"{path}: holds a {type(held).__name__} that is no table of tensors by name; expected a state dict"
        )
    if odd := sorted(str(name) for name, tensor in held.items() if not _is_plain(tensor)):
        raise UserError(
            f"{path}: tensor {odd[0]} is sparse, quantised by torch, or without values; expected plain tensors: save "
            f"the draft as safetensors"
        )
    return {str(name): tensor.detach() for name, tensor in held.items()}


def _load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True, mmap=_lies_flat(path))


def _lies_flat(path: Path) -> bool:
    """Whether tensors lie in the file as they are in memory: not so before torch 1.6, nor where they are compressed."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as file:
        return all(one.compress_type == zipfile.ZIP_STORED for one in file.infolist())


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_quantized or tensor.is_nested)

"""Files that others wrote, read without running anything in them, and their fields checked one by one.

What is wrong with a file is one UserError that names file, field, what was found and expected, and what to do.

Shapes: T tokens, W columns.
"""

import gzip
import io
import pickle
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from spectrace.replay.dumps.sample import Item, Sample
from spectrace.tracer.errors import UserError

__all__ = ["Fields", "files_below", "one_per_file", "read_fields"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_BESIDE = {"vocab_mapping.pt", "token_freq.pt"}  # what trainers keep in the same folder
_CUT = (
    RuntimeError,
    EOFError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    OSError,
    zlib.error,
)  # as torch ends
_AGAIN = "copy or write it again, or leave it out"


@dataclass(frozen=True, slots=True)
class Fields:
    """What one file holds, by field. Every getter raises UserError for a field that is not what it should be."""

    path: Path
    values: Mapping[str, object]

    def tokens(self, name: str) -> Tensor:
        """The ids of one text [T]."""
        ids = self._tensor(name, "token ids [T]")
        flat = ids.flatten() if ids.shape[-1:].numel() == ids.numel() else ids
        if flat.dim() != 1 or flat.dtype.is_floating_point or flat.dtype == torch.bool or not len(flat):
            raise self._wrong(name, _shown(ids), "the token ids of one text, integers [T] or [1, T]")
        for token in (int(flat.min()), int(flat.max())):
            if not 0 <= token < 1 << 31:
                raise self._wrong(name, f"the token {token}", "ids from 0, of 31 bits")
        return flat.long()

    def states(self, name: str, rows: int, *, layers: bool = False) -> Tensor:
        """Hidden states of a text of so many tokens, [T, W], or [T, layers, W]; a leading 1 is dropped."""
        return self._checked(name, self._tensor(name, "hidden states"), rows, 3 if layers else 2)

    def listed(self, name: str, rows: int) -> tuple[Tensor, ...]:
        """Hidden states in a list, [T, W] each."""
        value = self.values.get(name)
        if not isinstance(value, list | tuple) or not value or not all(isinstance(one, Tensor) for one in value):
            raise self._wrong(name, _shown(value), "a list of tensors [T, F]")
        return tuple(self._checked(f"{name}[{at}]", one, rows, 2) for at, one in enumerate(value))

    def slots(self, name: str, rows: int, width: int) -> tuple[Tensor, ...]:
        """Hidden states side by side, [T, A * width], as A tensors [T, width]."""
        packed = self.states(name, rows)
        if packed.shape[1] % width:
            raise self._wrong(name, _shown(packed), f"a multiple of {width} columns, as wide as the last hidden state")
        return torch.split(packed, width, dim=1)

    def mask(self, name: str, rows: int) -> Tensor | None:
        """Which tokens count [T], None where the field is not there."""
        if self.values.get(name) is None:
            return None
        mask = self._tensor(name, "a mask [T]")
        if mask.numel() != rows or not bool(((mask == 0) | (mask == 1)).all()):
            raise self._wrong(name, _shown(mask), f"zeros and ones, one for each of {rows} tokens")
        return mask.flatten() != 0

    def _tensor(self, name: str, expected: str) -> Tensor:
        value = self.values.get(name)
        if not isinstance(value, Tensor):
            raise self._wrong(name, _shown(value), expected)
        return value

    def _checked(self, name: str, states: Tensor, rows: int, dims: int) -> Tensor:
        flat = states[0] if states.dim() == dims + 1 and len(states) == 1 else states
        shape = "[T, layers, F]" if dims == 3 else "[T, F]"
        if flat.dim() != dims or len(flat) != rows or not flat.numel():
            raise self._wrong(name, _shown(states), f"{shape} with T = {rows}, one row for each token")
        if flat.dtype not in _FLOATS:
            raise self._wrong(name, _shown(states), "bfloat16, float16 or float32")
        finite = flat.isfinite().flatten(1).all(1)
        if not bool(finite.all()):
            where = (
                f"{int((~finite).sum())} of {rows} rows with NaN or infinity, row {int(finite.int().argmin())} first"
            )
            raise self._wrong(name, where, "finite numbers")
        return flat

    def _wrong(self, name: str, found: str, expected: str) -> UserError:
        there = f" (the file has {', '.join(map(str, self.values)) or 'no fields'})" if found == "nothing" else ""
        return UserError(f"{self.path}: field {name}: found {found}{there}, expected {expected}; {_AGAIN}")


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return "nothing" if value is None else type(value).__name__


def read_fields(path: Path) -> Fields:
    """A .safetensors file, or one of torch.save, gzipped or not; raises UserError where it cannot be read safely."""
    values = _safetensors(path) if path.suffix == ".safetensors" else _torch(path)
    if not isinstance(values, dict):
        raise UserError(f"{path}: found a {type(values).__name__}, expected a dict of tensors; {_AGAIN}")
    return Fields(path, values)


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    except SafetensorError as error:
        raise UserError(f"{path}: not a whole safetensors file ({error}); {_AGAIN}") from error


def _torch(path: Path) -> Any:
    try:
        data = io.BytesIO(gzip.decompress(path.read_bytes())) if path.suffix == ".gz" else path
        return torch.load(data, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if named := re.search(r"GLOBAL (\S+)", str(error)):
            raise UserError(
                f"{path}: found a pickle that names {named[1]}, expected tensors, lists and numbers alone; nothing of "
                f"it was run; write the file again without it, if you trust who wrote it"
            ) from error
        raise UserError(f"{path}: not a whole file of torch.save; {_AGAIN}") from error
    except gzip.BadGzipFile as error:
        raise UserError(f"{path}: not gzipped, by its first bytes ({error}); {_AGAIN}") from error
    except _CUT as error:
        if isinstance(error, OSError) and error.filename:
            raise
        raise UserError(f"{path}: not a whole file of torch.save ({_one_line(error)}); {_AGAIN}") from error


def _one_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]


def files_below(source: Path, suffixes: Sequence[str]) -> list[Path]:
    """The file itself, or every file below a folder that ends so, numbers in their names in the order of numbers."""
    if source.is_file():
        return [source]
    found = (path for path in source.rglob("*") if path.name.endswith(tuple(suffixes)) and path.name not in _BESIDE)
    return sorted((path for path in found if path.is_file()), key=lambda path: _natural(str(path)))


def _natural(name: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name)]


def one_per_file(suffixes: Sequence[str], read: Callable[[Fields], Sample]) -> Callable[[Path], list[Item]]:
    """How a dialect opens that has a text in every file."""

    def items(source: Path) -> Iterator[Item]:
        for path in files_below(source, suffixes):
            yield Item(path.name, lambda path=path: read(read_fields(path)))  # type: ignore[misc]

    return lambda source: list(items(source))

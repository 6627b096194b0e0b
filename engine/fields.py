"""A config.json that remembers which of its fields were read, which defaults were assumed, and what is odd about it."""

import json
from collections.abc import Mapping
from math import isfinite
from pathlib import Path

from spectrace.tracer.errors import UserError

__all__ = ["Fields", "read_config"]

_LARGEST = 1 << 24


def read_config(folder: Path) -> dict[str, object]:
    """The config.json of a checkpoint folder; a UserError says what is not there."""
    if folder.is_file():
        raise UserError(f"{folder}: a file; expected the folder that holds it, with config.json and *.safetensors")
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; expected a checkpoint folder with config.json and *.safetensors")
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(
            f"{folder}: no config.json in it, so this is no checkpoint; expected config.json, *.safetensors"
        )
    try:
        config = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}); expected a model config") from error
    if not isinstance(config, dict):
        raise UserError(f"{path}: holds a JSON {type(config).__name__}, expected an object")
    return config


def _is_real(value: float) -> bool:
    try:
        return isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


class Fields:
    """The fields of one object in a config; `within` an object they are named `object.field`."""

    def __init__(self, path: Path, values: Mapping[str, object], *, within: str = "") -> None:
        self.path, self._values, self._within = path, values, within
        self._read: set[str] = set()
        self._assumed: dict[str, object] = {}
        self._defaults: dict[str, object] = {}
        self._notes: list[str] = []
        self._objects: dict[str, Fields] = {}

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def name(self, field: str) -> str:
        """How a field is called in messages."""
        return f"{self._within}.{field}" if self._within else field

    def assume(self, defaults: Mapping[str, object]) -> None:
        """What fields are where they are absent, whatever default is given when they are read."""
        self._defaults.update(defaults)

    def note(self, text: str) -> None:
        """Something to be told to whoever wrote this."""
        if text not in self._notes:
            self._notes.append(text)

    def get(self, name: str, default: object = None) -> object:
        """A field's value; null counts as absent."""
        self._read.add(name)
        if name not in self:
            default = self._defaults.get(name, default)
            if default is not None:
                self._assumed[self.name(name)] = default
            return default
        return self._values[name]

    def peek(self, name: str) -> object:
        """A field's value, without counting as read."""
        return self._values.get(name)

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number, or UserError."""
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise UserError(
                f"{self.path}: field {self.name(name)} is {value!r}, expected a whole number; is this a draft's config?"
            )
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number above 0 that memory can be asked for, or UserError."""
        value = self.whole(name, default)
        if not 0 < value <= _LARGEST:
            raise UserError(
                f"{self.path}: field {self.name(name)} is {value!r:.40}, expected a number from 1 to {_LARGEST}"
            )
        return value

    def real(self, name: str, default: float | None = None) -> float:
        """A finite number, or UserError."""
        value = self.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not _is_real(value):
            raise UserError(f"{self.path}: field {self.name(name)} is {value!r:.40}, expected a number")
        return float(value)

    def positive(self, name: str, default: float | None = None) -> float:
        """A number above 0, or UserError."""
        value = self.real(name, default)
        if value <= 0:
            raise UserError(f"{self.path}: field {self.name(name)} is {value:g}, expected a number above 0")
        return value

    def flag(self, name: str, default: bool | None = None) -> bool:
        """True or false, absent counting as the default or else as false; a word that means either is UserError."""
        value = self.get(name, default)
        if value not in (None, True, False):
            raise UserError(f"{self.path}: field {self.name(name)} is {value!r}, expected true or false")
        return bool(value)

    def nested(self, name: str) -> "Fields":
        """An object's fields: none where it is absent; UserError where it is something else."""
        value = self.get(name) or {}
        if not isinstance(value, dict):
            raise UserError(f"{self.path}: field {self.name(name)} is {value!r}, expected an object or null")
        return self._objects.setdefault(name, Fields(self.path, value, within=self.name(name)))

    def unread(self) -> set[str]:
        """The names of all fields that hold something and that nobody asked for."""
        own = {self.name(field) for field in self._values if field in self and field not in self._read}
        return own.union(*(fields.unread() for fields in self._objects.values()))

    def assumed(self) -> dict[str, object]:
        """The defaults that stood in for absent fields."""
        found = dict(self._assumed)
        for fields in self._objects.values():
            found |= fields.assumed()
        return found

    def notes(self) -> tuple[str, ...]:
        """What there is to be told, each once."""
        return tuple(dict.fromkeys([*self._notes, *(note for one in self._objects.values() for note in one.notes())]))

"""What an engine makes of a draft, as data: the keys it reads, what it does otherwise, where in its code a link is."""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

from spectrace.engine.checkpoint import DraftCheckpoint, default_wiring
from spectrace.engine.dialect import IdKey
from spectrace.engine.spec import DraftSpec

__all__ = [
    "DEFAULT_WIRING", "Convention", "Departure", "Given", "Profile", "Refusal", "StandIn", "Switch", "TargetFacts",
    "filled", "value_at",
]  # fmt: skip

DEFAULT_WIRING = "(2, L/2, L-3), with L the number of layers of the target"

Convention: TypeAlias = Callable[[Sequence[int]], tuple[int, ...]]
"""The boundaries that layer ids of a config mean to an engine."""


class StandIn(StrEnum):
    """What an engine takes for a tensor."""

    EMBEDDING = "the target's embedding"
    HEAD = "the first rows of the target's head"
    ONES = "ones"
    IDENTITY = "zeros, so that draft id k is token k"
    MEMORY = "whatever the memory held"


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What an engine goes by of a target: the class that its config names, its layers, and how long texts may be."""

    architecture: str
    layers: int
    context: int | None = None


@dataclass(frozen=True, slots=True)
class Given:
    """What an engine is given: a draft as its files mean it, its config, and its target, if that is known.

    `held` are the names of all tensors in its files.
    """

    draft: DraftCheckpoint
    config: Mapping[str, Any]
    held: frozenset[str]
    target: TargetFacts | None = None

    def says(self, key: str) -> Any:
        """A value of the config by its dotted key, None where it is absent."""
        return value_at(self.config, key)


@dataclass(frozen=True, slots=True)
class Departure:
    """Something that an engine does otherwise than a draft's files mean: `takes` makes it of the switches.

    `link` is what is concerned, by its name in `link.LINKS` where it is one, and `why` says what the engine does.
    """

    link: str
    why: str
    takes: Callable[[DraftSpec, Given], DraftSpec]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Drafts that an engine does not serve, and why; `says` is part of the error that it ends with."""

    why: str
    met: Callable[[Given], bool]
    says: str


@dataclass(frozen=True, slots=True)
class Switch:
    """One link that a config key decides: the value of every key for every reading, and where the engine acts on it.

    `values` maps a reading to the keys and values that make it; numbers and objects are what `key` holds.
    `default` is the reading where the keys are absent, `note` what else there is to know of them.
    """

    title: str
    code: str
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    key: str = ""
    default: str = ""
    note: str = ""


def _every_boundary(boundary: int, layers: int) -> bool:
    return 0 <= boundary <= layers


@dataclass(frozen=True, slots=True)
class Profile:
    """What one engine makes of a configuration.

    `ids` are the keys of layer ids that it reads, the first that is there, in the convention it takes them in, which
    need not be the one they were published in; `conventions` are those of single classes of targets, whatever the key,
    and `captures` says of a boundary and a number of layers whether it can be had at all. `sorts`: boundaries are
    handed over in ascending order, each once. `departures` and `refusals` are what else it does otherwise.
    `code` maps a stage of the path to where the engine has it, `missing` a draft's tensors, by the part they
    belong to, to what stands in for one that is not there; "" is for all others. `replaces` says of which tensors it
    has the target's, whatever the folder holds, and `drops` whether it passes over tensors that it does not know, as
    against refusing them. `serve` is the command that serves, with TARGET, DRAFT and DEPTH in it; `wiring_flag`
    overrides ids. A `trainer` does not serve, but starts from a draft's folder.
    """

    engine: str
    ids: tuple[IdKey, ...]
    switches: Mapping[str, Switch]
    code: Mapping[str, str]
    version: str = ""
    default_wiring: str = DEFAULT_WIRING
    conventions: Mapping[str, Convention] = field(default_factory=dict)
    captures: Callable[[int, int], bool] = _every_boundary
    sorts: bool = False
    departures: tuple[Departure, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    missing: Mapping[str, StandIn] = field(default_factory=dict)
    replaces: Callable[[Given], Mapping[str, StandIn]] = lambda _given: {}
    drops: bool = True
    wiring_flag: str = ""
    serve: str = ""
    known: bool = True
    trainer: bool = False

    @property
    def title(self) -> str:
        """The engine and its version."""
        return f"{self.engine} {self.version}".strip()

    def id_key(self, config: Mapping[str, Any]) -> IdKey | None:
        """The key of layer ids that it takes."""
        return next((one for one in self.ids if value_at(config, one.key)), None)

    def resolve(self, config: Mapping[str, Any], layers: int, architecture: str = "") -> tuple[int, ...]:
        """The boundaries that it feeds a draft with this config, on a target of so many layers and such a class."""
        key = self.id_key(config)
        if key is None:
            return default_wiring(layers)
        found = self._convention(key, architecture)([int(i) for i in value_at(config, key.key)])
        found = tuple(boundary for boundary in found if self.captures(boundary, layers))
        return tuple(sorted(set(found))) if self.sorts else found

    def ids_for(self, key: IdKey, boundaries: Sequence[int], layers: int, architecture: str) -> list[int] | None:
        """The layer ids that mean these boundaries to it, None where none do."""
        for offset in dict.fromkeys((key.offset, 0, 1)):
            ids = [boundary - offset for boundary in boundaries]
            config: dict[str, Any] = {}
            _place(config, key.key, ids)
            if self.resolve(config, layers, architecture) == tuple(boundaries):
                return ids
        return None

    def _convention(self, key: IdKey, architecture: str) -> Convention:
        published = next((one for one in (architecture, "") if one in self.conventions), None)
        if published is not None:
            return self.conventions[published]
        return lambda ids: tuple(i + key.offset for i in ids)


def _place(config: dict[str, Any], key: str, value: object) -> None:
    """Put a value at a dotted key."""
    *outer, inner = key.split(".")
    for part in outer:
        config = config.setdefault(part, {})
    config[inner] = value


def filled(command: str, known: Mapping[str, str]) -> str:
    """A command with what is known in the place of its capital words; within JSON, as a string of it."""
    return shlex.join(_filled(word, known) for word in shlex.split(command))


def _filled(word: str, known: Mapping[str, str]) -> str:
    for name, value in known.items():
        word = value if word == name else word.replace(name, json.dumps(value)[1:-1])
    return word


def value_at(config: Mapping[str, Any], key: str) -> Any:
    """A value by its dotted key, None where it is absent."""
    held: Any = config
    for part in key.split("."):
        held = held.get(part) if isinstance(held, dict) else None
    return held

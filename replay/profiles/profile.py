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
    "DEFAULT_WIRING", "Capture", "Convention", "Departure", "Given", "Profile", "Refusal", "StandIn", "Switch",
    "TargetFacts", "filled", "value_at",
]  # fmt: skip

DEFAULT_WIRING = "(2, L/2, L-3), with L the number of layers of the target"

Convention: TypeAlias = Callable[[Sequence[int], int], Sequence[int]]
"""The boundaries that layer ids of a config mean, on a target of so many layers."""


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


@dataclass(frozen=True, slots=True)
class Capture:
    """What is captured of a class of targets: the boundaries that ids stand for, and those where there are none.

    Without a `convention` ids stand for what they are published as. `embedding` and `last` say whether boundaries 0 and
    L are to be had; without the first a run ends in an error, without the second the slot is left out, or where
    `fails_beyond`, the start ends in an error. `adds_default`: the default's boundaries are captured as well.
    """

    convention: Convention | None = None
    default: Callable[[int], tuple[int, ...]] = default_wiring
    embedding: bool = True
    last: bool = True
    fails_beyond: bool = False
    adds_default: bool = False

    def refusal(self, boundaries: Sequence[int], layers: int) -> Refusal | None:
        """Why boundaries that were set cannot be had."""
        if self.fails_beyond and any(boundary >= layers for boundary in boundaries):
            why = "on this class of targets it cannot capture what the last layer leaves"
            return Refusal(why, lambda _: True, says="IndexError")
        if not self.embedding and 0 in boundaries:
            why = "on this class of targets it cannot hand over the embedding (boundary 0)"
            return Refusal(why, lambda _: True, says="TypeError")
        return None


@dataclass(frozen=True, slots=True)
class Profile:
    """What one engine makes of a configuration.

    `ids` are the keys of layer ids that it reads, the first that is there, in the convention it takes them in, which
    need not be the one they were published in. `targets` says how it captures of a class of targets, "" for those that
    are not named; of a class that is in neither it captures nothing. `sorts`: boundaries are handed over in ascending
    order, each once. `graphs_by_default`: what is replayed from graphs captures the default, whatever the ids.
    `departures` and `refusals` are what else it does otherwise. `first_layers` are the names under which it reads the
    first layer's tensors. `code` maps a stage of the path to where the engine has it, `missing` a draft's tensors, by
    the part they belong to, to what stands in for one that is not there; "" is for all others. `replaces` says of which
    tensors it has the target's, whatever the folder holds, and `drops` whether it passes over tensors that it does not
    know, as against refusing them. `captures_nothing` says of which drafts it feeds them no boundary at all,
    `unread_names` are names of tensors that others read, and `latent_classes` its classes of drafts with latent
    attention. `context` is what comes of a draft whose context ends before its target's, which it may refuse. `serve`
    is the command that serves, with TARGET, DRAFT and DEPTH in it; `wiring_flag` overrides ids. A `trainer` does not
    serve, but starts from a draft's folder.
    """

    engine: str
    ids: tuple[IdKey, ...]
    switches: Mapping[str, Switch]
    code: Mapping[str, str]
    version: str = ""
    runner: str = ""
    default_wiring: str = DEFAULT_WIRING
    targets: Mapping[str, Capture] = field(default_factory=lambda: {"": Capture()})
    sorts: bool = False
    graphs_by_default: bool = False
    departures: tuple[Departure, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    first_layers: tuple[str, ...] = ("midlayer", "layers.0")
    missing: Mapping[str, StandIn] = field(default_factory=dict)
    replaces: Callable[[Given], Mapping[str, StandIn]] = lambda _given: {}
    captures_nothing: Callable[[Given], bool] = lambda _given: False
    unread_names: frozenset[str] = frozenset()
    latent_classes: frozenset[str] = frozenset()
    drops: bool = True
    context: str = "beyond it engines draft nothing, or noise, or refuse to start"
    refuses_shorter: bool = False
    wiring_flag: str = ""
    serve: str = ""
    known: bool = True
    trainer: bool = False

    @property
    def title(self) -> str:
        """The engine, its version and its runner."""
        return " ".join(filter(None, (self.engine, self.version, self.runner)))

    def id_key(self, config: Mapping[str, Any]) -> IdKey | None:
        """The key of layer ids that it takes."""
        return next((one for one in self.ids if _ids_at(config, one.key)), None)

    def capture(self, architecture: str) -> Capture | None:
        """How it captures of a class of targets; None where it does not."""
        return self.targets.get(architecture) or self.targets.get("") if architecture else self._usual()

    def _usual(self) -> Capture:
        return self.targets.get("") or next(iter(self.targets.values()))

    def resolve(self, config: Mapping[str, Any], layers: int, architecture: str = "") -> tuple[int, ...]:
        """The boundaries that it feeds a draft with this config, on a target of so many layers and such a class."""
        capture = self.capture(architecture)
        if capture is None:
            return ()
        end = layers + capture.last
        asked = [*self.asked(config, layers, architecture), *(capture.default(layers) if capture.adds_default else ())]
        found = tuple(boundary for boundary in asked if 0 <= boundary < end)
        return tuple(sorted(set(found))) if self.sorts else found

    def asked(self, config: Mapping[str, Any], layers: int, architecture: str = "") -> tuple[int, ...]:
        """The boundaries that it sets out to capture, whether they are to be had or not."""
        key, capture = self.id_key(config), self.capture(architecture) or self._usual()
        if key is None:
            return capture.default(layers)
        ids = _ids_at(config, key.key)
        return tuple(capture.convention(ids, layers) if capture.convention else (i + key.offset for i in ids))

    def ids_for(self, key: IdKey, boundaries: Sequence[int], layers: int, architecture: str) -> list[int] | None:
        """The layer ids that mean these boundaries to it, None where none do."""
        for offset in dict.fromkeys((key.offset, 0, 1)):
            ids = [boundary - offset for boundary in boundaries]
            config: dict[str, Any] = {}
            _place(config, key.key, ids)
            if self.resolve(config, layers, architecture) == tuple(boundaries):
                return ids
        return None


def _ids_at(config: Mapping[str, Any], key: str) -> list[int]:
    """The layer ids under a key; none where it holds something else."""
    held = value_at(config, key)
    return held if isinstance(held, list) and all(type(one) is int for one in held) else []


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

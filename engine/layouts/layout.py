"""A published layout of drafts, as data: how its folders are told, and which words it has for what a draft computes."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor

from spectrace.engine.fields import Fields
from spectrace.engine.spec import DraftSpec

__all__ = ["LAYER_IDS", "NESTED", "NESTED_IDS", "TOP_IDS", "IdKey", "Layout", "Limit", "Verifier"]

NESTED: Final = "eagle_config"
"""The object within which SpecForge and ModelOpt say what is of EAGLE alone."""


@dataclass(frozen=True, slots=True)
class IdKey:
    """A field of layer ids, dotted where nested; boundary = id + `offset`."""

    key: str
    offset: int


TOP_IDS: Final = IdKey("eagle_aux_hidden_state_layer_ids", 0)
NESTED_IDS: Final = IdKey(f"{NESTED}.eagle_aux_hidden_state_layer_ids", 1)
LAYER_IDS: Final = IdKey(f"{NESTED}.layer_ids", 0)


@dataclass(frozen=True, slots=True)
class Verifier:
    """The target that a draft is for, as some layouts name it."""

    path: str
    architectures: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Limit:
    """Something that a layout has no word for; `met` says of a draft and its boundaries that it needs it."""

    what: str
    met: Callable[[DraftSpec, tuple[int, ...] | None], bool]


Told = Callable[[Fields, Collection[str]], bool]
Words = Callable[[DraftSpec, tuple[int, ...] | None, Verifier | None], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Layout:
    """One way in which drafts are published.

    `told` says of a config and the names of the tensors beside it whether they are of this layout. `geometry` is the
    object of the config that holds widths, heads and RoPE; "" is the config itself. `absent` holds what a switch is
    where its field is absent, `classes` the same for the fields of `geometry`, by model type, "" where that is absent.
    `describes` are fields that say nothing about what is computed. `first` is what the first layer is called, and
    `config` the words for a draft; None where the layout is read only. `limits` is what it has no words for.
    `window_from_text` says that a window is counted from the text's row, whatever depth a row is drafted at,
    `whole_tables` that d2t and t2d are there for a draft of all tokens, too, `ascending` that slots lie in the order of
    their boundaries, not of their ids. `remarks` are about fields and tensors (by a `DraftModel`'s names), there or
    not, that others take to mean another thing.
    """

    name: str
    title: str
    told: Told
    geometry: str = ""
    absent: Mapping[str, Any] = field(default_factory=dict)
    classes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    describes: frozenset[str] = frozenset()
    first: str = "midlayer"
    config: Words | None = None
    limits: tuple[Limit, ...] = ()
    window_from_text: bool = False
    remarks: Callable[[Fields, Mapping[str, Tensor]], Iterator[str]] = lambda _fields, _tensors: iter(())
    whole_tables: bool = False
    ascending: bool = False

    def body(self, fields: Fields) -> Fields:
        """The fields of `geometry`, with the defaults of their class."""
        if not self.geometry:
            return fields
        body = fields.nested(self.geometry)
        kind = body.peek("model_type") or ""
        body.assume(self.classes.get(str(kind), {}))
        return body

    def unsaid(self, spec: DraftSpec, boundaries: tuple[int, ...] | None) -> list[str]:
        """What a draft computes that this layout has no word for."""
        return [limit.what for limit in self.limits if limit.met(spec, boundaries)]

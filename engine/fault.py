"""What a fault is: an id, what it needs, and the one place of the engine that it breaks, by functions called there.

Every place is right as it stands: its defaults change nothing.

Shapes: T rows, A slots, F target width, N answering rows, R requests, D depths, V draft vocabulary.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import TypeAlias, TypeVar

from torch import Tensor, nn

from spectrace.engine.packing import Int
from spectrace.engine.plan import CaptureHiddenMode
from spectrace.engine.sampling import Sampling
from spectrace.engine.spec import DraftSpec
from spectrace.engine.tree import Candidates
from spectrace.engine.verify import SampledRule

__all__ = [
    "Answering", "Boundaries", "Capture", "Drafting", "Fault", "Feeding", "HandOff", "HandedGroup", "Setting", "Source",
    "Tap", "Tensors", "Tokens", "Verifying", "broken",
]  # fmt: skip

Boundaries: TypeAlias = tuple[int, ...]
Tokens: TypeAlias = tuple[int, ...]
Tensors: TypeAlias = Mapping[str, Tensor]


class Tap(Enum):
    """What of the target stands in a slot: the boundary, the branch that enters it, or this rank's part of it."""

    BOUNDARY = "boundary"
    BRANCH = "branch"
    PART = "part"


@dataclass(frozen=True, slots=True)
class Setting:
    """A call and its pair, as far as it decides whether a fault can be had.

    `table` says whether the draft has d2t, `scaled` whether it is quantised: stored with scales. `tap` is where slots
    are taken: at their boundaries, unless a fault has moved it.
    """

    wiring: Boundaries
    layers: int
    spec: DraftSpec
    table: bool
    sampling: Sampling
    topk: int
    chunk: int | None
    fixed_window: bool
    tp: int
    draft_tp: int
    scaled: bool = False
    tap: Tap = Tap.BOUNDARY


@dataclass(frozen=True, slots=True)
class HandedGroup:
    """The rows of a pass that one request hands over, in order: `live` accepted ones, then what fills a fixed window.

    Rows are counted in the pass; the group's own begin at `first`. `verifies` tells a round from a piece of a prompt.
    """

    first: int
    rows: tuple[int, ...]
    live: int
    verifies: bool


@dataclass(frozen=True, slots=True)
class Capture:
    """The target captures other boundaries (given L), taps them elsewhere, or changes them (given the final norm)."""

    wiring: Callable[[Boundaries, int], Boundaries] = lambda wiring, _layers: wiring
    tap: Tap = Tap.BOUNDARY
    slots: Callable[[Tensor, nn.Module], Tensor] = lambda features_TAF, _norm: features_TAF


@dataclass(frozen=True, slots=True)
class HandOff:
    """Other rows are handed over than were accepted, or their features are changed, by a function made for each call.

    `mode` LAST hands over the last row of every piece of a prompt, and no more.
    """

    mode: CaptureHiddenMode = CaptureHiddenMode.FULL
    rows: Callable[[Sequence[HandedGroup]], Sequence[Sequence[int]]] = lambda groups: [group.rows for group in groups]
    features: Callable[[], Callable[[Tensor], Tensor]] = lambda: lambda features_TAF: features_TAF


@dataclass(frozen=True, slots=True)
class Feeding:
    """Draft rows take other tokens, given their own, those after them, and whether the pass ends in an answer."""

    tokens: Callable[[Tokens, Tokens, bool], Tokens] = lambda _own, after, _answers: after


@dataclass(frozen=True, slots=True)
class Source:
    """What a draft's tensors come from: its switches, the target's folder, and the scales of quantised ones, by name.

    A tensor is what is stored times its scale.
    """

    spec: DraftSpec
    target: Path
    scales: Tensors = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answering:
    """The rows of a forward that answer: how deep they are, their positions [N], and the draft's rank and switches."""

    depth: int
    positions: Int
    rank: int
    spec: DraftSpec


@dataclass(frozen=True, slots=True)
class Drafting:
    """The draft runs with other switches or with other tensors, stands elsewhere, or picks otherwise.

    `weights` returns what it changes; `advance` is how far a row of a depth stands beyond the text; `pick` is given
    logits [N, V], what was picked, and for which rows.
    """

    spec: Callable[[DraftSpec], DraftSpec] | None = None
    weights: Callable[[Tensors, Source], Tensors] | None = None
    advance: Callable[[int], int] = lambda depth: depth
    pick: Callable[[Tensor, Candidates, Answering], Candidates] = lambda _logits, picked, _rows: picked
    ranks_differ: bool = False

    @property
    def rebuilds(self) -> bool:
        """Whether the draft that serves is another than the one that was loaded."""
        return self.spec is not None or self.weights is not None


@dataclass(frozen=True, slots=True)
class Verifying:
    """Sampled drafts are accepted by another rule, or their probabilities [R, D, V] arrive otherwise."""

    rule: Callable[[SampledRule], SampledRule] = lambda rule: rule
    draft_probs: Callable[[Tensor], Tensor] = lambda probs_RDV: probs_RDV


Place = TypeVar("Place", Capture, HandOff, Feeding, Drafting, Verifying)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault and what it breaks. `variant` tells flavours apart; `lacks` says what a call lacks to have it."""

    id: str
    title: str
    breaks: Capture | HandOff | Feeding | Drafting | Verifying
    variant: str = ""
    lacks: Callable[[Setting], str] = lambda _setting: ""

    @property
    def name(self) -> str:
        """What `--fault` calls it."""
        return f"{self.id}:{self.variant}" if self.variant else self.id

    def wiring(self, wiring: Boundaries, layers: int) -> Boundaries:
        """The boundaries that are captured where these were wanted, of a target of so many layers."""
        return self.breaks.wiring(wiring, layers) if isinstance(self.breaks, Capture) else wiring

    def missing(self, setting: Setting) -> str:
        """What a call lacks to have this fault, or nothing."""
        if isinstance(self.breaks, Drafting) and self.breaks.rebuilds and setting.draft_tp > 1:
            return f"a draft on {setting.draft_tp} ranks is served as it was loaded; give --draft-tp 1"
        return self.lacks(setting)

    def after(self, setting: Setting) -> Setting:
        """What a further fault finds: boundaries, tap and switches as this one leaves them."""
        breaks = self.breaks
        if isinstance(breaks, Capture):
            tap = setting.tap if breaks.tap is Tap.BOUNDARY else breaks.tap
            return replace(setting, wiring=self.wiring(setting.wiring, setting.layers), tap=tap)
        if isinstance(breaks, Drafting) and breaks.spec:
            return replace(setting, spec=breaks.spec(setting.spec))
        return setting


def broken(faults: Iterable[Fault], place: type[Place]) -> list[Place]:
    """What some faults break in one place, in order."""
    return [fault.breaks for fault in faults if isinstance(fault.breaks, place)]

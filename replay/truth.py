"""True boundaries of recorded texts: as recorded beside the run, in another trace, or computed by the target again.

Shapes: P positions of a text (all but its last), F target width.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from spectrace.replay.configuration import Slot, View
from spectrace.replay.features import became_text, first_rows
from spectrace.replay.texts import Text, read_texts
from spectrace.tracer.errors import UserError
from spectrace.tracer.rowset import Rows
from spectrace.tracer.trace import Trace

__all__ = ["Delivered", "Recomputed", "Recorded", "Source", "TrueText", "Truth", "Wired"]

_ROWS_AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class TrueText:
    """One request's text, and what each of some slots truly is for its first positions [P, F]."""

    request: int
    text: Text
    slots: Mapping[Slot, Tensor]

    def wired(self, wiring: Sequence[Slot]) -> "Wired":
        """What a draft of this wiring is fed for the text."""
        return Wired(self.request, self.text, tuple(self.slots[slot] for slot in wiring))


@dataclass(frozen=True, slots=True)
class Wired:
    """One request's text and the slots that a draft is fed."""

    request: int
    text: Text
    slots: tuple[Tensor, ...]

    def __len__(self) -> int:
        return len(self.slots[0])

    def load(self) -> Tensor:
        return torch.cat(self.slots, dim=-1)


class Source(Protocol):
    """One place where true boundaries come from."""

    name: str

    def has(self, slot: Slot) -> bool: ...

    def covers(self, request: int) -> bool: ...

    def read(self, texts: Mapping[int, Text], slots: Collection[Slot]) -> Mapping[int, Mapping[Slot, Tensor]]: ...


class Truth:
    """Several sources in the order of trust; a slot is read from the first that has it.

    Texts that were read with `keep` are held: whoever keeps them sees to it that they are few.
    """

    def __init__(self, texts: Mapping[int, Text], sources: Sequence[Source], layers: int | None) -> None:
        self.sources, self.layers = sources, layers
        self._kept: dict[int, TrueText] = {}
        self.texts = {
            request: text
            for request, text in texts.items()
            if len(text.output) > 1 and sources and all(source.covers(request) for source in sources)
        }

    def has(self, slot: Slot) -> bool:
        """Whether this slot can be had at all."""
        return any(source.has(slot) for source in self.sources)

    def known(self) -> list[int]:
        """The boundaries that can be had, in order."""
        top = 512 if self.layers is None else self.layers
        return [boundary for boundary in range(top + 1) if self.has(Slot(boundary))]

    def read(self, requests: Sequence[int], slots: Collection[Slot], *, keep: bool = False) -> list[TrueText]:
        """Some requests' texts with these slots, in order; a slot that cannot be had raises UserError."""
        held = {r: self._kept[r] for r in requests if r in self._kept and self._kept[r].slots.keys() >= set(slots)}
        new = {text.request: text for text in self._read([r for r in requests if r not in held], slots)}
        if keep:
            self._kept |= new
        return [held[request] if request in held else new[request] for request in requests]

    def _read(self, requests: Sequence[int], slots: Collection[Slot]) -> list[TrueText]:
        texts = {request: self.texts[request] for request in requests}
        found: dict[int, dict[Slot, Tensor]] = {request: {} for request in texts}
        for source, wanted in self._shares(slots).items() if texts else ():
            for request, tensors in self.sources[source].read(texts, wanted).items():
                found[request] |= tensors
        return [_cut(request, texts[request], slots) for request, slots in found.items()]

    def _shares(self, slots: Collection[Slot]) -> dict[int, list[Slot]]:
        shares: dict[int, list[Slot]] = {}
        for slot in sorted(slots):
            at = next((at for at, source in enumerate(self.sources) if source.has(slot)), None)
            if at is None:
                raise UserError(f"boundary {slot} is in no reference and cannot be computed: give --target DIR")
            shares.setdefault(at, []).append(slot)
        return shares


def _cut(request: int, text: Text, slots: Mapping[Slot, Tensor]) -> TrueText:
    """A text for which a source knows only a beginning ends there."""
    rows = min(len(tensor) for tensor in slots.values())
    text = replace(text, output=text.output[: rows + 1 - len(text.prompt)])
    return TrueText(request, text, {slot: tensor[:rows] for slot, tensor in slots.items()})


class Recorded:
    """Reference rows: of the trace itself, or of another that holds the same prompts."""

    def __init__(self, trace: Trace, texts: Mapping[int, Text], own: bool) -> None:
        self.name = f"reference rows of {trace.folder}"
        self.trace = trace
        self.boundaries = {int(b) for facts in trace.writers.values() for b in facts.get("capture", ())}
        reference = trace.rows("reference", live=True, rank=0)
        reference = reference.take(reference.has("boundaries"))
        self._rows: Rows = reference.take(became_text(reference, trace.rows("verified", accepted=True)))
        theirs = read_texts(trace)
        self._twin = {request: request for request in texts} if own else _twins(texts, theirs)
        shared = {mine: _shared(texts[mine], theirs[twin]) for mine, twin in self._twin.items() if twin in theirs}
        # A text that parts at its first answers has no start that a draft could be judged at.
        self._lengths = {mine: length for mine, length in shared.items() if length > len(texts[mine].prompt) + 1}

    def has(self, slot: Slot) -> bool:
        return slot.view is View.STREAM and slot.boundary in self.boundaries and len(self._rows) > 0

    def covers(self, request: int) -> bool:
        return bool(self._found([request]))

    def read(self, texts: Mapping[int, Text], slots: Collection[Slot]) -> Mapping[int, Mapping[Slot, Tensor]]:
        found = self._found(list(texts))
        return {
            request: {slot: rows.tensor("boundaries", f"b{slot.boundary}") for slot in slots}
            for request, rows in found.items()
        }

    def _found(self, requests: Sequence[int]) -> dict[int, Rows]:
        known = [request for request in requests if request in self._lengths]
        needed = {self._twin[request]: self._lengths[request] - 1 for request in known}
        rows = dict(first_rows(self._rows, {twin: count for twin, count in needed.items() if count > 0}))
        return {request: rows[self._twin[request]] for request in known if self._twin[request] in rows}


def _twins(texts: Mapping[int, Text], theirs: Mapping[int, Text]) -> dict[int, int]:
    """Which request of the other trace has the same prompt; the n-th of ours is the n-th of theirs."""
    waiting: dict[tuple[int, ...], list[int]] = {}
    for request, text in theirs.items():
        waiting.setdefault(text.prompt, []).append(request)
    found = {}
    for request, text in texts.items():
        if waiting.get(text.prompt):
            found[request] = waiting[text.prompt].pop(0)
    return found


def _shared(mine: Text, theirs: Text) -> int:
    """How many tokens both texts begin with."""
    pairs = zip(mine.tokens, theirs.tokens, strict=False)
    same = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
    return min(len(mine.tokens), len(theirs.tokens)) if same is None else same


class Recomputed:
    """The target run again over the texts, once for every call of `read`."""

    def __init__(self, folder: Path, *, dtype: torch.dtype, device: str = "cpu") -> None:
        from spectrace.engine.target import TargetModel

        self.name = f"the target in {folder}, run again"
        self.model = TargetModel(folder, dtype=dtype, device=device)
        self.layers = len(self.model.layers)

    def has(self, slot: Slot) -> bool:
        if slot.view is View.BRANCH and slot.boundary:
            return slot.boundary <= self.layers and hasattr(self.model.layers[slot.boundary - 1], "mlp")
        return 0 <= slot.boundary <= self.layers

    def covers(self, request: int) -> bool:
        return True

    def read(self, texts: Mapping[int, Text], slots: Collection[Slot]) -> Mapping[int, Mapping[Slot, Tensor]]:
        found: dict[int, Mapping[Slot, Tensor]] = {}
        for group in _groups(texts):
            found |= self._run({request: texts[request] for request in group}, slots)
        return found

    def _run(self, texts: Mapping[int, Text], slots: Collection[Slot]) -> dict[int, Mapping[Slot, Tensor]]:
        from spectrace.engine.packing import PackedRows

        lengths = [len(text.tokens) - 1 for text in texts.values()]
        first = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
        positions = np.arange(sum(lengths)) - first
        rows = PackedRows(
            tokens=np.asarray([token for text in texts.values() for token in text.tokens[:-1]], np.int64),
            owners=np.repeat(list(texts), lengths),
            positions=positions,
            parents=np.where(positions == 0, -1, np.arange(sum(lengths)) - 1),
        )
        streams = {slot.boundary for slot in slots if slot.view is not View.BRANCH}
        branches = {slot.boundary for slot in slots if slot.view is View.BRANCH and slot.boundary}
        self.model.reset()
        out = self.model.forward(rows, boundaries=streams | {0}, branches=branches)
        self.model.reset()
        parts = {slot: torch.split(self._view(slot, out.boundaries, out.branches), lengths) for slot in slots}
        return {request: {slot: part[at] for slot, part in parts.items()} for at, request in enumerate(texts)}

    @torch.inference_mode()
    def _view(self, slot: Slot, streams: Mapping[int, Tensor], branches: Mapping[int, Tensor]) -> Tensor:
        match slot.view:
            case View.STREAM:
                return streams[slot.boundary]
            case View.NORMED:
                normed: Tensor = self.model.norm.forward(streams[slot.boundary])
                return normed
            case View.BRANCH:
                return branches[slot.boundary] if slot.boundary else streams[0]


def _groups(texts: Mapping[int, Text]) -> Iterator[list[int]]:
    """Requests in groups of about so many rows that their logits stay small."""
    group: list[int] = []
    rows = 0
    for request, text in texts.items():
        if group and rows + len(text.tokens) > _ROWS_AT_ONCE:
            yield group
            group, rows = [], 0
        group.append(request)
        rows += len(text.tokens)
    if group:
        yield group


class Delivered:
    """What the draft was delivered, taken at its word: each slot for the boundary that it is configured to hold."""

    def __init__(self, trace: Trace, wiring: Sequence[Slot], width: int) -> None:
        self.name = "what the draft was delivered, taken for its configured boundaries"
        self.wiring, self.width = tuple(wiring), width
        rows = trace.rows("received", live=True, depth=0, rank=0)
        self._rows = rows.take(rows.has("features"))
        self._lengths = _run_from_start(self._rows)

    def has(self, slot: Slot) -> bool:
        return slot in self.wiring

    def covers(self, request: int) -> bool:
        return request in self._lengths

    def read(self, texts: Mapping[int, Text], slots: Collection[Slot]) -> Mapping[int, Mapping[Slot, Tensor]]:
        needed = {request: min(int(self._lengths[request]), len(text.tokens) - 1) for request, text in texts.items()}
        found: dict[int, Mapping[Slot, Tensor]] = {}
        for request, rows in first_rows(self._rows, needed):
            parts = torch.split(rows.tensor("features"), self.width, dim=1)
            found[request] = {slot: parts[self.wiring.index(slot)] for slot in slots}
        return found


def _run_from_start(rows: Rows) -> dict[int, int]:
    """How many rows each request has from position 0 without a gap."""
    found: dict[int, int] = {}
    for request in np.unique(rows["request"]).tolist():
        positions = np.unique(rows["position"][rows["request"] == request])
        whole = positions == np.arange(len(positions))
        found[request] = int(whole.argmin()) if not whole.all() else len(positions)
    return {request: count for request, count in found.items() if count}

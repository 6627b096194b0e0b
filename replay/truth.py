"""True boundaries of recorded texts: as recorded beside the run, in another trace, or computed by the target again.

Shapes: P positions of a text (all but its last), F target width.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from spectrace.replay.compare import served_dtype
from spectrace.replay.configuration import Slot, View
from spectrace.replay.features import became_text
from spectrace.replay.inputs import Int, runs_from_start
from spectrace.replay.texts import Text
from spectrace.tracer.errors import UserError
from spectrace.tracer.trace import Trace

if TYPE_CHECKING:
    from spectrace.engine.target import TargetRows

__all__ = ["Answered", "Delivered", "Recomputed", "Recorded", "Source", "TrueText", "Truth", "Wired"]

_ROWS_AT_ONCE = 512
_MOST_LAYERS = 512


@dataclass(frozen=True, slots=True)
class Answered:
    """Of `tokens` that were answered greedily, `equal` are those that a source answers, too, at the same places."""

    tokens: int
    equal: int


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
    """One place where true boundaries come from; `coarse` where they were computed in less than float32."""

    name: str
    coarse: bool

    def has(self, slot: Slot) -> bool: ...

    def covers(self, request: int) -> bool: ...

    def read(self, texts: Mapping[int, Text], slots: Collection[Slot]) -> Mapping[int, Mapping[Slot, Tensor]]: ...


class Truth:
    """Several sources in the order of trust; each request's slots are read from the first that covers it and has them.

    The slots that can be had are those of the requests that most are known of; of what else there is, `texts` has only
    requests of which as many are known. Texts that were read with `keep` are held: whoever keeps them sees to it that
    they are few.
    """

    def __init__(self, texts: Mapping[int, Text], sources: Sequence[Source], layers: int | None) -> None:
        self.layers = layers
        self._kept: dict[int, TrueText] = {}
        covering = {
            request: tuple(source for source in sources if source.covers(request))
            for request, text in texts.items()
            if len(text.output) > 1
        }
        known = {by: self._known_to(by) for by in dict.fromkeys(covering.values())}
        self.slots: frozenset[Slot] = max(known.values(), key=len, default=frozenset())
        self._covering = {request: by for request, by in covering.items() if by and known[by] >= self.slots}
        self.texts = {request: texts[request] for request in self._covering}
        self.sources = [source for source in sources if any(source in by for by in self._covering.values())]

    @property
    def coarse(self) -> bool:
        """Whether some of it was computed in less than float32."""
        return any(source.coarse for source in self.sources)

    def has(self, slot: Slot) -> bool:
        """Whether this slot can be had at all."""
        return slot in self.slots

    def known(self) -> list[int]:
        """The boundaries that can be had, in order."""
        return sorted(slot.boundary for slot in self.slots if slot.view is View.STREAM)

    def read(self, requests: Sequence[int], slots: Collection[Slot], *, keep: bool = False) -> list[TrueText]:
        """Some requests' texts with these slots, in order; a slot that cannot be had raises UserError."""
        if lacking := sorted(set(slots) - self.slots):
            raise UserError(f"boundary {lacking[0]} is in no reference and cannot be computed: give --target DIR")
        held = {r: self._kept[r] for r in requests if r in self._kept and self._kept[r].slots.keys() >= set(slots)}
        new = {text.request: text for text in self._read([r for r in requests if r not in held], slots)}
        if keep:
            self._kept |= new
        return [held[request] if request in held else new[request] for request in requests]

    def _read(self, requests: Sequence[int], slots: Collection[Slot]) -> list[TrueText]:
        asked: dict[tuple[Source, tuple[Slot, ...]], list[int]] = {}
        for request in requests:
            for share in _shares(self._covering[request], slots).items():
                asked.setdefault(share, []).append(request)
        found: dict[int, dict[Slot, Tensor]] = {request: {} for request in requests}
        for (source, wanted), group in asked.items():
            for request, tensors in source.read({one: self.texts[one] for one in group}, wanted).items():
                found[request] |= tensors
        return [_cut(request, self.texts[request], tensors) for request, tensors in found.items()]

    def _known_to(self, sources: Sequence[Source]) -> frozenset[Slot]:
        boundaries = range((_MOST_LAYERS if self.layers is None else self.layers) + 1)
        slots = (Slot(boundary, view) for boundary, view in product(boundaries, View))
        return frozenset(slot for slot in slots if any(source.has(slot) for source in sources))


def _shares(sources: Sequence[Source], slots: Collection[Slot]) -> dict[Source, tuple[Slot, ...]]:
    """Which of the slots each source is asked for: the first that has them."""
    firsts = [(next(source for source in sources if source.has(slot)), slot) for slot in sorted(slots)]
    return {source: tuple(slot for first, slot in firsts if first is source) for source, _ in firsts}


def _cut(request: int, text: Text, slots: Mapping[Slot, Tensor]) -> TrueText:
    """A text for which a source knows only a beginning ends there."""
    rows = min(len(tensor) for tensor in slots.values())
    text = replace(text, output=text.output[: max(rows + 1 - len(text.prompt), 0)])
    return TrueText(request, text, {slot: tensor[:rows] for slot, tensor in slots.items()})


class Recorded:
    """Reference rows: of the trace itself, or of another that holds the same prompts; `theirs` are its own texts."""

    def __init__(self, trace: Trace, texts: Mapping[int, Text], theirs: Mapping[int, Text]) -> None:
        self.name, self.coarse = f"reference rows of {trace.folder}", served_dtype(trace) != torch.float32
        self._boundaries = {int(b) for facts in trace.writers.values() for b in facts.get("capture", ())}
        reference = trace.rows("reference", live=True, rank=0)
        reference = reference.take(reference.has("boundaries"))
        self._rows = reference.take(became_text(reference, trace.rows("verified", accepted=True)))
        self._told = _told(trace) if "texts" in trace.manifest else None
        twins = _twins(texts, theirs)
        self._pairs = [(twin, texts[mine], theirs[twin]) for mine, twin in twins.items()]
        runs, self._runs = runs_from_start(self._rows), dict[int, Int]()
        for mine, twin in twins.items():
            needed = _true_rows(texts[mine], theirs[twin])
            if needed and len(runs.get(twin, ())) >= needed:
                self._runs[mine] = runs[twin][:needed]

    def has(self, slot: Slot) -> bool:
        return slot.view is View.STREAM and slot.boundary in self._boundaries

    def covers(self, request: int) -> bool:
        return request in self._runs

    def read(self, texts: Mapping[int, Text], slots: Collection[Slot]) -> Mapping[int, Mapping[Slot, Tensor]]:
        runs = {request: self._runs[request] for request in texts}
        rows = self._rows.take(np.concatenate(list(runs.values())))
        return _dealt({slot: rows.tensor("boundaries", f"b{slot.boundary}") for slot in slots}, runs)

    def answered(self) -> Answered:
        """How much of what both runs answered greedily is the same, up to where their texts part.

        Where the other run was given these texts, what it says after each of their tokens counts.
        """
        greedy = [(twin, a, b) for twin, a, b in self._pairs if not (a.temperature or b.temperature)]
        if self._told is not None:
            told = [(mine, self._told[twin]) for twin, mine, _ in greedy if twin in self._told]
            whole = [(mine, best) for mine, best in told if len(best) == len(mine.tokens) - 1]
            equal = sum(_given_again(mine, best) for mine, best in whole)
            return Answered(sum(len(mine.output) for mine, _ in whole), equal)
        parting = [(_shared(a, b) - len(a.prompt), min(len(a.output), len(b.output))) for _, a, b in greedy]
        return Answered(sum(min(same + 1, length) for same, length in parting), sum(same for same, _ in parting))


def _told(trace: Trace) -> dict[int, Tensor]:
    """The best token after each row of the texts that a run was given, by request."""
    rows = trace.rows("emitted", live=True, rank=0)
    best = torch.from_numpy(rows["target_token"].astype(np.int64))
    return {request: best[torch.from_numpy(run)] for request, run in runs_from_start(rows).items()}


def _true_rows(mine: Text, theirs: Text) -> int:
    """For how many positions of a text what another run had of it is true: as far as it goes on as the other's does.

    A text that parts at its first answers has no start that a draft could be judged at.
    """
    shared = _shared(mine, theirs)
    return shared - 1 if shared > len(mine.prompt) + 1 else 0


def _dealt(tensors: Mapping[Slot, Tensor], rows: Mapping[int, Sized]) -> dict[int, dict[Slot, Tensor]]:
    """Tensors over the rows of several requests, one request behind another, as each one's own."""
    lengths = [len(of_one) for of_one in rows.values()]
    parts = {slot: torch.split(tensor, lengths) for slot, tensor in tensors.items()}
    return {request: {slot: part[at] for slot, part in parts.items()} for at, request in enumerate(rows)}


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
    tokens = mine.tokens, theirs.tokens
    if tokens[0] == tokens[1]:
        return len(tokens[0])
    parting = (at for at, (a, b) in enumerate(zip(*tokens, strict=False)) if a != b)
    return next(parting, min(map(len, tokens)))


class Recomputed:
    """The target run again over the texts, once for every call of `read`."""

    def __init__(self, folder: Path, *, dtype: torch.dtype, device: str = "cpu") -> None:
        from spectrace.engine.target import TargetModel

        self.name, self.coarse = f"the target in {folder}, run again", dtype != torch.float32
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
        streams = {slot.boundary for slot in slots if slot.view is not View.BRANCH}
        branches = {slot.boundary for slot in slots if slot.view is View.BRANCH and slot.boundary}
        for group in _groups(texts):
            out = self._run(group, streams | {0}, branches)
            found |= _dealt({slot: self._view(slot, out.boundaries, out.branches) for slot in slots}, group)
        return found

    def answered(self, texts: Mapping[int, Text]) -> Answered:
        """How many of the tokens that were answered greedily it would have answered; of the first texts alone."""
        greedy = {request: text for request, text in texts.items() if not text.temperature}
        equal = tokens = 0
        for group in islice(_groups(greedy), 1):
            chosen = self._run(group, (), ()).logits.argmax(-1).cpu()
            of_each = torch.split(chosen, [len(rows) for rows in group.values()])
            for request, mine in zip(group, of_each, strict=True):
                tokens += len(texts[request].output)
                equal += _given_again(texts[request], mine)
        return Answered(tokens, equal)

    def _run(
        self, texts: Mapping[int, Sequence[int]], boundaries: Collection[int], branches: Collection[int]
    ) -> "TargetRows":
        from spectrace.engine.packing import pack_texts

        self.model.reset()
        out = self.model.forward(pack_texts(texts), boundaries=boundaries, branches=branches)
        self.model.reset()
        return out

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


def _groups(texts: Mapping[int, Text]) -> Iterator[dict[int, Sequence[int]]]:
    """All tokens of each text but its last, in groups of about so many rows that their logits stay small."""
    from spectrace.engine.packing import grouped

    return grouped({request: text.tokens[:-1] for request, text in texts.items()}, _ROWS_AT_ONCE)


def _given_again(text: Text, chosen: Tensor) -> int:
    """How many of an answer's tokens are those that were chosen after the token before them [P]."""
    return int((chosen[len(text.prompt) - 1 :] == torch.tensor(text.output)).sum())


class Delivered:
    """What the draft was delivered, taken at its word: each slot for the boundary that it is configured to hold."""

    def __init__(self, trace: Trace, wiring: Sequence[Slot], width: int) -> None:
        self.name = "what the draft was delivered, taken for its configured boundaries"
        self.coarse = served_dtype(trace) != torch.float32
        self.wiring, self.width = tuple(wiring), width
        rows = trace.rows("received", live=True, depth=0, rank=0)
        self._rows = rows.take(rows.has("features"))
        self._runs = runs_from_start(self._rows)

    def has(self, slot: Slot) -> bool:
        return slot in self.wiring

    def covers(self, request: int) -> bool:
        return request in self._runs

    def read(self, texts: Mapping[int, Text], slots: Collection[Slot]) -> Mapping[int, Mapping[Slot, Tensor]]:
        runs = {request: self._runs[request][: len(text.tokens) - 1] for request, text in texts.items()}
        rows = self._rows.take(np.concatenate(list(runs.values())))
        parts = torch.split(rows.tensor("features"), self.width, dim=1)
        return _dealt({slot: parts[self.wiring.index(slot)] for slot in slots}, runs)

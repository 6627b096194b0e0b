"""What the target itself says of some texts' hidden states: which boundary each tensor is, and how its rows stand.

A few rows are run through the target, layer by layer, and every tensor is held against every boundary, and against the
last one with the final norm behind it, at three alignments. An error is max|Δ| over the row's max|true|, the median
over rows. Beside that, two tests of the last state: with the norm's weights taken away, rows of a normed state have
RMS 1; and the head finds the next token in it, at the right alignment.

Shapes: T rows of a text, F target width, V vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from spectrace.engine.packing import PackedRows, grouped, pack_texts
from spectrace.engine.target import TargetModel
from spectrace.replay.compare import row_error
from spectrace.replay.configuration import Slot, View
from spectrace.replay.dumps.sample import Norm, Sample
from spectrace.tracer.errors import UserError

__all__ = ["SHIFTS", "Match", "Measured", "Target", "measure"]

SHIFTS = (0, -1, 1)
_ROWS, _ROWS_AT_ONCE = 256, 512
_NEAR, _CLEAR = 0.12, 3.0


class Target(Protocol):
    """A target that can be run layer by layer."""

    layers: int
    width: int
    vocab: int
    dtype: torch.dtype
    target: TargetModel

    def boundaries(self, groups: Sequence[PackedRows]) -> Iterator[tuple[int, list[Tensor]]]: ...

    def logits(self, groups: Sequence[PackedRows], last: Sequence[Tensor]) -> Iterator[Tensor]: ...


@dataclass(frozen=True, slots=True)
class Match:
    """The best fit of one tensor of one text: row t is `slot` of token t + `shift`.

    The next best are another slot, and the same one with rows moved otherwise; an error is infinite where there are too
    few rows to compare.
    """

    slot: Slot
    shift: int
    error: float
    next_slot: Slot
    next_error: float
    moved_error: float

    @property
    def near(self) -> bool:
        """Whether it can be meant at all."""
        return self.error <= _NEAR

    @property
    def nowhere(self) -> bool:
        """Whether it is something else than any boundary."""
        return _NEAR < self.error < float("inf")

    @property
    def told(self) -> bool:
        """Whether no other slot comes close."""
        return self.near and self.next_error > _CLEAR * self.error

    @property
    def aligned(self) -> bool:
        """Whether no other alignment comes close."""
        return self.near and self.moved_error > _CLEAR * self.error


@dataclass(frozen=True, slots=True)
class Measured:
    """Of some texts, in their order: the match of each slot and of the last state, and which tokens the target says.

    `said` [T] is true where a token is the target's best after those before it. `rms_off` is how far a row of the last
    state is from RMS 1 at worst, and `heads` how many next tokens the head finds in it, of how many: for each norm and
    alignment, over all texts.
    """

    layers: int
    rows: int
    slots: tuple[tuple[Match, ...], ...]
    last: tuple[Match | None, ...]
    said: tuple[Tensor, ...]
    rms_off: float | None = None
    heads: Mapping[tuple[Norm, int], tuple[int, int]] = field(default_factory=dict)


def measure(samples: Sequence[Sample], target: Target) -> Measured:
    """Run the target over the first rows of some texts; raises UserError where it cannot be of these states."""
    _check(samples, target)
    texts = {at: sample.tokens[:_ROWS].tolist() for at, sample in enumerate(samples)}
    groups = [pack_texts(group) for group in grouped(texts, _ROWS_AT_ONCE)]
    lengths = [len(text) for text in texts.values()]
    fits = [[_Fit() for _ in _tensors(sample)] for sample in samples]
    hidden: list[Tensor] = []
    for boundary, hidden in target.boundaries(groups):
        for slot, true in _views(target, boundary, torch.cat(hidden)):
            for sample, part, of_text in zip(samples, torch.split(true, lengths), fits, strict=True):
                for tensor, fit in zip(_tensors(sample), of_text, strict=True):
                    fit.add(slot, tensor[:_ROWS].float(), part)
    last, bare = _last(samples, target)
    best = [
        torch.split(one, lengths)
        for one in _best(target, groups, torch.cat(hidden), *([last, bare] if len(last) else []))
    ]
    found = [[fit.match() for fit in of_text] for of_text in fits]
    tokens = [torch.tensor(text) for text in texts.values()]
    return Measured(
        layers=target.layers,
        rows=sum(lengths),
        slots=tuple(tuple(of_text[: len(one.slots)]) for one, of_text in zip(samples, found, strict=True)),
        last=tuple(of_text[-1] if one.last is not None else None for one, of_text in zip(samples, found, strict=True)),
        said=tuple(
            torch.cat((torch.tensor([False]), mine[:-1] == text[1:]))
            for mine, text in zip(best[0], tokens, strict=True)
        ),
        rms_off=float((bare.square().mean(1).sqrt() - 1).abs().max()) if len(bare) else None,
        heads={
            (norm, shift): _hits(mine, tokens, shift + 1)
            for norm, mine in zip((Norm.PRE, Norm.POST), best[1:], strict=False)
            for shift in SHIFTS
        },
    )


class _Fit:
    """The error of one tensor against everything that was met so far."""

    def __init__(self) -> None:
        self._errors: dict[tuple[Slot, int], float] = {}

    def add(self, slot: Slot, mine: Tensor, true: Tensor) -> None:
        for shift in SHIFTS:
            a, b = (mine[-shift:], true[:shift]) if shift < 0 else (mine[: len(mine) - shift], true[shift:])
            self._errors[slot, shift] = float(row_error(b, a).median()) if len(a) > 1 else float("inf")

    def match(self) -> Match:
        (slot, shift), error = min(self._errors.items(), key=lambda item: item[1])
        others = [(err, other) for (other, _), err in self._errors.items() if other != slot]
        next_error, next_slot = min(others, key=lambda one: one[0])
        moved = min(err for (other, by), err in self._errors.items() if other == slot and by != shift)
        return Match(slot, shift, error, next_slot, next_error, moved)


def _tensors(sample: Sample) -> tuple[Tensor, ...]:
    return sample.slots if sample.last is None else (*sample.slots, sample.last)


def _check(samples: Sequence[Sample], target: Target) -> None:
    for sample in samples:
        if (width := sample.slots[0].shape[1]) != target.width:
            raise UserError(
                f"{sample.path}: found hidden states of {width} columns, expected the target's {target.width}; give "
                f"the target that they are of, or none"
            )
        if (token := int(sample.tokens.max())) >= target.vocab:
            raise UserError(
                f"{sample.path}: found token {token}, expected one of the target's, 0 to {target.vocab - 1}; give the "
                f"target that they are of, or none"
            )


def _views(target: Target, boundary: int, hidden_TF: Tensor) -> Iterator[tuple[Slot, Tensor]]:
    """What a tensor may be at a boundary: the stream, and behind the last layer the stream after the norm, too."""
    yield Slot(boundary), hidden_TF.float()
    if boundary == target.layers:
        yield Slot(boundary, View.NORMED), _normed(target, hidden_TF).float()


@torch.inference_mode()
def _normed(target: Target, hidden_TF: Tensor) -> Tensor:
    normed: Tensor = target.target.norm(hidden_TF.to(target.target.device)).cpu()
    return normed


def _last(samples: Sequence[Sample], target: Target) -> tuple[Tensor, Tensor]:
    """The last states of all texts [T, F], and the same without the norm's weights; empty where there are none.

    The norm of a row of RMS 1 is its weights, row by row: so a normed state whose weights are taken away passes through
    the norm as it was, and the head reads it as if there were no norm before it.
    """
    last = [sample.last[:_ROWS].float() for sample in samples if sample.last is not None]
    if len(last) < len(samples):
        return torch.empty(0), torch.empty(0)
    weights = _normed(target, torch.ones(1, target.width, dtype=target.dtype)).float()
    return torch.cat(last), torch.cat(last) / torch.where(weights == 0, torch.ones_like(weights), weights)


def _best(target: Target, groups: Sequence[PackedRows], *states: Tensor) -> list[Tensor]:
    """The best token after each row [T], of each of several tensors that might leave the last layer [T, F]."""
    lengths = [len(group) for group in groups]
    parts = [part for one in states for part in torch.split(one.to(target.dtype), lengths)]
    best = [logits.argmax(-1).cpu() for logits in target.logits(list(groups) * len(states), parts)]
    return [torch.cat(best[at : at + len(groups)]) for at in range(0, len(best), len(groups))]


def _hits(best: Sequence[Tensor], tokens: Sequence[Tensor], ahead: int) -> tuple[int, int]:
    """How many rows name the token that stands so far ahead of them, and of how many."""
    named = [mine[: len(text) - ahead] == text[ahead:] for mine, text in zip(best, tokens, strict=True)]
    return sum(int(one.sum()) for one in named), sum(map(len, named))

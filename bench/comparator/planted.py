"""The differences that are planted in the second run, each one of its kind, and what would count as naming it.

Either tool names one where the first thing that differs says by its name what is wrong: one of `columns` for ours, one
of `tensors` for SGLang's comparator. Ours also does where a sentence of its report matches `says`; SGLang's has none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from comparator.tensors import DEPTH, Flaw, Run
from torch import Tensor

__all__ = ["PLANTED", "Planted"]

_STEP, _REQUEST, _PASS = 8, 3, 5


@dataclass(frozen=True, slots=True)
class Planted:
    """`flaw` is what the second run has; `says` a pattern."""

    number: str
    title: str
    flaw: Flaw
    says: str = ""
    columns: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()


def _blocks(runs: Sequence[Run]) -> list[slice]:
    """Where each run's accepted rows lie."""
    ends = torch.tensor([run.accepted for run in runs]).cumsum(0).tolist()
    return [slice(end - run.accepted, end) for end, run in zip(ends, runs, strict=True)]


def _swapped(step: int, runs: Sequence[Run], rows_TSF: Tensor, _before: Tensor) -> Tensor:
    if step == _STEP:
        a, b = next(
            (_blocks(runs)[a], _blocks(runs)[b])
            for b in range(len(runs))
            for a in range(b)
            if runs[a].accepted == runs[b].accepted
        )
        rows_TSF[a], rows_TSF[b] = rows_TSF[b].clone(), rows_TSF[a].clone()
    return rows_TSF


def _stale(step: int, _runs: Sequence[Run], rows_TSF: Tensor, before_TSF: Tensor) -> Tensor:
    """As far as the buffer was filled."""
    return torch.cat([before_TSF, rows_TSF[len(before_TSF) :]])[: len(rows_TSF)] if step == _STEP else rows_TSF


def _normed(_step: int, _runs: Sequence[Run], rows_TSF: Tensor, _before: Tensor) -> Tensor:
    last = rows_TSF[:, -1].float()
    rows_TSF[:, -1] = (last * last.square().mean(-1, keepdim=True).rsqrt()).to(rows_TSF.dtype)
    return rows_TSF


def _tail(_step: int, runs: Sequence[Run], rows_TSF: Tensor, _before: Tensor) -> Tensor:
    for run, block in zip(runs, _blocks(runs), strict=True):
        if run.request.number == _REQUEST and run.pass_ == 0:
            rows_TSF[block.stop - 1] = 0
    return rows_TSF


def _bit(step: int, _runs: Sequence[Run], rows_TSF: Tensor, _before: Tensor) -> Tensor:
    if step == _STEP:
        rows_TSF.view(torch.int16)[1, 1, 17] ^= 4
    return rows_TSF


def _decision(run: Run, depth: int, token: int, right: list[bool]) -> int:
    """At the end of a chain that is rejected before it: no text changes."""
    if (run.request.number, run.pass_, depth) != (_REQUEST, _PASS, DEPTH - 1):
        return token
    assert not all(right[:-1])
    return token + 1


PLANTED: Final = (
    Planted(
        "1", "two requests' rows swapped in one step", Flaw(deliver=_swapped), r"row of another request"
    ),
    Planted(
        "2", "slots 0 and 1 swapped",
        Flaw(deliver=lambda step, runs, rows_TSF, before: rows_TSF[:, [1, 0, 2]].contiguous()),
        r"slot 0 of B is slot 1 of A",
    ),
    Planted(
        "3", "one step's features are those of the step before", Flaw(deliver=_stale),
        r"step before|(earlier|previous) step",
    ),
    Planted("4", "every slot from one layer further", Flaw(layer_offset=1), r"is boundary|layer"),
    Planted(
        "5", "positions of drafted rows one too high", Flaw(place=lambda depth, position: position + (depth > 0)),
        columns=("position",), tensors=("positions",),
    ),
    Planted(
        "6", "draft is fed its own position's token", Flaw(feed=lambda run, tokens: run.tokens[: run.accepted]),
        columns=("token",), tensors=("input_ids",),
    ),
    Planted(
        "7", "features cast to fp8 and back",
        Flaw(deliver=lambda step, runs, rows_TSF, before: rows_TSF.to(torch.float8_e4m3fn).to(rows_TSF.dtype)),
        r"float8|fp8",
    ),
    Planted("8", "slot 2 normed", Flaw(deliver=_normed), r"normed|norm\b|each row scaled on its own"),
    Planted("9", "last row of a chunk of a prompt is zeros", Flaw(deliver=_tail), r"zeros"),
    Planted(
        "10a", "one drafted token changed", Flaw(answer=_decision),
        columns=("draft_token", "answer"), tensors=("draft_ids",),
    ),
    Planted("10b", "one bit of one element flipped", Flaw(deliver=_bit), r"1 bits at most"),
)  # fmt: skip

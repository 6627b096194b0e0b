"""What a draft can be fed for whole texts, read from a trace: true boundaries (`reference`), or what it was delivered.

Shapes: A slots, F target width, P rows of a text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from spectrace.replay.inputs import Int, places, runs_from_start
from spectrace.replay.texts import Text
from spectrace.tracer.errors import UserError
from spectrace.tracer.rowset import Rows
from spectrace.tracer.trace import Trace

__all__ = [
    "Fed", "GivenRows", "TextFeatures", "became_text", "blocks", "first_rows", "received_features",
    "reference_features", "tokens_and_positions",
]  # fmt: skip

_BLOCK_ROWS = 4096
_Fed = TypeVar("_Fed", bound="Fed")


class Fed(Protocol):
    """One request's text with what a draft is fed for its first positions: `load` gives them, [P, A*F]."""

    @property
    def request(self) -> int: ...

    @property
    def text(self) -> Text: ...

    def __len__(self) -> int: ...

    def load(self) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class TextFeatures:
    """One request's text, and the rows of its features by position from 0."""

    request: int
    text: Text
    rows: Rows
    wiring: tuple[int, ...] | None

    def __len__(self) -> int:
        return len(self.rows)

    def load(self) -> Tensor:
        """The features [P, A*F]."""
        if self.wiring is None:
            return self.rows.tensor("features")
        return torch.cat([self.rows.tensor("boundaries", f"b{boundary}") for boundary in self.wiring], dim=-1)


@dataclass(frozen=True, slots=True)
class GivenRows:
    """One request's text, and what is given at its first positions: features, tokens, positions."""

    request: int
    text: Text
    rows: Rows
    tokens: Int
    positions: Int

    def __len__(self) -> int:
        return len(self.tokens)

    def load(self) -> Tensor:
        """The features [P, A*F]."""
        return self.rows.tensor("features")


def tokens_and_positions(one: Fed) -> tuple[Int, Int]:
    """What a draft is given beside the features [P]: what it says, else the token after each position, and that."""
    if isinstance(one, GivenRows):
        return one.tokens, one.positions
    return np.array(one.text.tokens[1 : len(one) + 1], np.int64), np.arange(len(one))


def reference_features(trace: Trace, texts: Mapping[int, Text], wiring: Sequence[int]) -> list[TextFeatures]:
    """True boundaries for every position but the last of each text.

    Raises UserError when the trace has no reference rows, lacks one of the boundaries, or has no whole request.
    """
    reference = trace.rows("reference", live=True, rank=0)
    if not len(reference):
        raise UserError(f"{trace.folder}: no reference rows in it; record again with --capture {_listed(wiring)}")
    kept = {int(b) for facts in trace.writers.values() for b in facts.get("capture", ())}
    if missing := sorted(set(wiring) - kept):
        raise UserError(
            f"{trace.folder}: reference holds boundaries {_listed(sorted(kept))}, not {_listed(missing)}; "
            f"record again with --capture {_listed(sorted(kept | set(wiring)))}"
        )
    reference = reference.take(became_text(reference, trace.rows("verified", accepted=True)))
    needed = {request: len(text.tokens) - 1 for request, text in texts.items() if len(text.output) > 1}
    found = first_rows(reference, needed)
    if not found:
        raise UserError(
            f"{trace.folder}: no answer of two tokens or more has reference rows for its whole text; record longer ones"
        )
    return [TextFeatures(request, texts[request], rows, tuple(wiring)) for request, rows in found]


def received_features(trace: Trace, texts: Mapping[int, Text], depth: int) -> list[TextFeatures]:
    """What the draft was delivered, for every position below which a round of `depth` fits into the text.

    Rows past the last round were never delivered. Answers into which no such round fits are left out.
    """
    received = trace.rows("received", live=True, depth=0, rank=0)
    long = {request: text for request, text in texts.items() if len(text.output) > depth + 1}
    found = first_rows(received, {request: len(text.tokens) - depth - 1 for request, text in long.items()})
    return [TextFeatures(request, texts[request], rows, None) for request, rows in found]


def blocks(found: Sequence[_Fed]) -> list[list[_Fed]]:
    """Texts in groups of about as many rows, so that memory stays flat."""
    ends = list(accumulate(len(one) for one in found))
    groups: dict[int, list[_Fed]] = {}
    for one, end in zip(found, ends, strict=True):
        groups.setdefault(end // _BLOCK_ROWS, []).append(one)
    return list(groups.values())


def first_rows(rows: Rows, needed: Mapping[int, int]) -> list[tuple[int, Rows]]:
    """The first `needed` rows of each request, of those that have them all."""
    runs = runs_from_start(rows)
    whole = [(request, count) for request, count in needed.items() if len(runs.get(request, ())) >= count]
    return [(request, rows.take(runs[request][:count])) for request, count in whole]


def became_text(reference: Rows, accepted: Rows) -> np.ndarray:
    """Rows outside rounds (prompts, plain decoding), and those of a round that its verification accepted."""
    judged = places(
        [accepted[name] for name in ("request", "pass", "source_row")],
        [reference[name] for name in ("request", "pass", "node")],
    )
    return np.asarray((reference["round"] < 0) | (judged >= 0))


def _listed(boundaries: Sequence[int]) -> str:
    return ",".join(map(str, boundaries))

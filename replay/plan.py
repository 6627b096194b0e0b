"""Which requests of a trace serve for what in a diagnosis: settled before anything is run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spectrace.replay.inputs import Served
from spectrace.replay.truth import TrueText, Truth

__all__ = ["TRUE_ROWS", "Plan", "enough", "first_requests", "make_plan"]

_ENGINE_ROWS = 2048  # depth-0 rows on which hypotheses about the engine are tried
_CHOOSING_ROWS, TRUE_ROWS = 768, 6144  # true rows on which training is read, and on which acceptance is foretold
_TRUE_BYTES = 384 << 20
_FEWEST_ANSWERS = 64  # tokens of answers; of fewer nothing is sure


@dataclass(frozen=True, slots=True)
class Plan:
    """Requests by number. What the draft was trained for is chosen on some requests and confirmed on others."""

    engine: tuple[int, ...]
    choosing: tuple[int, ...]
    confirming: tuple[int, ...]
    foretelling: tuple[int, ...]

    def to_json(self) -> dict[str, int]:
        """How many requests serve for what."""
        names = ("engine", "choosing", "confirming", "foretelling")
        return {name: len(getattr(self, name)) for name in names}


def make_plan(served: Served | None, truth: Truth, *, width: int) -> Plan:
    """For a target of this width. Halves alternate by request, so that both see the whole time of the trace."""
    lengths = {request: len(text.tokens) for request, text in sorted(truth.texts.items())}
    rows = _TRUE_BYTES // max(4 * width * len(truth.known() or [0]), 1)
    halves = list(lengths)[::2], list(lengths)[1::2]
    choosing = first_requests({request: lengths[request] for request in halves[0]}, min(rows // 3, _CHOOSING_ROWS))
    confirming = first_requests(
        {request: lengths[request] for request in halves[1]}, min(2 * rows // 3, 2 * _CHOOSING_ROWS)
    )
    return Plan(
        engine=first_requests(_draft_rows(served), _ENGINE_ROWS) if served else (),
        choosing=choosing,
        confirming=confirming,
        foretelling=first_requests(lengths, TRUE_ROWS),
    )


def enough(texts: Sequence[TrueText]) -> bool:
    """Whether so much of the answers is known that anything can be sure."""
    return sum(len(one.text.output) for one in texts) >= _FEWEST_ANSWERS


def _draft_rows(served: Served) -> dict[int, int]:
    """How many depth-0 rows each replayable request has."""
    requests, counts = np.unique(served.received["request"][served.received["depth"] == 0], return_counts=True)
    found = dict(zip(requests.tolist(), counts.tolist(), strict=True))
    return {request: found.get(request, 0) for request in served.requests.tolist()}


def first_requests(lengths: Mapping[int, int], rows: int) -> tuple[int, ...]:
    """The first requests with about so many rows, one at least."""
    found, total = list[int](), 0
    for request, length in lengths.items():
        if found and total + length > rows:
            break
        found.append(request)
        total += length
    return tuple(found)

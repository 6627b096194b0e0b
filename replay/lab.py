"""Replay of a whole trace: in blocks, compared as it goes, with the acceptance that the replayed drafts come to."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from spectrace.engine.draft import DraftModel
from spectrace.replay.compare import Comparison
from spectrace.replay.inputs import DraftInputs, Served, read_served
from spectrace.replay.replay import DepthOutput, replay_inputs
from spectrace.replay.texts import Text, read_texts
from spectrace.replay.walk import MissingDrafts, Walk, walk, walk_acceptance
from spectrace.tracer.acceptance import Acceptance, acceptance_of_rows
from spectrace.tracer.errors import UserError
from spectrace.tracer.trace import Trace

__all__ = ["ReplayReport", "replay_trace"]

_BLOCK_ROWS = 4096


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """Replay against record, and over the requests that can be walked to their end, acceptance served and replayed.

    `incomplete` requests were not replayed, since their first draft rows are not in the trace.
    """

    comparison: Comparison
    served: Acceptance
    replayed: Acceptance
    requests: int
    incomplete: int


def replay_trace(
    trace: Trace,
    model: DraftModel,
    *,
    block_rows: int = _BLOCK_ROWS,
    progress: Callable[[int, int], None] | None = None,
) -> ReplayReport:
    """Replay every request that is whole; `progress` is told (requests done, requests in all).

    Raises UserError when the trace holds no request that can be replayed, or features that do not fit the draft.
    """
    served, texts = read_served(trace), read_texts(trace)
    if not len(served.requests):
        raise UserError(f"{trace.folder}: no request has all its draft rows from position 0; record whole requests")
    _check_width(trace, served, model)
    comparison, walks, done = Comparison(), dict[int, Walk](), 0
    for requests in served.blocks(block_rows):
        inputs = served.inputs(requests)
        drafts: dict[int, dict[int, list[int]]] = {}
        for rows, output in zip(inputs.depths, replay_inputs(model, inputs), strict=True):
            comparison.add(rows, output)
            _collect(drafts, inputs, output, texts)
        for request in sorted(texts.keys() & set(requests.tolist())):
            with suppress(MissingDrafts):  # torn: the request is left out on both sides
                walks[request] = walk(drafts.get(request, {}), texts[request].output)
        done += len(requests)
        if progress:
            progress(done, len(served.requests))
    if not comparison.answers:
        raise UserError(f"{trace.folder}: no draft token was recorded, so there is nothing to compare replay with")
    return ReplayReport(
        comparison,
        acceptance_of_rows(trace.rows("verified", request=list(walks))),
        walk_acceptance(list(walks.values()), max((texts[request].depth for request in walks), default=0)),
        len(served.requests),
        len(served.incomplete),
    )


def _check_width(trace: Trace, served: Served, model: DraftModel) -> None:
    zero = served.received.take(np.flatnonzero(served.received["depth"] == 0)[:1])
    if not zero.has("features").all():
        raise UserError(
            f"{trace.folder}: recorded at level light, without features; replay needs level features or full"
        )
    found, wanted = zero.tensor("features").shape[1], model.spec.features_width
    if found != wanted:
        raise UserError(
            f"{trace.folder}: received features are {found} wide, but this draft's fc takes {wanted}: "
            f"the trace is of another draft"
        )


def _collect(
    drafts: dict[int, dict[int, list[int]]], inputs: DraftInputs, output: DepthOutput, texts: Mapping[int, Text]
) -> None:
    """Note the replayed tokens under the round start t that they belong to: the base row p drafts for t = p + 2 - P."""
    rows, zero = inputs.depths[output.depth], inputs.depths[0]
    owners = rows.received["request"][rows.answering].tolist()
    positions = zero.positions[rows.bases[rows.answering]].tolist()
    for owner, position, token in zip(owners, positions, output.tokens.tolist(), strict=True):
        if owner in texts:
            start = position + 2 - len(texts[owner].prompt)
            drafts.setdefault(owner, {}).setdefault(start, []).append(token)

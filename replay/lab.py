"""Replay of a whole trace: in blocks, compared as it goes, with the acceptance that the replayed drafts come to."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from spectrace.engine.draft import DraftModel
from spectrace.engine.tree import Tree
from spectrace.replay.compare import TOLERANCE, Comparison, Drawn, tolerance_of
from spectrace.replay.expected import ExpectedWalk, drafts_were_drawn, expected_walk
from spectrace.replay.inputs import Served, places, read_served
from spectrace.replay.replay import replay_inputs
from spectrace.replay.texts import Text, read_texts
from spectrace.replay.trees import Regrowth, served_shape
from spectrace.replay.walk import MissingDrafts, Walk, walk, walk_acceptance
from spectrace.tracer.acceptance import Acceptance, acceptance_of_rows
from spectrace.tracer.errors import UserError
from spectrace.tracer.rowset import Rows
from spectrace.tracer.trace import Trace

__all__ = ["ReplayReport", "read_drawn", "replay_trace"]

_BLOCK_ROWS = 4096


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """Replay against record, and over the requests that can be walked to their end, acceptance served and replayed.

    Drafts that were drawn walk differently each time: `replayed` is None and `expected` says what they come to.
    `incomplete` requests were not replayed, since their first draft rows are not in the trace.
    """

    comparison: Comparison
    served: Acceptance
    replayed: Acceptance | None
    requests: int
    incomplete: int
    expected: ExpectedWalk | None = None

    tolerance: float = TOLERANCE

    @property
    def agrees(self) -> bool:
        """Whether replay found what was served: tensors to within what rounding does, every token, the same rounds.

        Of drawn drafts, a served length that they may come to.
        """
        if (self.comparison.max_error or 0.0) > self.tolerance:
            return False
        if self.expected:
            return self.expected.low <= self.expected.served <= self.expected.high
        walked = [(one.rounds, one.correct_drafts) for one in (self.served, self.replayed) if one]
        return self.comparison.tokens_equal == self.comparison.answers and len(set(walked)) == 1


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
    served, texts, shape = read_served(trace), read_texts(trace), served_shape(trace)
    if not len(served.requests):
        raise UserError(f"{trace.folder}: no request has all its draft rows from position 0; record whole requests")
    _check_width(trace, served, model)
    drawn = read_drawn(trace, served.drafted, texts)
    comparison, walks, done = Comparison(drawn=drawn), dict[int, Walk](), 0
    for requests in served.blocks(block_rows):
        inputs = served.inputs(requests)
        regrowth = Regrowth(model, inputs, shape)
        for rows, output in zip(inputs.depths, replay_inputs(model, inputs), strict=True):
            comparison.add(rows, output)
            regrowth.add(rows, output)
        drafts: dict[int, dict[int, Tree]] = {}
        for request, position, tree in regrowth.trees():
            if request in texts:
                drafts.setdefault(request, {})[position + 2 - len(texts[request].prompt)] = tree
        for request in sorted(texts.keys() & set(requests.tolist())):
            with suppress(MissingDrafts):  # torn: the request is left out on both sides
                walks[request] = walk(drafts.get(request, {}), texts[request].output)
        done += len(requests)
        if progress:
            progress(done, len(served.requests))
    if not (comparison.answers or comparison.stages):
        raise UserError(f"{trace.folder}: nothing is recorded of its draft tokens that replay could be compared with")
    expected = expected_walk(trace, model) if drawn else None
    verified = trace.rows("verified") if drawn else trace.rows("verified", request=list(walks))
    return ReplayReport(
        comparison,
        acceptance_of_rows(verified, depth=shape.depth),
        None if drawn else walk_acceptance(list(walks.values()), shape.depth),
        len(served.requests),
        len(served.incomplete),
        expected,
        tolerance_of(next(model.parameters()).dtype),
    )


def read_drawn(trace: Trace, drafted: Rows, texts: Mapping[int, Text]) -> Drawn | None:
    """The probabilities that these drawn drafts had, None where drafts were chosen.

    Of a draft whose id in the draft's vocabulary was not recorded there is nothing to compare.
    """
    if not drafts_were_drawn(trace):
        return None
    drafted = drafted.take(drafted["draft_token"] >= 0)
    verified = trace.rows("verified", request=np.unique(drafted["request"]))
    request, round_, depth = (drafted[name].astype(np.int64) for name in ("request", "round", "depth"))
    at = places([verified[name] for name in ("request", "round", "node")], [request, round_, depth + 1])
    keys = zip(*(column[at >= 0].tolist() for column in (request, round_, depth)), strict=True)
    q = dict(zip(keys, verified["q"][at[at >= 0]].tolist(), strict=True))
    told = trace.manifest.get("serving", {}).get("sampling", {}).get("temperature")
    temperature = {request: told for request, _, _ in q if told}  # of requests that have not finished
    return Drawn(temperature | {request: text.temperature for request, text in texts.items()}, q)


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

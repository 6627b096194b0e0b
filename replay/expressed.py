"""The acceptance that a trace shows, in every definition that it can be said in, and why in no other.

Engines count every round; spectrace leaves out those that an end cut. Both are said.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from spectrace.replay.metric import Given, Group, Measured, Metric, Value
from spectrace.replay.metric_refusals import refusal
from spectrace.replay.metrics import METRICS, convert
from spectrace.tracer.acceptance import Acceptance, acceptance_of_rows
from spectrace.tracer.errors import UserError
from spectrace.tracer.rowset import Rows
from spectrace.tracer.trace import Trace

__all__ = ["Expressed", "Expression", "expressed"]

_PER_REQUEST, _CHANCES = "sglang.request_length", "greedy.alpha"


@dataclass(frozen=True, slots=True)
class Expression:
    """One definition on one trace: over whole rounds, and over every round; or why it has no value.

    Of a definition that is of one request there are as many values as requests.
    """

    metric: Metric
    whole: Value | None
    every: Value | None
    why: str | None

    def to_json(self) -> dict[str, Any]:
        names = [str(name) for name in self.metric.names]
        return {"key": self.metric.key, "names": names, "whole": self.whole, "every": self.every, "why": self.why}


@dataclass(frozen=True, slots=True)
class Expressed:
    """A trace's acceptance by every definition; rounds draft `depth` tokens in a row and verify `nodes`, or various."""

    depth: int
    nodes: tuple[int, ...]
    tree: bool
    rounds: int
    rounds_cut: int
    expressions: tuple[Expression, ...]

    def to_json(self) -> dict[str, Any]:
        held = {name: getattr(self, name) for name in self.__slots__ if name != "expressions"}
        return {**held, "metrics": [one.to_json() for one in self.expressions]}


class _Known(NamedTuple):
    """What some rounds show: counts, from which all else follows, and chances or why there are none."""

    counts: Mapping[str, Value]
    chances: Value | str


def expressed(trace: Trace) -> Expressed | None:
    """None where nothing was verified."""
    verified = trace.rows("verified")
    if not len(verified):
        return None
    limit = int(trace.rows("requests")["depth_limit"].max(initial=0)) or None
    whole, every = (acceptance_of_rows(verified, depth=limit, with_cut=with_cut) for with_cut in (False, True))
    depth, nodes = len(every.cumulative_rates), _nodes(verified)
    node = verified["node"].astype(np.int64)
    tree = bool((verified["parent"] != node - 1).any())
    given = Given(depth, nodes[0] if len(nodes) == 1 else None)
    known = [
        _Known(_counts(rounds, len(rows)), _chances(rows, tree=tree, depth=depth))
        for rounds, rows in ((whole, verified.where(cut=False)), (every, verified))
    ]
    requests = _request_lengths(trace.rows("requests"))
    found = [_expression(metric, known, given, requests) for metric in METRICS.values()]
    return Expressed(depth, nodes, tree, every.rounds, whole.rounds_cut, tuple(found))


def _nodes(verified: Rows) -> tuple[int, ...]:
    """How many nodes rounds verify, the root included: one number, unless they differ."""
    columns = [verified[name].astype(np.int64) for name in ("incarnation", "request", "round")]
    _, sizes = np.unique(np.stack(columns, axis=1), axis=0, return_counts=True)
    return tuple(np.unique(sizes).tolist())


def _counts(found: Acceptance, rows: int) -> dict[str, Value]:
    """What engines count; nothing where there are no rounds."""
    if not found.rounds:
        return {}
    reached = [found.rounds, *(round((rate or 0.0) * found.rounds) for rate in found.cumulative_rates), 0]
    tally = tuple(float(one - after) for one, after in pairwise(reached))
    return {
        "vllm.counters": (float(found.rounds), float(rows - found.rounds), float(found.correct_drafts)),
        "sglang.histogram": tally,
    }


def _chances(rows: Rows, *, tree: bool, depth: int) -> Value | str:
    """The target's probability of the draft's best token at every depth that was tested; or why there is none."""
    node, p = rows["node"].astype(np.int64), rows["p"]
    tested = (node > 0) & np.isfinite(p)
    if tree:
        return "a tree tests several tokens at a place, and the draft's best is one of them"
    if not tested.any():
        return "the target's probability of a draft is not recorded; at temperature 0 none plays a part"
    if (rows["q"][tested] < 1).any():
        return "these drafts were drawn: they are not the draft's best tokens"
    means = (p[tested & (node == at + 1)] for at in range(depth))
    return tuple(float(one.mean()) if len(one) else None for one in means)


def _request_lengths(requests: Rows) -> tuple[float, ...]:
    pairs = zip(requests["output_tokens"], requests["rounds"].tolist(), strict=True)
    return tuple(len(output) / rounds for output, rounds in pairs if rounds > 0)


def _expression(metric: Metric, known: Sequence[_Known], given: Given, requests: tuple[float, ...]) -> Expression:
    if metric.key == _PER_REQUEST:
        return Expression(metric, None, requests or None, None if requests else "no finished request is recorded")
    if metric.measured is Measured.TEACHER_FORCED or (metric.group is Group.PROBABILITIES and metric.key != _CHANCES):
        return Expression(metric, None, None, str(refusal(METRICS["cumulative"], metric, given)))
    found = [one.chances if metric.key == _CHANCES else _value(metric.key, one.counts, given) for one in known]
    whole, every = (None if isinstance(one, str) else one for one in found)
    return Expression(metric, whole, every, found[1] if isinstance(found[1], str) else None)


def _value(key: str, counts: Mapping[str, Value], given: Given) -> Value | str:
    """From the first of the counts that converts; else why none does."""
    why = "there is no such round"
    for source, value in counts.items():
        try:
            return convert(value, source, key, depth=given.depth, num_draft_tokens=given.nodes)
        except UserError as error:
            why = str(refusal(METRICS[source], METRICS[key], given) or error.message)
    return why

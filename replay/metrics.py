"""The vocabulary of metrics: every definition of accuracy and acceptance length in use, and what converts exactly.

What does not convert is refused with the reason (`metric_refusals`): an estimate in the place of an exact number is how
published numbers went wrong. `docs/metrics.md` has examples.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

from spectrace.replay.metric import Given, Metric, Value, checked
from spectrace.replay.metric_refusals import ANOTHER_DEPTH, refusal
from spectrace.replay.metrics_served import SERVED
from spectrace.replay.metrics_trained import TRAINED
from spectrace.tracer.errors import UserError

__all__ = ["CONVERSIONS", "METRICS", "Conversion", "conditional_of", "convert", "cumulative_of", "length_of", "route"]

METRICS: Mapping[str, Metric] = {metric.key: metric for metric in (*TRAINED, *SERVED)}
"""By key, which begins with a project's name where that project alone counts so."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """One exact step. `needs` names the field of `Given` without which it cannot be, `holds` where it is exact if that
    is not everywhere.
    """

    source: str
    to: str
    formula: str
    run: Callable[[Any, Given], Value]
    needs: str | None = None
    holds: str | None = None

    def possible(self, given: Given) -> bool:
        return self.needs is None or getattr(given, self.needs) is not None

    def to_json(self) -> dict[str, str | None]:
        return {name: getattr(self, name) for name in ("source", "to", "formula", "needs", "holds")}


def cumulative_of(conditional: Sequence[float | None]) -> tuple[float, ...]:
    """Products; nothing comes after a 0, where a conditional rate is None."""
    return tuple(accumulate((one or 0.0 for one in conditional), mul))


def conditional_of(cumulative: Sequence[float]) -> tuple[float | None, ...]:
    """Quotients; None where no round came so far."""
    before = (1.0, *cumulative)
    return tuple(one / all_ if all_ else None for one, all_ in zip(cumulative, before, strict=False))


def length_of(cumulative: Sequence[float]) -> float:
    """Tokens per round with the bonus token. Cumulative rates are sums already: they do not multiply."""
    return 1.0 + sum(cumulative)


def _of_tally(tally: Sequence[float], given: Given) -> tuple[float, ...]:
    """Cumulative rates; as many as there are drafts in the best round where no depth is given."""
    rounds, depth = sum(tally), len(tally) - 1 if given.depth is None else given.depth
    if any(tally[depth + 1 :]):
        raise UserError(f"sglang.histogram: rounds with {len(tally) - 1} correct drafts, but a depth of {depth}")
    return tuple(sum(tally[k + 1 :]) / rounds for k in range(depth))


def _counted(tally: Sequence[float], given: Given) -> tuple[float, ...]:
    rounds = sum(tally)
    return rounds, rounds * (given.depth or 0), sum(j * count for j, count in enumerate(tally))


_FULL, _COND = "speculators.full_acc", "speculators.cond_acc"
_PARAMETER = {"depth": "depth (K)", "nodes": "num_draft_tokens (n)"}
_ALIKE = "every round drafts K tokens"
_ENOUGH = "every start has all K steps, unlike the last of an answer"
CONVERSIONS: tuple[Conversion, ...] = (
    Conversion("cumulative", "conditional", "c_k = r_k / r_(k-1)", lambda r, _: conditional_of(r)),
    Conversion("conditional", "cumulative", "r_k = prod_(i<=k) c_i", lambda c, _: cumulative_of(c)),
    Conversion("cumulative", "acceptance_length", "1 + sum r_k", lambda r, _: length_of(r)),
    Conversion("acceptance_length", "drafts_per_round", "AL - 1", lambda length, _: length - 1),
    Conversion("drafts_per_round", "acceptance_length", "1 + drafts", lambda drafts, _: 1 + drafts),
    Conversion("drafts_per_round", "vllm.acceptance_rate", "drafts / K", lambda x, g: x / g.depth, "depth", _ALIKE),
    Conversion("vllm.acceptance_rate", "drafts_per_round", "rate * K", lambda x, g: x * g.depth, "depth", _ALIKE),
    Conversion("drafts_per_round", "sglang.accept_rate", "drafts / (n - 1)", lambda x, g: x / g.below, "nodes"),
    Conversion("sglang.accept_rate", "drafts_per_round", "rate * (n - 1)", lambda x, g: x * g.below, "nodes"),
    Conversion("acceptance_length", "sglang.old_accept_rate", "AL / n", lambda x, g: x / g.nodes, "nodes"),
    Conversion("sglang.old_accept_rate", "acceptance_length", "rate * n", lambda x, g: x * g.nodes, "nodes"),
    Conversion("sglang.histogram", "cumulative", "r_k = sum_(j>k) h_j / sum h_j", _of_tally),
    Conversion("sglang.histogram", "vllm.counters", "sum h_j, K sum h_j, sum j h_j", _counted, "depth", _ALIKE),
    Conversion("vllm.counters", "acceptance_length", "1 + accepted / drafts", lambda x, _: 1 + x[2] / x[0]),
    Conversion("vllm.counters", "vllm.acceptance_rate", "accepted / draft tokens", lambda x, _: x[2] / max(x[1], 1)),
    Conversion(_FULL, _COND, "cond_k = full_k / full_(k-1)", lambda full, _: conditional_of(full), holds=_ENOUGH),
    Conversion(_COND, _FULL, "full_k = prod_(i<=k) cond_i", lambda cond, _: cumulative_of(cond), holds=_ENOUGH),
    Conversion(_FULL, "speculators.eal", "1 + sum full_k", lambda full, _: length_of(full), holds=_ENOUGH),
    *(
        Conversion(f"{who}.acc", "simulated_drafts", "sum_k prod_(i<=k) a_i", lambda a, _: sum(cumulative_of(a)))
        for who in ("eagle", "specforge", "modelopt", "nemo")
    ),
    Conversion("simulated_drafts", "simulated_length", "1 + drafts", lambda drafts, _: 1 + drafts),
    Conversion("simulated_length", "simulated_drafts", "length - 1", lambda length, _: length - 1),
)


def convert(
    value: float | Sequence[float | None],
    source: str,
    to: str,
    *,
    depth: int | None = None,
    num_draft_tokens: int | None = None,
) -> Value:
    """A value of one definition in another one, by exact steps alone.

    `depth` is how many tokens a round drafts in a row (vLLM's K), `num_draft_tokens` how many nodes it verifies, the
    root included (SGLang's). Raises UserError for what is not a value of `source`, and for what does not convert.
    """
    here, there = _metric(source), _metric(to)
    given = _given(here, value, depth, num_draft_tokens)
    found = checked(here, value, given)
    if source == to:
        return found
    if refused := refusal(here, there, given):
        raise UserError(f"{here} does not convert to {there}: {refused}")
    for step in route(source, to, given):
        found = checked(METRICS[step.to], step.run(found, given), given)
    return found


def _metric(key: str) -> Metric:
    if key not in METRICS:
        raise UserError(f"metric {key!r} is not known; expected one of {', '.join(METRICS)}")
    return METRICS[key]


def _given(metric: Metric, value: float | Sequence[float | None], depth: int | None, nodes: int | None) -> Given:
    """Rates per position say the depth themselves."""
    for name, one, least in (("depth", depth, 1), ("num_draft_tokens", nodes, 2)):
        if one is not None and one < least:
            raise UserError(f"{name} {one}: expected {least} or more")
    if not (metric.shape.per_position and isinstance(value, Sequence) and value):
        return Given(depth, nodes)
    if depth not in (None, len(value)):
        raise UserError(f"{metric}: {len(value)} rates, but a depth of {depth}: {ANOTHER_DEPTH}")
    return Given(len(value), nodes)


def route(source: str, to: str, given: Given) -> tuple[Conversion, ...]:
    """The fewest steps with what is given. Raises UserError where there are none, naming what more it takes."""
    everything = Given(1, 2)
    if found := next(_routes(source, to, given), None):
        return found
    if found := next(_routes(source, to, everything), None):
        needs = next(step.needs for step in found if step.needs and not step.possible(given))
        raise UserError(f"{METRICS[source]} converts to {METRICS[to]} only where {_PARAMETER[needs]} is known: give it")
    raise UserError(f"{METRICS[source]} does not convert to {METRICS[to]}: no exact way is known")


def _routes(source: str, to: str, given: Given) -> Iterator[tuple[Conversion, ...]]:
    """Breadth first."""
    waiting: deque[tuple[Conversion, ...]] = deque([()])
    seen = {source}
    while waiting:
        steps = waiting.popleft()
        at = steps[-1].to if steps else source
        if at == to:
            yield steps
        for step in CONVERSIONS:
            if step.source == at and step.to not in seen and step.possible(given):
                seen.add(step.to)
                waiting.append((*steps, step))

"""The pages of `info --metrics`: the vocabulary of metrics, and a trace's acceptance in its words."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Group as Parts
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from spectrace.replay.expressed import Expressed, Expression
from spectrace.replay.metric import Group, Metric, Value
from spectrace.replay.metric_refusals import REFUSALS
from spectrace.replay.metrics import CONVERSIONS, METRICS

__all__ = ["render_expressed", "render_vocabulary", "vocabulary_json"]

_SYMBOLS = (
    "K: tokens that a round drafts in a row (vLLM's num_speculative_tokens). k: one of them, from 0. n: nodes that a "
    "round verifies, the root included (SGLang's num_draft_tokens); of a chain, n = K + 1. p, q: the target's and the "
    "draft's probabilities."
)


def vocabulary_json() -> dict[str, Any]:
    """The document of `info --metrics --json` without a trace."""
    return {
        "metrics": [metric.to_json() for metric in METRICS.values()],
        "conversions": [one.to_json() for one in CONVERSIONS],
        "refusals": [one.to_json() for one in REFUSALS],
    }


def render_vocabulary() -> RenderableType:
    """The page a person reads."""
    groups = [part for group in Group for part in _group(group)]
    return Parts(*_title("At a glance"), _glance(), Text(_SYMBOLS), *groups, *_conversions(), *_refusals())


def render_expressed(trace: Path, found: Expressed | None) -> RenderableType:
    """The page of one trace."""
    if found is None:
        return Text(f"{trace}: no verified rows, so no acceptance")
    nodes = " or ".join(map(str, found.nodes))
    title = Text(f"{trace}  {found.rounds} rounds, {found.rounds_cut} of them cut by an end", style="bold")
    shape = f"{'trees' if found.tree else 'chains'}: K = {found.depth}, n = {nodes}"
    table = _table("printed as")
    for column in ("whole rounds", "every round"):
        table.add_column(column, justify="right")
    for one in found.expressions:
        if one.why is None:
            table.add_row(one.metric.key, _names(one.metric), _said(one.whole, one), _said(one.every, one))
    reasons: dict[str, list[Expression]] = {}
    for one in found.expressions:
        if one.why is not None:
            reasons.setdefault(one.why, []).append(one)
    legend = Text("Engines count every round; spectrace's own numbers leave out those that an end cut.", style="dim")
    return Parts(title, Text(shape), table, legend, *_missing(reasons))


def _missing(reasons: dict[str, list[Expression]]) -> Iterator[RenderableType]:
    """Reasons, and which definitions each is of."""
    if reasons:
        yield from _title("Not of this trace")
    for why, ones in reasons.items():
        yield Text(", ".join(one.metric.key for one in ones))
        yield _indented(Text(why, style="yellow"))


def _said(value: Value | None, one: Expression) -> str:
    if value is None:
        return "-"
    if not isinstance(value, tuple):
        return f"{value:.3f}"
    if not one.metric.shape.several:
        low, high = (f"{end(x for x in value if x is not None):.3f}" for end in (min, max))
        return f"{low} to {high} of {len(value)} requests"
    return " ".join("-" if x is None else f"{x:.3f}" if one.metric.shape.per_position else f"{x:.0f}" for x in value)


def _table(*columns: str) -> Table:
    """Of metrics, whose keys are there to be copied."""
    table = Table(box=None, pad_edge=False)
    table.add_column("metric", no_wrap=True)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _title(text: str) -> Iterator[RenderableType]:
    yield Text()
    yield Text(text, style="bold")


def _names(metric: Metric) -> str:
    return "; ".join(f"{name.project}: {name.printed}" for name in metric.names)


def _glance() -> Table:
    table = _table("counts", "bonus", "measured", "range")
    for metric in METRICS.values():
        bonus = "counted" if metric.bonus else "no"
        table.add_row(metric.key, metric.counting, bonus, metric.measured, metric.range)
    return table


def _group(group: Group) -> Iterator[RenderableType]:
    yield from _title(group)
    for metric in METRICS.values():
        if metric.group is group:
            yield Text(metric.key, style="cyan")
            yield _indented(_facts(metric))


def _facts(metric: Metric) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    facts = {
        "printed as": "; ".join(map(str, metric.names)),
        "is": metric.says,
        "formula": metric.formula,
        "counts": metric.numerator + (f", over {metric.denominator}" if metric.denominator else ""),
        "counted over": metric.counted,
        "outside draft vocabulary": metric.outside,
        "source": metric.source,
    }
    for name, value in facts.items():
        table.add_row(name, Text(value))
    return table


def _conversions() -> Iterator[RenderableType]:
    yield from _title("What converts exactly, step by step")
    table = Table(box=None, pad_edge=False)
    for column in ("from", "to"):
        table.add_column(column, no_wrap=True)
    table.add_column("by")
    for one in CONVERSIONS:
        given = {"depth": ", K given", "nodes": ", n given"}.get(one.needs or "", "")
        where = "" if one.holds is None else f"; where {one.holds}"
        table.add_row(one.source, one.to, Text(f"{one.formula}{given}{where}"))
    yield table


def _refusals() -> Iterator[RenderableType]:
    yield from _title("What does not convert")
    for one in REFUSALS:
        yield Text(one.title, style="cyan")
        yield _indented(Text(f"{one.reason}. It takes {one.needs}."))


def _indented(part: RenderableType) -> Padding:
    return Padding(part, (0, 0, 0, 2))

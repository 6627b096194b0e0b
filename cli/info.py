"""`spectrace info`: what a trace holds, and what metrics mean, without loading a model or torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from spectrace.cli.metrics_page import render_expressed, render_vocabulary, vocabulary_json
from spectrace.cli.options import PATH, as_json_option, print_json
from spectrace.replay.expressed import expressed
from spectrace.tracer.acceptance import Acceptance, acceptance_of_rows
from spectrace.tracer.trace import Trace

__all__ = ["info", "info_json", "render_info", "served_acceptance"]


@click.command(name="info")
@click.argument("trace", type=PATH, required=False)
@click.option("--metrics", is_flag=True, help="Every definition of acceptance; with TRACE, its own in each of them.")
@as_json_option
@click.pass_context
def info(context: click.Context, trace: Path | None, metrics: bool, as_json: bool) -> None:
    """Show what TRACE holds: manifest, rows per family, acceptance, completeness."""
    if metrics:
        return _metrics(trace, as_json=as_json)
    if trace is None:
        raise click.MissingParameter(ctx=context, param_hint="'TRACE'", param_type="argument")
    opened = Trace.open(trace)
    if as_json:
        print_json(info_json(opened))
    else:
        Console().print(render_info(opened, served_acceptance(opened)))


def _metrics(trace: Path | None, *, as_json: bool) -> None:
    found = None if trace is None else expressed(Trace.open(trace))
    if not as_json:
        Console().print(render_vocabulary() if trace is None else render_expressed(trace, found))
    elif trace is None:
        print_json(vocabulary_json())
    else:
        print_json({"trace": str(trace), "acceptance": found.to_json() if found else None})


def served_acceptance(trace: Trace) -> Acceptance | None:
    """What verification recorded, None when nothing was verified."""
    verified = trace.rows("verified")
    return acceptance_of_rows(verified) if len(verified) else None


def info_json(trace: Trace) -> dict[str, Any]:
    """The document of `info --json`."""
    acceptance = served_acceptance(trace)
    return {
        "manifest": trace.manifest,
        "sealed": trace.sealed,
        "writers": trace.writers,
        "families": trace.families(),
        "acceptance": acceptance.to_json() if acceptance else None,
        "completeness": trace.account().to_json(),
        "not recorded": _lacks(trace),
        "notes": _notes(trace),
        "hook_share": {name: status.share for name, status in trace.statuses.items() if status.share is not None},
    }


def render_info(trace: Trace, acceptance: Acceptance | None) -> RenderableType:
    """The page a person reads."""
    title = Text(f"{trace.folder}  {'sealed' if trace.sealed else 'unsealed'}", style="bold")
    return Group(title, *_loud(trace), _manifest(trace), _families(trace), _acceptance(acceptance), *_hooks(trace))


def _lacks(trace: Trace) -> list[str]:
    """What processes say of hooks that failed and steps that were lost."""
    return [problem.message for problem in trace.problems if problem.kind in ("hook", "steps")]


def _notes(trace: Trace) -> list[str]:
    return list(dict.fromkeys(note for status in trace.statuses.values() for note in status.notes))


def _loud(trace: Trace) -> Iterator[Text]:
    for line in _lacks(trace):
        yield Text(f"NOT RECORDED AS IT SHOULD BE  {line}", style="bold red")
    for note in _notes(trace):
        yield Text(f"note  {note}", style="yellow")


def _hooks(trace: Trace) -> Iterator[Text]:
    for name, status in trace.statuses.items():
        if status.steps and status.share is not None:
            took = f"hooks took {status.share:.1%} of the CPU time of the engine's thread"
            yield Text(f"{name}: {status.steps.written} of {status.steps.began} steps written; {took}")


def _manifest(trace: Trace) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in trace.manifest.items():
        text = value if isinstance(value, str) else json.dumps(value)
        table.add_row(Text(name, style="dim"), Text(text, overflow="ellipsis", no_wrap=True))
    for name, facts in trace.writers.items():
        table.add_row(Text("writer", style="dim"), f"{name}  level {facts.get('level', '?')}")
    return table


def _families(trace: Trace) -> Table:
    table = Table("family", box=None, pad_edge=False)
    columns = ("rows", "bytes", "expected", "sampled away", "dropped", "failed", "torn")
    for column in columns:
        table.add_column(column, justify="right")
    completeness = trace.account().to_json()
    for name, held in trace.families().items():
        numbers = {**completeness[name], **held}
        table.add_row(name, *(f"{numbers[column.replace(' ', '_')]:,}" for column in columns))
    return table


def _acceptance(acceptance: Acceptance | None) -> Text:
    if acceptance is None:
        return Text("acceptance: no verified rows")
    lines = [
        f"acceptance length {_number(acceptance.acceptance_length)} "
        f"(untrimmed {_number(acceptance.acceptance_untrimmed)}), "
        f"{acceptance.correct_drafts} correct drafts in {acceptance.rounds} rounds",
        "conditional rates " + "  ".join(map(_number, acceptance.conditional_rates)),
        "cumulative rates  " + "  ".join(map(_number, acceptance.cumulative_rates)),
    ]
    return Text("\n".join(lines))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"

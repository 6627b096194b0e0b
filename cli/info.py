"""`spectrace info`: what a trace holds, without loading a model or torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from spectrace.cli.options import PATH, as_json_option, print_json
from spectrace.tracer.acceptance import Acceptance, acceptance_of_rows
from spectrace.tracer.trace import Trace

__all__ = ["info", "info_json", "render_info", "served_acceptance"]


@click.command(name="info")
@click.argument("trace", type=PATH)
@as_json_option
def info(trace: Path, as_json: bool) -> None:
    """Show what TRACE holds: manifest, rows per family, acceptance, completeness."""
    opened = Trace.open(trace)
    if as_json:
        print_json(info_json(opened))
    else:
        Console().print(render_info(opened, served_acceptance(opened)))


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
    }


def render_info(trace: Trace, acceptance: Acceptance | None) -> RenderableType:
    """The page a person reads."""
    title = Text(f"{trace.folder}  {'sealed' if trace.sealed else 'unsealed'}", style="bold")
    return Group(title, _manifest(trace), _families(trace), _acceptance(acceptance))


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

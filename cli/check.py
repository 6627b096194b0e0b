"""`spectrace check`: every byte of a trace against its ledgers and its seal.

Exit codes: 0 sealed and whole; 1 unsealed, incomplete, or hooks that never fired; 3 damaged.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from spectrace.cli.options import PATH, as_json_option, print_json
from spectrace.tracer.errors import TraceDamaged
from spectrace.tracer.manifest import MANIFEST
from spectrace.tracer.problem import Problem
from spectrace.tracer.trace import Trace

__all__ = ["Verdict", "check", "render_check"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one check."""

    trace: Path
    sealed: bool
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        return self.sealed and not self.problems

    @property
    def exit_code(self) -> int:
        if any(problem.damage for problem in self.problems):
            return 3
        return 0 if self.ok else 1

    def to_json(self) -> dict[str, Any]:
        problems = [problem.to_json() for problem in self.problems]
        return {"sealed": self.sealed, "ok": self.ok, "problems": problems}


@click.command(name="check")
@click.argument("trace", type=PATH)
@as_json_option
@click.pass_context
def check(context: click.Context, trace: Path, as_json: bool) -> None:
    """Check every byte of TRACE. Exit code 0: sealed and whole; 1: unsealed or incomplete; 3: damaged."""
    verdict = examine(trace)
    if as_json:
        print_json(verdict.to_json())
    else:
        Console().print(render_check(verdict))
    context.exit(verdict.exit_code)


def examine(trace: Path) -> Verdict:
    try:
        opened = Trace.open(trace, tolerant=True)
    except TraceDamaged as error:
        return Verdict(trace, False, (Problem(MANIFEST, 0, "manifest", 0, error.message),))
    return Verdict(trace, opened.sealed, tuple(opened.verify()))


def render_check(verdict: Verdict) -> RenderableType:
    """The page a person reads."""
    lines: list[RenderableType] = [Text(f"{verdict.trace}: {_summary(verdict)}", style="bold")]
    if verdict.problems:
        lines.append(_problems(verdict.problems))
    if not verdict.sealed:
        lines.append(
            Text(
                "An unsealed trace vouches for what its ledgers acknowledged and for no more: one whose ledger and "
                "segments were cut at the same record looks like a recording that ended earlier."
            )
        )
    return Group(*lines)


def _summary(verdict: Verdict) -> str:
    if verdict.exit_code == 3:
        damage = [problem for problem in verdict.problems if problem.damage]
        places = f"{len(damage)} place{'s' * (len(damage) != 1)}"
        return f"damaged in {places}, costing {sum(problem.rows_lost for problem in damage)} rows or more"
    if not verdict.sealed:
        return "unsealed: the recording was interrupted or is still running; all acknowledged bytes are whole"
    return "sealed and whole" if verdict.ok else "sealed; all recorded bytes are whole, but rows are missing"


def _problems(problems: tuple[Problem, ...]) -> Table:
    table = Table("kind", "segment", box=None, pad_edge=False)
    table.add_column("offset", justify="right")
    table.add_column("rows lost", justify="right")
    table.add_column("what was found", overflow="fold")
    for problem in problems:
        table.add_row(problem.kind, problem.segment, f"{problem.offset}", f"{problem.rows_lost}", problem.message)
    return table

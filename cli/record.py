"""`spectrace record`: start a server that nobody edited, and record what crosses from its target to its draft."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import click
from rich.console import Console

from spectrace.cli.info import render_info, served_acceptance
from spectrace.cli.options import PATH
from spectrace.tracer.errors import UserError
from spectrace.tracer.launch import record as launch
from spectrace.tracer.rows import Level
from spectrace.tracer.trace import Trace

__all__ = ["record"]


@click.command(name="record", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--out", type=PATH, required=True, help="The trace, a new folder.")
@click.option("--level", type=click.Choice(["light", "features", "full"]), default="features", show_default=True)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
@click.pass_context
def record(context: click.Context, out: Path, level: str, command: tuple[str, ...]) -> None:
    """Run COMMAND, which starts vLLM, and record into a new trace; ends with the command's own exit code.

    spectrace record --out TRACE -- vllm serve MODEL --speculative-config '{...}'
    """
    done = launch(command, out, level=Level[level.upper()])
    if not done.writers:
        _nothing(context, out, command[0], done.exit_code)
    trace = Trace.open(out)
    console = Console(stderr=True)
    console.print(render_info(trace, served_acceptance(trace)))
    if done.unsealed:
        console.print(f"not sealed by their processes: {', '.join(done.unsealed)}")
    context.exit(done.exit_code)


def _nothing(context: click.Context, out: Path, program: str, code: int) -> NoReturn:
    """Nothing was recorded: what a command that failed says comes first, and its exit code stays."""
    if code:
        click.echo(f"{out}: nothing was recorded: {program} ended with exit code {code} before it served", err=True)
        context.exit(code)
    raise UserError(
        f"{out}: nothing was recorded: no process of {program} loaded spectrace's plugin; install spectrace in the "
        f"environment that serves, and see docs/engines/vllm.md"
    )

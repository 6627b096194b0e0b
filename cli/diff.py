"""`spectrace diff`: two traces of the same prompts side by side, where they part, and whether it matters."""

from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from spectrace.cli.options import PATH, THREADS, as_json_option, print_json
from spectrace.tracer.errors import SpectraceError, UserError
from spectrace.tracer.trace import Trace

if TYPE_CHECKING:
    from spectrace.replay.diff.attribution import Attribution
    from spectrace.replay.diff.diff import Diff

__all__ = ["diff"]

_WIDTH = 118


@click.command(name="diff")
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@click.option(
    "--benign",
    type=PATH,
    multiple=True,
    help="A repeat of A that does not matter (other batch, chunk, threads): the floor.",
)
@click.option("--plan", is_flag=True, help="Only which rows pair, and why others do not; reads no tensor.")
@click.option(
    "--replay/--no-replay", default=True, help="Swap one input at a time through the drafts, where acceptance differs."
)
@click.option("--threads", type=THREADS, help="CPU threads; all cores otherwise.")
@as_json_option
def diff(
    a: Path, b: Path, benign: tuple[Path, ...], plan: bool, replay: bool, threads: int | None, as_json: bool
) -> None:
    """Compare trace B with trace A, row by row: where they first part, and whether it matters.

    Ends with 0 where both are equal or no further apart than rounding takes them, with 1 where they differ.
    """
    import torch

    from spectrace.cli.diff_page import diff_json, plan_json, render_diff
    from spectrace.replay.diff.diff import Verdict
    from spectrace.replay.diff.diff import diff as compare
    from spectrace.replay.diff.diff import plan as plan_of

    if threads:
        torch.set_num_threads(threads)
    if benign and {a, b} & set(benign):
        raise UserError("--benign: a trace is no repeat of itself; give another run of A's configuration")
    one, other = Trace.open(a), Trace.open(b)
    if plan:
        planned = plan_of(one, other)
        print_json(plan_json(planned)) if as_json else click.echo(str(planned))
        return
    with Console(stderr=True).status("comparing"):
        found = compare(one, other, [Trace.open(trace) for trace in benign])
        swapped = _attribution(found) if replay else None
    if as_json:
        print_json(diff_json(found, swapped))
    else:
        console = Console()
        console.width = max(console.width, _WIDTH)
        console.print(render_diff(found, swapped))
    click.get_current_context().exit(0 if found.verdict in (Verdict.EQUAL, Verdict.WITHIN) else 1)


def _attribution(found: "Diff") -> "Attribution | str | None":
    """Which input costs the acceptance that differs; why not, where that cannot be told."""
    from spectrace.replay.diff.diff import Verdict

    lost = found.decisions.tokens_lost
    if found.verdict is not Verdict.DIFFERENT or not lost:
        return None
    import torch

    from spectrace.cli.replay import recorded_draft, recorded_target
    from spectrace.engine.checkpoint import build_draft, read_draft
    from spectrace.replay.diff.attribution import attribute

    try:
        drafts = [
            build_draft(read_draft(recorded_draft(trace)), target=recorded_target(trace), dtype=torch.float32)
            for trace in (found.a, found.b)
        ]
        return attribute(found.a, found.b, found.beginning(), (drafts[0], drafts[1]))
    except SpectraceError as error:
        return str(error)

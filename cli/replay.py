"""`spectrace replay`: run a trace's draft again, offline, and compare with what was served."""

import re
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console, Group, RenderableType
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from spectrace.cli.options import DTYPES, PATH, THREADS, as_json_option, print_json, say_leftovers, torch_dtype
from spectrace.tracer.acceptance import Acceptance
from spectrace.tracer.errors import UserError
from spectrace.tracer.trace import Trace

if TYPE_CHECKING:
    from spectrace.replay.lab import ReplayReport

__all__ = ["acceptance_table", "recorded_draft", "recorded_target", "render_replay", "replay", "replay_json"]


@click.command(name="replay")
@click.argument("trace", type=PATH)
@click.option("--draft", type=PATH, help="The draft's folder; else where it was when recorded.")
@click.option("--target", type=PATH, help="For an embedding the draft shares; else as recorded.")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Precision to replay in; as recorded otherwise.")
@click.option("--threads", type=THREADS, help="CPU threads; all cores otherwise.")
@as_json_option
def replay(
    trace: Path,
    draft: Path | None,
    target: Path | None,
    device: str,
    dtype: str | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Replay the draft of TRACE on exactly what it was given."""
    import torch

    from spectrace.engine.checkpoint import build_draft, read_draft
    from spectrace.replay.lab import replay_trace

    opened = Trace.open(trace)
    if threads:
        torch.set_num_threads(threads)
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise UserError(f"--device {device!r}: expected cpu, cuda or cuda:N")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"--device {device}: no CUDA device here; use --device cpu")
    checkpoint = read_draft(draft or recorded_draft(opened))
    say_leftovers(checkpoint.report)
    model = build_draft(
        checkpoint,
        target=target or recorded_target(opened),
        dtype=torch_dtype(dtype or opened.manifest.get("dtype", "float32")),
        device=device,
    )
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("replaying requests", total=None)
        report = replay_trace(opened, model, progress=lambda done, total: bar.update(task, completed=done, total=total))
    if as_json:
        print_json({"replay": replay_json(report), "acceptance": acceptance_json(report)})
    else:
        Console().print(render_replay(trace, report))
    click.get_current_context().exit(0 if report.agrees else 1)


def recorded_draft(trace: Trace) -> Path:
    """Where the manifest says the draft is; raises UserError where it says nothing."""
    path = (trace.manifest.get("draft") or {}).get("path")
    if not path:
        raise UserError(f"{trace.folder}: its manifest names no draft; say which one with --draft DIR")
    return Path(path)


def recorded_target(trace: Trace) -> Path | None:
    """Where the manifest says the target is, if that is still there."""
    path = trace.manifest.get("target", {}).get("path")
    return Path(path) if path and Path(path).is_dir() else None


def replay_json(report: "ReplayReport") -> dict[str, Any]:
    """The `replay` part of --json."""
    compared = report.comparison
    return {
        "rows": compared.rows,
        "answers": compared.answers,
        "tokens_equal": compared.tokens_equal,
        "max_error": _finite(compared.max_error),
        "finite": compared.max_error is None or isfinite(compared.max_error),
        "stages": {
            stage.stage: {"rows": stage.rows, "max_error": _finite(stage.max_error)} for stage in compared.stages
        },
        "requests": report.requests,
        "incomplete_requests": report.incomplete,
        "rows_per_second": compared.rows_per_second,
        "served_rows_per_second": compared.served_rows_per_second,
    }


def _finite(error: float | None) -> float | None:
    """JSON has no infinity: an error that is none of its numbers is null, and `finite` is false."""
    return error if error is not None and isfinite(error) else None


def acceptance_json(report: "ReplayReport") -> dict[str, Any]:
    """The `acceptance` part of --json: as served, and as the replayed drafts walk or, if drawn, are expected to."""
    return {
        "served": report.served.to_json(),
        "replayed": report.replayed and report.replayed.to_json(),
        "expected": report.expected and asdict(report.expected),
    }


def render_replay(trace: Path, report: "ReplayReport") -> RenderableType:
    """The page a person reads."""
    compared = report.comparison
    facts = Table(show_header=False, box=None, pad_edge=False)
    if compared.answers:
        facts.add_row("draft tokens equal", f"{compared.tokens_equal} of {compared.answers}")
    for stage in compared.stages:
        facts.add_row(f"max error, {stage.stage}", f"{stage.max_error:.2e} of the row's maximum, {stage.rows} rows")
    if not compared.stages:
        facts.add_row("max error", "not compared: this level keeps no draft tensors (record with --level full)")
    facts.add_row("rows per second", f"{compared.rows_per_second:,.0f}")
    if compared.served_rows_per_second:
        facts.add_row("rows per second served", f"{compared.served_rows_per_second:,.0f} of draft-forward time")
    if report.incomplete:
        facts.add_row("requests left out", f"{report.incomplete}: their first draft rows are not in the trace")
    title = Text(f"{trace}: {compared.rows} draft rows of {report.requests} requests replayed", style="bold")
    if report.expected:
        one = report.expected
        facts.add_row("acceptance length", f"{one.served:.3f} served, in {one.served_rounds} rounds not near an end")
        facts.add_row("expected of drawn drafts", f"{one.expected:.3f}; 95 % of walks {one.low:.3f} to {one.high:.3f}")
    columns = {"served": report.served} | ({"replayed": report.replayed} if report.replayed else {})
    return Group(title, facts, acceptance_table(columns))


def acceptance_table(columns: dict[str, Acceptance]) -> Table:
    """Acceptance length and rates, one column per configuration."""
    table = Table("", box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right")
    values = list(columns.values())
    table.add_row("acceptance length", *(_number(one.acceptance_length) for one in values))
    table.add_row("rounds", *(str(one.rounds) for one in values))
    table.add_row("correct drafts", *(str(one.correct_drafts) for one in values))
    for k in range(max(len(one.cumulative_rates) for one in values)):
        table.add_row(f"cumulative rate, draft {k + 1}", *(_number(one.cumulative_rates[k]) for one in values))
    for k in range(max(len(one.conditional_rates) for one in values)):
        table.add_row(f"conditional rate, draft {k + 1}", *(_number(one.conditional_rates[k]) for one in values))
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"

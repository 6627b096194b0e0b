"""`spectrace diagnose`: name the broken link between target and draft, and the edit that repairs it."""

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import Progress

from spectrace.cli.diagnosis_page import render_diagnosis
from spectrace.cli.options import PATH, THREADS, as_json_option, check_finite, print_json, say_leftovers
from spectrace.cli.replay import recorded_draft, recorded_target
from spectrace.replay.diagnosis import Cause, Diagnosis, Identified, Verdict
from spectrace.tracer.errors import UserError
from spectrace.tracer.trace import Trace

if TYPE_CHECKING:
    from spectrace.replay.ladder import Trained

__all__ = ["ACCURACY_DEFINITIONS", "diagnose", "diagnosis_json", "exit_code", "render_diagnosis"]

ACCURACY_DEFINITIONS = ("eagle", "specforge", "speculators_full", "speculators_cond", "restricted")


def parse_accuracies(_ctx: click.Context, option: click.Parameter, value: str | None) -> tuple[float, ...] | None:
    """A list such as 0.747,0.71, as a click callback."""
    if value is None:
        return None
    try:
        return tuple(float(part) for part in value.split(","))
    except ValueError:
        name = option.opts[0]
        raise UserError(f"{name} {value!r}: expected one share per step, separated by commas: 0.747,0.71") from None


@click.command(name="diagnose")
@click.argument("trace", type=PATH)
@click.option("--draft", type=PATH, help="The draft that should be served; else as recorded.")
@click.option(
    "--target", type=PATH, help="To compute true features with; else as recorded, unless there is a reference."
)
@click.option("--no-target", is_flag=True, help="Do without the target, even if it is where it was when recorded.")
@click.option("--reference", type=PATH, help="A trace that has true features for these prompts.")
@click.option("--trained-accuracy", callback=parse_accuracies, help="As training reported it, by step: 0.747,0.71,...")
@click.option(
    "--accuracy-definition", type=click.Choice(ACCURACY_DEFINITIONS), help="What training counts.  [default: eagle]"
)
@click.option(
    "--budget", type=click.FloatRange(0, min_open=True), callback=check_finite, default=180.0, show_default=True,
    help="Seconds.",
)  # fmt: skip
@click.option("--threads", type=THREADS, help="CPU threads; all cores otherwise.")
@as_json_option
def diagnose(
    trace: Path,
    draft: Path | None,
    target: Path | None,
    no_target: bool,
    reference: Path | None,
    trained_accuracy: tuple[float, ...] | None,
    accuracy_definition: str | None,
    budget: float,
    threads: int | None,
    as_json: bool,
) -> None:
    """Say why TRACE's drafts are rejected, and what to edit.

    Exit code 0: nothing to repair, or too little to tell. 1: a fault is named.
    """
    import torch

    from spectrace.engine.checkpoint import read_draft
    from spectrace.replay.diagnose import diagnose as diagnose_trace

    trained = _trained(trained_accuracy, accuracy_definition)
    opened, other = Trace.open(trace), Trace.open(reference) if reference else None
    where = _target(opened, target, no_target) or (None if no_target or not other else recorded_target(other))
    if threads:
        torch.set_num_threads(threads)
    checkpoint = read_draft(draft or _there(opened, recorded_draft(opened)))
    if not as_json:
        say_leftovers(checkpoint.report)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=None)
        diagnosis = diagnose_trace(
            opened,
            checkpoint,
            target=where,
            reference=other,
            rerun=target is not None or other is None,
            trained=trained,
            budget_secs=budget,
            progress=lambda what, done, total: bar.update(task, description=what, completed=done, total=total),
        )
    if as_json:
        print_json(diagnosis_json(diagnosis))
    else:
        Console().print(render_diagnosis(trace, diagnosis), crop=False)
    click.get_current_context().exit(exit_code(diagnosis))


def _trained(accuracies: tuple[float, ...] | None, definition: str | None) -> "Trained | None":
    from spectrace.replay.ladder import Trained

    if accuracies is None:
        if definition:
            raise UserError(f"--accuracy-definition {definition}: of which accuracy? give --trained-accuracy, too")
        return None
    return Trained(accuracies, definition or ACCURACY_DEFINITIONS[0])


def _target(trace: Trace, given: Path | None, without: bool) -> Path | None:
    if given and without:
        raise UserError(f"--target {given} and --no-target contradict each other: give one of them")
    if given and not given.is_dir():
        raise UserError(f"--target {given}: no such folder; expected the checkpoint folder of the target")
    return None if without else given or recorded_target(trace)


def _there(trace: Trace, folder: Path) -> Path:
    if not folder.is_dir():
        raise UserError(f"{trace.folder}: its draft was at {folder}, and is not there now; say where with --draft DIR")
    return folder


def exit_code(diagnosis: Diagnosis) -> int:
    """1 where a fault or a state of the engine is named, 0 where nothing is to be repaired or too little is known."""
    return 1 if diagnosis.verdict in (Verdict.FAULT, Verdict.ENGINE_STATE) else 0


def diagnosis_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """The document of --json; numbers that are none are null."""
    document = {
        "verdict": str(diagnosis.verdict),
        "causes": [_cause_json(cause) for cause in diagnosis.causes],
        "readings": {
            link: {name: getattr(reading, name) for name in ("configured", "engine", "trained")}
            for link, reading in diagnosis.readings.items()
        },
        "identified": {str(one.slot): _identified_json(one) for one in diagnosis.identified},
        "worth": diagnosis.worth,
        "coverage": diagnosis.coverage,
        "notes": diagnosis.notes,
        "next_command": diagnosis.next_command,
        "served_acceptance": diagnosis.served_acceptance,
        "repaired_acceptance": diagnosis.repaired_acceptance,
    }
    return {name: _plain(value) for name, value in document.items()}


def _cause_json(cause: Cause) -> dict[str, Any]:
    names = ("title", "confidence", "evidence", "served_acceptance", "predicted_acceptance", "fix", "command")
    first = {"fault": cause.fault, "variant": cause.variant, "class": [cause.fault, *cause.alike]}
    return first | {name: getattr(cause, name) for name in names}


def _identified_json(one: Identified) -> dict[str, Any]:
    return {
        "configured": one.configured,
        "boundary": one.best,
        "error": one.error,
        "runner_up": one.runner_up,
        "runner_up_error": one.runner_up_error,
    }


def _plain(value: Any) -> Any:
    """A value as JSON has it: no tuple, and null for a number that is none."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not isfinite(value) else value

"""`spectrace lint`: a draft judged by its files alone, and by what the engine that will serve it makes of them."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from spectrace.cli.options import PATH, as_json_option, print_json
from spectrace.tracer.errors import UserError

if TYPE_CHECKING:
    from spectrace.replay.lint.finding import LintFinding
    from spectrace.replay.lint.lint import Linted

__all__ = ["lint", "render_lint"]

_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}


@click.command(name="lint")
@click.argument("draft", type=PATH)
@click.option("--target", type=PATH, help="Folder of the target that it is for.")
@click.option("--engine", metavar="NAME[==VERSION]", help="What will serve it, such as sglang==0.5.23 or vllm.")
@as_json_option
def lint(draft: Path, target: Path | None, engine: str | None, as_json: bool) -> None:
    """Say what is wrong with DRAFT, an EAGLE-3 draft's folder, before anything runs.

    With --target it is held against that, and with --engine it is told what that engine will really run, and where
    that is not what the files mean. Exits with 1 where there is an error.
    """
    from spectrace.replay.lint.lint import lint_draft
    from spectrace.replay.profiles.known import profile_named

    if target is not None and not target.is_dir():
        raise UserError(f"--target {target}: no such folder; expected the folder of a Hugging Face model")
    linted = lint_draft(draft, target_folder=target, profile=profile_named(engine) if engine else None)
    if as_json:
        print_json(_document(draft, linted))
    else:
        Console().print(render_lint(draft, linted), crop=False)
    click.get_current_context().exit(int(linted.failed))


def _document(draft: Path, linted: "Linted") -> dict[str, Any]:
    subject = linted.subject
    running = subject.running if subject else None
    wiring = subject.draft.wiring if subject else None
    return {
        "path": str(draft.absolute()),
        "findings": [one.to_json() for one in linted.findings],
        "dialect": subject.draft.layout if subject else None,
        "spec": asdict(subject.draft.spec) if subject else None,
        "wiring": asdict(wiring) if wiring else None,
        "engine": {
            "name": running.profile.engine,
            "version": running.profile.version,
            "spec": asdict(running.spec),
            "boundaries": running.boundaries,
            "key": running.key or None,
            "taken": {running.names[name]: str(taken) for name, taken in running.taken.items()},
            "dropped": running.dropped,
            "refuses": [one.why for one in running.refusals],
        }
        if running
        else None,
    }


def render_lint(draft: Path, linted: "Linted") -> RenderableType:
    """The page a person reads."""
    counts = {kind: sum(str(one.severity) == kind for one in linted.findings) for kind in _STYLES}
    told = ", ".join(f"{count} {kind}{'s' * (count != 1)}" for kind, count in counts.items() if count)
    return Group(
        Text(f"{draft}: {told or 'nothing to be said against it'}", style="bold"),
        *_facts(linted),
        *(line for one in linted.findings for line in _finding(one)),
    )


def _facts(linted: "Linted") -> Iterator[RenderableType]:
    subject = linted.subject
    if subject is None:
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    draft, running, wiring = subject.draft, subject.running, subject.draft.wiring
    table.add_row("layout", draft.layout)
    table.add_row("means", _boundaries(wiring.boundaries if wiring else None, f"by {wiring.key}" if wiring else "none"))
    if running and running.refusals:
        table.add_row(running.profile.title, "does not serve it")
    elif running:
        key = f"by {running.key}" if running.key else "by default"
        table.add_row(running.profile.title, _boundaries(running.boundaries, key))
        for name, taken in running.taken.items():
            table.add_row("", f"{running.names[name]}: {taken}")
    yield table


def _boundaries(boundaries: tuple[int, ...] | None, key: str) -> str:
    return f"boundaries {', '.join(map(str, boundaries))}, {key}" if boundaries is not None else f"boundaries: {key}"


def _finding(one: "LintFinding") -> Iterator[Text]:
    severity = str(one.severity)
    yield Text()
    yield Text.assemble((f"{severity}  ", _STYLES[severity]), (one.title, "bold"), f"  [{one.code}]")
    for line in one.evidence:
        yield Text(f"  {line}")
    yield Text(f"  So: {one.consequence}")
    words, *command = one.fix.splitlines()
    yield Text(f"  Fix: {words}", style="green")
    yield from (Text(line, style="cyan", no_wrap=True, overflow="ignore") for line in command)

"""`make scoreboard`: faults seeded into live deployments, recorded, diagnosed blind and scored."""

import io
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "models"))

from scoreboard.clean import clean
from scoreboard.judge import Diagnose, Judge
from scoreboard.kept import Kept
from scoreboard.pairs import IDS, PAIRS, Pair, make_pairs
from scoreboard.quick import quick
from scoreboard.render import render
from scoreboard.scoring import Run, totals
from scoreboard.seeds import Seed, draw
from scoreboard.stage import Stage

from spectrace.replay.diagnosis import Diagnosis
from spectrace.tracer.rows import Level

__all__ = ["chosen", "document", "plan"]

_DOCS = Path(__file__).resolve().parents[2] / "docs"
_QUIET = Console(stderr=True)


def plan(numbers: Sequence[int], pairs: Sequence[Pair], *, few: bool) -> list[Seed]:
    """Every run of some seeds, in the order of the page."""
    found = []
    for number in numbers:
        seeds = [seed for pair in pairs for seed in (*draw(number, pair), *clean(number, pair))]
        found += quick(seeds) if few else seeds
    return sorted(found, key=_place)


def _place(seed: Seed) -> tuple[Any, ...]:
    ids, pairs = [*IDS], [*PAIRS]
    return len(seed.faults), [ids.index(id) for id in seed.faults], pairs.index(seed.pair), seed.number


def chosen(seeds: Iterable[Seed], only: Sequence[str]) -> list[Seed]:
    """The runs of an id, or with a text in their name; all where nothing is asked for."""

    def asked_for(seed: Seed) -> bool:
        return any(one in seed.faults if one in IDS else one in seed.name for one in only)

    return [seed for seed in seeds if not only or asked_for(seed)]


def document(runs: Sequence[Run], *, command: str, secs: float) -> dict[str, Any]:
    """What scoreboard.json holds."""
    return {
        "command": command,
        "seconds": round(secs),
        "totals": totals(runs),
        "runs": [run.to_json() for run in runs],
    }


def _blind(budget_secs: float) -> Diagnose:
    """The diagnosis under test, loaded when it is used."""
    from spectrace.replay.diagnose import diagnose

    return lambda trace, checkpoint, target: diagnose(trace, checkpoint, target=target, budget_secs=budget_secs)


def _page(trace: Path, found: Diagnosis) -> str:
    """What the command prints of a diagnosis, as text."""
    from spectrace.cli.diagnosis_page import render_diagnosis

    console = Console(width=110, file=io.StringIO(), record=True)
    console.print(render_diagnosis(trace, found), crop=False)
    return console.export_text()


@click.command()
@click.option("--seed", "numbers", type=int, multiple=True, default=(1,), show_default=True, help="Draws everything.")
@click.option("--only", multiple=True, metavar="ID|TEXT", help="Runs of an id, or with this in their name.")
@click.option("--quick", "few", is_flag=True, help="Each id once, on its cheapest pair, and some clean runs.")
@click.option("--pairs", "names", help=f"Comma-separated, of {', '.join(PAIRS)}.")
@click.option("--keep", type=click.Path(path_type=Path), help="Keep every trace, and what was said of it, in there.")
@click.option(
    "--again", type=click.Path(exists=True, path_type=Path), help="Diagnose what was kept in there; serve nothing."
)
@click.option("--level", type=click.Choice(["features", "full"]), default="features", show_default=True)
@click.option("--budget", default=180.0, show_default=True, help="Seconds for one diagnosis.")
@click.option("--threads", default=1, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=_DOCS, help="Gets scoreboard.json and .md.")
@click.option("--require", type=float, help="Fail where fewer are named first, or a clean run is called broken.")
@click.option("--thin", is_flag=True, help="Diagnose again with less in each trace, and without the target.")
@click.option("--list", "listed", is_flag=True, help="Only say what would run.")
def main(
    numbers: tuple[int, ...], only: tuple[str, ...], few: bool, names: str | None, keep: Path | None,
    again: Path | None, level: str, budget: float, threads: int, out: Path, require: float | None, thin: bool,
    listed: bool,
) -> None:  # fmt: skip
    """Seed, record, diagnose, score."""
    if again and (thin or keep):
        raise click.UsageError("--again goes without --keep and --thin: it serves nothing")
    torch.set_num_threads(threads)
    _hush()
    with tempfile.TemporaryDirectory(prefix="scoreboard-") as folder:
        pairs = make_pairs(Path(folder), tuple(names.split(",")) if names else ())
        seeds = chosen(plan(numbers, pairs, few=few), only)
        if listed:
            return _list(seeds)
        with Stage(Path(folder), threads=threads) as stage:
            kept, before = (Kept(root, _page) if root else None for root in (keep, again))
            judge = Judge(stage, _blind(budget), level=Level[level.upper()], keep=kept, again=before, thin=thin)
            command = " ".join(("make scoreboard", *_arguments(numbers, only, few, names, thin, again)))
            runs = _all(judge, seeds, {pair.name: pair for pair in pairs}, out, command)
    found = totals(runs)
    _QUIET.print(f"{found['first']} of {found['scored']} named first, {found['false_alarms']} false alarms; {out}")
    if require is not None and ((found["first_share"] or 0) < require or found["false_alarms"] or found["errors"]):
        raise SystemExit(1)


def _hush() -> None:
    """No progress bars but our own."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _arguments(
    numbers: Sequence[int], only: Sequence[str], few: bool, names: str | None, thin: bool, again: Path | None
) -> list[str]:
    """How to have the same again."""
    options = [f"--seed {number}" for number in numbers] + [f"--only {one}" for one in only]
    options += ["--quick"] * few + ["--thin"] * thin + ([f"--pairs {names}"] if names else [])
    options += ["--again KEPT"] * bool(again)
    return [f'ARGS="{" ".join(options)}"']


def _all(judge: Judge, seeds: Sequence[Seed], pairs: dict[str, Pair], out: Path, command: str) -> list[Run]:
    """Run deployment by deployment, so that few are started; written down after each pair of one."""
    order = sorted(range(len(seeds)), key=lambda at: (seeds[at].dtype, seeds[at].ranks, seeds[at].pair))
    done, started = dict[int, Run](), time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_QUIET) as progress:
        task = progress.add_task("seeds", total=len(seeds))
        for count, at in enumerate(order, 1):
            progress.update(task, description=seeds[at].name)
            done[at] = judge.run(seeds[at], pairs[seeds[at].pair])
            progress.console.print(_line(seeds[at], done[at]), highlight=False, markup=False, soft_wrap=True)
            progress.advance(task)
            if count == len(order) or seeds[order[count]].pair != seeds[at].pair:
                _write([done[i] for i in sorted(done)], out, command, time.perf_counter() - started)
    return [done[at] for at in sorted(done)]


def _line(seed: Seed, run: Run) -> str:
    """What became of a run."""
    if not run.scored:
        return f"{seed.name}: not scored: {run.reason}"
    place = "" if run.clean else f", place {run.rank}"
    told = ", ".join(f"{x:.3f}" if x is not None else "-" for x in (run.served, run.predicted, run.real))
    return f"{seed.name}: {run.verdict} {run.named or ''}{place}; {told}; {run.seconds:.0f} s {run.reason}"


def _write(runs: Sequence[Run], out: Path, command: str, secs: float) -> None:
    found = document(runs, command=command, secs=secs)
    out.mkdir(parents=True, exist_ok=True)
    (out / "scoreboard.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    (out / "scoreboard.md").write_text(render(found), "utf-8")


def _list(seeds: Sequence[Seed]) -> None:
    """Which ids are seeded into which pairs, and every run by name."""
    pairs = [name for name in PAIRS if any(seed.pair == name for seed in seeds)]
    table = Table("id", *pairs)
    rows = [("clean", ()), *((id, (id,)) for id in IDS)]
    for title, faults in rows:
        counts = [sum(seed.faults == faults and seed.pair == pair for seed in seeds) for pair in pairs]
        table.add_row(title, *(str(count or "") for count in counts))
    table.add_row("several", *(str(sum(len(s.faults) > 1 and s.pair == pair for s in seeds) or "") for pair in pairs))
    Console(width=140).print(table, *(seed.name for seed in seeds), sep="\n")


if __name__ == "__main__":
    main()

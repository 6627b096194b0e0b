"""`make scoreboard`: faults seeded into live deployments, recorded, diagnosed blind and scored."""

import io
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "models"))

from scoreboard.board import document, merged, place, write
from scoreboard.clean import clean
from scoreboard.judge import Diagnose, Judge
from scoreboard.kept import Kept
from scoreboard.pairs import IDS, PAIRS, Pair, make_pairs
from scoreboard.quick import quick
from scoreboard.scoring import Run, totals
from scoreboard.seeds import Seed, draw
from scoreboard.stage import Stage

from spectrace.replay.diagnosis import Diagnosis
from spectrace.tracer.errors import UserError
from spectrace.tracer.rows import Level

__all__ = ["chosen", "main", "plan"]

_ROOT = Path(__file__).resolve().parents[2]
_DOCS, _PARTIAL = _ROOT / "docs", _ROOT / "build" / "scoreboard"
_NOT_ALL = "--(only|pairs|quick)"
_LEVEL, _BUDGET_SECS, _THREADS = "features", 180.0, 1
_QUIET = Console(stderr=True)


def plan(numbers: Sequence[int], pairs: Sequence[Pair], *, few: bool) -> list[Seed]:
    """Every run of some seeds, in the order of the page."""
    found = []
    for number in numbers:
        seeds = [seed for pair in pairs for seed in (*draw(number, pair), *clean(number, pair))]
        found += quick(seeds) if few else seeds
    return sorted(found, key=lambda seed: place(seed.faults, seed.pair, seed.number))


def chosen(seeds: Iterable[Seed], only: Sequence[str]) -> list[Seed]:
    """The runs of an id, or with a text in their name; all where nothing is asked for."""

    def asked_for(seed: Seed) -> bool:
        return any(one in seed.faults if one in IDS else one in seed.name for one in only)

    return [seed for seed in seeds if not only or asked_for(seed)]


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


def _pair_names(_context: click.Context, _option: click.Parameter, given: str | None) -> tuple[str, ...]:
    names = tuple(given.split(",")) if given else ()
    if unknown := [name for name in names if name not in PAIRS]:
        raise click.UsageError(f"--pairs: no pair is called {', '.join(unknown)}; there are {', '.join(PAIRS)}")
    return names


_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command()
@click.option("--seed", "numbers", type=int, multiple=True, default=(1,), show_default=True, help="Draws everything.")
@click.option("--only", multiple=True, metavar="ID|TEXT", help="Runs of an id, or with this in their name.")
@click.option("--quick", "few", is_flag=True, help="Each id once, on its cheapest pair, and some clean runs.")
@click.option("--pairs", "names", callback=_pair_names, help=f"Comma-separated, of {', '.join(PAIRS)}.")
@click.option("--keep", type=click.Path(path_type=Path), help="Keep every trace, and what was said of it, in there.")
@click.option("--again", type=_FOLDER, help="Diagnose what was kept in there; serve nothing.")
@click.option("--level", type=click.Choice(["features", "full"]), default=_LEVEL, show_default=True)
@click.option("--budget", default=_BUDGET_SECS, show_default=True, help="Seconds for one diagnosis.")
@click.option("--threads", default=_THREADS, show_default=True)
@click.option(
    "--out", type=click.Path(path_type=Path),
    help="Gets scoreboard.json and .md; by default docs, and where not all is run, build/scoreboard.",
)  # fmt: skip
@click.option("--require", type=float, help="Fail where fewer are named first, or a clean run is called broken.")
@click.option("--thin", is_flag=True, help="Diagnose again with less in each trace, and without the target.")
@click.option("--merge", type=_FOLDER, multiple=True, help="Run nothing: one board of those in several folders.")
@click.option("--list", "listed", is_flag=True, help="Only say what would run.")
def main(
    numbers: tuple[int, ...], only: tuple[str, ...], few: bool, names: tuple[str, ...], keep: Path | None,
    again: Path | None, level: str, budget: float, threads: int, out: Path | None, require: float | None, thin: bool,
    merge: tuple[Path, ...], listed: bool,
) -> None:  # fmt: skip
    """Seed, record, diagnose, score."""
    if again and (thin or keep):
        raise click.UsageError("--again goes without --keep and --thin: it serves nothing")
    if merge:
        return _merge(merge, out)
    out = out or (_PARTIAL if only or names or few else _DOCS)
    torch.set_num_threads(threads)
    _hush()
    with tempfile.TemporaryDirectory(prefix="scoreboard-") as folder:
        pairs = make_pairs(Path(folder), names)
        seeds = chosen(plan(numbers, pairs, few=few), only)
        if listed:
            return _list(seeds)
        with Stage(Path(folder), threads=threads) as stage:
            kept, before = (Kept(root, _page) if root else None for root in (keep, again))
            judge = Judge(stage, _blind(budget), level=Level[level.upper()], keep=kept, again=before, thin=thin)
            command = _command(numbers, only, few, names, thin, again, level, budget, threads)
            runs = _all(judge, seeds, {pair.name: pair for pair in pairs}, out, command)
    found = totals(runs)
    _QUIET.print(f"{found['first']} of {found['scored']} named first, {found['false_alarms']} false alarms; {out}")
    if require is not None and ((found["first_share"] or 0) < require or found["false_alarms"] or found["errors"]):
        raise SystemExit(1)


def _merge(folders: Sequence[Path], out: Path | None) -> None:
    try:
        found = merged(folders)
    except UserError as error:
        raise click.UsageError(str(error)) from None
    write(found, out or (_PARTIAL if re.search(_NOT_ALL, found["command"]) else _DOCS))


def _hush() -> None:
    """No progress bars but our own."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _command(
    numbers: Sequence[int], only: Sequence[str], few: bool, names: Sequence[str], thin: bool, again: Path | None,
    level: str, budget: float, threads: int,
) -> str:  # fmt: skip
    """How to have the same again."""
    options = [f"--seed {number}" for number in numbers] + [f"--only {shlex.quote(one)}" for one in only]
    options += ["--quick"] * few + ["--thin"] * thin + [f"--pairs {','.join(names)}"] * bool(names)
    options += [f"--level {level}"] * (level != _LEVEL) + [f"--budget {budget:g}"] * (budget != _BUDGET_SECS)
    options += [f"--threads {threads}"] * (threads != _THREADS)
    options += ["--again KEPT"] * bool(again)
    return f'make scoreboard ARGS="{" ".join(options)}"'


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
                runs = [done[i] for i in sorted(done)]
                write(document(runs, command=command, secs=time.perf_counter() - started), out)
    return [done[at] for at in sorted(done)]


def _line(seed: Seed, run: Run) -> str:
    """What became of a run."""
    if not run.scored:
        return f"{seed.name}: not scored: {run.reason}"
    where = "" if run.clean else f", place {run.rank}"
    others = f"not there: {', '.join(run.others)}; " if run.others else ""
    told = ", ".join(f"{x:.3f}" if x is not None else "-" for x in (run.served, run.predicted, run.real))
    return f"{seed.name}: {run.verdict} {run.named or ''}{where}; {told}; {run.seconds:.0f} s {others}{run.reason}"


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

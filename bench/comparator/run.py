"""`bench/comparator/run.py --sglang-python PYTHON`: the same tensors compared by SGLang's comparator and by ours.

Writes the tables of docs/comparator.md. PYTHON is of an environment that has sglang; the page says how to make one.
"""

import os
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console

sys.path.append(str(Path(__file__).resolve().parents[1]))

from comparator.planted import PLANTED, Planted
from comparator.sides import OURS, SETTINGS, Said, Tools
from comparator.tensors import Sizes

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "comparator.md"
_SMALL = Sizes()
_MIDDLE = Sizes(requests=16, prompt=128, output=64, width=1024, batch=8, chunk=128)
_LARGE = Sizes(requests=96, prompt=256, output=256, width=4096, batch=64, chunk=256)  # rows of 24 KiB
_QUIET = Console(stderr=True)


def _other_batches(sizes: Sizes) -> Sizes:
    return replace(sizes, batch=sizes.batch - 1, chunk=sizes.chunk * 2 // 3, backwards=True)


def planted_table(tools: Tools, chosen: Sequence[Planted]) -> list[str]:
    """Each pair, by each tool: is it reported, and is it named?"""
    heads = [f"SGLang: {setting.title}" for setting in SETTINGS]
    rows = [
        _row(["B differs from A by", *heads, "named", "what it says first", f"{OURS}: sites", "named", "what it says"])
    ]
    rows.append("|---" * 9 + "|")
    tools.write("A", _SMALL)
    for title, sizes in (
        ("nothing", _SMALL),
        ("batches, chunks and order; all rows are equal", _other_batches(_SMALL)),
    ):
        tools.write("B", sizes)
        rows.append(_compared(tools, title, None))
        shutil.rmtree(tools.folder / "B")
    for one in chosen:
        tools.write("B", _SMALL, one)
        rows.append(_compared(tools, f"{one.number}. {one.title}", one))
        shutil.rmtree(tools.folder / "B")
    shutil.rmtree(tools.folder / "A")
    return rows


def _compared(tools: Tools, title: str, planted: Planted | None) -> str:
    _QUIET.print(title)
    theirs = [tools.sglang("A", "B", setting, planted) for setting in SETTINGS]
    ours = tools.ours("A", "B", planted)
    first = next((said.first for said in (theirs[1], *theirs) if said.first), "")
    named = _yes(any(said.named for said in theirs)) if planted else ""
    return _row([title, *map(_cell, theirs), named, first, *_our_cells(ours, planted)])


def _our_cells(ours: Said | None, planted: Planted | None) -> list[str]:
    if ours is None:
        return ["not run", "", ""]
    return [_cell(ours), _yes(ours.named) if planted else "", ours.first]


def _cell(said: Said) -> str:
    return f"exit {said.code}: {said.counted}"


def _yes(true: bool) -> str:
    return "yes" if true else "no"


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def speed_table(tools: Tools, pairs: dict[str, tuple[Sizes, Sizes, Planted | None]], repeats: int) -> list[str]:
    """Both tools in turn, so many times; medians, and ratios of runs that followed each other."""
    heads = ["pair", "tool", "verdict", "secs, median (min-max)", "peak MB", "secs ÷ ours", "peak ÷ ours"]
    rows = [_row(heads), "|---" * len(heads) + "|"]
    for title, (a, b, planted) in pairs.items():
        _QUIET.print(title)
        tools.write("A", a)
        tools.write("B", b, planted)
        title = f"{title}, {_gigabytes(tools.folder / 'A' / 'trace'):.2f} GB a run as a trace"
        calls: dict[str, Callable[[], Said | None]] = {OURS: lambda: tools.ours("A", "B")}
        settings = SETTINGS[1:] if a == _MIDDLE else SETTINGS[2:]  # of many files, step by step takes hours
        calls |= {f"SGLang, {one.title}": (lambda one=one: tools.sglang("A", "B", one)) for one in settings}
        took: dict[str, list[Said]] = {name: [] for name in calls}
        for _ in range(repeats):
            for name, call in calls.items():
                if (said := call()) is not None:
                    took[name].append(said)
        rows += [_row([title, name, *_figures(found, took[OURS])]) for name, found in took.items()]
        shutil.rmtree(tools.folder / "A")
        shutil.rmtree(tools.folder / "B")
    return rows


def _figures(found: list[Said], ours: list[Said]) -> list[str]:
    if not found:
        return ["not run", "", "", "", ""]
    secs = [said.secs for said in found]
    spread = f"{statistics.median(secs):.1f} ({min(secs):.1f}-{max(secs):.1f})"
    peak = f"{statistics.median(said.peak_bytes for said in found) / 1e6:,.0f}"
    pairs = list(zip(found, ours, strict=True)) if ours else []
    times = f"{statistics.median(one.secs / mine.secs for one, mine in pairs):.1f}" if pairs else ""
    peaks = f"{statistics.median(one.peak_bytes / mine.peak_bytes for one, mine in pairs):.1f}" if pairs else ""
    return [_cell(found[0]), spread, peak, times, peaks]


def _gigabytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e9


def write_between(page: Path, name: str, lines: Sequence[str]) -> None:
    """Put a table between its markers in a page."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    text = page.read_text("utf-8")
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    assert pattern.search(text), f"{page} has no {begin}"
    page.write_text(pattern.sub(lambda _: "\n".join([begin, *lines, end]), text), "utf-8")


@click.command()
@click.option("--sglang-python", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--only", default="", help="Numbers of planted differences, with commas; the page stays as it is then.")
@click.option("--table", type=click.Choice(["planted", "speed"]), multiple=True, default=["planted", "speed"])
@click.option("--scale", default=1.0, show_default=True, help="Of the large timed pair.")
@click.option("--repeats", default=3, show_default=True)
@click.option("--work", type=click.Path(file_okay=False, path_type=Path), help="Where runs are written.")
@click.option("--page", type=click.Path(path_type=Path), default=_PAGE, show_default=True)
def main(
    sglang_python: Path, only: str, table: Sequence[str], scale: float, repeats: int, work: Path | None, page: Path
) -> None:
    """Compare the planted pairs, time the large ones, print both tables and write them into the page."""
    chosen = [one for one in PLANTED if not only or one.number in only.split(",")]
    for name in table:
        with tempfile.TemporaryDirectory(dir=work) as folder:
            tools = Tools(Path(folder), sglang_python.absolute())
            lines = planted_table(tools, chosen) if name == "planted" else _timed(tools, scale, repeats)
        Console(width=400).print("\n".join(lines), markup=False, highlight=False)
        if not only:
            write_between(page, name, lines)


def _timed(tools: Tools, scale: float, repeats: int) -> list[str]:
    large = replace(_LARGE, requests=max(round(_LARGE.requests * scale), 1))
    cast = next(one for one in PLANTED if one.number == "7")
    pairs = {
        "equal": (large, large, None),
        "equal, batched otherwise": (_MIDDLE, _other_batches(_MIDDLE), None),
        "every received row cast": (_MIDDLE, _MIDDLE, cast),
    }
    cpus = f"{len(os.sched_getaffinity(0))} CPUs, {repeats} repeats"
    return [*speed_table(tools, pairs, repeats), "", f"Measured in one run with {cpus}."]


if __name__ == "__main__":
    main()

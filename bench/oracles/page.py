"""docs/agreement.md: every switch on every implementation, run and compared anew.

SPECTRACE_ORACLES=ENV SPECTRACE_SGLANG=ENV SPECTRACE_VLLM=ENV python bench/oracles/page.py
"""

import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

from oracles.agreement import TOLERANCE, Judged, judge, run_oracle
from oracles.cases import CASES
from oracles.known import ORACLES
from oracles.target import save_verifier

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "agreement.md"
_BEGIN, _END = "<!-- written by bench/oracles/page.py -->", "<!-- end -->"

Board = Mapping[str, Mapping[str, Judged]]


def measured(folder: Path) -> Board:
    """What came of every draft, by implementation and draft."""
    verifier, found = save_verifier(folder / "target"), {}
    for name, oracle in ORACLES.items():
        if oracle.python is None:
            raise click.UsageError(
                f"{oracle.environment} is not set; expected the folder of an environment with {name}"
            )
        run_oracle(oracle, folder / oracle.script, verifier)
        found[name] = {case.name: judge(oracle, folder / oracle.script, case) for case in oracle.cases()}
    return found


def render(board: Board) -> str:
    """The table, and below it what is done otherwise, by implementation."""
    return "\n".join((*_table(board), "", *_otherwise(board)))


def _table(board: Board) -> Iterator[str]:
    yield f"| draft | {' | '.join(board)} |"
    yield "|---" * (len(board) + 1) + "|"
    for draft in CASES:
        yield f"| {draft} | {' | '.join(_cell(found.get(draft)) for found in board.values())} |"


def _cell(judged: Judged | None) -> str:
    if judged is None:
        return "–"
    shown = judged.kind if judged.figure is None else f"{judged.kind} {judged.figure:.0e}"
    return shown.removeprefix("agrees ") if judged.holds else f"**not as known: {shown}**"


def _otherwise(board: Board) -> Iterator[str]:
    for name, found in board.items():
        told: dict[str, list[str]] = {}
        for draft, judged in found.items():
            if judged.words:
                told.setdefault(judged.words, []).append(draft)
        if told:
            yield f"**{name}**"
            yield ""
            yield from (f"- {'; '.join(drafts)}: {words}" for words, drafts in told.items())
            yield ""


@click.command()
@click.option("--page", type=Path, default=_PAGE, help="Where the table goes, between its marks.")
def main(page: Path) -> None:
    """Run every draft on every implementation and write the table."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        board = measured(Path(folder))
    text = render(board)
    print(text)
    before, _, rest = page.read_text("utf-8").partition(_BEGIN)
    page.write_text(f"{before}{_BEGIN}\n\n{text}\n{_END}{rest.partition(_END)[2]}", "utf-8")
    judged = [one for found in board.values() for one in found.values()]
    agreeing = [one.figure for one in judged if one.figure is not None]
    print(f"{len(judged)} drafts, {sum(not one.holds for one in judged)} not as known, worst {max(agreeing):.1e}")
    if not all(one.holds for one in judged) or max(agreeing) > TOLERANCE:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

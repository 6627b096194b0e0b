"""The board on disk: scoreboard.json and the page, written after each pair, and put together from several."""

import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from scoreboard.pairs import IDS, PAIRS
from scoreboard.render import render
from scoreboard.scoring import Run, totals

from spectrace.tracer.errors import UserError

__all__ = ["document", "merged", "place", "write"]

_JSON, _PAGE = "scoreboard.json", "scoreboard.md"
_PARTS = re.compile(r" ?--(seed \d+|pairs [\w,]+)")


def document(runs: Sequence[Run], *, command: str, secs: float) -> dict[str, Any]:
    """What scoreboard.json holds."""
    return {
        "command": command,
        "seconds": round(secs),
        "totals": totals(runs),
        "runs": [run.to_json() for run in runs],
    }


def write(found: dict[str, Any], out: Path) -> None:
    """Both files of a board."""
    out.mkdir(parents=True, exist_ok=True)
    (out / _JSON).write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    (out / _PAGE).write_text(render(found), "utf-8")


def place(faults: Sequence[str], pair: str, number: int) -> tuple[Any, ...]:
    """The order of the page."""
    return len(faults), [IDS.index(id) for id in faults], [*PAIRS].index(pair), number


def merged(folders: Sequence[Path]) -> dict[str, Any]:
    """One board of several that ran beside each other, each over pairs or seeds of its own.

    Raises UserError for boards that differ in other options, for runs that are in two of them, and for pairs that lack
    a seed which others have.
    """
    boards = {folder / _JSON: _read(folder / _JSON) for folder in folders}
    commands = {path: _PARTS.sub("", board["command"]) for path, board in boards.items()}
    if len(set(commands.values())) > 1:
        said = "; ".join(f"{path}: {command}" for path, command in commands.items())
        raise UserError(f"boards of different options do not go together: {said}")
    held: dict[tuple[str, int], Path] = {}
    for path, board in boards.items():
        for pair, seed in sorted({(run["pair"], run["seed"]) for run in board["runs"]}):
            if (pair, seed) in held:
                raise UserError(f"pair {pair}, seed {seed} is in {held[pair, seed]} and in {path}; give each once")
            held[pair, seed] = path
    pairs, seeds = {pair for pair, _ in held}, sorted({seed for _, seed in held})
    if lacking := sorted((pair, seed) for pair in pairs for seed in seeds if (pair, seed) not in held):
        raise UserError(f"pair {lacking[0][0]} lacks seed {lacking[0][1]}, which others have; give its board, too")
    runs = [Run(**run) for board in boards.values() for run in board["runs"]]
    runs.sort(key=lambda run: place(run.faults, run.pair, run.seed))
    secs = max(board["seconds"] for board in boards.values())
    return document(runs, command=_whole(next(iter(commands.values())), pairs, seeds), secs=secs)


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"{path}: no board can be read there: {error.strerror}") from None
    return found


def _whole(command: str, pairs: Collection[str], seeds: Sequence[int]) -> str:
    """The command of all of them: its seeds, and its pairs where some are missing."""
    named = ",".join(pair for pair in PAIRS if pair in pairs)
    parts = [f"--seed {seed}" for seed in seeds], [f"--pairs {named}"] if len(pairs) < len(PAIRS) else []
    others = re.findall(r'ARGS="(.*)"$', command)
    return f'make scoreboard ARGS="{" ".join([*parts[0], *filter(None, map(str.strip, others)), *parts[1]])}"'

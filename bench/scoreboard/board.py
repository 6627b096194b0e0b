"""The board on disk: scoreboard.json and the page, written after each pair, and put together from several."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scoreboard.pairs import IDS, PAIRS
from scoreboard.render import render
from scoreboard.scoring import Run, totals

from spectrace.tracer.errors import UserError

__all__ = ["document", "merged", "place", "write"]

_JSON, _PAGE = "scoreboard.json", "scoreboard.md"
_PAIRS_OPTION = re.compile(r" --pairs [\w,]+")


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
    """One board of several that ran beside each other, each over pairs of its own.

    Raises UserError for boards that differ in anything but their pairs.
    """
    boards = {folder / _JSON: _read(folder / _JSON) for folder in folders}
    commands = {path: _PAIRS_OPTION.sub("", board["command"]) for path, board in boards.items()}
    if len(set(commands.values())) > 1:
        said = "; ".join(f"{path}: {command}" for path, command in commands.items())
        raise UserError(f"boards of different seeds or options do not go together: {said}")
    of_pairs: dict[str, Path] = {}
    for path, board in boards.items():
        for pair in sorted({run["pair"] for run in board["runs"]}):
            if pair in of_pairs:
                raise UserError(f"pair {pair} is in {of_pairs[pair]} and in {path}; give boards of different pairs")
            of_pairs[pair] = path
    runs = [Run(**run) for board in boards.values() for run in board["runs"]]
    runs.sort(key=lambda run: place(run.faults, run.pair, run.seed))
    secs = max(board["seconds"] for board in boards.values())
    return document(runs, command=_of_pairs(next(iter(commands.values())), list(of_pairs)), secs=secs)


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"{path}: no board can be read there: {error.strerror}") from None
    return found


def _of_pairs(command: str, pairs: Sequence[str]) -> str:
    """The command with its pairs, where some are missing."""
    if len(pairs) == len(PAIRS):
        return command
    named = ",".join(pair for pair in PAIRS if pair in pairs)
    return re.sub('"$', f' --pairs {named}"', command)

"""Runs that are kept: each one's trace, what was said of it, and its score; so that it can be diagnosed again."""

import json
import re
import shutil
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scoreboard.scoring import Run
from scoreboard.seeds import Seed

from spectrace.replay.diagnosis import Diagnosis

__all__ = ["Kept"]


@dataclass(frozen=True, slots=True)
class Kept:
    """A folder with one folder for each run; `page` turns a diagnosis into the text that a user reads."""

    root: Path
    page: Callable[[Path, Diagnosis], str]

    def folder(self, seed: Seed) -> Path:
        """Where a run is kept."""
        return self.root / re.sub("[^A-Za-z0-9.,+-]+", "_", seed.name)

    def trace(self, seed: Seed) -> Path:
        """Where its trace is."""
        return self.folder(seed) / "trace"

    def put_trace(self, seed: Seed, trace: Path) -> None:
        """Keep what was recorded, in the place of what was kept before."""
        shutil.rmtree(self.folder(seed), ignore_errors=True)
        shutil.copytree(trace, self.trace(seed))

    def put_diagnosis(self, seed: Seed, trace: Path, found: Diagnosis | Exception) -> None:
        """Keep what was said of a trace, for programs and for people; or why nothing was."""
        folder = self.folder(seed)
        if isinstance(found, Exception):
            (folder / "error.txt").write_text("".join(traceback.format_exception(found)), "utf-8")
            return
        text = json.dumps(asdict(found), indent=2, default=_plain)
        (folder / "diagnosis.json").write_text(text + "\n", "utf-8")
        self.put_page(seed, "diagnosis", trace, found)

    def put_page(self, seed: Seed, name: str, trace: Path, found: Diagnosis) -> None:
        """Keep one page that a user would read."""
        (self.folder(seed) / f"{name}.txt").write_text(self.page(trace, found), "utf-8")

    def put_run(self, seed: Seed, run: Run) -> None:
        """Keep the score."""
        (self.folder(seed) / "run.json").write_text(json.dumps(run.to_json(), indent=2) + "\n", "utf-8")

    def run(self, seed: Seed) -> Run | None:
        """The score of a run; None where it was not kept."""
        path = self.folder(seed) / "run.json"
        return Run(**json.loads(path.read_text("utf-8"))) if path.exists() else None


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)

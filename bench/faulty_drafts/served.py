"""Drafts served by real vLLM and recorded, each in a folder of its own that is kept: draft, trace, what vLLM said."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faulty_drafts.kinds import BASES, Kind
from scoreboard import edits
from scoreboard.pairs import Pair, draw_rng

from spectrace.tracer.acceptance import acceptance_of_rows
from spectrace.tracer.trace import Trace

__all__ = ["Ran", "Stage"]

_SERVE = Path(__file__).with_name("serve.py")
_TIMEOUT_SECS = 600.0
_COUNT = {"smollm2": 10}
_LOUD = re.compile(r"\b(?:WARNING|ERROR)\b.*?\] ?(.*)")
_RAISED = re.compile(r"(?:\[rank\d+\]: )?((?:\w+\.)*\w*(?:Error|Exception)\b:.*)")
_LONGEST = 200


@dataclass(frozen=True, slots=True)
class Ran:
    """One draft served: `counters` are vLLM's own, None where it did not come to an end; then `failure` says why.

    `warnings` are what vLLM logged as a warning or worse.
    """

    folder: Path
    draft: Path
    counters: Mapping[str, Any] | None
    outputs: tuple[tuple[int, ...], ...]
    failure: str
    warnings: tuple[str, ...]

    @property
    def trace(self) -> Path:
        return self.folder / "trace"

    @property
    def length(self) -> float | None:
        """vLLM's mean acceptance length, by its counters."""
        if not self.counters:
            return None
        return 1 + self.counters["num_accepted_tokens"] / max(self.counters["num_drafts"], 1)

    @property
    def whole_length(self) -> float | None:
        """Over whole rounds, as a diagnosis counts and foretells."""
        if self.counters is None:
            return None
        return acceptance_of_rows(Trace.open(self.trace).rows("verified", rank=0)).acceptance_length


@dataclass(frozen=True, slots=True)
class Stage:
    """`vllm` is the `bin` of an environment that has vLLM; everything is kept in `root`, and served once."""

    root: Path
    vllm: Path
    again: bool = False

    def sound(self, pair: Pair, base: str) -> Ran | None:
        """The draft with nothing wrong in it."""
        if not base:
            return self._ran(pair, self.root / pair.name / "sound", pair.draft)
        folder = self.root / pair.name / f"sound {base}".replace(" ", "-")
        draft = folder / "draft"
        if not draft.exists():
            edits.write(BASES[base](edits.read(pair.draft)), draft)
        return self._ran(pair, folder, draft)

    def faulty(self, pair: Pair, kind: Kind) -> Ran | None:
        """The draft with a fault in it; None where it was not kept, and nothing is served."""
        folder = self.root / pair.name / kind.name.replace(" ", "-")
        draft = folder / "draft"
        if not draft.exists():
            sound = edits.read(pair.draft)
            edits.write(kind.edit(BASES[kind.base](sound) if kind.base else sound), draft)
        return self._ran(pair, folder, draft)

    def mended(self, pair: Pair, faulty: Ran, sound: Ran, command: str) -> Ran | None:
        """The faulty folder with an edit done to a copy of it, served again; None where the command fails.

        One that writes into the sound folder is not run.
        """
        if str(faulty.draft) not in command or str(sound.draft) in command:
            return None
        folder = faulty.folder / f"mended-{hashlib.sha256(command.encode()).hexdigest()[:8]}"
        draft = folder / "draft"
        if not draft.exists():
            shutil.copytree(faulty.draft, draft)
            if not _edited(command.replace(str(faulty.draft), str(draft))):
                shutil.rmtree(folder)
                return None
        return self._ran(pair, folder, draft)

    def _ran(self, pair: Pair, folder: Path, draft: Path) -> Ran | None:
        log = folder / "log.txt"
        if not log.exists():
            if self.again:
                return None
            self._serve(pair, folder, draft)
        said = folder / "said.json"
        told = json.loads(said.read_text("utf-8")) if said.exists() else {"counters": None, "outputs": []}
        lines = log.read_text("utf-8").splitlines()
        failure = "" if told["counters"] else _failure(lines)
        return Ran(folder, draft, told["counters"], tuple(map(tuple, told["outputs"])), failure, tuple(_warned(lines)))

    def _serve(self, pair: Pair, folder: Path, draft: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder / "trace", ignore_errors=True)
        prompts = pair.ask(draw_rng(1, pair, "prompts"), _COUNT.get(pair.name, pair.count))
        asked = {
            "target": str(pair.target), "draft": str(draft.resolve()), "prompts": prompts,
            "depth": pair.serving.depth, "max_new": pair.serving.max_new,
        }  # fmt: skip
        (folder / "asked.json").write_text(json.dumps(asked), "utf-8")
        record = [self.vllm / "spectrace", "record", "--out", folder / "trace", "--level", "features", "--"]
        command = [*record, self.vllm / "python", _SERVE, folder / "asked.json", folder / "said.json"]
        path = os.pathsep.join((str(self.vllm), os.environ["PATH"]))
        done = subprocess.run(
            list(map(str, command)), env={**os.environ, "PATH": path}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=_TIMEOUT_SECS, check=False, cwd=folder,
        )  # fmt: skip
        (folder / "log.txt").write_text(done.stdout, "utf-8")


def _edited(command: str) -> bool:
    """Whether a command, run by a shell as a user would, came to its end."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    shell = ["bash", "-c", command]
    done = subprocess.run(shell, env={**os.environ, "PATH": path}, capture_output=True, timeout=60.0, check=False)
    return done.returncode == 0


def _warned(lines: list[str]) -> Iterator[str]:
    """What was logged as a warning or worse, without its time and place."""
    for line in lines:
        if found := _LOUD.search(line):
            yield found[1].strip()[:_LONGEST]


def _failure(lines: list[str]) -> str:
    """The last line that names an exception."""
    errors = [found[1] for line in lines if (found := _RAISED.match(line))]
    return errors[-1] if errors else lines[-1] if lines else "no word"

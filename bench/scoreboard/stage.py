"""Where seeds are served: one running deployment at a time; faults, settings and drafts change from call to call."""

import shutil
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from types import TracebackType

import torch
from scoreboard import edits
from scoreboard.edits import Edit
from scoreboard.pairs import Pair
from scoreboard.seeds import Seed
from scoreboard.ways import redrawn

from spectrace.engine.cluster import ensure_cluster, stop_cluster
from spectrace.engine.deployment import Deployment
from spectrace.engine.serving import Serving
from spectrace.tracer.acceptance import acceptance_of_rows
from spectrace.tracer.errors import RunFailed
from spectrace.tracer.rows import Level
from spectrace.tracer.trace import Trace

__all__ = ["Recorded", "Stage", "believed", "read", "remove", "same_values"]

_KEYS = ("rank", "request", "pass", "depth", "node", "position", "live", "token")
_FAMILIES = ("emitted", "received", "drafted", "verified")

Facts = dict[str, list[tuple[object, ...]]]


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a run came to: its acceptance, and of every recorded row its tokens and the hashes of its features.

    States that the draft feeds itself are left out: they may differ by what changes no answer.
    """

    acceptance: float | None
    facts: Facts


class Stage:
    """Use as a context manager. Folders that have to be made are made in `folder`, under names that say nothing.

    Nothing runs before something is served.
    """

    def __init__(self, folder: Path, *, threads: int = 1) -> None:
        self.folder, self.threads = folder, threads
        self._live: Deployment | None = None
        self._key: tuple[str, tuple[int, int]] | None = None
        self._stack, self._repaired = ExitStack(), dict[object, Recorded]()
        self._edited: dict[tuple[str, Edit], Path] = {}
        self._traces = 0

    def __enter__(self) -> "Stage":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()
        self._stack.close()

    def record(self, seed: Seed, pair: Pair, *, level: Level) -> Path:
        """Serve a seed as it is, into a new trace."""
        draft = believed(self, seed, pair) if seed.kind != "conversion" else self.edited(seed.edit, pair)
        return self._serve(seed, pair, draft, replace(seed.served, level=level))

    def repaired(self, seed: Seed, pair: Pair, *, left: tuple[str, ...] = ()) -> Recorded:
        """The same prompts on the pair's own draft, with what is `left` switched on: the real fix, served once."""
        serving = replace(seed.serving, level=Level.LIGHT, faults=left)
        key = (pair.name, seed.prompts, serving, seed.ranks, seed.dtype)
        if key not in self._repaired:
            trace = self._serve(seed, pair, pair.draft, serving)
            self._repaired[key] = read(trace)
            remove(trace)
        return self._repaired[key]

    def real(self, seed: Seed, pair: Pair, *, left: tuple[str, ...] = ()) -> tuple[float | None, int]:
        """The acceptance length that the real fix brings, and of how many runs it is the mean.

        At a temperature it is itself drawn, so there are several, the seed's own draws first.
        """
        if not (seed.greedy or pair.draws):
            return None, 0
        servings = redrawn(seed.serving, pair.draws)
        found = [self.repaired(replace(seed, serving=one), pair, left=left).acceptance for one in servings]
        known = [acceptance for acceptance in found if acceptance is not None]
        return fmean(known) if known else None, len(known)

    def shown(self, trace: Path) -> Path:
        """A kept trace, under a name that says nothing."""
        self._traces += 1
        link = self.folder / f"trace-{self._traces}"
        link.symlink_to(trace.absolute())
        return link

    def edited(self, edit: Edit | None, pair: Pair) -> Path:
        """The pair's draft with something done to it."""
        assert edit
        if (pair.name, edit) not in self._edited:
            folder = self.folder / f"draft-{len(self._edited)}"
            self._edited[pair.name, edit] = edits.write(edit.apply(edits.read(pair.draft)), folder)
        return self._edited[pair.name, edit]

    def _serve(self, seed: Seed, pair: Pair, draft: Path, serving: Serving) -> Path:
        self._traces += 1
        trace = self.folder / f"trace-{self._traces}"
        deployment = self._running(seed, pair, draft)
        try:
            served = deployment.serve(seed.prompts, serving, trace=trace)
        except RunFailed:
            self._end()  # ranks may be gone: the next run starts others
            raise
        if served.losses:
            raise RunFailed(f"the recording is incomplete: {'; '.join(served.losses)}")
        return trace

    def _running(self, seed: Seed, pair: Pair, draft: Path) -> Deployment:
        """The deployment of so many ranks and this precision, holding these folders."""
        key = (seed.dtype, seed.ranks)
        if self._live is None or self._key != key:
            self._end()
            if ensure_cluster(None):
                self._stack.callback(stop_cluster)
            dtype, (tp, draft_tp) = getattr(torch, seed.dtype), seed.ranks
            live = Deployment(pair.target, draft, dtype=dtype, threads=self.threads, tp=tp, draft_tp=draft_tp)
            self._live, self._key = live.__enter__(), key
        elif (self._live.target_folder, self._live.draft_folder) != (pair.target, draft):
            self._live.swap(pair.target, draft)
        return self._live

    def _end(self) -> None:
        if self._live:
            self._live.close()
        self._live = None


def believed(stage: Stage, seed: Seed, pair: Pair) -> Path:
    """The folder that the team believes it serves."""
    if seed.edit and seed.kind != "conversion":
        return stage.edited(seed.edit, pair)
    return seed.draft or pair.draft


def read(folder: Path) -> Recorded:
    """A trace's acceptance, and what was recorded of every row."""
    trace = Trace.open(folder)
    facts = {family: _facts(trace, family) for family in _FAMILIES}
    return Recorded(acceptance_of_rows(trace.rows("verified", rank=0)).acceptance_length, facts)


def _facts(trace: Trace, family: str) -> list[tuple[object, ...]]:
    rows = trace.rows(family)
    columns = [rows[name].tolist() for name in _KEYS]
    if family == "drafted":
        columns.append(rows["draft_token"].tolist())
    if family in ("emitted", "received"):
        own = zip(rows["hashes"], rows["depth"].tolist(), strict=True)
        columns.append([() if depth else tuple(map(int, hashes)) for hashes, depth in own])
    return sorted(zip(*columns, strict=True))


def same_values(one: Recorded, other: Recorded) -> bool:
    """Whether no feature, no position and no token tells two runs apart."""
    return one.facts == other.facts


def remove(folder: Path) -> None:
    """A trace that is not needed any more."""
    shutil.rmtree(folder, ignore_errors=True)

"""One run from seed to score: served and recorded, repaired for real, diagnosed blind."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from scoreboard.kept import Kept
from scoreboard.mending import is_misread, mends
from scoreboard.pairs import Pair
from scoreboard.scoring import Real, Run, failed, score, unscored
from scoreboard.seeds import Seed
from scoreboard.stage import Recorded, Stage, believed, read, remove, same_values
from scoreboard.thin import Thinned, ThinTrace, View, failed_view, seen, thinned, views

from spectrace.engine.checkpoint import DraftCheckpoint, read_draft
from spectrace.replay.diagnosis import Cause, Diagnosis
from spectrace.tracer.rows import Level
from spectrace.tracer.trace import Trace

__all__ = ["Diagnose", "Judge"]

Diagnose = Callable[[Trace, DraftCheckpoint, Path | None], Diagnosis]
"""A trace, the draft that the team believes it serves, the target's folder if given: nothing else is known to it."""


@dataclass(frozen=True, slots=True)
class Judge:
    """`keep` gets every trace and what was said of it; with `again` nothing is served, and kept traces are diagnosed.

    With `thin` what is diagnosed is diagnosed again with less in the trace.
    """

    stage: Stage
    diagnose: Diagnose
    level: Level = Level.FEATURES
    keep: Kept | None = None
    again: Kept | None = None
    thin: bool = False

    def run(self, seed: Seed, pair: Pair) -> Run:
        """Score one seed. What raises becomes part of the record."""
        if self.again:
            return self._judge_again(self.again, seed, pair)
        try:
            trace = self.stage.record(seed, pair, level=self.level)
        except Exception as error:
            return failed(seed, error, while_="serving", scored=False)
        try:
            if self.keep:
                self.keep.put_trace(seed, trace)
            run = self._judge(seed, pair, trace)
            if self.keep:
                self.keep.put_run(seed, run)
            return run
        finally:
            remove(trace)

    def _judge(self, seed: Seed, pair: Pair, trace: Path) -> Run:
        try:
            recorded = read(trace)
            idle = self._idle(seed, pair, recorded)
            if idle:
                return unscored(seed, idle, real=self.stage.repaired(seed, pair).acceptance, served=recorded.acceptance)
            real = self._real(seed, pair) if seed.faults else Real(recorded.acceptance)
        except Exception as error:
            return failed(seed, error, while_="serving the repair", scored=False)
        run = self._diagnosed(seed, pair, trace, real)
        return replace(run, thinned=self._thinned(seed, pair, trace, recorded)) if self.thin and not run.raised else run

    def _judge_again(self, kept: Kept, seed: Seed, pair: Pair) -> Run:
        """As it was served before, by what the diagnosis says now."""
        before = kept.run(seed)
        if before is None:
            return unscored(seed, f"is not kept in {kept.root}")
        if not before.scored:
            return before
        real = Real(before.real, {id: after for id, (_, after) in before.each.items()}, before.real_runs)
        run = self._diagnosed(seed, pair, self.stage.shown(kept.trace(seed)), real)
        return replace(run, served_as=before.served_as, greedy=before.greedy)

    def _diagnosed(self, seed: Seed, pair: Pair, trace: Path, real: Real) -> Run:
        checkpoint, started = read_draft(believed(self.stage, seed, pair)), time.perf_counter()
        try:
            found = self.diagnose(Trace.open(trace), checkpoint, pair.target)
        except Exception as error:
            if self.keep:
                self.keep.put_diagnosis(seed, trace, error)
            return failed(seed, error, while_="diagnosing", scored=True, real=real)
        seconds = time.perf_counter() - started
        if self.keep:
            self.keep.put_diagnosis(seed, trace, found)
        return score(seed, found, real=real, seconds=seconds, is_mended=self._mending(seed, pair))

    def _mending(self, seed: Seed, pair: Pair) -> Callable[[Cause], bool] | None:
        """Whether a cause's edit mends the folder that is wrong; None where there is none, or not any more."""
        if not (seed.faults and seed.edit) or (self.again and seed.kind == "conversion"):
            return None
        wrong = self.stage.edited(seed.edit, pair)
        return partial(mends, wrong=wrong, right=pair.draft) if is_misread(wrong, pair.draft) else None

    def _idle(self, seed: Seed, pair: Pair, recorded: Recorded) -> str:
        """Why there is nothing in a trace to be named, if so: the same is recorded with a fault repaired, or all."""
        if seed.faults and same_values(recorded, self.stage.repaired(seed, pair)):
            return "changes no feature, no position and no token"
        for id, left in _one_repaired(seed):
            if same_values(recorded, self.stage.repaired(seed, pair, left=left)):
                return f"{id} is masked: without it the same is recorded"
        return ""

    def _real(self, seed: Seed, pair: Pair) -> Real:
        acceptance, runs = self.stage.real(seed, pair)
        each = {id: self.stage.real(seed, pair, left=left)[0] for id, left in _one_repaired(seed)}
        return Real(acceptance, each, runs)

    def _thinned(self, seed: Seed, pair: Pair, trace: Path, recorded: Recorded) -> dict[str, dict[str, Any]]:
        """What is said of each view of the trace."""
        repaired = self.stage.repaired(seed, pair).facts if seed.faults else {}
        found = {}
        for view in views(Trace.open(trace), seed):
            sign = seen(view, recorded.facts) != seen(view, repaired)
            found[view.name] = asdict(self._through(view, seed, pair, trace, sign=sign))
        return found

    def _through(self, view: View, seed: Seed, pair: Pair, trace: Path, *, sign: bool) -> Thinned:
        checkpoint = read_draft(believed(self.stage, seed, pair))
        try:
            found = self.diagnose(ThinTrace(trace, view), checkpoint, pair.target if view.target else None)
        except Exception as error:
            return failed_view(error)
        if self.keep:
            self.keep.put_page(seed, view.name, trace, found)
        return thinned(seed, found, sign=sign)


def _one_repaired(seed: Seed) -> list[tuple[str, tuple[str, ...]]]:
    """Of several faults each, and those that are left when it is repaired."""
    if len(seed.faults) < 2:
        return []
    return [(id, tuple(other for other in seed.faults if other != id)) for id in seed.faults]

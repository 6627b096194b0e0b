"""A recorded trace with less in it: some of its requests, prompts without their first draft rows, or no target.

A view declares no loss. What is missing has to be noticed from the rows that are left.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scoreboard.scoring import Real, absent, score
from scoreboard.seeds import Seed
from scoreboard.stage import Facts

from spectrace.replay.diagnosis import Diagnosis, Verdict
from spectrace.tracer.account import Account, FamilyAccount
from spectrace.tracer.rows import FAMILY
from spectrace.tracer.rowset import Rows
from spectrace.tracer.survey import survey
from spectrace.tracer.trace import Trace

__all__ = ["OUTCOMES", "ThinTrace", "Thinned", "View", "failed_view", "seen", "thinned", "views"]

OUTCOMES = ("right", "in part", "insufficient", "no sign", "silent", "wrong", "raised")
"""`in part`: of several faults one comes first, and not all are named. `insufficient`: no cause, and no claim that all
is well. `silent`: that claim, though the rows show what was seeded; `no sign` where they do not. `wrong`: a cause
comes first that is not there."""

_SHARES = (50, 20, 5)
_CUT = 3  # of a prompt one position in so many
_DRAFT = ("received", "drafted")

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class View:
    """What is left: `requests`, and of the draft's rows of text in each those from position `cut` on."""

    name: str
    requests: frozenset[int]
    cut: Mapping[int, int] = field(default_factory=dict)
    target: bool = True

    def keeps(self, family: str, requests: Ints, depths: Ints, positions: Ints) -> Bools:
        """Which rows are there."""
        kept = np.isin(requests, list(self.requests))
        if family in _DRAFT and self.cut:
            first = np.array([self.cut.get(request, 0) for request in requests.tolist()], np.int64)
            kept &= (depths > 0) | (positions >= first)
        return np.asarray(kept, np.bool_)


class ThinTrace(Trace):
    """A trace as it is seen through a view."""

    def __init__(self, folder: Path, view: View) -> None:
        super().__init__(survey(folder))
        self.view = view
        self._kept: dict[str, Rows] = {}

    def rows(self, family: str, **equals: object) -> Rows:
        """The rows that are left."""
        if family not in self._kept:
            rows = super().rows(family)
            columns = (rows[name].astype(np.int64) for name in ("request", "depth", "position"))
            self._kept[family] = rows.take(self.view.keeps(family, *columns))
        return self._kept[family].where(**equals)

    def account(self) -> Account:
        """As if nothing else had ever been there."""
        return Account({name: FamilyAccount(recorded=len(self.rows(name))) for name in FAMILY})


def views(trace: Trace, seed: Seed) -> Iterator[View]:
    """What a seed's trace is seen through; which requests are left is drawn by the seed's name."""
    rows = trace.rows("requests")
    cut = {
        request: max(len(prompt) // _CUT, 1)
        for request, prompt in zip(rows["request"].tolist(), rows["prompt_tokens"], strict=True)
    }
    everything = sorted(cut)
    for percent in _SHARES:
        count = max(round(len(everything) * percent / 100), 1)
        yield View(f"{percent} % of requests", frozenset(_drawn(seed, f"{percent} %", everything, count)))
    all_ = frozenset(everything)
    yield View("prefixes cut", all_, cut)
    half = _drawn(seed, "prefixes", everything, max(len(everything) // 2, 1))
    yield View("half of the prefixes cut", all_, {request: cut[request] for request in half})
    yield View("no target", all_, target=False)


def _drawn(seed: Seed, what: str, requests: list[int], count: int) -> list[int]:
    return random.Random(f"{seed.name} {what}").sample(requests, count)


def seen(view: View, facts: Facts) -> Facts:
    """What is left of recorded facts."""
    found: Facts = {}
    for family, rows in facts.items():
        keys = np.array([[row[1], row[3], row[5]] for row in rows], np.int64).reshape(-1, 3)  # as `stage` orders them
        found[family] = [row for row, kept in zip(rows, view.keeps(family, *keys.T), strict=True) if kept]
    return found


# What became of it


@dataclass(frozen=True, slots=True)
class Thinned:
    """What was said of a view; `outcome` is one of OUTCOMES, `others` are causes further down that are not there."""

    verdict: str
    named: str | None
    confidence: float | None
    outcome: str
    next_command: str
    said: str = ""
    others: tuple[str, ...] = ()


def thinned(seed: Seed, found: Diagnosis, *, sign: bool) -> Thinned:
    """Hold what was said against the seed; `sign` says whether the rows of the view tell it from the repaired run."""
    first = found.causes[0] if found.causes else None
    return Thinned(
        verdict=str(found.verdict),
        named=first.fault if first else None,
        confidence=first.confidence if first else None,
        outcome=_outcome(seed, found, sign),
        next_command=found.next_command,
        said=first.evidence[0] if first and first.evidence else next(iter(found.notes), ""),
        others=absent(seed, found.causes[1:]),
    )


def failed_view(error: Exception) -> Thinned:
    """A diagnosis that raised."""
    text = str(error).strip().splitlines()
    return Thinned("error", None, None, "raised", "", f"{type(error).__name__}: {text[0] if text else ''}")


def _outcome(seed: Seed, found: Diagnosis, sign: bool) -> str:
    run = score(seed, found, real=Real(None), seconds=0.0)
    undecided = found.verdict in (Verdict.INSUFFICIENT, Verdict.ENGINE_STATE)
    if not seed.faults:
        return "wrong" if run.false_alarm else "insufficient" if undecided else "right"
    if found.causes:
        first = run.rank == 1 or 1 in run.ranks.values()
        return "wrong" if not first else "in part" if run.rank is None else "right"
    return "insufficient" if undecided else "silent" if sign else "no sign"

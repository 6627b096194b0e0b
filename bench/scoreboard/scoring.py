"""How a diagnosis is scored against what was seeded, and what all runs come to.

A cause names a fault when the fault's id is its own, or among those it says the data cannot tell from it: it is one
cause with one edit. It names one fault: of several, each has a cause of its own, or is missed. A fault's prediction is
that of the cause that names it. A cause that names no seeded fault is not there, in whatever place it comes.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import permutations
from typing import Any

from scoreboard.seeds import Seed

from spectrace.replay.diagnosis import Cause, Diagnosis, Verdict

__all__ = ["Real", "Run", "absent", "failed", "score", "totals", "unscored"]

_EXACT, _NEAR = 1e-6, 0.10
_ALARMS = (Verdict.FAULT, Verdict.ENGINE_STATE)
_FIRST_OF = 3
_RAISED = "error"


@dataclass(frozen=True, slots=True)
class Real:
    """The acceptance length after the real repair, the mean of so many `runs`; `each` of several faults alone."""

    acceptance: float | None
    each: Mapping[str, float | None] = field(default_factory=dict)
    runs: int = 1


@dataclass(frozen=True, slots=True)
class Run:
    """One run. `rank` is the place, from 1, of the cause that names the fault; of several faults, of the last of them.

    `fault` is an id, a list of them, or None where the run is clean. `real` is the acceptance length after the real
    repair, the mean of `real_runs`, `each` of several faults what repairing it alone comes to: foretold and real.
    `edit_right` says of a wrong config whether the edit, done, mends it. `others` are causes that are not there.
    `greedy` tells that nothing was drawn or rounded: predictions are due exactly. `thinned` is what was said with less
    in the trace, by view.
    """

    fault: str | list[str] | None
    variant: str
    pair: str
    seed: int
    kind: str
    named: str | None = None
    named_variant: str = ""
    rank: int | None = None
    predicted: float | None = None
    real: float | None = None
    served: float | None = None
    seconds: float = 0.0
    scored: bool = True
    reason: str = ""
    verdict: str = ""
    title: str = ""
    fix: str = ""
    edit_right: bool | None = None
    others: Sequence[str] = ()
    served_as: str = ""
    greedy: bool = True
    real_runs: int = 1
    ranks: Mapping[str, int | None] = field(default_factory=dict)
    each: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    thinned: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        return self.fault is None

    @property
    def single(self) -> bool:
        return isinstance(self.fault, str)

    @property
    def faults(self) -> Sequence[str]:
        return () if self.fault is None else [self.fault] if isinstance(self.fault, str) else self.fault

    @property
    def raised(self) -> bool:
        """Serving it, or diagnosing it, raised."""
        return self.verdict == _RAISED

    @property
    def stacked(self) -> bool:
        return isinstance(self.fault, list)

    @property
    def false_alarm(self) -> bool:
        """Of a clean run: something was said to be broken."""
        return self.clean and self.scored and (self.named is not None or self.verdict in _ALARMS)

    @property
    def wrong(self) -> bool:
        """Something was not said as it is: of a single fault, first; of several, at all; of a clean run, nothing."""
        if self.clean:
            return self.false_alarm or (self.scored and self.raised)
        return self.scored and (self.rank != 1 if self.single else self.rank is None)

    @property
    def error(self) -> float | None:
        """How far the prediction is from the real repair."""
        told = self.predicted is not None and self.real is not None and self.rank is not None
        return abs(self.predicted - self.real) if told else None  # type: ignore[operator]

    def to_json(self) -> dict[str, Any]:
        found = asdict(self)
        return found if self.thinned else {name: value for name, value in found.items() if name != "thinned"}


def _begun(seed: Seed) -> dict[str, Any]:
    faults = seed.faults
    fault = None if not faults else faults[0] if len(faults) == 1 else list(faults)
    variant = seed.edit.what if seed.edit and seed.faults else seed.variant
    served: dict[str, Any] = {"served_as": seed.served_as, "greedy": seed.greedy}
    return {"fault": fault, "variant": variant, "pair": seed.pair, "seed": seed.number, "kind": seed.kind, **served}


def failed(seed: Seed, error: Exception, *, while_: str, scored: bool, real: Real | None = None) -> Run:
    """A run that raised. One that could not be served says nothing of the diagnosis, and is not scored."""
    text, real = str(error).strip(), real or Real(None)
    first = text.splitlines()[0] if text else ""
    return Run(
        **_begun(seed),
        scored=scored,
        reason=_at_home(f"{while_}: {type(error).__name__}: {first}"),
        verdict=_RAISED,
        real=real.acceptance,
        real_runs=real.runs,
        each={id: (None, after) for id, after in real.each.items()},
    )


def unscored(seed: Seed, reason: str, *, real: float | None = None, served: float | None = None) -> Run:
    """A run that no diagnosis could be right or wrong about."""
    return Run(**_begun(seed), scored=False, reason=reason, real=real, served=served)


def score(
    seed: Seed,
    found: Diagnosis,
    *,
    real: Real,
    seconds: float,
    is_mended: Callable[[Cause], bool] | None = None,
) -> Run:
    """Hold a diagnosis against its seed; `is_mended` judges a cause's edit, where there is a config to be edited."""
    first = found.causes[0] if found.causes else None
    ranks = _places(seed, found.causes)
    naming = {id: found.causes[place - 1] if place else None for id, place in ranks.items()}
    places = [place for place in ranks.values() if place is not None]
    all_named = bool(places) and len(places) == len(ranks)
    told = next((cause for cause in naming.values() if cause), None)
    edited = told or first
    return Run(
        **_begun(seed),
        named=first.fault if first else None,
        named_variant=first.variant if first else "",
        rank=max(places) if all_named else None,
        predicted=_predicted(seed, found),
        real=real.acceptance,
        real_runs=real.runs,
        served=found.served_acceptance,
        seconds=round(seconds, 2),
        reason=_at_home(_reason(seed, found, ranks)),
        verdict=str(found.verdict),
        title=first.title if first else "",
        fix=_at_home(edited.fix) if edited else "",
        edit_right=bool(told and is_mended(told)) if is_mended else None,
        others=absent(seed, found.causes),
        ranks=ranks if len(ranks) > 1 else {},
        each={id: (_foretold(naming[id]), after) for id, after in real.each.items()},
    )


def absent(seed: Seed, causes: Sequence[Cause]) -> tuple[str, ...]:
    """The ids of causes that name nothing that was seeded."""
    return tuple(cause.fault for cause in causes if not any(_names(cause, id, seed.alike) for id in seed.faults))


def _at_home(text: str) -> str:
    """A text with only the last part of every absolute path: the folders are this machine's."""
    return re.sub(r"(?<![\w.])(/[\w.@+-]+)+/", ".../", text)


def _names(cause: Cause, id: str, alike: Sequence[str]) -> bool:
    return bool({id, *alike} & {cause.fault, *cause.alike})


def _places(seed: Seed, causes: Sequence[Cause]) -> dict[str, int | None]:
    """The place, from 1, of the cause that names each fault, every one another: as many faults as can be, and early."""
    faults, places = seed.faults, [*range(1, len(causes) + 1)]
    choices: list[tuple[int | None, ...]] = [
        named
        for named in permutations((*places, *(None for _ in faults)), len(faults))
        if all(not at or _names(causes[at - 1], id, seed.alike) for id, at in zip(faults, named, strict=True))
    ]

    def worth(named: tuple[int | None, ...]) -> tuple[int, int, int]:
        own = sum(causes[at - 1].fault == id for id, at in zip(faults, named, strict=True) if at)
        return named.count(None), sum(at for at in named if at), -own

    best = min(choices, key=worth)
    return dict(zip(faults, best, strict=True))


def _foretold(cause: Cause | None) -> float | None:
    return cause.predicted_acceptance if cause else None


def _predicted(seed: Seed, found: Diagnosis) -> float | None:
    """Of one fault what its cause foretells; where several causes name it, and of several faults, all repaired."""
    naming = [cause for cause in found.causes if any(_names(cause, id, seed.alike) for id in seed.faults)]
    if not seed.faults or not naming:
        return None
    return naming[0].predicted_acceptance if len(seed.faults) == len(naming) == 1 else found.repaired_acceptance


def _reason(seed: Seed, found: Diagnosis, ranks: Mapping[str, int | None]) -> str:
    """Why a run went wrong, in the diagnosis's own words."""
    first = found.causes[0] if found.causes else None
    right = all(place == 1 or (place and len(ranks) > 1) for place in ranks.values()) if ranks else first is None
    if right:
        return ""
    said = first.evidence[0] if first and first.evidence else found.notes[0] if found.notes else "nothing said"
    named = f"{first.fault} named" if first else f"{found.verdict}, nothing named"
    return f"{named}: {said}"


def totals(runs: Iterable[Run]) -> dict[str, Any]:
    """What all runs come to: single faults, clean runs and stacked faults apart."""
    runs = list(runs)
    faults = [run for run in runs if run.single]
    scored = [run for run in faults if run.scored]
    clean = [run for run in runs if run.clean]
    first = sum(run.rank == 1 for run in scored)
    top = sum(run.rank is not None and run.rank <= _FIRST_OF for run in scored)
    return {
        "seeds": sorted({run.seed for run in runs}),
        "faults": len(faults),
        "scored": len(scored),
        "unscored": len(faults) - len(scored),
        "unscored_share": _share(len(faults) - len(scored), len(faults)),
        "first": first,
        "first_share": _share(first, len(scored)),
        "top3": top,
        "top3_share": _share(top, len(scored)),
        "clean": sum(run.scored for run in clean),
        "false_alarms": sum(run.false_alarm for run in clean),
        "clean_undecided": sum(run.scored and run.verdict == Verdict.INSUFFICIENT for run in clean),
        "errors": sum(run.raised for run in runs),
        "false_causes": sum(bool(run.others) for run in scored),
        "predictions": _predictions(scored),
        "edits": {
            "checked": sum(run.edit_right is not None for run in scored),
            "right": sum(bool(run.edit_right) for run in scored),
        },
        "stacked": _stacked([run for run in runs if run.stacked]),
        "by_id": {id: _of_id([run for run in faults if run.fault == id]) for id in _ids(faults)},
        "one_pair_only": [id for id in _ids(faults) if len({r.pair for r in scored if r.fault == id}) < 2],
        **({"thin": _thin(runs)} if any(run.thinned for run in runs) else {}),
    }


def _thin(runs: Sequence[Run]) -> dict[str, dict[str, int]]:
    """By view, how often each outcome came."""
    views = dict.fromkeys(view for run in runs for view in run.thinned)
    outcomes = {view: [run.thinned[view]["outcome"] for run in runs if view in run.thinned] for view in views}
    return {view: {one: found.count(one) for one in sorted(set(found))} for view, found in outcomes.items()}


def _ids(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(str(run.fault) for run in runs))


def _of_id(runs: Sequence[Run]) -> dict[str, Any]:
    scored = [run for run in runs if run.scored]
    return {
        "scored": len(scored),
        "unscored": len(runs) - len(scored),
        "first": sum(run.rank == 1 for run in scored),
        "top3": sum(run.rank is not None and run.rank <= _FIRST_OF for run in scored),
        "pairs": sorted({run.pair for run in scored}),
    }


def _predictions(scored: Sequence[Run]) -> dict[str, Any]:
    """Over the scored faults that are named; those of greedy float32, where they are due exactly, and others apart."""
    named = [run for run in scored if run.rank is not None]
    return {
        **_errors(named),
        "not_foretold": sum(run.predicted is None for run in named),
        "not_measured": sum(run.real is None for run in named),
        "greedy": _errors([run for run in named if run.greedy]),
        "other": _errors([run for run in named if not run.greedy]),
    }


def _errors(named: Sequence[Run]) -> dict[str, Any]:
    errors = [run.error for run in named if run.error is not None]
    return {
        "compared": len(errors),
        "exact": sum(error <= _EXACT for error in errors),
        "within_0.10": sum(error <= _NEAR for error in errors),
        "max_error": round(max(errors), 4) if errors else None,
    }


def _stacked(runs: Sequence[Run]) -> dict[str, Any]:
    scored = [run for run in runs if run.scored]
    return {
        "runs": len(runs),
        "scored": len(scored),
        "all_named": sum(run.rank is not None for run in scored),
        "some_named": sum(any(place is not None for place in run.ranks.values()) for run in scored),
        "false_causes": sum(bool(run.others) for run in scored),
        "predictions": _predictions(scored),
    }


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None

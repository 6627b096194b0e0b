"""How a diagnosis is scored against what was seeded, and what all runs come to.

A cause names a fault when the fault's id is its own, or among those it says the data cannot tell from it: it is one
cause with one edit. A fault's prediction is that of the cause that names it.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from scoreboard.seeds import Seed

from spectrace.replay.diagnosis import Cause, Diagnosis, Verdict

__all__ = ["Run", "failed", "score", "totals", "unscored"]

_EXACT, _NEAR = 1e-6, 0.10
_ALARMS = (Verdict.FAULT, Verdict.ENGINE_STATE)
_FIRST_OF = 3
_RAISED = "error"


@dataclass(frozen=True, slots=True)
class Run:
    """One run. `rank` is the place, from 1, of the cause that names the fault; of several faults, of the last of them.

    `fault` is an id, a list of them, or None where the run is clean. `real` is the acceptance length after the real
    repair, `each` of several faults what repairing it alone comes to: foretold and real. `edit_right` says of a wrong
    config whether the edit has the right numbers in it. `thinned` is what was said with less in the trace, by view.
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
    return {"fault": fault, "variant": variant, "pair": seed.pair, "seed": seed.number, "kind": seed.kind}


def failed(
    seed: Seed,
    error: Exception,
    *,
    while_: str,
    scored: bool,
    real: float | None = None,
    each: Mapping[str, float | None] | None = None,
) -> Run:
    """A run that raised. One that could not be served says nothing of the diagnosis, and is not scored."""
    text = str(error).strip()
    first = text.splitlines()[0] if text else ""
    return Run(
        **_begun(seed),
        scored=scored,
        reason=_at_home(f"{while_}: {type(error).__name__}: {first}"),
        verdict=_RAISED,
        real=real,
        each={id: (None, after) for id, after in (each or {}).items()},
    )


def unscored(seed: Seed, reason: str, *, real: float | None = None, served: float | None = None) -> Run:
    """A run that no diagnosis could be right or wrong about."""
    return Run(**_begun(seed), scored=False, reason=reason, real=real, served=served)


def score(
    seed: Seed,
    found: Diagnosis,
    *,
    real: float | None,
    seconds: float,
    each: Mapping[str, float | None] | None = None,
) -> Run:
    """Hold a diagnosis against its seed; `each` is the real acceptance with one of several faults repaired."""
    first = found.causes[0] if found.causes else None
    naming = {id: _naming(id, seed.alike, found.causes) for id in seed.faults}
    ranks = {id: place for id, (place, _) in naming.items()}
    places = [place for place in ranks.values() if place is not None]
    all_named = bool(places) and len(places) == len(ranks)
    return Run(
        **_begun(seed),
        named=first.fault if first else None,
        named_variant=first.variant if first else "",
        rank=max(places) if all_named else None,
        predicted=_predicted(seed, found),
        real=real,
        served=found.served_acceptance,
        seconds=round(seconds, 2),
        reason=_at_home(_reason(seed, found, all_named)),
        verdict=str(found.verdict),
        title=first.title if first else "",
        fix=_at_home(first.fix) if first else "",
        edit_right=bool(first and seed.repair in first.fix) if seed.repair else None,
        ranks=ranks if len(ranks) > 1 else {},
        each={id: (_foretold(naming[id][1]), now) for id, now in (each or {}).items()},
    )


def _at_home(text: str) -> str:
    """A text with only the last part of every absolute path: the folders are this machine's."""
    return re.sub(r"(?<![\w.])(/[\w.@+-]+)+/", ".../", text)


def _naming(id: str, alike: Sequence[str], causes: Sequence[Cause]) -> tuple[int | None, Cause | None]:
    """The first cause that names a fault, and its place."""
    wanted = {id, *alike}
    for place, cause in enumerate(causes, 1):
        if wanted & {cause.fault, *cause.alike}:
            return place, cause
    return None, None


def _foretold(cause: Cause | None) -> float | None:
    return cause.predicted_acceptance if cause else None


def _predicted(seed: Seed, found: Diagnosis) -> float | None:
    """Of one fault what its cause foretells; where several causes name it, and of several faults, all repaired."""
    wanted = {*seed.faults, *seed.alike}
    naming = [cause for cause in found.causes if wanted & {cause.fault, *cause.alike}]
    if not seed.faults or not naming:
        return None
    return naming[0].predicted_acceptance if len(seed.faults) == len(naming) == 1 else found.repaired_acceptance


def _reason(seed: Seed, found: Diagnosis, all_named: bool) -> str:
    """Why a run went wrong, in the diagnosis's own words."""
    first = found.causes[0] if found.causes else None
    right = all_named and (len(seed.faults) > 1 or _naming(seed.faults[0], seed.alike, found.causes)[0] == 1)
    if right or (not seed.faults and first is None):
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
    """Over the scored faults that a cause names with a prediction."""
    errors = [run.error for run in scored if run.error is not None]
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
        "predictions": _predictions(scored),
    }


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None

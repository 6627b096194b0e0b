"""The last step of a diagnosis: the verdict, what it rests on, what was not decided, and what to record next."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spectrace.replay.case import Case
from spectrace.replay.causes import Readings
from spectrace.replay.diagnosis import Cause, Diagnosis, Verdict
from spectrace.replay.evidence import Evidence
from spectrace.replay.found import Broken
from spectrace.replay.ladder import Ladder
from spectrace.replay.profiles.known import profile_of
from spectrace.replay.profiles.profile import filled
from spectrace.replay.readings import SURPRISED, Clock
from spectrace.replay.truth import Truth
from spectrace.replay.worth import Worth
from spectrace.tracer.acceptance import Acceptance

__all__ = ["Outcome", "conclude", "insufficient", "ranked", "record_again"]

_MORE_TIME = 5  # times the budget, where it was too little
_FAR_WORSE = 0.8  # of the served acceptance length
_OFTEN_RIGHT = 0.5  # of first drafts
_HIDING = "PMX"  # other weights, or other rows, than are meant: what is computed from them tells little else


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Everything that a verdict rests on; `repaired` is the acceptance length with every named cause repaired."""

    case: Case
    evidence: Evidence
    truth: Truth
    readings: Readings | None
    broken: tuple[Broken, ...]
    causes: tuple[Cause, ...]
    served: Acceptance
    repaired: float | None
    worth: Worth
    ladder: Ladder | None
    coverage: Mapping[str, Any]
    notes: tuple[str, ...]
    clock: Clock

    @property
    def untried(self) -> int:
        """Hypotheses that were not tried for want of time."""
        return self.clock.skipped


def insufficient(why: str, command: str) -> Diagnosis:
    """Nothing can be said, with what to do about it."""
    return Diagnosis(Verdict.INSUFFICIENT, (), {}, (), None, None, notes=(why,), next_command=command)


def conclude(outcome: Outcome) -> Diagnosis:
    """Weigh it all."""
    verdict, notes = _verdict(outcome)
    readings, named = outcome.readings, verdict is Verdict.FAULT
    if readings and outcome.untried:  # half of a search is no reading
        readings = replace(readings, trained=None)
    return Diagnosis(
        verdict=verdict,
        causes=outcome.causes if named else (),
        readings=readings.table(outcome.broken) if readings else {},
        identified=tuple(match.shown for match in readings.matches) if readings else (),
        served_acceptance=outcome.served.acceptance_length,
        repaired_acceptance=outcome.repaired if named or not outcome.causes else None,
        worth=outcome.worth.to_json(),
        coverage={**outcome.coverage, **({"ladder": outcome.ladder.to_json()} if outcome.ladder else {})},
        notes=(*notes, *outcome.notes),
        next_command=_next_command(outcome, verdict),
    )


def _verdict(outcome: Outcome) -> tuple[Verdict, list[str]]:
    readings = outcome.readings
    engine = readings.engine if readings else None
    unexplained = engine is not None and not engine.explained
    untried = f"{outcome.untried} hypotheses were not tried for want of time: raise --budget"
    if worse := _repaired_to_worse(outcome):
        return Verdict.INSUFFICIENT, worse
    if outcome.causes:
        lines = [f"{untried}: more may be broken"] if outcome.untried else []
        return Verdict.FAULT, [*lines, *_beside(outcome, unexplained=unexplained)]
    if outcome.untried:
        return Verdict.INSUFFICIENT, [untried]
    if outcome.evidence.missing:
        return Verdict.INSUFFICIENT, [outcome.evidence.missing]
    if outcome.evidence.doubts:
        return Verdict.INSUFFICIENT, [line for doubt in outcome.evidence.doubts for line in doubt.evidence]
    if readings is None or engine is None:
        held = "no served answer could be held against a replay, or too few to tell rounding from a fault"
        return Verdict.INSUFFICIENT, [held]
    if unexplained:
        return Verdict.ENGINE_STATE, _unexplained(outcome)
    if readings.trained is None or not readings.matches:
        obeyed = "the engine computed what the config says, on what it was delivered"
        return Verdict.INSUFFICIENT, [obeyed, *_undecided(outcome)]
    if step := readings.trained.undecided:
        return Verdict.INSUFFICIENT, [
            f"the draft may have been trained otherwise than configured ({step.link}): these texts are likelier "
            "then, but they are too few, or too unlike those it was trained on, to be sure"
        ]
    return _how_good(outcome)


def _repaired_to_worse(outcome: Outcome) -> list[str]:
    """Why what was found is not to be repaired: the draft that is believed in is worse than what was served."""
    now, then = outcome.served.acceptance_length, outcome.repaired
    if not outcome.causes or now is None or then is None or then >= _FAR_WORSE * now:
        return []
    return [
        f"what was served differs from {outcome.case.checkpoint.folder}, but that would be accepted for {then:.3f} "
        f"where {now:.3f} was served: is it the folder that is meant?",
        *(f"it differs so: {cause.title}" for cause in outcome.causes),
    ]


def _beside(outcome: Outcome, *, unexplained: bool) -> list[str]:
    """What the causes do not account for, or hide."""
    hiding = [cause.fault for cause in outcome.causes if cause.fault[0] in _HIDING]
    if hiding and (unexplained or any(id[0] != "P" for id in hiding)):
        return [
            f"what else may be broken does not show beside {', '.join(hiding)}: the lengths foretold are the most that "
            f"these repairs bring; diagnose a trace again that was recorded after them"
        ]
    return ["what is named does not account for everything", *_unexplained(outcome)] if unexplained else []


def _undecided(outcome: Outcome) -> list[str]:
    """Why it is not known what the draft was trained for, or what it was delivered."""
    if not outcome.truth.sources:
        return ["whether that is what the draft was trained on takes true boundaries"]
    return ["the answers of which true boundaries are known are too few or too short to tell what it was trained for"]


def _unexplained(outcome: Outcome) -> list[str]:
    """Inputs agree, outputs do not: said as closely as the trace allows."""
    assert outcome.readings and outcome.readings.engine
    found = outcome.readings.engine.configured
    missed = found.first_miss()
    assert missed
    request, round_, position, depth = missed
    rates = ", ".join(f"{rate:.1%}" for rate in found.by_depth())
    lines = [
        f"replayed on the inputs that were recorded, the draft does not give the tokens that were served, and no "
        f"hypothesis tried explains them: {found.agreement:.1%} of {len(found.met)} come out (by depth {rates})",
        f"first at request {request}, round {round_}, position {position}, depth {depth}",
    ]
    if stage := found.first_stage():
        lines.append(
            f"the first stage to part is {stage.stage} at depth {stage.depth}, {stage.rows - stage.equal} of "
            f"{stage.rows} rows"
        )
    return lines + found.patterns()


def _how_good(outcome: Outcome) -> tuple[Verdict, list[str]]:
    """No fault: healthy, a weak draft, or other data than it was trained on."""
    ladder, served, worth = outcome.ladder, outcome.served, outcome.worth
    if ladder is not None and ladder.reaches is not None:
        if not ladder.reaches:
            return Verdict.OTHER_DATA, [
                "the draft falls short of its trained accuracy on these texts, on true features"
            ]
        if _pays(served, worth) is False:
            return Verdict.WEAK_DRAFT, ["the draft reaches its trained accuracy, and that is not enough to pay"]
        return Verdict.HEALTHY, ["the draft reaches its trained accuracy"]
    trained = outcome.readings.trained if outcome.readings else None
    if trained and trained.surprise > SURPRISED:
        return Verdict.WEAK_DRAFT, [
            f"other data is likelier than a weak draft: a token that came surprises it by {trained.surprise:.1f} nats "
            f"more than it expects to be surprised; run as trained, on data as trained, that is 0 or less",
            *_replayed(outcome),
        ]
    verdicts = {True: Verdict.HEALTHY, False: Verdict.WEAK_DRAFT, None: Verdict.INSUFFICIENT}
    return verdicts[_pays(served, worth)], [_why(served, worth), *_replayed(outcome)]


def _replayed(outcome: Outcome) -> list[str]:
    """What speaks for the engine."""
    engine = outcome.readings.engine if outcome.readings else None
    if engine is None:
        return []
    found = engine.reproduced
    return [
        f"replayed on the inputs that were recorded, {found.agreement:.1%} of {len(found.met)} draft tokens come out "
        f"as they were served: weights, cache, masks and kernels did what they should"
    ]


def _why(served: Acceptance, worth: Worth) -> str:
    """What a verdict of good or weak rests on."""
    if served.mostly_cut and not _pays(served, worth):
        return "most rounds were cut by the end of an answer, so whether acceptance pays is not known"
    if worth.break_even_acceptance is not None:
        even, least = worth.break_even_acceptance, _least(served)
        length = f"acceptance length {_said(least)}{' at least' if served.mostly_cut else ''}"
        if not _pays(served, worth):
            return f"{length} is below the break-even length, which is {even:.2f} at least"
        most = worth.break_even_at_most
        if most is None or least is None or least < most:
            return (
                f"{length} is above {even:.2f}, the least that the break-even length can be; whether it pays, this "
                f"trace does not tell: serve once without a draft"
            )
        return f"{length} is above the break-even length, which is {most:.2f} at most"
    first = served.conditional_rates[0] if served.conditional_rates else None
    return "no break-even length is known; of first drafts " + (
        "none was verified" if first is None else f"{first:.0%} are right"
    )


def _said(length: float | None) -> str:
    return "-" if length is None else f"{length:.3f}"


def _pays(served: Acceptance, worth: Worth) -> bool | None:
    """Whether acceptance reaches the break-even length; where timings are missing, whether drafts are right at all.

    None where it does not, but is of so many rounds that were cut that it may.
    """
    length, first = _least(served), served.conditional_rates[0] if served.conditional_rates else None
    if worth.break_even_acceptance is not None:
        pays = length is not None and length >= worth.break_even_acceptance
    else:
        pays = first is not None and first >= _OFTEN_RIGHT
    return pays or (None if served.mostly_cut else False)


def _least(served: Acceptance) -> float | None:
    """Acceptance length, or what it is at least where most rounds were cut."""
    return served.acceptance_untrimmed if served.mostly_cut else served.acceptance_length


def _next_command(outcome: Outcome, verdict: Verdict) -> str:
    case = outcome.case
    if verdict is not Verdict.INSUFFICIENT:
        return next((cause.command for cause in outcome.causes if cause.command), "")
    given = ["spectrace", "diagnose", str(case.trace.folder), "--draft", str(case.checkpoint.folder)]
    if outcome.untried:
        given += ["--target", str(case.target)] if case.target else []
        return shlex.join([*given, "--budget", f"{_MORE_TIME * max(outcome.clock.budget_secs, 60):.0f}"])
    if case.target is None and (outcome.readings is None or outcome.readings.trained is None):
        return _with_truth(case, given)
    return record_again(case)


def _with_truth(case: Case, diagnose: Sequence[str]) -> str:
    """The command that gets true boundaries: a target that is served elsewhere is seldom one to load whole here."""
    trace = case.trace
    if trace.manifest.get("engine", "spectrace") == "spectrace":
        return shlex.join([*diagnose, "--target", "TARGET"])
    target = (trace.manifest.get("target") or {}).get("path") or "TARGET"
    words = ("spectrace", "reference", "--target", str(target), "--prompts", str(trace.folder), "--out", "REFERENCE")
    return shlex.join(words)


def record_again(case: Case) -> str:
    """The command that records what this trace lacks, with the engine that served it."""
    profile, draft = profile_of(case.trace.manifest), case.served_folder or case.checkpoint.folder
    if profile.serve and profile.engine != "spectrace":
        return filled(profile.serve, {"DRAFT": str(draft)})
    target = (case.trace.manifest.get("target") or {}).get("path") or "TARGET"
    depth = (case.trace.manifest.get("serving") or {}).get("depth") or 3
    models = shlex.join(("--target", str(target), "--draft", str(draft), "--depth", str(depth)))
    return f"spectrace run {models} --prompts PROMPTS --level features --out NEW_TRACE"


def ranked(causes: Sequence[Cause]) -> tuple[Cause, ...]:
    """What costs most first; of equals, what is surest."""

    def gain(cause: Cause) -> float:
        if cause.predicted_acceptance is None or cause.served_acceptance is None:
            return 0.0
        return cause.predicted_acceptance - cause.served_acceptance

    return tuple(sorted(causes, key=lambda cause: (-round(gain(cause), 3), -cause.confidence)))

"""Name the cause: evidence that needs no hypothesis, then values, then replays, then confirmation on other requests.

Three readings are compared: what checkpoint and config mean, what the engine did, and what the draft was trained for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from spectrace.engine.checkpoint import DraftCheckpoint
from spectrace.replay.case import Case, on_its_traces, open_case
from spectrace.replay.causes import Readings, broken_links, found_alone
from spectrace.replay.configuration import Configuration, Slot, View, listed
from spectrace.replay.diagnosis import Cause, Diagnosis
from spectrace.replay.ends import find_end
from spectrace.replay.evidence import Evidence, gather
from spectrace.replay.fed import ONE_SLOT, fed_width
from spectrace.replay.foretell import Foreteller
from spectrace.replay.handoff import faithful_rows
from spectrace.replay.hypotheses import computing, ending, feeding, mapping, moving
from spectrace.replay.hypothesis import Hypothesis
from spectrace.replay.identify import Match, identify
from spectrace.replay.inputs import Served, read_served
from spectrace.replay.lab import read_drawn
from spectrace.replay.ladder import Ladder, Trained, compare, target_choices, teacher_forced
from spectrace.replay.plan import Plan, enough, make_plan
from spectrace.replay.readings import Clock, EngineReading, Told, TrainedReading, read_engine, read_training
from spectrace.replay.reference import is_another, is_of_this_target, is_this_target, said_of
from spectrace.replay.repairs import foretell_repairs
from spectrace.replay.texts import read_texts
from spectrace.replay.trees import served_shape
from spectrace.replay.truth import Answered, Delivered, Recomputed, Recorded, Source, Truth
from spectrace.replay.verdict import Outcome, conclude, insufficient, ranked, record_again
from spectrace.replay.vocabulary import rebuilt_table
from spectrace.replay.worth import worth
from spectrace.tracer.acceptance import acceptance_of_rows
from spectrace.tracer.errors import UserError
from spectrace.tracer.trace import Trace

__all__ = ["Trained", "diagnose"]


def diagnose(
    trace: Trace,
    checkpoint: DraftCheckpoint,
    *,
    target: Path | None = None,
    reference: Trace | None = None,
    rerun: bool = True,
    trained: Trained | None = None,
    budget_secs: float = 180.0,
    progress: Told | None = None,
) -> Diagnosis:
    """Diagnose a trace of the draft that the team believes it serves, within about so many seconds.

    `target` lets true boundaries be computed, `reference` is a trace that has them; without `rerun`, no more of the
    target is read than a draft shares with it. Raises UserError for a target or a reference that does not fit, or is
    not what was served.
    """
    case = open_case(trace, checkpoint, target)
    if lacking := _lacking(case):
        return lacking
    clock = Clock(budget_secs, progress)
    clock.tell("true boundaries", 0, 1)
    case, truth, doubts = _with_truth(case, reference, rerun=rerun)
    clock.tell("reading the trace", 0, 1)
    found = _Lab(case, gather(case), truth, trained, clock, doubts).diagnosis()
    return on_its_traces(found, trace, reference)


def _lacking(case: Case) -> Diagnosis | None:
    """What a trace must have for anything to be said."""
    trace, again = case.trace, record_again(case)
    if not len(trace.rows("received")):
        return insufficient("no row that a draft received is in the trace: nothing was drafted", again)
    if not case.texts:
        return insufficient("no request has finished in the trace: record until at least one has", again)
    if not any(len(text.output) > 1 for text in case.texts.values()):
        return insufficient("no answer is longer than one token: nothing was verified; record longer ones", again)
    return None


def _with_truth(case: Case, reference: Trace | None, *, rerun: bool) -> tuple[Case, Truth, list[str]]:
    """Where true boundaries come from: recorded ones first, then the target; and what to note of them.

    What its weights or tokens show to be of another target is left out, the case's own target, too: better nothing is
    decided than wrongly. One that is not run again is believed in as far as what was recorded is.
    """
    found: list[tuple[Source, Answered | None]] = []
    if len(case.trace.rows("reference")):
        found.append((Recorded(case.trace, case.texts, case.texts), None))
    if reference is not None:
        known, recorded = is_of_this_target(case.trace, reference), _recorded(case, reference)
        found.append((recorded, None if known else recorded.answered()))
    layers, known = case.layers, case.target is not None and is_this_target(case.trace, case.target)
    if case.target is not None and rerun:
        again = Recomputed(case.target, dtype=case.dtype)
        found.append((again, None if known else again.answered(case.texts)))
        layers = again.layers
    sources = [source for source, answered in found if answered is None or not is_another(answered)]
    notes = [said_of(source.name, answered) for source, answered in found if answered is not None]
    believed = any(isinstance(source, Recomputed) for source in sources) if rerun else known or bool(sources)
    if not believed:
        case = open_case(case.trace, case.checkpoint, None)
    return case, Truth(case.texts, sources, layers), [note for note in notes if note]


def _recorded(case: Case, reference: Trace) -> Recorded:
    if not len(reference.rows("reference")):
        raise UserError(f"{reference.folder}: no reference rows in it; record it with spectrace reference")
    found = Recorded(reference, case.texts, read_texts(reference))
    if not any(found.covers(request) for request in case.texts):
        raise UserError(
            f"{reference.folder}: none of the trace's requests is in it whole; record it for this very trace: "
            f"spectrace reference --prompts {case.trace.folder}"
        )
    return found


def _names(causes: Sequence[Cause]) -> list[str]:
    """What each repair is called: by its id alone, where that is of several causes by its variant or else its title."""
    ways = [
        [cause.fault for cause in causes],
        [f"{cause.fault}:{cause.variant}" for cause in causes],
        [f"{cause.fault} ({cause.title})" for cause in causes],
    ]
    return [next((way[at] for way in ways if way.count(way[at]) == 1), f"cause {at + 1}") for at in range(len(causes))]


@dataclass(slots=True)
class _Lab:
    """One diagnosis under way."""

    case: Case
    evidence: Evidence
    truth: Truth
    trained: Trained | None
    clock: Clock
    doubts: Sequence[str]

    def diagnosis(self) -> Diagnosis:
        case, evidence = self.case, self.evidence
        served = self._served()
        plan = make_plan(served, self.truth, width=case.checkpoint.spec.target_width)
        foreteller = Foreteller(case.trace)
        readings = self._readings(served, plan, foreteller)
        # What a search that was cut has found may be half of what there is, or a way to something else.
        whole = readings is not None and not self.clock.skipped
        broken = broken_links(case, readings, evidence) if readings and whole else found_alone(case, evidence)
        accepted = acceptance_of_rows(case.trace.rows("verified"), depth=foreteller.shape.depth)
        self.clock.tell("foretelling what repairs bring", 0, 1)
        true = None if evidence.lossy else readings
        repairs = foretell_repairs(true, broken, self._foretelling(readings), plan.foretelling, foreteller)
        causes = ranked(repairs.causes(broken, accepted.acceptance_length))
        lengths = [cause.predicted_acceptance for cause in causes]
        gains = dict(zip(_names(causes), lengths, strict=True)) | ({"all": repairs.all} if len(causes) > 1 else {})
        return conclude(
            Outcome(
                case=case,
                evidence=evidence,
                truth=self.truth,
                readings=readings,
                broken=tuple(broken),
                causes=causes,
                served=accepted,
                repaired=repairs.all,
                worth=worth(case.trace, gains),
                ladder=self._ladder(readings, plan),
                coverage=self._coverage(served, plan, readings),
                notes=self._notes(readings),
                clock=self.clock,
            )
        )

    def _served(self) -> Served | None:
        """The rows to replay; None where the trace keeps no features, or no whole request."""
        served = read_served(self.case.trace, gaps=self.evidence.last_only)
        first = served.received.take(served.received["depth"] == 0)
        first = first.take(first.has("features"))
        if not len(first):
            return None
        width, found = self.case.checkpoint.spec.features_width, fed_width(self.case.trace)
        if found != width and any(one.variant == ONE_SLOT for one in self.evidence.findings):
            return None
        if found != width:
            raise UserError(
                f"{self.case.trace.folder}: received features are {found} wide, but fc of "
                f"{self.case.checkpoint.folder} takes {width}: the trace is of another draft"
            )
        whole = np.isin(served.requests, np.unique(first["request"]))
        return replace(served, requests=served.requests[whole]) if whole.any() else None

    def _readings(self, served: Served | None, plan: Plan, foreteller: Foreteller) -> Readings | None:
        configured = self.case.configured
        if configured is None:
            return None
        if self.evidence.weights and self.evidence.weights.served:
            configured = replace(configured, spare={**configured.spare, "served": self.evidence.weights.served})
        matches = self._matches(configured)
        engine = self._engine(configured, served, plan)
        training = self._training(configured, matches, plan, foreteller)
        return Readings(configured, engine, training, matches)

    def _matches(self, configured: Configuration) -> tuple[Match, ...]:
        if self.evidence.masked or not self.truth.sources:
            return ()
        rows = faithful_rows(self.case.trace)
        if not len(rows) and (not self.evidence.hand_off.compared or self.evidence.only_cast):
            rows = self.case.trace.rows("received", live=True, depth=0, rank=0)
        rows = rows.take(rows.has("features"))
        if not len(rows) or self.evidence.misplaced:
            return ()
        width = self.case.checkpoint.spec.target_width
        return identify(rows, self.truth, configured.wiring, coarse=self.case.coarse, width=width)

    def _engine(self, configured: Configuration, served: Served | None, plan: Plan) -> EngineReading | None:
        if served is None:
            return None
        chosen = served.requests[np.isin(served.requests, plan.engine)]
        end = find_end(self.case.trace)

        def around(at: Configuration) -> Iterator[Hypothesis]:
            if self.evidence.of_unknown_weights:  # chance alone would find what makes them a little better
                return
            yield from computing(at, self.case.shared, self.case.others)
            if end is not None:
                yield ending(end.position, end.told)

        return read_engine(
            configured,
            around,
            [served.inputs(chosen)],
            read_drawn(self.case.trace, served.drafted.where(request=chosen), self.case.texts),
            seen=self._seen(configured),
            likely={finding.fault for finding in self.evidence.findings},
            coarse=self.case.coarse,
            tolerance=self.case.tolerance,
            clock=self.clock,
        )

    def _seen(self, configured: Configuration) -> tuple[Hypothesis, ...]:
        """The steps that show in what was loaded."""
        weights = self.evidence.weights
        return weights.seen(configured, computing(configured, self.case.shared, self.case.others)) if weights else ()

    def _training(
        self, configured: Configuration, matches: Sequence[Match], plan: Plan, foreteller: Foreteller
    ) -> TrainedReading | None:
        truth = self.truth
        if self.evidence.lossy or not all(truth.has(slot) for slot in configured.wiring):
            return None
        slots = {Slot(boundary) for boundary in truth.known()} | set(configured.wiring)
        slots |= {match.held for match in matches if match.held} | {Slot(truth.layers or 0, View.NORMED)}
        slots = {slot for slot in slots if truth.has(slot)}
        self.clock.tell("true boundaries", 0, 1)
        choosing, confirming = (truth.read(half, slots, keep=True) for half in (plan.choosing, plan.confirming))
        if not (enough(choosing) and enough(confirming)):
            return None

        rebuilt = rebuilt_table(self.case.checkpoint)

        def around(at: Configuration) -> Iterator[Hypothesis]:
            yield from computing(at, self.case.shared, self.case.others)
            yield from mapping(at, rebuilt)
            yield from moving()
            for one in feeding(at, truth.layers or max(truth.known()), truth.known()):
                if all(truth.has(slot) for slot in one.apply(at).wiring):
                    yield one

        return read_training(configured, around, foreteller, choosing, confirming, clock=self.clock)

    def _foretelling(self, readings: Readings | None) -> Truth:
        """True boundaries; where there are none, what was delivered, at its word, if nothing is known against it."""
        if readings is None or self.truth.sources or not self.evidence.delivered_whole:
            return self.truth
        width = self.case.checkpoint.spec.target_width
        source = Delivered(self.case.trace, readings.configured.wiring, width)
        return Truth(self.case.texts, [source], self.case.layers)

    def _ladder(self, readings: Readings | None, plan: Plan) -> Ladder | None:
        if self.trained is None or readings is None or readings.trained is None:
            return None
        right = readings.trained.configuration
        texts = self.truth.read(plan.foretelling, right.wiring)
        model = right.build()
        sampled = any(text.text.temperature > 0 for text in texts)
        choices = target_choices(self.case.trace, model) if sampled else None
        fed = [[text.wired(right.wiring) for text in texts]]
        depth = len(self.trained.accuracies)
        return compare(self.trained, teacher_forced(model, fed, depth, choices=choices, steps=right.steps))

    def _coverage(self, served: Served | None, plan: Plan, readings: Readings | None) -> dict[str, Any]:
        return {
            **self.evidence.compared,
            "served with": self._served_with(),
            "true boundaries from": [source.name for source in self.truth.sources],
            "boundaries known": len(self.truth.known()),
            "requests": plan.to_json(),
            "requests finished": len(self.case.texts),
            "draft tokens replayed": len(readings.engine.configured.met) if readings and readings.engine else 0,
            "requests without all their draft rows": len(served.incomplete) if served else 0,
            "hypotheses tried": self.clock.tried,
            "hypotheses left untried for want of time": self.clock.skipped,
        }

    def _notes(self, readings: Readings | None) -> tuple[str, ...]:
        notes = list(self.doubts)
        if self.case.why_no_model:
            notes.append(f"nothing was replayed: {self.case.why_no_model}")
        if readings and readings.trained is None:
            notes.append("lengths after a repair hold if features are what the config says, which is not known here")
        if readings and self.clock.skipped and readings.delivered not in (None, readings.configured.wiring):
            held, told = (listed(wiring) for wiring in (readings.delivered, readings.configured.wiring))
            notes.append(f"by value the slots hold {held}, and {told} is configured: which is right takes more time")
        if readings and not readings.matches:
            notes.append(f"which boundaries the slots hold is not decided: {self._why_no_matches()}")
        for link, one in readings.table().items() if readings else ():
            if one.engine is not None and one.engine == one.trained != one.configured:
                notes.append(
                    f"{link}: configured is {one.configured}, but the engine did {one.engine}, and for that the draft "
                    f"was trained: two mistakes make up for each other"
                )
        return tuple(notes)

    def _served_with(self) -> str:
        shape, warmest = served_shape(self.case.trace), max(text.temperature for text in self.case.texts.values())
        chain = "chains" if shape.topk == 1 else f"trees of {shape.nodes} nodes, {shape.topk} below each"
        return f"{chain}, depth {shape.depth}, temperature {warmest:g}"

    def _why_no_matches(self) -> str:
        if self.evidence.masked:
            return "what was received does not tell it"
        return "the trace keeps no features" if self.truth.sources else "no true boundary is known"

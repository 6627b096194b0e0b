"""From readings and findings to causes: which link is broken, who is wrong about it, and the edit that repairs it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from spectrace.engine.fields import read_config
from spectrace.engine.spec import GqaSpec, LaterNorm
from spectrace.replay.case import Case
from spectrace.replay.configuration import Configuration, Slot, listed
from spectrace.replay.diagnosis import Reading
from spectrace.replay.edits import TENSORS, Who, fix_hand_off, fix_switch, fix_wiring
from spectrace.replay.evidence import Evidence
from spectrace.replay.found import OWN, SHARED, Broken, from_finding, with_lost
from spectrace.replay.hypothesis import Hypothesis
from spectrace.replay.identify import Match
from spectrace.replay.link import LINKS
from spectrace.replay.links import TRAINED_OTHERWISE
from spectrace.replay.loading import layers_of
from spectrace.replay.profiles.known import profile_of
from spectrace.replay.readings import SURPRISED, EngineReading, TrainedReading, rivals_of
from spectrace.replay.rewriting import Edit
from spectrace.replay.tensor_edits import drop_tensors, turn_rows
from spectrace.replay.trees import served_shape
from spectrace.replay.vocabulary import rebuilt_table
from spectrace.replay.wirings import name_wiring

__all__ = ["Readings", "broken_links", "found_alone"]


@dataclass(frozen=True, slots=True)
class Readings:
    """The three readings as far as they were decided; None where one was not.

    `matches` are the received slots by value, empty where they could not be matched.
    """

    configured: Configuration
    engine: EngineReading | None
    trained: TrainedReading | None
    matches: tuple[Match, ...] = ()

    @property
    def delivered(self) -> tuple[Slot, ...] | None:
        """What the slots held, None where one is not known."""
        held = [match.held for match in self.matches]
        return tuple(one for one in held if one) if held and all(held) else None

    def table(self, broken: Sequence[Broken] = ()) -> dict[str, Reading]:
        """Every link as configured, as the engine had it, and as the draft was trained.

        Of a link that the trace shows to be broken by itself, that is what the engine had.
        """
        explained = self.engine if self.engine and self.engine.explained else None
        found = {}
        for name, link in LINKS.items():
            engine = link.read(explained.configuration) if explained else None
            if name == "wiring":
                engine = listed(self.delivered) if self.delivered else None
            trained = link.read(self.trained.configuration) if self.trained else None
            found[name] = Reading(link.read(self.configured), engine, trained)
        for one in broken:
            if not one.proven or not one.link or one.variant == "checkpoint":
                continue
            said = LINKS[one.link].read(one.step.apply(self.configured)) if one.step else one.title
            kept = found.get(one.link, Reading("as it should be", None, "as it should be"))
            found[one.link] = replace(kept, engine=said)
        return found


def found_alone(case: Case, evidence: Evidence) -> list[Broken]:
    """What the trace shows by itself."""
    return [from_finding(case, evidence, finding) for finding in evidence.findings]


def broken_links(case: Case, readings: Readings, evidence: Evidence) -> list[Broken]:
    """Everything that is wrong, what is proven by the trace alone first; one entry for one link.

    What is not proven is wrong where a reading says so, too.
    """
    trained = readings.trained
    confirmed = (
        trained is not None
        and trained.undecided is None
        and trained.surprise <= SURPRISED
        and "vocabulary map" not in {step.link for step in trained.steps}
    )
    findings = [one for one in evidence.findings if not (one.variant == "checkpoint" and confirmed)]
    found = [from_finding(case, evidence, finding) for finding in findings]
    unsure = [from_finding(case, evidence, one) for one in (*evidence.doubts, *evidence.suspected)]
    copied = bool(evidence.weights and evidence.weights.other_files)
    values = () if evidence.cast else (*_unknown_slots(case, readings), *_scaled(case, readings))
    for one in (*_wiring(case, readings), *values, *_computing(case, readings, copied=copied)):
        same = [other for other in found if other.proven and _is_same(other, one)]
        borne_out = [other for other in unsure if _is_same(other, one)]
        if same:
            found = [_joined(other, one) if other in same else other for other in found]
        else:
            found.append(_joined(borne_out[0], one) if borne_out else one)
    # A table that cannot be rebuilt was held against no other: it is wrong where nothing else makes sense of the text.
    if trained is not None and not trained.surprise <= SURPRISED and rebuilt_table(case.checkpoint) is None:
        found += [from_finding(case, evidence, one) for one in evidence.suspected]
    return found


def _is_same(finding: Broken, reading: Broken) -> bool:
    """Whether a finding and a reading are about one thing: the same link, and faults that may be one."""
    links = {finding.link, reading.link} - {""}
    return len(links) == 1 and bool({finding.fault, *finding.alike} & {reading.fault, *reading.alike})


def _joined(finding: Broken, reading: Broken) -> Broken:
    """A finding that a reading confirms: of the two, the reading is what is run.

    What happened on the way to the draft, or between ranks, keeps its repair; so does a tensor, of which a finding
    knows where it was lost.
    """
    keeps = finding.link == "wiring" or finding.link in TENSORS
    return replace(
        reading,
        fault=finding.fault,
        variant=finding.variant or reading.variant,
        title=finding.title,
        evidence=(*finding.evidence, *reading.evidence),
        edit=finding.edit if keeps else reading.edit,
        confidence=max(finding.confidence, reading.confidence),
        alike=finding.alike,
    )


def _wiring(case: Case, readings: Readings) -> Iterator[Broken]:
    """What the slots hold against what is configured, and what the draft was trained on against both."""
    configured, delivered = readings.configured.wiring, readings.delivered
    trained = readings.trained.configuration.wiring if readings.trained else configured
    served = case.served_wiring
    if delivered is not None and delivered != trained:
        copied = served is not None and not served.key.startswith("--")  # a flag overrides whatever was copied
        told = tuple(Slot(boundary) for boundary in served.boundaries) if served and copied else configured
        meant_otherwise = delivered == configured or (trained == configured and delivered == _as_read(case))
        who: Who = "config" if meant_otherwise else "conversion" if delivered == told else "engine"
        yield _wrong_wiring(case, readings, trained, delivered, who)
    elif trained != configured and delivered is None:
        yield _wrong_wiring(case, readings, trained, configured, "config")


def _as_read(case: Case) -> tuple[Slot, ...]:
    """What the engine that served makes of the believed config, which need not be what the config means."""
    named = (case.trace.manifest.get("target") or {}).get("architectures") or [""]
    config = read_config(case.checkpoint.folder)
    resolved = profile_of(case.trace.manifest).resolve(config, case.layers or 0, str(named[0]))
    return tuple(Slot(boundary) for boundary in resolved)


def _scaled(case: Case, readings: Readings) -> Iterator[Broken]:
    """Slots that hold their boundary multiplied by something."""
    scaled = [match for match in readings.matches if match.held and match.scale != 1.0]
    if scaled:
        slots = ", ".join(f"{match.shown.slot} ({match.shown.best})" for match in scaled)
        yield Broken(
            fault="D2",
            variant="scaled",
            title=f"slots are multiplied: {slots}",
            evidence=tuple(_slot_evidence(match) for match in scaled),
            edit=fix_hand_off(profile_of(case.trace.manifest), "D2"),
            confidence=0.95,
            link="scale",
            simulated=False,
        )


def _wrong_wiring(case: Case, readings: Readings, right: tuple[Slot, ...], wrong: tuple[Slot, ...], who: Who) -> Broken:
    (fault, variant, title), alike = name_wiring(right, wrong, case.layers or 0)
    profile, served = profile_of(case.trace.manifest), case.served_wiring
    configured = readings.configured.wiring
    if any(slot.view != other.view for slot, other in zip(right, wrong, strict=True)):
        edit = fix_hand_off(profile, fault, variant)
    elif who == "engine" and right != configured:
        said = _wrong_wiring(case, readings, right, configured, "config").edit
        obey = f"and have the engine obey it: it delivers {listed(wrong)} where the config says {listed(configured)}"
        edit = Edit(f"{said.text}; {obey}", said.command)
    else:
        edit = fix_wiring(
            profile,
            who=who,
            draft=case.checkpoint.folder,
            served=case.served_folder,
            boundaries=tuple(slot.boundary for slot in right),
            now=tuple(slot.boundary for slot in wrong),
            key=served.key if served else None,
        )
    evidence = [_slot_evidence(match) for match in readings.matches]
    if served:
        evidence.append(f"by its own account the engine took boundaries {list(served.boundaries)}, from {served.key}")
    if who == "config" and right != configured:
        evidence.append(_trained_evidence(readings, "wiring"))
    return Broken(
        fault=fault,
        variant=variant or who,
        title=f"{title}: {listed(wrong)} where {listed(right)} is right",
        evidence=tuple(evidence),
        edit=edit,
        confidence=0.99 if all(match.exact for match in readings.matches) else 0.9,
        link="wiring",
        alike=alike,
    )


def _slot_evidence(match: Match) -> str:
    shown = match.shown
    runner_up = f"; the closest other is {shown.runner_up} at {shown.runner_up_error:.1e}" if shown.runner_up else ""
    return (
        f"slot {shown.slot} is configured as boundary {shown.configured} and holds {shown.best}: error "
        f"{shown.error:.1e} of the row's maximum, median of {match.rows} rows{runner_up}"
    )


def _trained_evidence(readings: Readings, link: str) -> str:
    trained = readings.trained
    assert trained
    said, gain = LINKS[link].read, trained.gain or (0.0, 0.0)
    others = [step.link for step in trained.steps if step.link != link]
    together = f" (and {', '.join(dict.fromkeys(others))} as said elsewhere)" if others else ""
    return (
        f"on true features the draft reaches acceptance length {_number(trained.best)} with {link} "
        f"{said(trained.configuration)}{together}, and {_number(trained.configured)} as configured, "
        f"{said(readings.configured)}; "
        f"on requests kept apart to confirm it, each token that came is likelier by {gain[0]:.2f} to {gain[1]:.2f} "
        f"nats (99 %)"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _unknown_slots(case: Case, readings: Readings) -> Iterator[Broken]:
    """Slots that hold something else than configured, where it is not known of all what they hold."""
    wrong = [match for match in readings.matches if match.contradicted]
    if readings.delivered is not None or not wrong:
        return
    told = [f"slot {one.shown.slot} holds {one.shown.best}, not {one.shown.configured}" for one in wrong if one.held]
    unknown = [match for match in wrong if match.held is None]
    everything = bool(unknown) and all(match.everything for match in unknown)
    if unknown:
        said = "no boundary of the target, with or without residual or final norm"
        said = said if everything else "another boundary than configured; which one is not known"
        told.append(f"slot {', '.join(str(match.shown.slot) for match in unknown)} holds {said}")
    yield Broken(
        fault="D2" if everything else "W1",
        variant="captured" if everything else "unknown",
        title="; ".join(told),
        evidence=tuple(_slot_evidence(match) for match in readings.matches),
        edit=fix_hand_off(profile_of(case.trace.manifest), "D2" if everything else "W8"),
        confidence=0.5,
        link="wiring",
        alike=("W8", "W9") if everything else ("W2", "W3", "W4", "W5", "W6", "W8"),
        simulated=False,
    )


def _computing(case: Case, readings: Readings, *, copied: bool) -> Iterator[Broken]:
    """The links of the draft's own forward, in the order in which they were found; `copied`: a copy was served."""
    engine, trained = readings.engine, readings.trained
    done = {step.link for step in engine.steps} if engine else set[str]()
    for step in _last(engine.steps if engine else ()):
        right = trained.configuration if trained else readings.configured
        assert engine
        if LINKS[step.link].read(right) != LINKS[step.link].read(engine.configuration):
            lost = _served_so(case, step.link, engine.configuration) or (copied and step.link in TENSORS)
            who: Who = "conversion" if lost else "engine"
            if step.link == "context":
                who = _who_ends(case, engine.configuration.steps.end or 0)
            yield _wrong_link(case, readings, step, right, engine.configuration, who, _engine_evidence(engine, step))
    for step in _last(trained.steps if trained else ()):
        assert trained
        if step.link not in done and step.link != "wiring":
            evidence = (_trained_evidence(readings, step.link),)
            yield _wrong_link(case, readings, step, trained.configuration, readings.configured, "config", evidence)


def _who_ends(case: Case, end: int) -> Who:
    """Whether the believed config says that the draft's context ends about there, or the one that was served."""
    depth = served_shape(case.trace).depth
    contexts = [spec.context if spec else None for spec in (case.checkpoint.spec, case.served_spec)]
    believed, served = (context is not None and context - depth <= end <= context + 1 for context in contexts)
    return "config" if believed else "conversion" if served else "engine"


def _last(steps: Iterable[Hypothesis]) -> Iterable[Hypothesis]:
    """The last step of each link, or of each part of it: a number may be found ever closer."""
    return {(step.link, step.variant): step for step in steps}.values()


def _served_so(case: Case, link: str, engine: Configuration) -> bool:
    """Whether the folder that was served says what the engine did, and the believed one does not."""
    if case.served_spec is None:
        return False
    served = Configuration(case.served_spec, engine.tensors, engine.wiring)
    return LINKS[link].in_config and LINKS[link].read(served) == LINKS[link].read(engine)


def _engine_evidence(engine: EngineReading, step: Hypothesis) -> tuple[str, ...]:
    before, after = engine.configured, engine.reproduced
    lines = [
        f"replayed on the inputs that were recorded, {before.agreement:.1%} of {len(before.met)} draft tokens come out "
        f"as they were served, and {after.agreement:.1%} if {step.title}"
    ]
    if stage := before.first_stage():
        lines.append(
            f"as configured, replay and record part first at {stage.stage}, depth {stage.depth}: "
            f"{stage.rows - stage.equal} of {stage.rows} rows"
        )
    if others := [one.title for one in rivals_of(engine, step)]:
        lines.append(f"the answers cannot tell this from: {', '.join(others)}")
    return tuple(lines)


def _wrong_link(
    case: Case,
    readings: Readings,
    step: Hypothesis,
    right: Configuration,
    wrong: Configuration,
    who: Who,
    evidence: tuple[str, ...],
) -> Broken:
    link = LINKS[step.link]
    edit = _edit(case, step, who, right=link.to_write(right), now=link.to_write(wrong))
    of_engine = readings.engine is not None and step in readings.engine.steps
    reading = readings.engine if of_engine else readings.trained
    rivals = rivals_of(reading, step) if reading else ()
    alike = dict.fromkeys(fault for one in (step, *rivals) for fault in (one.fault, *one.alike))
    fault = (_trained_otherwise(step) if who == "config" else "") or step.fault
    return Broken(
        fault=fault,
        variant=step.variant or who,
        title=f"{step.link}: {link.read(wrong)}, where {link.read(right)} is right",
        evidence=evidence,
        edit=edit,
        confidence=readings.engine.reproduced.agreement if readings.engine and of_engine else 0.99,
        link=step.link,
        alike=tuple(other for other in alike if other != fault),
        step=step,
    )


def _trained_otherwise(step: Hypothesis) -> str:
    """What a fault of an engine is called where the draft was trained so; empty where that is the same."""
    return TRAINED_OTHERWISE.get(f"{step.fault}:{step.variant}" if step.variant else step.fault, "")


def _edit(case: Case, step: Hypothesis, who: Who, *, right: object, now: object) -> Edit:
    """The edit that makes a link read `right` where it reads `now`."""
    profile, draft, served = profile_of(case.trace.manifest), case.checkpoint.folder, case.served_folder
    if step.link in ("positions", "state norms"):
        return fix_hand_off(profile, step.fault, "reverse" if who == "config" else step.variant)
    if step.link == "context" and who == "config":
        right = case.longest
    if who == "config" and (edit := _tensors_edit(case, step, right)):
        return edit
    edit = fix_switch(profile, step.link, who=who, draft=draft, served=served, right=right, now=now)
    return with_lost(case, step.link, edit) if who == "conversion" else edit


def _tensors_edit(case: Case, step: Hypothesis, right: object) -> Edit | None:
    """The edit of a draft's own tensors, where it was trained with others, or with these in another order."""
    draft, spec, names = case.checkpoint.folder, case.checkpoint.spec, case.checkpoint.names
    if _trained_otherwise(step):
        return drop_tensors(draft, [names[OWN[step.link]]], SHARED)
    if step.link == "later norm" and right in set(LaterNorm):
        own = [names[f"{layer}input_norm.weight"] for layer in layers_of(spec)[1:]]
        return drop_tensors(draft, own, f"the draft was trained with {right}, which is in the folder, too")
    turned = step.link == "rope pairs" and isinstance(spec.attention, GqaSpec)
    if turned or step.link == "q and k rows":
        held = {name: names[name] for name in case.checkpoint.tensors}
        return turn_rows(draft, held, spec, back=turned or step.variant == "twice")
    return None

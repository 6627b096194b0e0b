"""Findings about what an engine makes of a draft beside its layer ids: refused, passed over, replaced, made up."""

from collections.abc import Iterator

from spectrace.replay.lint.finding import LintFinding, Severity
from spectrace.replay.lint.subject import Subject
from spectrace.replay.lint.target import UNRELATED, likeness, same_values
from spectrace.replay.profiles.profile import Departure, StandIn
from spectrace.replay.profiles.running import Running

__all__ = ["departures", "refusals", "tensors"]

_PASSED = {"input_norm.weight"}  # vLLM drops it where no key asks for it
_MEMORY = "it computes with ones and with what memory held in their place: it drafts noise"
_TRAINED = "what is served is not the draft that was trained: output text stays right, and fewer drafts are accepted"


def refusals(subject: Subject) -> Iterator[LintFinding]:
    """Why it does not serve the draft."""
    for one in subject.running.refusals if subject.running else ():
        yield LintFinding(
            code="engine-refuses",
            severity=Severity.ERROR,
            title=f"{subject.engine} does not take this draft: {one.why}",
            evidence=(f"it ends with an error that says {one.says!r}",),
            consequence="it is not served at all",
            fix="serve it with an engine or version that has what the draft needs",
        )


def departures(subject: Subject) -> Iterator[LintFinding]:
    """What it computes otherwise."""
    running = subject.running
    if running is None or running.refusals:
        return
    for one in running.departures:
        yield _departure(subject, one)


def _departure(subject: Subject, one: Departure) -> LintFinding:
    assert subject.given
    before, after = subject.draft.spec, one.takes(subject.draft.spec, subject.given)
    changed = [
        f"{name} is {_said(getattr(before, name))}, and {_said(getattr(after, name))} in {subject.engine}"
        for name in before.__dataclass_fields__
        if getattr(before, name) != getattr(after, name)
    ]
    title = f"{subject.engine}, {one.link}: {one.why}"
    return LintFinding(
        code="engine-ignores",
        severity=Severity.ERROR,
        title=title,
        evidence=tuple(changed) or (one.why,),
        consequence=_TRAINED,
        fix=f"serve it with an engine that reads this, or train the draft on as {subject.engine} computes it",
    )


def _said(value: object) -> str:
    fields = getattr(value, "__dataclass_fields__", None)
    return str({name: getattr(value, name) for name in fields}) if fields else str(value)


def tensors(subject: Subject) -> Iterator[LintFinding]:
    """Tensors that it takes from elsewhere though the draft has them, makes up, or passes over."""
    running = subject.running
    if running is None or running.refusals:
        return
    draft = subject.draft
    missing = {*draft.report.missing_tensors, *running.unread}
    yield from _unread(subject, running)
    unwritten = [running.names[name] for name in running.unwritten if running.names[name] not in missing]
    if unwritten:
        yield LintFinding(
            code="engine-unwritten",
            severity=Severity.ERROR,
            title=f"{subject.engine} computes with a {unwritten[0]} that is not there",
            evidence=(f"its class has {', '.join(unwritten)}, and nothing is written to it",),
            consequence="it drafts by what the memory held: another draft at every start",
            fix="store the tensors, as zeros if they are biases; a draft_vocab_size of null takes the target's head",
        )
    for name, taken in running.taken.items():
        theirs = running.names[name]
        if name in draft.tensors and taken in (StandIn.EMBEDDING, StandIn.HEAD):
            yield from _replaced(subject, name, taken)
        elif taken is StandIn.ONES and theirs not in missing:
            yield LintFinding(
                code="engine-drops",
                severity=Severity.ERROR,
                title=f"{subject.engine} takes ones for {theirs}",
                evidence=(f"the draft has {draft.names.get(name, name)}, and {subject.engine} looks for {theirs}",),
                consequence=_TRAINED,
                fix=f"store the tensor as {theirs}, too",
            )


def _unread(subject: Subject, running: Running) -> Iterator[LintFinding]:
    """Tensors under names that this engine does not read, and those that make it refuse the draft."""
    told = set(subject.draft.report.unused_tensors)
    if running.unread:
        more = f" and {len(running.unread) - 1} more" if len(running.unread) > 1 else ""
        yield LintFinding(
            code="engine-drops",
            severity=Severity.ERROR,
            title=f"{subject.engine} does not read {running.unread[0]}{more}",
            evidence=(f"it reads the first layer's tensors as {' or '.join(running.profile.first_layers)}.*",),
            consequence=_MEMORY if running.profile.drops else "it does not load the draft",
            fix="write the draft in EAGLE's layout: spectrace convert DRAFT --to eagle --out FOLDER",
        )
    elif not running.profile.drops and (names := [name for name in running.dropped if name not in told | _PASSED]):
        yield LintFinding(
            code="engine-refuses",
            severity=Severity.ERROR,
            title=f"{subject.engine} does not load a draft with {', '.join(names[:3])}",
            evidence=(f"its class for {subject.draft.spec.layers} layers has no tensor of that name",),
            consequence="it is not served at all",
            fix="remove what the draft is not computed from, or serve it with an engine that has it",
        )


def _replaced(subject: Subject, name: str, taken: StandIn) -> Iterator[LintFinding]:
    own, target = subject.draft.tensors[name], subject.target
    theirs = None if target is None else target.embedding if taken is StandIn.EMBEDDING else target.head
    theirs = None if theirs is None else theirs[: len(own)]
    if theirs is not None and same_values(own, theirs):
        return
    like = theirs is not None and theirs.shape == own.shape and likeness(own, theirs) >= UNRELATED
    known = f"{subject.draft.names[name]} is in the files"
    told = known if theirs is None else f"{known}, and it is not {taken}"
    yield LintFinding(
        code="engine-replaces",
        severity=Severity.ERROR if like else Severity.WARNING,
        title=f"{subject.engine} takes {taken} in place of {subject.draft.names[name]}",
        evidence=(told,),
        consequence=_TRAINED,
        fix="serve it with an engine that keeps the draft's own, or train the draft on with the target's",
    )

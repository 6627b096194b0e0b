"""Findings about layer ids: what they mean, by themselves and on the target, and what the engine makes of them."""

from collections.abc import Iterator

from spectrace.engine.checkpoint import default_wiring
from spectrace.engine.dialect import ID_KEYS
from spectrace.replay.lint.finding import LintFinding, Severity, fixed_by
from spectrace.replay.lint.subject import Subject
from spectrace.replay.profiles.profile import Profile, value_at
from spectrace.replay.rewriting import set_config

__all__ = ["as_served", "meant"]

_TRAINS = "it is trained on other layers from there on"
_SILENT = "output text stays right, and fewer drafts are accepted: the draft is fed other layers than it was trained on"


def meant(subject: Subject) -> Iterator[LintFinding]:
    """What is wrong with the ids themselves."""
    wiring, target = subject.draft.wiring, subject.target
    config = subject.folder / "config.json"
    if wiring is None:
        boundaries = f", here {list(default_wiring(target.facts.layers))}" if target else ""
        yield LintFinding(
            code="wiring-absent",
            severity=Severity.WARNING,
            title="no layer ids are named",
            evidence=(f"{config} has none of {', '.join(one.key for one in ID_KEYS)}",),
            consequence=f"engines take (2, L/2, L-3) without a word{boundaries}: right only if trained so",
            fix=f"write the boundaries that it was trained on into {ID_KEYS[0].key}",
        )
        return
    named = f"{wiring.key} {list(wiring.raw_ids)} means boundaries {list(wiring.boundaries)}"
    beyond = [b for b in wiring.boundaries if target and not 0 <= b <= target.facts.layers]
    if target and beyond and not _may_be_boundaries(subject):
        yield LintFinding(
            code="wiring-range",
            severity=Severity.ERROR,
            title=f"boundary {beyond[0]} is not one of the target's",
            evidence=(f"{named}; {target.folder} has boundaries 0 to {target.facts.layers}, one more than layers",),
            consequence="engines drop such an id without a word, and then fail, or feed fc fewer slots than it has",
            fix="it is another target's draft, or its ids are of another convention: write what it was trained on",
        )
    if len(set(wiring.boundaries)) < len(wiring.boundaries):
        yield LintFinding(
            code="wiring-twice",
            severity=Severity.ERROR,
            title="one boundary feeds two slots",
            evidence=(named,),
            consequence="engines that keep ids as a set hand over fewer slots than fc takes, and fail; "
            "others feed it one layer twice",
            fix="write the boundaries that it was trained on; two slots are never trained on one",
        )
    if list(wiring.boundaries) != sorted(wiring.boundaries):
        yield LintFinding(
            code="wiring-unsorted",
            severity=Severity.WARNING,
            title="layer ids are not in ascending order",
            evidence=(named,),
            consequence="engines that capture while the target runs hand slots over in ascending order",
            fix="if it was trained on this order, put the blocks of fc.weight into ascending order, and the ids, too",
        )
    yield from _contradictions(subject, named)
    yield from _other_convention(subject, named)


def _contradictions(subject: Subject, named: str) -> Iterator[LintFinding]:
    wiring = subject.draft.wiring
    assert wiring
    for one in ID_KEYS:
        ids = value_at(subject.config, one.key)
        if one.key == wiring.key or not isinstance(ids, list):
            continue
        boundaries = [i + one.offset for i in ids if isinstance(i, int)]
        if boundaries != list(wiring.boundaries) and not _right_for_the_engine(subject):
            yield LintFinding(
                code="wiring-contradiction",
                severity=Severity.WARNING,
                title=f"{one.key} says otherwise than {wiring.key}",
                evidence=(f"{named}; {one.key} {ids} means {boundaries}",),
                consequence="which of them counts depends on the engine",
                fix=f"set both to what it was trained on: under {one.key} id i stands for boundary i + {one.offset}"
                if one.offset
                else "set both to the boundaries that it was trained on",
            )


def _right_for_the_engine(subject: Subject) -> bool:
    """Whether the engine captures what the draft means, whatever other keys say to others."""
    wiring, running = subject.draft.wiring, subject.running
    return wiring is not None and running is not None and running.boundaries == wiring.boundaries


def _other_convention(subject: Subject, named: str) -> Iterator[LintFinding]:
    """Ids that are the usual ones of the other convention, or that are boundaries of the target in it alone."""
    wiring, target = subject.draft.wiring, subject.target
    if wiring is None or target is None:
        return
    usual = default_wiring(target.facts.layers)
    one = next(one for one in ID_KEYS if one.key == wiring.key)
    shifted = tuple(boundary - 1 for boundary in usual) if one.offset == 0 else tuple(b + 1 for b in usual)
    if wiring.boundaries != shifted and not _may_be_boundaries(subject):
        return
    other = "the layers that streams leave" if one.offset == 0 else "the layers that streams enter"
    yield LintFinding(
        code="wiring-convention",
        severity=Severity.WARNING,
        title=f"{wiring.key} looks as if its ids were {other}",
        evidence=(
            f"{named}; trainers take {list(usual)} by default, and there are boundaries 0 to {target.facts.layers}",
        ),
        consequence="drafts of both conventions are about, and nothing in the files says which this one is of",
        fix=f"find out what it was trained on: if boundaries {list(wiring.raw_ids)}, write these into {ID_KEYS[0].key}",
    )


def _may_be_boundaries(subject: Subject) -> bool:
    """Whether ids that mean one more are likely boundaries themselves: the usual ones, or else beyond the target."""
    wiring, target = subject.draft.wiring, subject.target
    if wiring is None or target is None or wiring.boundaries == wiring.raw_ids:
        return False
    layers = target.facts.layers
    beyond = max(wiring.boundaries) > layers >= max(wiring.raw_ids)
    return beyond or wiring.raw_ids == default_wiring(layers)


def as_served(subject: Subject) -> Iterator[LintFinding]:
    """What the engine makes of the ids."""
    profile, running, target = subject.profile, subject.running, subject.target
    if profile is None or running is None or running.refusals:
        return
    wiring = subject.draft.wiring
    yield from _graphs(subject, profile)
    if wiring is None or (target is None and running.key == wiring.key and profile.engine == "spectrace"):
        return
    if wiring.key not in {one.key for one in profile.ids} and running.key == "":
        yield _unread(subject, profile)
        return
    made = running.boundaries
    if target is None or made is None or made == wiring.boundaries:
        return
    likely = made == wiring.raw_ids and _may_be_boundaries(subject)
    yield LintFinding(
        code="wiring-misread",
        severity=Severity.WARNING if likely else Severity.ERROR,
        title=f"{profile.title} captures boundaries {list(made)} for a draft of {list(wiring.boundaries)}",
        evidence=(
            f"{wiring.key} {list(wiring.raw_ids)} means boundaries {list(wiring.boundaries)}; {profile.title} makes "
            f"{list(made)} of {running.key or 'its default'} on {target.facts.architecture}",
            *_fewer(subject),
        ),
        consequence="right, if the ids were meant as boundaries" if likely else _outcome(subject, profile),
        fix="leave the ids as they are, if so" if likely else _set_ids(subject, profile),
    )


def _outcome(subject: Subject, profile: Profile) -> str:
    """What comes of other boundaries."""
    assert subject.running and subject.running.boundaries is not None
    count, spec = len(subject.running.boundaries), subject.draft.spec
    if count == spec.slots or (count == 1 and spec.target_width == spec.width):
        return _TRAINS if profile.trainer else _SILENT
    return "it ends in an error at the first step: fc is not as wide as what arrives"


def _graphs(subject: Subject, profile: Profile) -> Iterator[LintFinding]:
    running, target = subject.running, subject.target
    if not profile.graphs_by_default or target is None or running is None or running.boundaries is None:
        return
    default = profile.resolve({}, target.facts.layers, target.facts.architecture)
    if running.boundaries == default:
        return
    yield LintFinding(
        code="wiring-graphs",
        severity=Severity.ERROR,
        title=f"{profile.title} verifies with boundaries {list(default)}, and prefills with {list(running.boundaries)}",
        evidence=("its graphs are captured before layer ids are set, with those of its default",),
        consequence=_SILENT,
        fix="serve with --disable-cuda-graph, or with a later version",
    )


def _fewer(subject: Subject) -> Iterator[str]:
    assert subject.running and subject.running.boundaries is not None
    count, slots = len(subject.running.boundaries), subject.draft.spec.slots
    if count != slots:
        yield f"{count} slots arrive where fc takes {slots}"


def _unread(subject: Subject, profile: Profile) -> LintFinding:
    wiring, target = subject.draft.wiring, subject.target
    assert wiring
    made = subject.running.boundaries if subject.running else None
    default = f"{list(made)}" if made else profile.default_wiring
    right = target is not None and subject.running is not None and subject.running.boundaries == wiring.boundaries
    return LintFinding(
        code="wiring-unread",
        severity=Severity.NOTE if right else Severity.ERROR if target else Severity.WARNING,
        title=f"{profile.title} does not read {wiring.key}",
        evidence=(
            f"{wiring.key} {list(wiring.raw_ids)} means boundaries {list(wiring.boundaries)}; {profile.title} reads "
            f"{' and '.join(one.key for one in profile.ids)}, and takes {default} where these are absent",
        ),
        consequence="by chance its default is what the draft means" if right else _outcome_of_default(subject, profile),
        fix=_set_ids(subject, profile),
    )


def _outcome_of_default(subject: Subject, profile: Profile) -> str:
    return _outcome(subject, profile) if subject.running and subject.running.boundaries else _SILENT


def _set_ids(subject: Subject, profile: Profile) -> str:
    """The edit that has this engine capture what the draft means, if there is one."""
    wiring, target = subject.draft.wiring, subject.target
    assert wiring
    if target is None:
        return f"say which target it is for (--target DIR): what ids mean to {profile.title} depends on its class"
    top, named = ID_KEYS[0], target.facts.architecture
    key = next((one for one in profile.ids if one == top), profile.ids[0])
    ids = profile.ids_for(key, wiring.boundaries, target.facts.layers, named)
    capture = profile.capture(named)
    if ids is None or capture is None or capture.refusal(wiring.boundaries, target.facts.layers):
        return (
            f"no ids under {key.key} have {profile.title} capture {list(wiring.boundaries)} on {named}: "
            f"serve it with another engine or version"
        )
    changes = {top.key: list(wiring.boundaries), key.key: ids}
    why = f"{profile.title} takes {key.key} for {list(wiring.boundaries)} on {named}, other engines may not"
    return fixed_by(set_config(subject.folder, changes, {}, why=why))

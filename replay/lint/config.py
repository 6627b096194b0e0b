"""Findings about a draft's config beside its layer ids: what nobody reads, what is assumed, what can be read twice."""

from collections.abc import Iterator

from spectrace.engine.spec import Stream
from spectrace.replay.lint.finding import LintFinding, Severity
from spectrace.replay.lint.subject import Subject

__all__ = ["assumed", "odd", "unread", "untrained"]

_TOLD_ELSEWHERE = (
    "d2t is there although", "t2d keeps", "not read, the draft's tensors are in other files", "names other boundaries",
)  # fmt: skip
_MODELOPT = "ModelOpt from 0.41 on"
_WIRING = ("layer_ids",)


def unread(subject: Subject) -> Iterator[LintFinding]:
    """Fields that nothing is computed by."""
    for name in subject.draft.report.unread_fields:
        if name.endswith(_WIRING):
            continue  # told with the wiring
        yield LintFinding(
            code="field-unread",
            severity=Severity.WARNING,
            title=f"the field {name} is not read",
            evidence=(f"{subject.folder / 'config.json'} has {name}, and nothing is computed by it",),
            consequence="if the draft was trained by it, what is served is another draft",
            fix="find out what wrote it, and what it means",
        )


def assumed(subject: Subject) -> Iterator[LintFinding]:
    """Defaults in the place of fields that are not there."""
    for name, value in subject.draft.report.assumed.items():
        yield LintFinding(
            code="field-assumed",
            severity=Severity.NOTE,
            title=f"{name} is absent, and {value} counts",
            evidence=(f"{subject.folder / 'config.json'} has no {name}",),
            consequence="defaults of engines and trainers have differed",
            fix=f"write {name} into the config, as the draft was trained",
        )


def untrained(subject: Subject) -> Iterator[LintFinding]:
    """Switches that no trainer of this layout trains with, so that a converter may have set them."""
    if subject.draft.layout != "speculators" and subject.draft.spec.residual is Stream.POST_NORM:
        yield LintFinding(
            code="switch-untrained",
            severity=Severity.WARNING,
            title="norm_before_residual is true, which trainers of this layout do not train with",
            evidence=(
                f"{subject.folder} is in the layout {subject.draft.layout}; of known trainers speculators' "
                f"alone takes the residual behind the norm",
                "ModelOpt's convert_to_vllm_ckpt.py writes true for drafts that were trained otherwise",
            ),
            consequence="if it was not trained so, engines that read the key compute another draft",
            fix="if EAGLE, SpecForge, AngelSlim or ModelOpt trained it, set norm_before_residual to false",
        )


def odd(subject: Subject) -> Iterator[LintFinding]:
    """What is read though it is odd."""
    for note in subject.draft.report.notes:
        if any(told in note for told in _TOLD_ELSEWHERE):
            continue
        if note.startswith(_MODELOPT):
            yield LintFinding(
                code="norm-twice",
                severity=Severity.WARNING,
                title="trained with a norm that no engine applies, if ModelOpt 0.41 or later made it",
                evidence=(note,),
                consequence="served, the state is normed once: other drafts than those that were trained",
                fix="hold ModelOpt's input_layernorm of the first layer constant in training, or train with 0.40",
            )
            continue
        yield LintFinding(
            code="odd",
            severity=Severity.NOTE,
            title=note.partition(":")[0],
            evidence=(note,),
            consequence="it is read as said",
            fix="nothing, if this is meant",
        )

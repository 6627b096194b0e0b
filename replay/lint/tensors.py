"""Findings about a draft's tensors, each by itself: which are there, under which names, and what they hold."""

import difflib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from spectrace.engine.stored import files_passed_over
from spectrace.replay.lint.finding import LintFinding, Severity
from spectrace.replay.lint.subject import Subject
from spectrace.replay.missing import stand_in
from spectrace.replay.spare import shapes_of
from spectrace.tracer.fingerprint import tensor_fingerprint

__all__ = ["contents", "files", "names", "problems"]

_AGAIN = "export the draft again from the run that trained it"
_NOTHING_READS = "nothing is computed from it, by spectrace or by anybody who reads such folders"
_HUGE = 1e4  # no weight that was trained is so large
_ALIKE_NAMES = 0.5
_LISTED = 12  # names that a sentence can hold
_ROWS = 4096


def problems(subject: Subject) -> Iterator[LintFinding]:
    """What reading the folder found wrong with single tensors, and with how they lie there."""
    for one in subject.problems:
        consequence = "an engine that loads it fails, or computes with something else"
        yield LintFinding(
            code=one.code,
            severity=Severity.ERROR,
            title=_title(one.message),
            evidence=(one.message,),
            consequence=consequence,
            fix=_AGAIN,
        )


def _title(message: str) -> str:
    return message.partition(": ")[2].partition("; ")[0] or message


def files(subject: Subject) -> Iterator[LintFinding]:
    """Files that nobody reads."""
    if passed := files_passed_over(subject.folder):
        yield LintFinding(
            code="files-passed-over",
            severity=Severity.WARNING,
            title=f"{', '.join(passed)} is read by nobody",
            evidence=("the index does not name it, or the draft has safetensors and this is torch's",),
            consequence="whoever put it there meant it to count",
            fix=f"remove it from {subject.folder}, or put it into the index",
        )


def names(subject: Subject) -> Iterator[LintFinding]:
    """Tensors that are not there, tensors that nothing reads, and those that are one and the same."""
    missing, unused = list(subject.draft.report.missing_tensors), list(subject.draft.report.unused_tensors)
    ours = {theirs: name for name, theirs in subject.draft.names.items()}
    shapes = {subject.draft.names[name]: list(shape) for name, shape in shapes_of(subject.draft.spec).items()}
    for name in list(missing):
        found = _meant(name, shapes.get(name), unused, subject.stored.shapes)
        if found is None:
            continue
        missing.remove(name)
        unused.remove(found)
        yield LintFinding(
            code="tensor-misnamed",
            severity=Severity.ERROR,
            title=f"{name} is there as {found}",
            evidence=(f"{name} is missing, and {found} is of its shape, {subject.stored.shapes[found]}",),
            consequence=_without(subject, ours[name]),
            fix=f"rename {found} to {name} in the files of {subject.folder}",
        )
    yield from _missing(subject, [name for name in missing if ours[name] != "d2t"], ours)  # d2t: with the vocabulary
    for name in unused:
        yield _unused(subject, name)
    yield from _no_table(subject)


def _no_table(subject: Subject) -> Iterator[LintFinding]:
    """No embedding of its own, where the target's is of another width."""
    spec = subject.draft.spec
    if not spec.own_embedding and spec.target_width != spec.width:
        name = subject.draft.names["embedding.weight"]
        yield LintFinding(
            code="tensor-missing",
            severity=Severity.ERROR,
            title=f"{name} is not there, and the target's is of another width",
            evidence=(f"hidden_size is {spec.width}, and target_hidden_size {spec.target_width}",),
            consequence="engines compute with what the memory held, or fail",
            fix=_AGAIN,
        )


def _missing(subject: Subject, missing: list[str], ours: Mapping[str, str]) -> Iterator[LintFinding]:
    """One finding for each consequence."""
    together: dict[tuple[str, str], list[str]] = {}
    for name in missing:
        code = "head-missing" if ours[name] == "head.weight" else "tensor-missing"
        together.setdefault((code, _without(subject, ours[name])), []).append(name)
    for (code, consequence), names in together.items():
        several = f"{names[0]} and {len(names) - 1} more are" if len(names) > 1 else f"{names[0]} is"
        yield LintFinding(
            code=code,
            severity=Severity.ERROR,
            title=f"{several} not there",
            evidence=(f"no file of {subject.folder} holds {', '.join(names[:_LISTED])}",),
            consequence=consequence,
            fix=_AGAIN,
        )


def _unused(subject: Subject, name: str) -> LintFinding:
    refused = subject.profile is not None and subject.profile.known and not subject.profile.drops
    consequence = f"{subject.engine} does not load a draft with a tensor that it does not know" if refused else ""
    return LintFinding(
        code="tensor-unused",
        severity=Severity.ERROR if refused else Severity.WARNING,
        title=f"{name} is not used",
        evidence=(f"{name} {subject.stored.shapes[name]} is in the files: {_NOTHING_READS}",),
        consequence=consequence or "if the draft was trained with it, what is served is another draft",
        fix=f"find out what wrote {name}: remove it, or say in the config what it is for",
    )


def _without(subject: Subject, name: str) -> str:
    """What comes of a tensor that is not there."""
    told = subject.profile and stand_in(subject.profile, name)
    return told or "engines say nothing, and take ones, the target's tensor, or whatever the memory held"


def _meant(name: str, shape: list[int] | None, unused: list[str], shapes: Mapping[str, list[int]]) -> str | None:
    """The unused tensor that is most likely this one: of its shape, and named alike."""
    alike = [one for one in unused if shapes[one] == shape]
    last = name.removesuffix(".weight").rpartition(".")[2]
    for one in alike:
        if one.endswith(name) or one.removesuffix(".weight").endswith(last):
            return one
    close = difflib.get_close_matches(name, alike, n=1, cutoff=_ALIKE_NAMES)
    return close[0] if close else alike[0] if len(alike) == 1 and len(shape or ()) > 1 else None


def contents(subject: Subject) -> Iterator[LintFinding]:
    """Weights that cannot have been trained by what they hold."""
    names, seen = subject.draft.names, dict[str, str]()
    for name, tensor in subject.draft.tensors.items():
        if name == "d2t":
            continue
        gains = names[name].endswith("norm.weight") and not subject.draft.spec.unit_offset_norms
        yield from _untrained(names[name], tensor, gains=gains)
        if name == "fc.weight":
            yield from _idle_slots(names[name], tensor, subject.draft.spec.slots)
        if tensor.dim() < 2 or not bool(tensor.any()):
            continue
        other = seen.setdefault(tensor_fingerprint(tensor), names[name])
        if other != names[name]:
            yield LintFinding(
                code="tensor-twice",
                severity=Severity.WARNING,
                title=f"{names[name]} is {other}",
                evidence=(f"{names[name]} and {other} are the same {list(tensor.shape)}, bit for bit",),
                consequence="one of them was written in the place of the other, unless they were tied when trained",
                fix=_AGAIN,
            )


def _idle_slots(name: str, fc_HX: Tensor, slots: int) -> Iterator[LintFinding]:
    """Slots that fc multiplies by nothing."""
    idle = [slot for slot, block in enumerate(fc_HX.chunk(slots, -1)) if not bool(block.any())]
    if idle and len(idle) < slots:
        yield LintFinding(
            code="tensor-constant",
            severity=Severity.ERROR,
            title=f"{name} is 0 throughout for slot {idle[0]}",
            evidence=(f"of {slots} slots, {len(idle)} are multiplied by zeros alone",),
            consequence="the draft does not use these features: a part was never loaded, or never trained",
            fix=_AGAIN,
        )


def _untrained(name: str, tensor: Tensor, *, gains: bool) -> Iterator[LintFinding]:
    """`gains`: a norm multiplies by it, so that zeros leave nothing."""
    value = float(tensor.flatten()[0])
    asked = tensor.dim() > 1 or (gains and value == 0)
    if asked and all(bool((some.float() == value).all()) for some in torch.split(tensor, _ROWS)):
        yield LintFinding(
            code="tensor-constant",
            severity=Severity.ERROR,
            title=f"{name} is {value:g} throughout",
            evidence=(f"all {tensor.numel()} values of {name} are {value:g}",),
            consequence="it was never loaded, or never trained",
            fix=_AGAIN,
        )
        return
    tiny = huge = 0
    for some in torch.split(tensor, _ROWS):
        sizes = some.float().abs()
        tiny += int(((sizes > 0) & (sizes < torch.finfo(torch.float32).tiny)).sum())
        huge += int((sizes > _HUGE).sum())
    if huge or tiny > tensor.numel() // 2:
        told = f"{huge} of {tensor.numel()} values are above {_HUGE:g}, {tiny} are subnormal"
        yield LintFinding(
            code="tensor-unwritten",
            severity=Severity.ERROR,
            title=f"{name} holds no weights",
            evidence=(told,),
            consequence="it looks like memory that nothing was written to: the draft drafts noise",
            fix=_AGAIN,
        )

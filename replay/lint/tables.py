"""Findings about a draft's vocabulary: its table by itself and beside t2d, and whether the head's rows go by it.

Shapes: K draft ids, V tokens, H width.
"""

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from spectrace.replay.finding import Finding
from spectrace.replay.lint.finding import LintFinding, Severity
from spectrace.replay.lint.subject import Subject
from spectrace.replay.missing import stand_in
from spectrace.replay.vocabulary import lint_table, rebuilt_table

__all__ = ["head_rows", "table"]

_CODES: Final = {"V1": "d2t-missing", "V2": "d2t-absolute", "V3": "d2t-broken", "V4": "d2t-shifted", "V5": "d2t-zero"}
_SURE: Final = 0.8
_DRAFTS: Final = "what is drafted is turned into other tokens than were meant, and hardly ever accepted"
_ROWS, _CHUNK, _ALIKE, _MANY = 512, 4096, 0.5, 0.5


def table(subject: Subject) -> Iterator[LintFinding]:
    """What is wrong with d2t."""
    draft = subject.draft
    broken = any(one.code == "d2t-range" for one in subject.problems)
    for found in () if broken else lint_table(draft):
        yield _told(subject, found)
    if any(note.startswith("d2t is there although") for note in draft.report.notes):
        yield LintFinding(
            code="d2t-whole",
            severity=Severity.WARNING,
            title="d2t is there though the draft has all tokens",
            evidence=(f"draft_vocab_size is vocab_size, {draft.spec.target_vocab}, and d2t is not all zero",),
            consequence="trainers and vLLM pass it over, SGLang applies it: they draft different tokens",
            fix=f"remove d2t from the files of {subject.folder}",
        )


def _told(subject: Subject, found: Finding) -> LintFinding:
    rebuilt = rebuilt_table(subject.draft)
    fix = "export the draft again with the table that its head was trained with; never make one anew from other data"
    if rebuilt is not None:
        fix = f"the right table can be rebuilt from the folder: `spectrace diagnose` prints the command; or {fix}"
    consequence = _DRAFTS
    if found.fault == "V1" and subject.profile and (taken := stand_in(subject.profile, "d2t")):
        consequence = f"{taken}: {_DRAFTS}"
    severity = Severity.ERROR if found.confidence >= _SURE else Severity.WARNING
    return LintFinding(
        code=_CODES[found.fault],
        severity=severity,
        title=found.title,
        evidence=found.evidence,
        consequence=consequence,
        fix=fix,
    )


def head_rows(subject: Subject) -> Iterator[LintFinding]:
    """Whether the head's rows are those of the tokens that d2t leads to.

    Trainers start a head from the target's rows, so trained ones still resemble them. Where most rows resemble a row of
    the target's head, and hardly any that of their own token, the table is another one's. One that resembles none was
    not made so, and says nothing.
    """
    draft, target = subject.draft, subject.target
    offsets, head = draft.tensors.get("d2t"), draft.tensors.get("head.weight")
    if (
        target is None
        or offsets is None
        or head is None
        or target.head is None
        or target.head.shape != (draft.spec.target_vocab, head.shape[1])
    ):
        return
    tokens = torch.arange(len(offsets)) + offsets.long()
    if bool(((tokens < 0) | (tokens >= draft.spec.target_vocab)).any()):
        return
    sample = torch.linspace(0, len(head) - 1, min(_ROWS, len(head))).long()
    best, own = _likeness(head[sample], target.head, tokens[sample])
    resemble = best > _ALIKE
    right = own >= best - 1e-3
    if float(resemble.float().mean()) < _MANY or float(right[resemble].float().mean()) > 1 - _MANY:
        return
    told = (
        f"of {len(sample)} rows of lm_head.weight that were looked at, {int(resemble.sum())} resemble a row of the "
        f"target's head (cosine above {_ALIKE:g}), and {int((right & resemble).sum())} of these that of their own token"
    )
    yield LintFinding(
        code="head-rows",
        severity=Severity.ERROR,
        title="the head's rows are not those of the tokens that d2t leads to",
        evidence=(told,),
        consequence=_DRAFTS,
        fix="take d2t and lm_head.weight from one and the same run: the table was made anew after the head was trained",
    )


def _likeness(rows_KH: Tensor, head_VH: Tensor, tokens_K: Tensor) -> tuple[Tensor, Tensor]:
    """The cosine of each row with the row of the target that it resembles most, and with its own token's [K]."""
    rows = torch.nn.functional.normalize(rows_KH.float(), dim=-1)
    best = torch.full((len(rows),), -1.0)
    for some_VH in torch.split(head_VH, _CHUNK):
        best = best.maximum((rows @ torch.nn.functional.normalize(some_VH.float(), dim=-1).T).amax(-1))
    return best, (rows * torch.nn.functional.normalize(head_VH[tokens_K].float(), dim=-1)).sum(-1)

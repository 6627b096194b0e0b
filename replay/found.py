"""Broken links, and those that a trace shows by itself: what is wrong, who is wrong about it, and the edit."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from spectrace.engine.fields import read_config
from spectrace.replay.case import Case
from spectrace.replay.edits import Edit, Who, drop_tensor, fix_hand_off, fix_switch
from spectrace.replay.evidence import Evidence
from spectrace.replay.fed import ONE_SLOT
from spectrace.replay.finding import Finding
from spectrace.replay.hypotheses import LINKS, Hypothesis, moved, served_table
from spectrace.replay.links import LINK_OF
from spectrace.replay.missing import shipped_by_copy
from spectrace.replay.profiles import profile_of, value_at
from spectrace.replay.vocabulary import drafted_pairs

__all__ = ["OWN", "Broken", "from_finding"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A broken link before its worth is known.

    `simulated` tells that a free run can have this link broken, so that others can be foretold beside it; `step` breaks
    it, where a step does; `proven` says that the trace shows it by itself, not the replay.
    """

    fault: str
    variant: str
    title: str
    evidence: tuple[str, ...]
    edit: Edit
    confidence: float
    link: str = ""
    alike: tuple[str, ...] = ()
    simulated: bool = True
    step: Hypothesis | None = field(default=None, compare=False)
    proven: bool = False


def from_finding(case: Case, evidence: Evidence, finding: Finding) -> Broken:
    """A finding's cause; positions and tables that are wrong can be run so, too."""
    step, link = _as_found(case, finding), LINK_OF.get(finding.fault, "")
    of_the_draft = link in _OF_THE_DRAFT
    edit = _draft_edit(case, evidence, finding, link) if of_the_draft else _engine_edit(case, finding)
    return Broken(
        fault=finding.fault,
        variant=finding.variant,
        title=finding.title,
        evidence=finding.evidence,
        edit=edit,
        confidence=finding.confidence,
        link=link,
        alike=finding.alike,
        simulated=step is not None or finding.variant == "checkpoint",
        step=step,
        proven=True,
    )


def _as_found(case: Case, finding: Finding) -> Hypothesis | None:
    """The step that a trace shows by itself; None where it shows none that a free run can take."""
    if finding.offsets:
        return moved(finding.offsets, finding.fault, finding.title)
    if LINK_OF.get(finding.fault) == "vocabulary map" and finding.variant in ("", "engine"):
        ids, tokens = (torch.from_numpy(one) for one in drafted_pairs(case.trace, case.checkpoint.spec))
        return served_table(ids, tokens, finding.fault, finding.title)
    return None


OWN = {"embedding": "embedding.weight", "head": "head.weight"}
"""What a draft may share with its target, by the link."""
_OF_THE_DRAFT = frozenset(LINKS) - {"wiring", "positions", "fc"}


def _engine_edit(case: Case, finding: Finding) -> Edit:
    """An engine that is told to do so by a config, which it alone reads, is not wrong."""
    profile, served = profile_of(case.trace.manifest), (case.trace.manifest.get("draft") or {}).get("config")
    switch = profile.switches.get("fc") if finding.variant == ONE_SLOT else None
    if switch is None or not _says(switch.values["skipped"], served):
        return fix_hand_off(profile, finding.fault, finding.variant)
    who: Who = "config" if _says(switch.values["skipped"], read_config(case.checkpoint.folder)) else "conversion"
    draft, copy = case.checkpoint.folder, case.served_folder
    return fix_switch(profile, "fc", who=who, draft=draft, served=copy, right="applied", now="skipped")


def _says(values: Mapping[str, object], config: Mapping[str, Any] | None) -> bool:
    """Whether a config has these values."""
    return config is not None and all(value_at(config, key) == value for key, value in values.items())


def _draft_edit(case: Case, evidence: Evidence, finding: Finding, link: str) -> Edit:
    """By who is wrong: the checkpoint itself, the copy that was served, or the engine that loaded it."""
    copied = bool(evidence.weights and evidence.weights.other_files)
    who: Who = "config" if finding.variant == "checkpoint" else "conversion" if copied else "engine"
    right: object = "as the draft was trained" if who == "config" else "the checkpoint's"
    extra = shipped_by_copy(case.trace, case.checkpoint, OWN.get(link, ""))
    if who == "conversion" and extra and case.served_folder:
        return drop_tensor(case.served_folder, extra)
    if LINKS[link].in_config and case.configured:
        right = LINKS[link].to_write(case.configured)
    return fix_switch(
        profile_of(case.trace.manifest),
        link,
        who=who,
        draft=case.checkpoint.folder,
        served=case.served_folder,
        right=right,
        now=f"not: {finding.title}",
        stage=finding.stage,
    )

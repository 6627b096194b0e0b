"""Broken links, and those that a trace shows by itself: what is wrong, who is wrong about it, and the edit."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from spectrace.engine.fields import read_config
from spectrace.replay.case import Case
from spectrace.replay.edits import Who, fix_hand_off, fix_switch, fix_weights
from spectrace.replay.evidence import Evidence
from spectrace.replay.fed import ONE_SLOT
from spectrace.replay.finding import Finding
from spectrace.replay.hypotheses import moved, served_table
from spectrace.replay.hypothesis import Hypothesis
from spectrace.replay.link import LINKS
from spectrace.replay.links import link_of
from spectrace.replay.missing import bias_of, lost_in_copy, shipped_by_copy
from spectrace.replay.profiles.known import profile_of
from spectrace.replay.profiles.profile import value_at
from spectrace.replay.rewriting import Edit
from spectrace.replay.tensor_edits import copy_tensors, drop_tensors
from spectrace.replay.vocabulary import drafted_pairs

__all__ = ["OWN", "SHARED", "Broken", "from_finding", "with_lost"]


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
    step, link = _as_found(case, finding), link_of(finding.fault, finding.variant)
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
    if link_of(finding.fault, finding.variant) == "vocabulary map" and finding.variant in ("", "engine"):
        ids, tokens = (torch.from_numpy(one) for one in drafted_pairs(case.trace, case.checkpoint.spec))
        return served_table(ids, tokens, finding.fault, finding.title)
    return None


OWN = {"embedding": "embedding.weight", "head": "head.weight"}
"""What a draft may share with its target, by the link."""
_OF_THE_DRAFT = frozenset(LINKS) - {"wiring", "positions", "fc"}
SHARED = "the draft was trained with its target's"
"""Why a tensor of a draft's own may be one too many."""


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
    profile, draft, served = profile_of(case.trace.manifest), case.checkpoint.folder, case.served_folder
    right: object = "as the draft was trained" if who == "config" else "the checkpoint's"
    extra = shipped_by_copy(case.trace, case.checkpoint, OWN.get(link, ""))
    if who == "conversion" and extra and served:
        return drop_tensors(served, [extra], SHARED)
    if finding.fault == "P6":
        return fix_weights(profile, who=who, draft=draft, served=served)
    if LINKS[link].in_config and case.configured:
        right = LINKS[link].to_write(case.configured)
    now = f"not: {finding.title}"
    edit = fix_switch(profile, link, who=who, draft=draft, served=served, right=right, now=now, stage=finding.stage)
    return with_lost(case, link, edit) if who == "conversion" else edit


def with_lost(case: Case, link: str, edit: Edit) -> Edit:
    """An edit of a copy's config, and the tensors of this link that the copy lost as well."""
    lost, served = _lost(case, link), case.served_folder
    return copy_tensors(case.checkpoint.folder, served, lost, edit) if lost and served else edit


def _lost(case: Case, link: str) -> list[str]:
    """What of a link's tensors the folder that was served does not hold, as they are called in files."""
    of_link = _TENSORS_OF.get(link)
    return [theirs for name, theirs in lost_in_copy(case.trace, case.checkpoint).items() if of_link and of_link(name)]


_TENSORS_OF: Mapping[str, Callable[[str], bool]] = {
    "norm before fc": lambda name: name.startswith("fuse_norms."),
    "attention bias": lambda name: bias_of(name) in ("", "o"),
    "MLP bias": lambda name: bias_of(name) == "mlp",
    "later norm": lambda name: name.endswith(".input_norm.weight"),
}
"""Tensors that have to be there for a switch to be right, by the link."""

"""Everything that a trace shows by itself: hand-off, invariants, ranks, loaded weights, vocabulary, verification."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from spectrace.replay.case import Case
from spectrace.replay.decisions import decisions
from spectrace.replay.fed import one_slot
from spectrace.replay.finding import Finding
from spectrace.replay.handoff import HandOff, hand_off
from spectrace.replay.invariants import Invariants, invariants
from spectrace.replay.links import link_of
from spectrace.replay.missing import missing_weights
from spectrace.replay.profiles.known import profile_of
from spectrace.replay.ranks import ranks
from spectrace.replay.vocabulary import lint_table, vocabulary
from spectrace.replay.weights import LoadedWeights, loaded_weights

__all__ = ["Evidence", "gather"]

_TABLE = "vocabulary map"


@dataclass(frozen=True, slots=True)
class Evidence:
    """Findings in the order of the data's path, and what was compared for them.

    `doubts` are no cause by themselves, and no health either: rows that came with other hashes than were emitted, by no
    way that is known (changed, or rows of requests that the trace lacks); ranks that may differ by rounding alone; a
    table that may be wrong by its looks. Where a target can tell of this last, it is `suspected` instead.
    """

    hand_off: HandOff
    invariants: Invariants
    weights: LoadedWeights | None
    findings: tuple[Finding, ...]
    compared: Mapping[str, int]
    doubts: tuple[Finding, ...] = ()
    suspected: tuple[Finding, ...] = ()

    @property
    def last_only(self) -> bool:
        """Whether the draft got the last row of each prefill alone: then a request's rows rightly have gaps."""
        return any(finding.fault == "M1" for finding in self.findings)

    @property
    def delivered_whole(self) -> bool:
        """Whether nothing is known to have happened to the features on their way to the draft."""
        return not any(link_of(finding.fault, finding.variant) in ("hand-off", "wiring") for finding in self.findings)

    @property
    def only_cast(self) -> bool:
        """Whether all that happened to the features on their way is a cast: their values are still near."""
        return all(finding.fault == "D1" for finding in self.hand_off.findings)

    @property
    def cast(self) -> bool:
        """Whether features went through a narrower type on their way: their values are then near, or at its ends."""
        return any(finding.fault == "D1" for finding in self.findings)

    @property
    def misplaced(self) -> bool:
        """Whether rows of text do not stand at the positions that they say."""
        return any((finding.fault, finding.variant) == ("R1", "text") for finding in self.findings)

    @property
    def missing(self) -> str:
        """What lacks of the rows that the draft was fed, without the recording having said so; empty if nothing."""
        counts = self.invariants.counts
        if self.last_only or counts.excused or not counts.gaps:
            return ""
        return f"{counts.gaps} requests lack {counts.missing} rows that a draft must have been fed to serve them"

    @property
    def of_unknown_weights(self) -> bool:
        """Whether all or most weights are others than the checkpoint's, and nothing says which."""
        return any(finding.fault == "P6" for finding in self.findings) and not (self.weights and self.weights.served)

    @property
    def lossy(self) -> bool:
        """Whether verification broke its rule: then the text is not the target's, and foretells nothing."""
        return any(finding.fault[0] == "S" for finding in self.findings)

    @property
    def masked(self) -> bool:
        """Whether what was received does not tell what the target captured."""
        return any(finding.masks for finding in self.findings)


def gather(case: Case) -> Evidence:
    """Run every check that needs no hypothesis."""
    trace = case.trace
    handed, held, agreed = hand_off(trace), invariants(trace), ranks(trace)
    loaded = None
    if case.model is not None:
        loaded = loaded_weights(trace, case.checkpoint, case.model, target=case.target, spare=case.spare)
    mapped, decided = vocabulary(trace, case.checkpoint), decisions(trace)
    weights = loaded.findings if loaded else ()
    found = (*weights, *mapped.findings, *lint_table(case.checkpoint, trace))
    tables = [one for one in found if link_of(one.fault, one.variant) == _TABLE]
    findings = [
        *agreed.findings,
        *handed.findings,
        *held.findings,
        *one_slot(trace, case.checkpoint),
        *missing_weights(case.checkpoint, profile_of(trace.manifest)),
        *(one for one in weights if link_of(one.fault, one.variant) != _TABLE),
        *_one_table(tables),
        *decided.findings,
    ]
    compared = {
        "received rows compared with emitted": handed.compared,
        "received rows equal": handed.equal,
        "tokens compared with the text": held.tokens,
        "tokens fed deeper compared with drafts": held.drafted_tokens,
        "positions compared": held.positions + held.drafted_positions,
        "rows compared between ranks": sum(agreed.compared.values()),
        "loaded tensors compared": loaded.compared if loaded else 0,
        "pairs of draft id and token compared": mapped.pairs,
        "decisions of verification made again": decided.compared,
    }
    certain = tuple(one for one in findings if not one.doubt)
    unsure = [one for one in findings if one.doubt]
    suspected = tuple(one for one in unsure if case.target is not None and link_of(one.fault, one.variant) == _TABLE)
    doubts = tuple(one for one in unsure if one not in suspected)
    return Evidence(handed, held, loaded, certain, compared, doubts, suspected)


def _one_table(findings: Sequence[Finding]) -> list[Finding]:
    """All that is found about the table is one finding, called by what knows most: weights, then tokens, then lint."""
    if not findings:
        return []
    first = findings[0]
    evidence = tuple(line for one in findings for line in one.evidence)
    sure, doubt = max(one.confidence for one in findings), all(one.doubt for one in findings)
    return [replace(first, evidence=evidence, confidence=sure, doubt=doubt)]

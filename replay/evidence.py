"""Everything that a trace shows by itself, gathered: hand-off, invariants, ranks, loaded weights, vocabulary."""

from collections.abc import Mapping
from dataclasses import dataclass

from spectrace.replay.case import Case
from spectrace.replay.finding import Finding
from spectrace.replay.handoff import HandOff, hand_off
from spectrace.replay.invariants import Invariants, invariants
from spectrace.replay.ranks import Ranks, ranks

__all__ = ["Evidence", "gather"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """Findings in the order of the data's path, and what was compared for them."""

    hand_off: HandOff
    invariants: Invariants
    ranks: Ranks
    findings: tuple[Finding, ...]
    compared: Mapping[str, int]

    @property
    def last_only(self) -> bool:
        """Whether the draft got the last row of each prefill alone: then a request's rows rightly have gaps."""
        return any(finding.fault == "M1" for finding in self.findings)

    @property
    def masked(self) -> bool:
        """Whether what was received does not tell what the target captured."""
        return any(finding.masks for finding in self.findings)


def gather(case: Case) -> Evidence:
    """Run every check that needs no hypothesis."""
    trace = case.trace
    handed, held, agreed = hand_off(trace), invariants(trace), ranks(trace)
    findings = [*agreed.findings, *handed.findings, *held.findings]
    compared = {
        "received rows compared with emitted": handed.compared,
        "received rows equal": handed.equal,
        "tokens compared with the text": held.tokens,
        "positions compared": held.positions + held.drafted_positions,
        "rows compared between ranks": sum(agreed.compared.values()),
    }
    return Evidence(handed, held, agreed, tuple(findings), compared)

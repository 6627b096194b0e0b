"""What an engine counts against what was recorded of it: the two come by different ways and have to agree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from spectrace.tracer.acceptance import acceptance_of_rows
from spectrace.tracer.problem import Problem

if TYPE_CHECKING:
    from spectrace.tracer.trace import Trace

__all__ = ["miscounts"]

_IN_FLIGHT: Final = 2
"""Rounds of a request that was aborted, or under way at the end, which one of the two never heard of."""


def miscounts(trace: Trace) -> Iterator[Problem]:
    """Of a sealed trace whose engine counts rounds: where its counts are not those of the rows."""
    told = {name: status.counted for name, status in trace.statuses.items() if status.counted}
    if not trace.sealed or trace.account()["verified"].lost:
        return
    if not told:
        hooked = [name for name, status in trace.statuses.items() if status.steps]
        if hooked and len(trace.rows("verified")):
            text = f"{hooked[0]}: what the engine counts itself was not heard of, and is held against nothing"
            yield Problem(hooked[0], 0, "steps", 0, text)
        return
    rounds = sum(counted.rounds for counted in told.values())
    correct = sum(counted.correct_drafts for counted in told.values())
    found = acceptance_of_rows(trace.rows("verified"))
    aborted = int((trace.rows("requests")["finish_reason"] == "abort").sum())
    extra = found.rounds_untrimmed - rounds
    if abs(extra) > _IN_FLIGHT * aborted or (not extra and not aborted and found.correct_drafts_untrimmed != correct):
        text = (
            f"{', '.join(told)}: the engine counts {rounds} rounds with {correct} correct drafts, and "
            f"{found.rounds_untrimmed} with {found.correct_drafts_untrimmed} were recorded"
        )
        yield Problem(next(iter(told)), 0, "steps", 0, text)

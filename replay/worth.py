"""What speculation is worth: seconds per round from recorded timings, and the acceptance length at which it pays.

With R the seconds of a round and S the seconds of a token decoded plainly, L tokens a round come at L / R tokens per
second, so speculation pays from L = R / S on. Both ways, from speeds alone: 1.8 tokens a round at 54.8 tokens/s with
speculation, against 90.0 tokens/s without, gives 1.8 * 90.0 / 54.8 = 2.96.

A request waits for the whole pass that its round is verified in, whoever shares it: so R and its parts are seconds that
one request waits, and tokens per second are those of one answer.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from spectrace.tracer.acceptance import acceptance_of_rows
from spectrace.tracer.rows import Phase
from spectrace.tracer.rowset import Rows
from spectrace.tracer.trace import Trace

__all__ = ["After", "Plain", "Worth", "worth"]

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]
_FEW = 3


class Plain(StrEnum):
    """Where the time of a plain decode step comes from.

    `SLOPE`: the verify pass less what its extra rows cost, by the slope over passes of different row counts. `BOUND`:
    the verify pass itself, since plain decoding runs fewer rows: no more than that.
    """

    SLOPE = "slope"
    BOUND = "bound"


@dataclass(frozen=True, slots=True)
class After:
    """What a repair brings: its predicted acceptance length, in tokens per second at today's seconds per round."""

    acceptance: float | None
    tokens_per_second: float | None


@dataclass(frozen=True, slots=True)
class Worth:
    """Seconds of a round and of its parts, per request; None where the timings for it are not in the trace.

    `requests_per_pass` is how many requests shared a verify pass. `plain_seconds_per_token` is one row's target forward
    (from where: `plain_from`) and all of the round's rest. Some of that rest is speculation's own, so plain decoding
    takes no longer, and speculation pays from `break_even_acceptance` on at the earliest. Were all of the rest
    speculation's own, it would pay from `break_even_at_most` on, which only a slope tells.
    """

    seconds_per_round: float | None = None
    target_seconds: float | None = None
    draft_seconds: float | None = None
    rest_seconds: float | None = None
    draft_share: float | None = None
    requests_per_pass: float | None = None
    acceptance: float | None = None
    tokens_per_second: float | None = None
    plain_seconds_per_token: float | None = None
    plain_from: Plain | None = None
    break_even_acceptance: float | None = None
    break_even_at_most: float | None = None
    after: Mapping[str, After] | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in self.__slots__},
            "plain_from": self.plain_from and str(self.plain_from),
            "after": {name: asdict(one) for name, one in (self.after or {}).items()},
        }


def worth(trace: Trace, repaired: Mapping[str, float | None]) -> Worth:
    """From a trace's timings; `repaired` is the acceptance length predicted after each repair, by its name."""
    verified = trace.rows("verified")
    served = acceptance_of_rows(verified).acceptance_length if len(verified) else None
    seconds = _seconds_per_round(trace.rows("requests"))
    parts = _parts(trace, verified)
    rest = None if not (seconds and parts.target and parts.draft) else seconds - parts.target - parts.draft
    rest = rest if rest is not None and rest >= 0 else None  # forwards cannot outlast their round: timed otherwise
    plain = None if parts.one_row is None or rest is None else parts.one_row + rest
    return Worth(
        seconds_per_round=seconds,
        target_seconds=parts.target,
        draft_seconds=parts.draft,
        rest_seconds=rest,
        draft_share=_ratio(parts.draft, seconds) if rest is not None else None,
        requests_per_pass=parts.requests,
        acceptance=served,
        tokens_per_second=_ratio(served, seconds),
        plain_seconds_per_token=plain,
        plain_from=parts.plain_from if plain else None,
        break_even_acceptance=_ratio(seconds, plain),
        break_even_at_most=_ratio(seconds, parts.one_row) if plain and parts.plain_from is Plain.SLOPE else None,
        after={name: After(length, _ratio(length, seconds)) for name, length in repaired.items()},
    )


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _seconds_per_round(requests: Rows) -> float | None:
    """Wall seconds from first to last token over rounds, of all finished requests that were timed."""
    secs, rounds = requests["finished_secs"] - requests["first_token_secs"], requests["rounds"]
    timed = np.isfinite(secs) & (rounds > 0)
    return float(secs[timed].sum() / rounds[timed].sum()) if timed.any() and (secs[timed] > 0).any() else None


class _Parts(NamedTuple):
    """Means over rounds of what `Worth` says; `one_row` is a pass with a row for each request."""

    target: float | None = None
    draft: float | None = None
    requests: float | None = None
    one_row: float | None = None
    plain_from: Plain | None = None


class _Passes(NamedTuple):
    """Engine steps by number: rows and seconds of the target's pass, and how many of its rows verify rounds."""

    steps: Int
    rows: Int
    secs: Float
    verifying: Int


def _parts(trace: Trace, verified: Rows) -> _Parts:
    account, rounds = trace.account(), verified.where(node=0)
    if not len(rounds) or any(not _whole(account[name].to_json()) for name in ("emitted", "drafted")):
        return _Parts()  # the rows of a forward share its seconds: with some of them away, so are some of the seconds
    passes = _passes(trace.rows("emitted", rank=0))
    steps, sharing = np.unique(_steps(rounds), return_counts=True)
    at = np.searchsorted(passes.steps, steps).clip(max=max(len(passes.steps) - 1, 0))
    if not len(passes.steps) or (passes.steps[at] != steps).any() or not np.isfinite(passes.secs[at]).all():
        return _Parts()
    weight = sharing / sharing.sum()  # a pass that many rounds wait for counts for each of them
    target, requests = float(passes.secs[at] @ weight), float(sharing @ sharing / sharing.sum())
    slope = _slope(passes)
    one_row = target - slope * float((passes.verifying[at] - sharing) @ weight)  # prompts share plain passes as well
    if slope and one_row > 0:
        return _Parts(target, _drafting(trace), requests, one_row, Plain.SLOPE)
    return _Parts(target, _drafting(trace), requests, target, Plain.BOUND)


def _whole(account: Mapping[str, int]) -> bool:
    return account["recorded"] == account["expected"] and not account["torn"]


def _steps(rows: Rows) -> Int:
    """The engine step of each row, incarnations apart."""
    steps: Int = rows["incarnation"].astype(np.int64) << 48 | rows["step"].astype(np.int64)
    return steps


def _passes(emitted: Rows) -> _Passes:
    steps, at = np.unique(_steps(emitted), return_inverse=True)
    at = at.reshape(-1)
    verifying = np.bincount(at, emitted["phase"] == Phase.VERIFY, len(steps))
    secs: Float = np.bincount(at, emitted["forward_secs"], len(steps)).astype(np.float64)
    return _Passes(steps, np.bincount(at, minlength=len(steps)), secs, verifying.astype(np.int64))


def _drafting(trace: Trace) -> float | None:
    """Seconds of all draft forwards of a step that drafts, mean over the rounds that they draft; None if untimed."""
    drafted = trace.rows("drafted", rank=0)
    steps, at = np.unique(_steps(drafted), return_inverse=True)
    secs = np.bincount(at.reshape(-1), drafted["forward_secs"], len(steps))
    rounds = np.bincount(at.reshape(-1), (drafted["depth"] == 0) & (drafted["token"] >= 0), len(steps))
    if not rounds.sum() or not np.isfinite(secs[rounds > 0]).all():
        return None
    return float(secs[rounds > 0] @ rounds[rounds > 0] / rounds.sum())


def _slope(passes: _Passes) -> float:
    """Seconds that one more row costs, over passes of rounds alone; 0 where their row counts do not differ.

    Least squares through the median time of every row count seen often enough, weighted by how often; no less than 0,
    and no more than a row's share of the average pass.
    """
    alone = (passes.verifying == passes.rows) & np.isfinite(passes.secs)
    counts, at, seen = np.unique(passes.rows[alone], return_inverse=True, return_counts=True)
    often = seen >= _FEW
    if often.sum() < 2:
        return 0.0
    medians = np.array([np.median(passes.secs[alone][at.reshape(-1) == i]) for i in np.flatnonzero(often)])
    slope = float(np.polyfit(counts[often], medians, 1, w=np.sqrt(seen[often]))[0])
    most = float(passes.secs[alone].sum() / passes.rows[alone].sum())
    return min(max(slope, 0.0), most)

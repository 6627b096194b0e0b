"""What holds of every row that a draft is fed, whatever it computes: its token, its position, and that it is there.

The row at position p takes the token of p + 1; a row of depth d takes the token that its parent drafted and stands d
places beyond the row of text that it is below. Rows of requests that have not finished have no text to compare with.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from spectrace.replay.counts import RowCounts, row_counts
from spectrace.replay.finding import Finding
from spectrace.replay.inputs import Int, places
from spectrace.replay.pairing import Bool, Pairing, pair_rows
from spectrace.replay.texts import Text, read_texts
from spectrace.tracer.rowset import Rows
from spectrace.tracer.trace import Trace

__all__ = ["Invariants", "invariants"]

_NEARLY_ALL: Final = 0.98
_KEY: Final = ("request", "pass", "node")


@dataclass(frozen=True, slots=True)
class Invariants:
    """How many rows were compared: tokens and positions, at depth 0 and deeper; and what `counts` says."""

    tokens: int
    drafted_tokens: int
    positions: int
    drafted_positions: int
    counts: RowCounts
    findings: tuple[Finding, ...] = ()


def invariants(trace: Trace) -> Invariants:
    """Check every live row of rank 0."""
    pairing = pair_rows(trace)
    counts = row_counts(trace, pairing)
    tokens, found = _text_tokens(pairing, read_texts(trace))
    positions, more = _text_positions(pairing)
    deeper = trace.rows("received", rank=0, live=True)
    drafted_tokens, drafted_positions, deep = _deeper(deeper, trace.rows("drafted", rank=0))
    findings = (*counts.findings, *found, *more, *deep)
    return Invariants(tokens, drafted_tokens, positions, drafted_positions, counts, findings)


def _text_tokens(pairing: Pairing, texts: Mapping[int, Text]) -> tuple[int, list[Finding]]:
    """Rows of text against their texts, at the positions of the rows that were emitted for them."""
    rows = pairing.received.take(np.isin(pairing.received["request"], list(texts)))
    sources = pairing.sources[np.isin(pairing.received["request"], list(texts))]
    if not len(rows):
        return 0, []
    positions = rows["position"].astype(np.int64)
    if len(pairing.emitted):
        positions = np.where(sources >= 0, pairing.emitted["position"][sources], positions)
    numbers = np.array(sorted(texts), np.int64)
    lengths = np.array([len(texts[number].tokens) for number in numbers.tolist()], np.int64)
    prompts = np.array([len(texts[number].prompt) for number in numbers.tolist()], np.int64)
    flat = np.concatenate([np.asarray(texts[number].tokens, np.int64) for number in numbers.tolist()])
    of = np.searchsorted(numbers, rows["request"])
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])[of]

    def text(at: Int) -> Int:
        inside = (at >= 0) & (at < lengths[of])
        return np.where(inside, flat[starts + np.where(inside, at, 0)], -1)

    wanted, fed = text(positions + 1), rows["token"].astype(np.int64)
    compared = wanted >= 0
    wrong = compared & (fed != wanted)
    if not wrong.any():
        return int(compared.sum()), []
    ends = _chunk_ends(rows, positions) & (positions + 1 < prompts[of])
    shifts = {shift: text(positions + shift) == fed for shift in (0, 2, -1)}
    return int(compared.sum()), [_wrong_tokens(compared, wrong, ends & compared, shifts)]


def _chunk_ends(rows: Rows, positions: Int) -> Bool:
    """The last row of each pass of a request."""
    order = np.lexsort([positions, rows["pass"], rows["request"]])
    request, pass_ = rows["request"][order], rows["pass"][order]
    ends = np.zeros(len(rows), np.bool_)
    ends[order] = np.r_[(request[1:] != request[:-1]) | (pass_[1:] != pass_[:-1]), True]
    return ends


def _wrong_tokens(compared: Bool, wrong: Bool, ends: Bool, shifts: Mapping[int, Bool]) -> Finding:
    count = int(wrong.sum())
    told = f"{count} of {int(compared.sum())} rows of text are fed another token than the one after their position"
    own = int((wrong & shifts[0]).sum())
    if not (wrong & ~ends).any():
        evidence = (
            told,
            f"all {count} are among the {int(ends.sum())} rows that end a chunk inside a prompt; no other row is wrong",
            f"{own} of {count} are fed their own position's token",
        )
        return Finding("T2", "the last row of a prompt's chunk takes a wrong token", evidence)
    for shift, rows in shifts.items():
        explained = int((wrong & rows).sum())
        if explained >= _NEARLY_ALL * count:
            title = "tokens are not shifted by one" if shift == 0 else f"tokens are shifted by {shift} instead of one"
            place = "their own position" if shift == 0 else f"position {shift:+d} from their own"
            shifted = (told, f"{explained} of {count} are fed the token of {place}")
            return Finding("T1", title, shifted, variant="" if shift == 0 else "other")
    others = (told, f"{own} of {count} are fed their own position's token, the others neither that nor the next")
    return Finding("T1", "rows of text are fed wrong tokens, by no shift", others, variant="other", confidence=0.8)


def _text_positions(pairing: Pairing) -> tuple[int, list[Finding]]:
    """Rows of text against the positions at which the target ran them."""
    known = pairing.sources >= 0
    if not known.any():
        return 0, []
    off = (pairing.received["position"][known] - pairing.emitted["position"][pairing.sources[known]]).astype(np.int64)
    wrong = off != 0
    if not wrong.any():
        return len(off), []
    values, counts = np.unique(off[wrong], return_counts=True)
    usual, often = int(values[counts.argmax()]), int(counts.max())
    evidence = (
        f"{int(wrong.sum())} of {len(off)} rows of text stand at another position than in the target",
        f"{often} of these {int(wrong.sum())} stand {usual:+d} from it",
    )
    title = "rows of text stand at wrong positions in the draft"
    return len(off), [Finding("R1", title, evidence, variant="text", confidence=round(often / int(wrong.sum()), 3))]


@dataclass(frozen=True, slots=True)
class _Depth:
    """One depth against the one above: how far rows stand from the text, and which are fed what no parent drafted."""

    depth: int
    offsets: Int
    fed: int
    strangers: int


def _deeper(received: Rows, drafted: Rows) -> tuple[int, int, list[Finding]]:
    """Rows below the text: their tokens and their positions."""
    depths = list(_by_depth(received, drafted))
    findings: list[Finding] = []
    fed, strangers = (sum(getattr(one, name) for one in depths) for name in ("fed", "strangers"))
    if strangers:
        first = next(one for one in depths if one.strangers)
        evidence = (
            f"of {strangers} of {fed} rows that drafted, none below is fed the token that they drafted",
            f"first at depth {first.depth}: {first.strangers} of {first.fed}",
        )
        title = "draft rows are fed tokens that their parents did not draft"
        findings.append(Finding("T1", title, evidence, variant="depth", alike=("Q1",)))
    findings += _positions([one for one in depths if len(one.offsets)])
    return fed, sum(len(one.offsets) for one in depths), findings


def _by_depth(received: Rows, drafted: Rows) -> list[_Depth]:
    above = received.take(received["depth"] == 0)
    bases = above["position"].astype(np.int64)
    found: list[_Depth] = []
    for depth in range(1, int(received["depth"].max(initial=0)) + 1):
        rows = received.take(received["depth"] == depth)
        parents = places([above[name] for name in _KEY], [rows[name] for name in ("request", "pass", "parent")])
        rows, parents = rows.take(parents >= 0), parents[parents >= 0]
        bases = bases[parents]
        answers = drafted.take((drafted["depth"] == depth - 1) & (drafted["token"] >= 0))
        fed, strangers = _strangers(rows, answers)
        found.append(_Depth(depth, rows["position"].astype(np.int64) - bases, fed, strangers))
        above = rows
    return found


def _strangers(rows: Rows, answers: Rows) -> tuple[int, int]:
    """Of the rows that others stand below, how many have none below that is fed what they drafted.

    In a tree others of their candidates stand there, too; the best of them does if any does.
    """
    above = places([answers[name] for name in _KEY], [rows[name] for name in ("request", "pass", "parent")])
    known = above >= 0
    with_rows = np.bincount(above[known], minlength=len(answers)) > 0
    same = rows["token"][known] == answers["token"][above[known]]
    matched = np.bincount(above[known], same, minlength=len(answers)) > 0
    return int(with_rows.sum()), int((with_rows & ~matched).sum())


def _positions(depths: list[_Depth]) -> list[Finding]:
    """How far the rows of each depth stand beyond the text: by their depth, if all is well."""
    wrong = sum(int((one.offsets != one.depth).sum()) for one in depths)
    if not wrong:
        return []
    rows = sum(len(one.offsets) for one in depths)
    usual = [_usual(one.offsets) for one in depths]
    # Where most rows stand right, the few that do not are no pattern: the finding is as sure as they are many.
    right = all(offset == one.depth for offset, one in zip(usual, depths, strict=True))
    alike = sum(int((one.offsets == usual[at]).sum()) for at, one in enumerate(depths))
    share = (wrong if right else alike) / rows
    beyond = {offset - one.depth for offset, one in zip(usual, depths, strict=True)}
    told = f"{wrong} of {rows} rows below the text do not stand as many places beyond it as they are deep"
    places_ = ", ".join(f"{offset:+d} at depth {one.depth}" for offset, one in zip(usual, depths, strict=True))
    evidence, confidence = (told, f"most stand {places_}"), round(share, 3)
    if set(usual) == {0} or (len(usual) > 1 and len(set(usual)) == 1):
        title = "draft positions do not advance with depth"
        return [Finding("R2", title, evidence, confidence=confidence, offsets=tuple(usual))]
    if len(beyond) == 1 and beyond != {0}:
        title = f"draft positions are {beyond.pop():+d} off from depth 1 on"
        return [Finding("R1", title, evidence, confidence=confidence, offsets=tuple(usual))]
    title = "draft positions do not follow the depth"
    return [Finding("R1", title, evidence, variant="other", confidence=confidence, alike=("R2",))]


def _usual(values: Int) -> int:
    found, counts = np.unique(values, return_counts=True)
    return int(found[counts.argmax()])

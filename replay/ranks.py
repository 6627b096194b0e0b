"""Whether the ranks of a role agree: rows of one key have the same hashes and tokens on all of them.

Ranks run the same steps on the same data, so that the first family in the path of the data that differs is at fault;
what comes after it differs as a consequence and is only told.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from spectrace.replay.compare import row_error
from spectrace.replay.finding import Finding
from spectrace.replay.inputs import Int, places
from spectrace.replay.pairing import Bool
from spectrace.tracer.rowset import Rows
from spectrace.tracer.trace import Trace

__all__ = ["Ranks", "ranks"]

_KEY: Final = ("incarnation", "request", "pass", "depth", "node")
_SAMPLE: Final = 256
_ROUNDING: Final = 64  # units of the type's last place, of a row's largest value: what other orders of summing do


@dataclass(frozen=True, slots=True)
class Ranks:
    """Of `compared` rows above rank 0, by family, `equal` are what rank 0 has. `rounding` families differ by no more
    than sums in another order do."""

    compared: Mapping[str, int]
    equal: Mapping[str, int]
    rounding: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Rows of ranks above 0 beside those of rank 0, in the same order; by column, which ones differ [rows]."""

    ours: Rows
    theirs: Rows
    differs: Mapping[str, Bool]

    @property
    def any(self) -> Bool:
        any_: Bool = np.logical_or.reduce(list(self.differs.values()))
        return any_

    def at(self, depth: int | None) -> Bool:
        """Rows of depth 0, or deeper ones where None is given."""
        return np.asarray(self.ours["depth"] > 0 if depth is None else self.ours["depth"] == depth)


def ranks(trace: Trace) -> Ranks:
    """Compare every rank with rank 0 of its role; one rank alone has nothing to be compared."""
    columns = {
        "emitted": ("hashes", "token", "target_token"),
        "received": ("hashes", "token", "position"),
        "drafted": ("state_hash", "draft_token", "token"),
    }
    pairs = {family: _paired(trace.rows(family, live=True), named) for family, named in columns.items()}
    pairs = {family: one for family, one in pairs.items() if len(one.ours)}
    compared = {family: len(one.ours) for family, one in pairs.items()}
    equal = {family: int((~one.any).sum()) for family, one in pairs.items()}
    rounding = _roundings(pairs)
    findings: list[Finding] = []
    if "emitted" in pairs and pairs["emitted"].any.any() and "emitted" not in rounding:
        findings.append(_partial_sums(trace, pairs["emitted"], pairs.get("received")))
    if "received" in pairs and "drafted" in pairs:
        findings += _draft(pairs["received"], pairs["drafted"], rounding, upstream=bool(findings))
    return Ranks(compared, equal, rounding, tuple(findings))


def _paired(rows: Rows, columns: Sequence[str]) -> _Pairs:
    first, others = rows.take(rows["rank"] == 0), rows.take(rows["rank"] > 0)
    at = places([first[name] for name in _KEY], [others[name] for name in _KEY])
    ours, theirs = first.take(at[at >= 0]), others.take(at >= 0)
    return _Pairs(ours, theirs, {name: _unequal(ours, theirs, name) for name in columns})


def _unequal(ours: Rows, theirs: Rows, name: str) -> Bool:
    """Which rows differ in a column; hashes are read for rows of equally many, those of text and those below it."""
    if name != "hashes":
        return np.asarray(ours[name] != theirs[name])
    differs = np.ones(len(ours), np.bool_)
    for rows in (np.flatnonzero(ours["depth"] == 0), np.flatnonzero(ours["depth"] > 0)):
        one, other = ours.take(rows)["hashes"], theirs.take(rows)["hashes"]
        if one.dtype != object and one.shape == other.shape:
            differs[rows] = (one != other).reshape(len(rows), -1).any(1)
        else:
            differs[rows] = [not np.array_equal(*both) for both in zip(one, other, strict=True)]
    return differs


def _roundings(pairs: Mapping[str, _Pairs]) -> tuple[str, ...]:
    """Families of which all that differs are tensors, and these by rounding alone, as far as they were recorded."""
    kinds = {"emitted": "slots", "received": "features", "drafted": "state"}
    found = []
    for family, one in pairs.items():
        exact = [name for name in one.differs if name not in ("hashes", "state_hash")]
        if not one.any.any() or any(one.differs[name].any() for name in exact):
            continue
        error, rows = _error(one, kinds[family])
        if rows and error is not None and error <= _ROUNDING:
            found.append(family)
    return tuple(found)


def _error(pairs: _Pairs, kind: str) -> tuple[float | None, int]:
    """The largest difference of some rows that differ, in units of the last place of the row's largest value."""
    rows = _sample(pairs, kind)
    if not len(rows):
        return None, 0
    ours, theirs = pairs.ours.take(rows).tensor(kind), pairs.theirs.take(rows).tensor(kind)
    error = row_error(ours, theirs) / torch.finfo(ours.dtype).eps
    return float(torch.nan_to_num(error, nan=torch.inf).max()), len(rows)


def _sample(pairs: _Pairs, kind: str) -> Int:
    held = np.flatnonzero(pairs.any & pairs.ours.has(kind) & pairs.theirs.has(kind))
    return held[np.unique(np.linspace(0, len(held) - 1, _SAMPLE).astype(np.int64))] if len(held) else held


def _partial_sums(trace: Trace, emitted: _Pairs, received: _Pairs | None) -> Finding:
    differs = emitted.any
    told = [
        f"{int(differs.sum())} of {len(differs)} emitted rows of other ranks have other hashes or tokens than rank 0's"
    ]
    hashes = emitted.ours["hashes"], emitted.theirs["hashes"]  # of target rows, which are all of depth 0
    if hashes[0].ndim == 2 and hashes[0].shape == hashes[1].shape:
        slots = np.flatnonzero((hashes[0] != hashes[1]).any(0))
        told.append(f"slots that differ: {', '.join(map(str, slots.tolist()))} of 0 to {hashes[0].shape[1] - 1}")
    if received is not None and (upset := received.any & received.at(0)).any():
        told.append(f"so do {int(upset.sum())} of {int(received.at(0).sum())} rows that the draft's ranks received")
    told += _sums(trace, emitted)
    tensors = emitted.differs["hashes"].any()
    return Finding(
        "W9" if tensors else "Q1",
        "ranks of the target capture different features" if tensors else "ranks of the target come to different tokens",
        tuple(told),
        variant="" if tensors else "target",
        confidence=0.9,
        masks=bool(tensors),
    )


def _sums(trace: Trace, emitted: _Pairs) -> list[str]:
    """Whether the ranks' slots add up to a boundary that was recorded for the same row."""
    rows = _sample(emitted, "slots")
    ranks_ = sorted(set(emitted.theirs["rank"].tolist()))
    reference = trace.rows("reference", rank=0)
    configured = ((trace.manifest.get("wiring") or {}).get("resolved") or {}).get("boundaries") or ()
    if not len(rows) or len(ranks_) != 1 or not len(reference):
        return []
    ours, theirs = emitted.ours.take(rows), emitted.theirs.take(rows)
    at = places([reference[name] for name in _KEY], [ours[name] for name in _KEY])
    if (at < 0).any() or not reference.take(at).has("boundaries").all():
        return []
    slots = [part.tensor("slots").float().chunk(max(len(configured), 1), -1) for part in (ours, theirs)]
    told = []
    for slot, boundary in enumerate(configured):
        true = _boundary(reference.take(at), boundary)
        if true is not None and true.shape == slots[0][slot].shape:
            one, both = (
                float(row_error(true, part).median()) for part in (slots[0][slot], slots[0][slot] + slots[1][slot])
            )
            told.append(
                f"slot {slot}, {len(rows)} rows read: rank 0 is {one:.2g} of the row's maximum from boundary "
                f"{boundary}, the sum over ranks {both:.2g}"
            )
    return told


def _boundary(rows: Rows, boundary: int) -> Tensor | None:
    from spectrace.tracer.errors import UserError

    try:
        return rows.tensor("boundaries", f"b{boundary}").float()
    except UserError:
        return None


def _draft(received: _Pairs, drafted: _Pairs, rounding: Sequence[str], *, upstream: bool) -> list[Finding]:
    """The first thing that the draft's ranks do not have alike."""
    features = received.differs["hashes"] & received.at(0)
    if features.any() and "received" not in rounding:
        return [] if upstream else [_features(features, received.at(0))]
    tokens = _tokens(received, drafted)
    if tokens:
        return [tokens]
    states = drafted.differs["state_hash"]
    if not states.any() or "drafted" in rounding:
        return []
    depths = drafted.ours["depth"][states]
    evidence = (
        f"{int(states.sum())} of {len(states)} draft rows have another state on another rank than on rank 0, first at "
        f"depth {int(depths.min())}",
        "what the ranks received at depth 0, and all their tokens, are alike",
    )
    title = "ranks of the draft compute different states from the same inputs"
    return [Finding("Q4", title, evidence, confidence=0.5, alike=("Q2", "Q3"))]


def _features(differs: Bool, at_zero: Bool) -> Finding:
    evidence = (
        f"{int(differs.sum())} of {int(at_zero.sum())} rows of other ranks at depth 0 have other hashes than rank 0's",
        "the target's ranks, as far as they were recorded, emitted the same",
    )
    return Finding("Q1", "ranks of the draft receive different features", evidence, variant="features", confidence=0.8)


def _tokens(received: _Pairs, drafted: _Pairs) -> Finding | None:
    picked = drafted.differs["token"] | drafted.differs["draft_token"]
    fed = received.differs["token"]
    if not (picked.any() or fed.any()):
        return None
    answers = (drafted.ours["token"] >= 0) | (drafted.theirs["token"] >= 0)
    told = [f"{int(picked.sum())} of {int(answers.sum())} tokens drafted on another rank are not rank 0's"]
    told.append(f"{int(fed.sum())} of {len(fed)} rows are fed another token there than on rank 0")
    for pairs, which, word in ((drafted, picked, "drafted"), (received, fed, "fed")):
        if which.any():
            depth = int(pairs.ours["depth"][which].min())
            count = int((which & pairs.at(depth)).sum())
            told.append(f"first {word} differently at depth {depth}: {count} rows")
    return Finding("Q1", "ranks of the draft draft different tokens", tuple(told))

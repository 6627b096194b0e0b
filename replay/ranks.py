"""Whether the ranks of a role agree: rows of one key have the same hashes and tokens on all of them.

Ranks run the same steps on the same data, so that the first family in the path of the data that differs is at fault;
what comes after it differs as a consequence and is only told. Hashes do not tell a fault from sums in another order:
values do, and where none were recorded the difference is a doubt.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from spectrace.replay.compare import row_error
from spectrace.replay.finding import Finding
from spectrace.replay.inputs import Int, places
from spectrace.replay.pairing import Bool
from spectrace.tracer.errors import UserError
from spectrace.tracer.rowset import Rows
from spectrace.tracer.trace import Trace

__all__ = ["Ranks", "ranks"]

_KEY: Final = ("incarnation", "request", "pass", "depth", "node")
_SAMPLE: Final = 256
_ROUNDING: Final = 64  # units of the type's last place, of a row's largest value: what other orders of summing do
_TENSOR: Final = {"emitted": "slots", "received": "features", "drafted": "state"}
_HASHES: Final = ("hashes", "state_hash")
_UNREAD: Final = "whether that is more than rounding is not known: no values were recorded; --level full records them"
_Apart: TypeAlias = Mapping[str, float | None]
"""How far tensors that differ lie apart, by family, in units of the last place of a row's largest value; None where no
values were recorded. Families whose tensors are alike are not in it."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Of `compared` rows above rank 0, by family, `equal` are what rank 0 has. `rounding` families differ by no more
    than sums in another order do; of a finding that is a doubt it is not known whether it does."""

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
        return self.tensors | self.tokens

    @property
    def tensors(self) -> Bool:
        """Rows with other hashes."""
        [differs] = (self.differs[name] for name in _HASHES if name in self.differs)
        return differs

    @property
    def tokens(self) -> Bool:
        """Rows with another token, or another position."""
        differs: Bool = np.logical_or.reduce([self.differs[name] for name in self.differs if name not in _HASHES])
        return differs

    def take(self, which: Bool) -> "_Pairs":
        differs = {name: rows[which] for name, rows in self.differs.items()}
        return _Pairs(self.ours.take(which), self.theirs.take(which), differs)

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
    apart = _apart(pairs)
    rounding = tuple(family for family in apart if _rounds(apart, family) and not pairs[family].tokens.any())
    return Ranks(compared, equal, rounding, tuple(_between(trace, pairs, apart)))


def _between(trace: Trace, pairs: Mapping[str, _Pairs], apart: _Apart) -> Iterator[Finding]:
    """What the ranks do not have alike."""
    emitted, received, drafted = (pairs.get(family) for family in _TENSOR)
    upstream = emitted is not None and (emitted.tokens.any() or not _rounds(apart, "emitted"))
    if emitted is not None and upstream:
        yield from _target(trace, emitted, received, apart)
    if received is not None and drafted is not None:
        yield from _draft(received, drafted, apart, upstream=bool(upstream), handed=emitted is not None)


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


def _apart(pairs: Mapping[str, _Pairs]) -> _Apart:
    """Of emitted rows whose slots were not recorded, by the received rows that carry their hashes on either rank."""
    apart = {family: _error(one, _TENSOR[family]) for family, one in pairs.items() if one.tensors.any()}
    if "received" in pairs and apart.get("emitted", 0.0) is None:
        apart["emitted"] = _error(_carrying(pairs["received"], pairs["emitted"]), "features")
    return apart


def _rounds(apart: _Apart, family: str) -> bool:
    """Whether tensors are alike, or apart by rounding alone, as far as they were recorded."""
    error = apart.get(family, 0.0)
    return error is not None and error <= _ROUNDING


def _carrying(received: _Pairs, emitted: _Pairs) -> _Pairs:
    """The received rows that carry, rank by rank, the hashes of an emitted row that differs: its values are theirs."""

    def hashes(pairs: _Pairs) -> list[tuple[bytes, ...]]:
        both = pairs.ours["hashes"], pairs.theirs["hashes"]
        return [tuple(one.tobytes() for one in row) for row in zip(*both, strict=True)]

    handed, received = set(hashes(emitted.take(emitted.tensors))), received.take(received.tensors)
    return received.take(np.array([row in handed for row in hashes(received)], np.bool_))


def _error(pairs: _Pairs, kind: str) -> float | None:
    """The largest difference of some rows that differ, in units of the last place of the row's largest value."""
    rows = _sample(pairs, kind)
    if not len(rows):
        return None
    ours, theirs = pairs.ours.take(rows).tensor(kind), pairs.theirs.take(rows).tensor(kind)
    error = row_error(ours, theirs) / torch.finfo(ours.dtype).eps
    return float(torch.nan_to_num(error, nan=torch.inf, posinf=torch.inf).max())


def _sample(pairs: _Pairs, kind: str) -> Int:
    held = np.flatnonzero(pairs.tensors & pairs.ours.has(kind) & pairs.theirs.has(kind))
    return held[np.unique(np.linspace(0, len(held) - 1, _SAMPLE).astype(np.int64))] if len(held) else held


def _target(trace: Trace, emitted: _Pairs, received: _Pairs | None, apart: _Apart) -> Iterator[Finding]:
    """Partial sums where features are far apart; other tokens where these are not."""
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
    title = "ranks of the target capture different features"
    error = apart.get("emitted", 0.0)
    if error is None:
        yield Finding("W9", title, (*told, _UNREAD), confidence=0.5, doubt=True)
    elif error > _ROUNDING:
        yield Finding("W9", title, tuple(told), confidence=0.9, masks=True)
        return
    if emitted.tokens.any():
        title = "ranks of the target come to different tokens"
        yield Finding("Q1", title, tuple(told), variant="target", confidence=0.9)


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
    try:
        return rows.tensor("boundaries", f"b{boundary}").float()
    except UserError:
        return None


def _draft(received: _Pairs, drafted: _Pairs, apart: _Apart, *, upstream: bool, handed: bool) -> Iterator[Finding]:
    """The first thing that the draft's ranks do not have alike.

    `upstream` says that the target's do not either, `handed` that these were compared: what they have alike is not
    rounded on its way.
    """
    features = received.differs["hashes"] & received.at(0)
    if features.any() and not _rounds(apart, "received"):
        if not upstream:
            known = apart["received"] is not None or (handed and "emitted" not in apart)
            yield _features(features, received.at(0), known)
        return
    if tokens := _tokens(received, drafted):
        yield tokens
        return
    if not drafted.tensors.any() or _rounds(apart, "drafted"):
        return
    known = apart["drafted"] is not None
    if known or not features.any():  # states made of rounded features are other states
        yield _states(drafted, known)


def _states(drafted: _Pairs, known: bool) -> Finding:
    states = drafted.tensors
    told = (
        f"{int(states.sum())} of {len(states)} draft rows have another state on another rank than on rank 0, first at "
        f"depth {int(drafted.ours['depth'][states].min())}",
        "what the ranks received at depth 0 is alike, or but for rounding, and all their tokens are alike",
    )
    title = "ranks of the draft compute different states from the same inputs"
    evidence = told if known else (*told, _UNREAD)
    return Finding("Q4", title, evidence, confidence=0.5, alike=("Q2", "Q3"), doubt=not known)


def _features(differs: Bool, at_zero: Bool, known: bool) -> Finding:
    told = (
        f"{int(differs.sum())} of {int(at_zero.sum())} rows of other ranks at depth 0 have other hashes than rank 0's",
        "the target's ranks, as far as they were recorded, emitted the same",
    )
    title = "ranks of the draft receive different features"
    evidence = told if known else (*told, _UNREAD)
    return Finding("Q1", title, evidence, variant="features", confidence=0.8 if known else 0.5, doubt=not known)


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

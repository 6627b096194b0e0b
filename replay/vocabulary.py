"""The draft's vocabulary: which token each of its ids stands for, by the checkpoint's d2t and by what was drafted.

`d2t` holds offsets: id k stands for token k + d2t[k]. `t2d`, which some trainers export, marks the tokens kept, in
order; engines do not read it, so it is a witness. Without it a table may look wrong and be right: then the tokens that
came in the place of first drafts are witnesses.

Shapes: K ids of the draft, N first drafts of a round.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from spectrace.engine.checkpoint import DraftCheckpoint, read_tensor
from spectrace.engine.spec import DraftSpec
from spectrace.replay.finding import Finding
from spectrace.replay.inputs import Int, places
from spectrace.tracer.errors import UserError
from spectrace.tracer.trace import Trace

__all__ = ["Misreading", "Vocabulary", "drafted_pairs", "lint_table", "misreadings", "rebuilt_table", "vocabulary"]

_FEW_IDS: Final = 8  # below, offsets may all be different by chance
_LOOKS: Final = 0.5  # confidence in what nothing but a table's looks speaks for
_FEW_HITS, _MANY_TIMES = 8, 4


@dataclass(frozen=True, slots=True)
class Misreading:
    """A way to take a table wrongly, and the tokens [K] that the ids then stand for."""

    fault: str
    title: str
    tokens: Int


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Of `pairs` different pairs of draft id and token that were drafted, `configured` are the checkpoint's own."""

    pairs: int
    configured: int
    findings: tuple[Finding, ...] = ()


def misreadings(offsets: Int, vocab: int) -> Iterator[Misreading]:
    """The known ways to read a table of offsets wrongly, for a target of so many tokens."""
    ids = np.arange(len(offsets))
    yield Misreading("V1", "d2t is not applied", ids)
    yield Misreading("V2", "d2t is taken for tokens instead of offsets", offsets % vocab)
    yield Misreading("V2", "d2t holds tokens where offsets are added to the id", (2 * ids + offsets) % vocab)
    for by in (1, -1):
        yield Misreading("V4", "d2t is shifted by one row", (ids + np.roll(offsets, by)) % vocab)
        yield Misreading("V4", "the draft's tokens are shifted by one id", np.roll(ids + offsets, by))


def vocabulary(trace: Trace, checkpoint: DraftCheckpoint) -> Vocabulary:
    """What was drafted against the checkpoint's table; no pairs where an engine does not tell ids from tokens."""
    spec, offsets = checkpoint.spec, _offsets(checkpoint)
    ids, tokens = drafted_pairs(trace, spec)
    own = tokens == (ids + offsets[ids] if offsets is not None else ids)
    findings = () if own.all() else (_mapped_otherwise(ids, tokens, own, offsets, spec.target_vocab),)
    return Vocabulary(len(ids), int(own.sum()), findings)


def drafted_pairs(trace: Trace, spec: DraftSpec) -> tuple[Int, Int]:
    """Every draft id that was drafted, and the token that it stood for; each pair once."""
    drafted = trace.rows("drafted", rank=0)
    known = (drafted["token"] >= 0) & (drafted["draft_token"] >= 0) & (drafted["draft_token"] < spec.draft_vocab)
    pairs = np.stack([drafted[name][known].astype(np.int64) for name in ("draft_token", "token")])
    ids, tokens = np.unique(pairs, axis=1)
    return ids, tokens


def _mapped_otherwise(ids: Int, tokens: Int, own: np.ndarray, offsets: Int | None, vocab: int) -> Finding:
    told = [f"{int((~own).sum())} of {len(ids)} pairs of draft id and token that were drafted are not the checkpoint's"]
    several = len(ids) - len(np.unique(ids))
    if several:
        told.append(f"{several} pairs give an id another token than it had before: no table does that")
        title = "draft ids do not always stand for the same token"
        return Finding("V3", title, tuple(told), variant="inconsistent", confidence=0.6)
    tried = [] if offsets is None else list(misreadings(offsets, vocab))
    fitting = [one for one in tried if (one.tokens[ids] == tokens).all()]
    if not fitting:
        told.append("they fit none of the known ways to misread its table, but are one table")
        return Finding("V3", "d2t of the engine is another table than the checkpoint's", tuple(told), confidence=0.9)
    others = {one.fault for one in fitting[1:]} - {fitting[0].fault}
    if fitting[0].fault == "V1":
        others |= {"V5"}
    told.append(f"all {len(ids)} pairs are those of a table that is read so: {fitting[0].title}")
    return Finding(fitting[0].fault, fitting[0].title, tuple(told), alike=tuple(sorted(others)))


def lint_table(checkpoint: DraftCheckpoint, trace: Trace | None = None) -> tuple[Finding, ...]:
    """What is wrong with a checkpoint's own table, by itself and beside t2d; nothing where it needs none.

    One that could be right by its looks is held against what came where it was drafted by, if there is a trace.
    """
    spec, offsets = checkpoint.spec, _offsets(checkpoint)
    if "d2t" not in checkpoint.tensors:
        if spec.draft_vocab >= spec.target_vocab:
            return ()
        lacking = f"no tensor d2t, but {spec.draft_vocab} of {spec.target_vocab} tokens are drafted"
        return (Finding("V1", "the checkpoint has no d2t", (lacking,), variant="checkpoint"),)
    assert offsets is not None
    kept = _kept(checkpoint.folder)
    found = _wrong_table(offsets, spec.target_vocab, kept)
    if found is None:
        return ()
    fault, title, confidence = found
    told, rebuilt = [_state(offsets, spec.target_vocab, kept)], rebuilt_table(checkpoint)
    if rebuilt is not None:
        told.append("the right table can be rebuilt from the folder")
    if confidence <= _LOOKS:
        hits = None if trace is None else _hits(trace, checkpoint, None if rebuilt is None else rebuilt.numpy())
        if hits and hits.many(hits.right, hits.otherwise):
            return ()
        told += [hits.told] if hits else []
        if hits and hits.many(hits.otherwise, hits.right):
            confidence = 0.9
        else:
            told.append(f"by its looks, {title}; but a right table may look so: --target tells, on texts enough")
    doubt = confidence <= _LOOKS
    return (Finding(fault, title, tuple(told), variant="checkpoint", confidence=confidence, doubt=doubt),)


def rebuilt_table(checkpoint: DraftCheckpoint) -> Tensor | None:
    """The offsets [K] that a broken table should have held, as far as the folder says: from t2d, or from itself.

    From t2d only if it keeps as many tokens as there are ids; those who export it number them in order.
    """
    offsets, kept = _offsets(checkpoint), _kept(checkpoint.folder)
    ids = np.arange(checkpoint.spec.draft_vocab)
    if kept is not None and len(kept) == len(ids):
        return torch.from_numpy(kept - ids)
    if offsets is None or kept is not None:
        return None
    found = _wrong_table(offsets, checkpoint.spec.target_vocab, kept)
    if found is None or found[0] not in ("V2", "V4"):
        return None
    return torch.from_numpy(offsets - ids if found[0] == "V2" else np.roll(offsets, -_rolled(offsets)))


@dataclass(frozen=True, slots=True)
class _Hits:
    """Of so many `telling` first drafts those that came: by the table, if it were read `otherwise`, and by `chance`."""

    telling: int
    right: int
    otherwise: int
    chance: float

    def many(self, ones: int, others: int) -> bool:
        """Whether these are far more than those, and than chance."""
        return ones >= max(_FEW_HITS, _MANY_TIMES * max(others, self.chance))

    @property
    def told(self) -> str:
        return (
            f"of {self.telling} first drafts that can tell, {self.right} came as the table has them, {self.otherwise} "
            f"as they would be if it were wrong so; by chance {self.chance:.0f} would"
        )


def _hits(trace: Trace, checkpoint: DraftCheckpoint, rebuilt: Int | None) -> _Hits | None:
    """First drafts that another table would have made other tokens; None where an engine did not draft by this one.

    If the other is not known, some of the highest ids, half of all at most: tokens in order may begin as a table of
    zeros does.
    """
    mapped, offsets = vocabulary(trace, checkpoint), _offsets(checkpoint)
    if offsets is None or mapped.configured < max(mapped.pairs, 1):
        return None
    tokens = np.arange(len(offsets)) + offsets
    drafted_N, came_N = _first_drafts(trace)
    order = np.argsort(tokens)
    ids_N = order[np.searchsorted(tokens, drafted_N, sorter=order).clip(max=len(order) - 1)]
    known = (tokens[ids_N] == drafted_N) & (came_N >= 0)
    ids_N, came_N = ids_N[known], came_N[known]
    hits_N = tokens[ids_N] == came_N
    if not len(ids_N):
        return None
    if rebuilt is None:
        needed = 2 * _FEW_HITS * len(ids_N) // max(int(hits_N.sum()), 1)
        telling = np.argsort(ids_N)[-min(needed, len(ids_N) // 2) :]
    else:
        telling = np.flatnonzero(offsets[ids_N] != rebuilt[ids_N])
    often = np.bincount(came_N, minlength=checkpoint.spec.target_vocab) / len(came_N)
    ids, came = ids_N[telling], came_N[telling]
    otherwise = 0 if rebuilt is None else int((ids + rebuilt[ids] == came).sum())
    return _Hits(len(telling), int(hits_N[telling].sum()), otherwise, float(often[tokens[ids]].sum()))


def _first_drafts(trace: Trace) -> tuple[Int, Int]:
    """The tokens drafted first in every round, and those that the target came to in their place [N]."""
    verified = trace.rows("verified", rank=0)
    roots = verified.take(verified["node"] == 0)
    firsts = verified.take((verified["node"] > 0) & (verified["parent"] == 0))
    at = places(*([rows[name] for name in ("request", "pass")] for rows in (roots, firsts)))
    drafted, came = firsts["token"][at >= 0], roots["target_token"][at[at >= 0]]
    return drafted.astype(np.int64), came.astype(np.int64)


def _offsets(checkpoint: DraftCheckpoint) -> Int | None:
    """The checkpoint's d2t; None where it has none and its ids are the first tokens, or all."""
    table = checkpoint.tensors.get("d2t")
    return None if table is None else table.to(torch.int64).numpy()


def _kept(folder: Path) -> Int | None:
    """The tokens that t2d keeps, in order; None where the folder has no t2d."""
    try:
        return np.flatnonzero(read_tensor(folder, ("t2d",)).numpy())
    except UserError:
        return None


def _is_table(tokens: Int, vocab: int, kept: Int | None) -> bool:
    """Whether these can be what ids stand for: each token once, none beyond the vocabulary, those that t2d keeps."""
    ordered = np.sort(tokens)
    inside = bool(len(ordered) and ordered[0] >= 0 and ordered[-1] < vocab and (np.diff(ordered) > 0).all())
    return inside and (kept is None or np.array_equal(ordered, kept))


def _wrong_table(offsets: Int, vocab: int, kept: Int | None) -> tuple[str, str, float] | None:
    """Fault, title and confidence; None for a table that nothing speaks against."""
    ids = np.arange(len(offsets))
    sound = _is_table(ids + offsets, vocab, kept)
    if not offsets.any():
        if sound and (kept is not None or len(ids) == vocab):
            return None  # t2d keeps the first tokens, too
        return "V5", "d2t is all zero", _LOOKS if sound else 1.0
    if sound and kept is not None:
        return None
    if _is_table(offsets, vocab, kept) and (len(ids) >= _FEW_IDS or not sound):
        return "V2", "d2t holds tokens instead of offsets", _LOOKS if sound else 1.0
    if kept is not None:
        if any(_is_table((ids + np.roll(offsets, by)) % vocab, vocab, kept) for by in (1, -1)):
            return "V4", "d2t is shifted by one row", 1.0
        return "V3", "d2t is not the table of t2d", 0.9
    if (by := _rolled(offsets)) and _is_table(ids + np.roll(offsets, -by), vocab, kept):
        return "V4", "d2t is shifted by one row", _LOOKS if sound else 0.9
    return None if sound else ("V3", "d2t is no table: ids share tokens, or stand for none", 0.9)


def _rolled(offsets: Int) -> int:
    """By how many rows a table of tokens in order may have been shifted, 0 where it has not been."""
    falls = np.flatnonzero(np.diff(offsets) < 0)
    if len(falls) != 1 or len(offsets) < _FEW_IDS:
        return 0
    if falls[0] == 0 and offsets[0] >= offsets[-1]:
        return 1
    return -1 if falls[0] == len(offsets) - 2 and offsets[-1] <= offsets[0] else 0


def _state(offsets: Int, vocab: int, kept: Int | None) -> str:
    """What the table says, read as offsets."""
    tokens = np.arange(len(offsets)) + offsets
    outside = int(((tokens < 0) | (tokens >= vocab)).sum())
    shared = len(tokens) - len(np.unique(tokens))
    told = f"of {len(tokens)} ids, {outside} stand for no token of {vocab} and {shared} for one that another id has"
    if kept is None:
        return f"{told}; there is no t2d"
    return f"{told}; {int(np.isin(tokens, kept).sum())} stand for one of the {len(kept)} tokens that t2d keeps"

"""What differing rows come to: tokens chosen otherwise, and whether that was a tie; distributions side by side.

Of logits the best k of a row are kept, and their logsumexp. Probabilities of tokens that both sides kept are exact; all
others are one class, so that divergence is never overstated: KL and total variation are at least, the shared
probability sum(min(p, q)) at most, what is given here. Temperature 1.

Shapes: n rows, k logits.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from spectrace.replay.diff.alignment import Alignment, PairedRows
from spectrace.replay.diff.floor import Noise
from spectrace.replay.diff.texts import TextPair
from spectrace.replay.pairing import Bool
from spectrace.tracer.rowset import Rows

__all__ = ["Flips", "Likeness", "Split", "find_flips", "find_likeness", "find_splits"]

_ROWS: Final = 2048


@dataclass(frozen=True, slots=True)
class Split:
    """Where the texts of a pair of requests part.

    `margin` is how much logits had to move for it, of the row's largest, None where they were not recorded; `tie`
    whether rounding moves them as much, None where that is not known, or where tokens were `drawn`.
    """

    a: int
    b: int
    position: int
    token_a: int
    token_b: int
    margin: float | None
    tie: bool | None
    drawn: bool


@dataclass(frozen=True, slots=True)
class Flips:
    """Of `rows` that chose a token on both sides, `flips` chose another.

    `ties` of these were ones; of `open` that is not known, since logits were not recorded. Tokens that were drawn are
    in none of them. `depth` is None for the target.
    """

    depth: int | None
    rows: int
    flips: int
    ties: int
    open: int

    def __add__(self, other: "Flips") -> "Flips":
        """Of the rows of both."""
        rows, flips, ties = self.rows + other.rows, self.flips + other.flips, self.ties + other.ties
        return Flips(self.depth, rows, flips, ties, self.open + other.open)


@dataclass(frozen=True, slots=True)
class Likeness:
    """Distributions of `rows`, means: shares with the same best token, of the best k that both have, and the bounds."""

    depth: int | None
    rows: int
    same_best: float
    overlap: float
    kl: float
    total_variation: float
    shared: float

    def __add__(self, other: "Likeness") -> "Likeness":
        """Of the rows of both."""
        rows = self.rows + other.rows
        means = (
            (getattr(self, name) * self.rows + getattr(other, name) * other.rows) / rows
            for name in ("same_best", "overlap", "kl", "total_variation", "shared")
        )
        return Likeness(self.depth, rows, *means)


def find_splits(alignment: Alignment, noise: Noise | None) -> list[Split]:
    """Every pair of requests whose texts part after a common beginning."""
    parting = [(at, pair) for at, pair in enumerate(alignment.texts) if pair.parts]
    return [_split(alignment.families.get("emitted"), at, pair, noise) for at, pair in parting]


def find_flips(pairs: PairedRows, depth: int | None, noise: Noise | None, greedy: Bool | None = None) -> Flips:
    """Rows of one family, and of one depth of a draft, that chose otherwise; all were greedy unless it says so."""
    emitted, chosen = ("target_token", "target_token") if depth is None else ("token", "draft_token")
    a, b = pairs.a[emitted].astype(np.int64), pairs.b[emitted].astype(np.int64)
    both = (a >= 0) & (b >= 0) & (True if greedy is None else greedy)
    flipped = np.flatnonzero(both & (a != b))
    held = (pairs.a.has("logits") & pairs.b.has("logits"))[flipped]
    mapped = (pairs.a[chosen] == pairs.b[chosen])[flipped]  # one choice, and two tokens made of it: never a tie
    weighed = pairs.take(flipped[held & ~mapped])
    ties = int((_margins(weighed, chosen) <= _moves(noise)).sum()) if noise else 0
    return Flips(depth, int(both.sum()), len(flipped), ties, int((~held & ~mapped).sum()) if noise else len(flipped))


def find_likeness(pairs: PairedRows, depth: int | None) -> Likeness | None:
    """The distributions of rows of one family, and of one depth of a draft; None where logits were not recorded.

    Rows whose logsumexp and token are the same are not read.
    """
    pairs = pairs.take(pairs.a.has("logits") & pairs.b.has("logits"))
    if not len(pairs):
        return None
    token = "target_token" if depth is None else "draft_token"
    same = (pairs.a["logsumexp"] == pairs.b["logsumexp"]) & (pairs.a[token] == pairs.b[token])
    differ = np.flatnonzero(~same)
    chosen = differ[:: -(-len(differ) // _ROWS)] if len(differ) else differ
    found = _compared(pairs.take(chosen)) if len(chosen) else np.zeros((5, 1))
    share, equal = float((~same).mean()), np.array([1, 1, 0, 0, 1.0])
    return Likeness(depth, len(pairs), *(share * found.mean(1) + (1 - share) * equal).tolist())


def _split(emitted: PairedRows | None, at: int, pair: TextPair, noise: Noise | None) -> Split:
    place = pair.shared - 1
    tokens = pair.text_a.tokens[pair.shared], pair.text_b.tokens[pair.shared]
    margin = None
    if emitted is not None:
        found = np.flatnonzero((emitted.text == at) & (emitted.place == place) & (emitted.a["position"] == place))
        row = emitted.take(found[:1])
        if len(row) and row.a.has("logits").all() and row.b.has("logits").all():
            margin = float(_margin(row, torch.tensor([tokens[0]]), torch.tensor([tokens[1]]))[0])
    drawn = max(pair.text_a.temperature, pair.text_b.temperature) > 0
    tie = None if margin is None or noise is None or drawn else margin <= _moves(noise)
    return Split(pair.a, pair.b, pair.shared, *tokens, margin, tie, drawn)


def _moves(noise: Noise) -> float:
    """By how much rounding moves two logits against each other, of the row's largest: each by its typical error."""
    return 2 * min(noise.largest, 4 * noise.median or noise.largest)


def _margins(pairs: PairedRows, column: str) -> np.ndarray:
    if not len(pairs):
        return np.zeros(0)
    chosen = (torch.from_numpy(rows[column].astype(np.int64)) for rows in (pairs.a, pairs.b))
    return _margin(pairs, *chosen).numpy()


def _margin(pairs: PairedRows, token_a: Tensor, token_b: Tensor) -> Tensor:
    """How much the two tokens' logits had to move against each other [n], of the row's largest logit.

    By how much a preferred its token to b's, and b its own to a's; one that was drawn may not have been preferred. A
    token that was not kept is at most the least kept.
    """
    total = torch.zeros(len(token_a))
    for rows, own, other in ((pairs.a, token_a, token_b), (pairs.b, token_b, token_a)):
        ids, values = rows.tensor("logits", "ids").long(), rows.tensor("logits", "values").float()
        preferred = _value(ids, values, own) - _value(ids, values, other)
        total += preferred.clamp_min(0) / values.abs().amax(-1)
    return total


def _value(ids: Tensor, values: Tensor, token: Tensor) -> Tensor:
    is_it = ids == token[:, None]
    return torch.where(is_it.any(-1), (values * is_it).sum(-1), values.amin(-1))


def _compared(pairs: PairedRows) -> np.ndarray:
    """Same best token, overlap, KL, total variation and shared probability of each row [5, n]."""
    ids, logs = zip(*(_logs(rows) for rows in (pairs.a, pairs.b)), strict=True)
    same = ids[0][:, :, None] == ids[1][:, None, :]
    kept = same.any(-1)
    p = torch.where(kept, logs[0].exp(), 0)
    q = torch.where(kept, logs[1].gather(1, same.int().argmax(-1)).exp(), 0)
    p, q = (torch.cat([one, (1 - one.sum(-1, keepdim=True)).clamp_min(0)], 1) for one in (p, q))
    shared = torch.minimum(p, q).sum(-1)
    kl = torch.where(p > 0, p * (p.clamp_min(1e-30).log() - q.clamp_min(1e-30).log()), 0).sum(-1).clamp_min(0)
    best = (ids[0][:, 0] == ids[1][:, 0]).double()
    overlap = kept.double().mean(-1)
    return torch.stack([best, overlap, kl, 1 - shared, shared]).numpy()


def _logs(rows: Rows) -> tuple[Tensor, Tensor]:
    """Ids and log-probabilities [n, k], best first."""
    values = rows.tensor("logits", "values").double()
    order = values.argsort(dim=-1, descending=True, stable=True)
    logs = values.gather(1, order) - torch.from_numpy(rows["logsumexp"].astype(np.float64))[:, None]
    return rows.tensor("logits", "ids").long().gather(1, order), logs

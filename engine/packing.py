"""Packed rows: one forward over the new rows of many requests, and who may see whom.

A cached row belongs to a request and is either committed (part of the request's text) or on trial (a node of a tree
that verification may reject). A new row sees its request's committed rows, its ancestors on trial, and itself. So
continuous batching, chunked prefill, chains and trees are one mechanism. A sliding window counts positions, never
places in the cache: a request's rows stand apart there, siblings of a tree behind each other.

Shapes: T new rows, S cached rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Bool", "Int", "PackedRows", "RowTable", "grouped", "pack_texts"]

Int = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
_NOBODY = -1


@dataclass(frozen=True, slots=True)
class PackedRows:
    """New rows [T]: token, owning request, position, and parent.

    A parent is the index of an earlier row of the same batch, or `-1` for the end of what the owner has committed, or
    `-2 - j` for the j-th row of the cache (a node on trial).
    """

    tokens: Int
    owners: Int
    positions: Int
    parents: Int

    def __len__(self) -> int:
        return len(self.tokens)


def pack_texts(texts: Mapping[int, Sequence[int]]) -> PackedRows:
    """The tokens of whole texts, one text behind another, each owned by its number and seen by itself alone."""
    lengths = [len(tokens) for tokens in texts.values()]
    total = sum(lengths)
    first = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
    positions = np.arange(total) - first
    return PackedRows(
        tokens=np.asarray([token for tokens in texts.values() for token in tokens], np.int64),
        owners=np.repeat(np.asarray(list(texts), np.int64), lengths),
        positions=positions,
        parents=np.where(positions == 0, _NOBODY, np.arange(total) - 1),
    )


def grouped(texts: Mapping[int, Sequence[int]], rows: int) -> Iterator[dict[int, Sequence[int]]]:
    """Texts, by number, in groups of at most so many rows, of one text at least: what a forward holds stays small."""
    group: dict[int, Sequence[int]] = {}
    held = 0
    for number, tokens in texts.items():
        if group and held + len(tokens) > rows:
            yield group
            group, held = {}, 0
        group[number] = tokens
        held += len(tokens)
    if group:
        yield group


class RowTable:
    """The owner, position and standing of every row in a key-value cache; the tensors themselves are the caller's."""

    def __init__(self) -> None:
        self.owners: Int = np.empty(0, np.int64)
        self.positions: Int = np.empty(0, np.int64)
        self.parents: Int = np.empty(0, np.int64)
        self.committed: Bool = np.empty(0, np.bool_)

    def __len__(self) -> int:
        return len(self.owners)

    def mask(self, rows: PackedRows) -> Bool:
        """Which of the cached rows and of the new ones each new row sees: [T, S + T]."""
        cached, new = len(self), len(rows)
        seen = np.zeros((new, cached + new), np.bool_)
        seen[:, :cached] = (rows.owners[:, None] == self.owners) & self.committed
        for row, parent in enumerate(rows.parents.tolist()):
            if parent >= 0:
                seen[row] |= seen[parent]
            while parent < -1:
                seen[row, -2 - parent] = True
                parent = int(self.parents[-2 - parent])
            seen[row, cached + row] = True
        return seen

    def within(self, rows: PackedRows, window: int) -> Bool:
        """Which of the cached rows and of the new ones stand fewer than `window` positions before each new row.

        [T, S + T], whoever owns them: what a layer with a sliding window sees is this and `mask`.
        """
        positions = np.concatenate((self.positions, rows.positions))
        return positions > rows.positions[:, None] - window

    def append(self, rows: PackedRows) -> Int:
        """Put the new rows behind the cached ones, on trial; returns where each stands."""
        first = len(self)
        inside = np.where(rows.parents >= 0, -2 - (rows.parents + first), rows.parents)
        self.owners = np.concatenate((self.owners, rows.owners))
        self.positions = np.concatenate((self.positions, rows.positions))
        self.parents = np.concatenate((self.parents, inside))
        self.committed = np.concatenate((self.committed, np.zeros(len(rows), np.bool_)))
        return np.arange(first, first + len(rows))

    def settle(self, accepted: Int) -> None:
        """Commit some rows on trial and give up all others."""
        self.committed[accepted] = True
        self.owners[~self.committed] = _NOBODY

    def release(self, requests: Sequence[int]) -> None:
        """Give up every row of finished requests."""
        gone = np.isin(self.owners, np.asarray(requests, np.int64))
        self.owners[gone] = _NOBODY
        self.committed[gone] = False

    def compact(self, *, slack: float = 0.25) -> Int | None:
        """Forget given-up rows once they are more than `slack` of all; returns the rows that stay, for index_select."""
        alive = self.owners != _NOBODY
        if len(self) == 0 or (~alive).mean() <= slack:
            return None
        kept: Int = alive.nonzero()[0]
        self.owners, self.positions, self.committed = self.owners[kept], self.positions[kept], self.committed[kept]
        self.parents = np.full(len(kept), -1)
        return kept

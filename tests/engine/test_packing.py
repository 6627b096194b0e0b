"""Who sees whom: a row sees its request's text, its ancestors on trial, itself, and nothing else, ever.

Through a sliding window it sees those of them that stand near enough, wherever the cache keeps them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrace.engine.packing import PackedRows, RowTable, grouped, pack_texts


@dataclass
class Row:
    """One row that exists somewhere, by what it stands for: its owner, its parent row, and what became of it."""

    owner: int
    parent: Row | None
    position: int
    state: str = "trial"


@dataclass
class World:
    """The plain truth beside the table: `cache` lists what each place of the cache holds."""

    table: RowTable = field(default_factory=RowTable)
    cache: list[Row] = field(default_factory=list)

    def sees(self, row: Row, other: Row) -> bool:
        """By definition."""
        if other is row:
            return True
        if other.state == "committed":
            return other.owner == row.owner
        above = row.parent
        while above is not None:
            if above is other:
                return other.state == "trial"
            above = above.parent
        return False

    def add(self, data: st.DataObject) -> None:
        """A batch: rows whose parents are the end of the text, rows on trial in the cache, or rows of the batch."""
        new: list[Row] = []
        owners, parents = [], []
        for _ in range(data.draw(st.integers(1, 6))):
            owner = data.draw(st.integers(0, 2))
            inside = [at for at, row in enumerate(new) if row.owner == owner]
            cached = [at for at, row in enumerate(self.cache) if row.owner == owner and row.state == "trial"]
            parent = data.draw(st.sampled_from([-1, *inside, *(-2 - at for at in cached)]))
            above = None if parent == -1 else new[parent] if parent >= 0 else self.cache[-2 - parent]
            new.append(Row(owner, above, data.draw(st.integers(0, 9))))
            owners.append(owner)
            parents.append(parent)
        positions = np.array([row.position for row in new])
        rows = PackedRows(np.zeros_like(positions), np.array(owners), positions, np.array(parents))
        window = data.draw(st.integers(1, 9))
        mask, near = self.table.mask(rows), self.table.within(rows, window)
        places = self.table.append(rows)
        assert mask.tolist() == [[self.sees(row, other) for other in [*self.cache, *new]] for row in new]
        assert near.tolist() == [
            [other.position > row.position - window for other in [*self.cache, *new]] for row in new
        ]
        assert places.tolist() == list(range(len(self.cache), len(self.cache) + len(new)))
        self.cache += new

    def settle(self, data: st.DataObject) -> None:
        """A path of one tree on trial, per owner, is accepted; all other rows on trial are given up."""
        accepted: list[int] = []
        for owner in range(3):
            trial = [at for at, row in enumerate(self.cache) if row.owner == owner and row.state == "trial"]
            chosen = data.draw(st.sampled_from([-1, *trial]))
            if chosen >= 0:
                at: Row | None = self.cache[chosen]
                while at is not None and at.state == "trial":
                    accepted.append(next(i for i, row in enumerate(self.cache) if row is at))
                    at = at.parent
        for place, row in enumerate(self.cache):
            if row.state == "trial":
                row.state = "committed" if place in accepted else "gone"
        self.table.settle(np.array(sorted(accepted), np.int64))

    def release(self, data: st.DataObject) -> None:
        owners = data.draw(st.lists(st.integers(0, 3), max_size=2))
        for row in self.cache:
            if row.owner in owners:
                row.state = "gone"
        self.table.release(owners)

    def compact(self, data: st.DataObject) -> None:
        """Only between steps, when nothing is on trial, as its callers do."""
        if any(row.state == "trial" for row in self.cache):
            return
        slack = data.draw(st.sampled_from([0.0, 0.25, 0.9]))
        kept = self.table.compact(slack=slack)
        gone = sum(row.state == "gone" for row in self.cache)
        assert (kept is None) == (not self.cache or gone <= slack * len(self.cache))
        if kept is not None:
            alive = [at for at, row in enumerate(self.cache) if row.state != "gone"]
            assert kept.tolist() == alive
            self.cache = [self.cache[at] for at in alive]
        assert len(self.table) == len(self.cache)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_the_mask_is_its_definition_after_any_history(data: st.DataObject) -> None:
    """Batches with trees and chains over three requests, settled, released and compacted in any order."""
    world = World()
    for _ in range(data.draw(st.integers(1, 10))):
        act = data.draw(st.sampled_from([World.add, World.add, World.settle, World.release, World.compact]))
        act(world, data)


def rows(owners: list[int], parents: list[int]) -> PackedRows:
    zeros = np.zeros(len(owners), np.int64)
    return PackedRows(zeros, np.array(owners), zeros, np.array(parents))


def test_a_window_counts_positions_and_not_places() -> None:
    """A prompt in a batch of its own, then two branches whose nodes alternate: of 3 positions each sees its own."""
    table = RowTable()
    count = np.arange(4)
    table.settle(table.append(PackedRows(count, np.zeros(4, int), count, count - 1)))
    tree = PackedRows(np.zeros(6, int), np.zeros(6, int), np.repeat([4, 5, 6], 2), np.array([-1, -1, 0, 1, 2, 3]))
    seen = table.mask(tree) & table.within(tree, 3)
    assert [row.nonzero()[0].tolist() for row in seen] == [
        [2, 3, 4],
        [2, 3, 5],
        [3, 4, 6],
        [3, 5, 7],
        [4, 6, 8],
        [5, 7, 9],
    ]


def test_a_prompt_in_one_batch_is_causal() -> None:
    mask = RowTable().mask(rows([0] * 4, [-1, 0, 1, 2]))
    assert np.array_equal(mask, np.tril(np.ones((4, 4), bool)))


def test_whole_texts_in_one_batch_are_causal_each_by_itself() -> None:
    rows = pack_texts({4: (7, 8, 9), 2: (5,), 3: (6, 6)})
    assert rows.tokens.tolist() == [7, 8, 9, 5, 6, 6] and rows.owners.tolist() == [4, 4, 4, 2, 3, 3]
    assert rows.positions.tolist() == [0, 1, 2, 0, 0, 1]
    same = rows.owners[:, None] == rows.owners
    assert (RowTable().mask(rows) == (same & (rows.positions[:, None] >= rows.positions))).all()


def test_groups_hold_so_many_rows_and_a_longer_text_is_one_by_itself() -> None:
    texts = {number: (0,) * length for number, length in enumerate((2, 3, 9, 1, 4, 1))}
    assert [list(group) for group in grouped(texts, 5)] == [[0, 1], [2], [3, 4], [5]]
    assert list(grouped({}, 5)) == []


def test_siblings_do_not_see_each_other_and_the_next_batch_sees_only_the_accepted() -> None:
    table = RowTable()
    table.settle(table.append(rows([0, 0, 1], [-1, 0, -1])))
    tree = rows([0, 0, 0, 0], [-1, 0, 0, 2])
    assert table.mask(tree)[:, 3:].tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [True, False, True, False],
        [True, False, True, True],
    ]
    assert table.mask(tree)[:, :3].tolist() == [[True, True, False]] * 4
    places = table.append(tree)
    table.settle(places[[0, 2]])
    assert table.mask(rows([0], [-1]))[0].tolist() == [True, True, False, True, False, True, False, True]


@pytest.mark.parametrize("gone", [0, 1, 2, 3, 4])
def test_rows_are_forgotten_once_a_quarter_of_them_is_given_up(gone: int) -> None:
    table = RowTable()
    table.settle(table.append(rows([0] * (8 - gone) + [1] * gone, [-1] * 8)))
    table.release([1])
    kept = table.compact()
    assert (kept is None) == (gone <= 2)
    assert len(table) == (8 if gone <= 2 else 8 - gone)

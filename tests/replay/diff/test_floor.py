"""A floor is what benign repeats differ by; one of nothing or of zero is refused, and the table stands in elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spectrace.replay.diff.floor import MEASURED, TABLE, Noise, Table, measured
from spectrace.replay.diff.measure import Distance, Measure
from spectrace.replay.diff.sites import Site
from spectrace.tracer.errors import UserError

SLOT = Site("emitted", "slot", slot=0)


def distance(*errors: float) -> Distance:
    measure = Measure(np.zeros(len(errors), np.bool_))
    a = torch.ones(len(errors), 1)
    measure.add(np.arange(len(errors)), a, a + torch.tensor(errors)[:, None])
    return measure.distance()


TABLE_OF = {dtype: Table(dtype, ((3, 30, 120), ())) for dtype in (torch.float32, torch.bfloat16)}


def test_the_floor_is_the_largest_of_all_repeats() -> None:
    repeats = [{SLOT: distance(1e-5, 2e-5)}, {SLOT: distance(4e-5, 1e-5)}]
    noise = measured(repeats, ("x", "y"), TABLE_OF[torch.float32]).of(SLOT)
    assert noise
    assert noise.largest == pytest.approx(4e-5, rel=0.1)
    assert noise.factor == MEASURED
    assert noise.above(distance(4e-5, 1e-5)) == pytest.approx(1, rel=0.3)


def test_a_shift_of_all_rows_is_above_the_floor_though_none_is_the_largest() -> None:
    noise = Noise(largest=1e-2, median=1e-5, factor=3)
    assert noise.above(distance(*[1e-3] * 9)) == pytest.approx(100, rel=0.05)
    assert noise.limits == (pytest.approx(3e-2), pytest.approx(3e-5))


def test_a_floor_of_zero_and_one_of_nothing_are_refused() -> None:
    table = TABLE_OF[torch.float32]
    with pytest.raises(UserError, match="bit-equal"):
        measured([{SLOT: distance(0.0, 0.0)}], ("x",), table)
    with pytest.raises(UserError, match="nothing could be compared"):
        measured([{}], ("x",), table)
    with pytest.raises(UserError, match="nothing could be compared"):
        measured([{Site("drafted", "answer"): distance(1.0)}], ("x",), table)


def test_what_was_fed_something_else_or_is_far_off_is_no_repeat() -> None:
    for site, error in ((SLOT, 1.0), (Site("received", "token"), 1.0)):
        with pytest.raises(UserError, match="no benign repeat"):
            measured([{site: distance(error)}], ("x",), TABLE_OF[torch.float32])


def test_a_site_that_a_repeat_leaves_alone_has_the_tables_floor_and_the_factor_of_repeats() -> None:
    table, other = TABLE_OF[torch.float32], Site("emitted", "slot", slot=1)
    floor = measured([{SLOT: distance(0.0), other: distance(2e-5)}], ("x",), table)
    left_alone, moved, tabled = floor.of(SLOT), floor.of(other), table.of(SLOT)
    assert left_alone and moved and tabled
    assert (left_alone.largest, left_alone.factor) == (tabled.largest, MEASURED)
    assert moved.largest == pytest.approx(2e-5, rel=0.01)


def test_a_site_that_no_repeat_has_gets_the_tables_floor() -> None:
    table, other = TABLE_OF[torch.float32], Site("emitted", "slot", slot=1)
    assert measured([{SLOT: distance(1e-6)}], ("x",), table).of(other) == table.of(other)


def test_the_table_grows_with_coarser_numbers_and_beyond_its_own_depth() -> None:
    sites = [Site("emitted", "slot", slot=slot) for slot in range(3)]
    fine, coarse = ([table.of(site) for site in sites] for table in TABLE_OF.values())
    assert all(one and other and one.largest < other.largest for one, other in zip(fine, coarse, strict=True))
    assert fine[1] and fine[2]
    assert fine[2].largest == pytest.approx(2 * fine[1].largest)
    assert fine[1].factor == TABLE
    assert TABLE_OF[torch.float32].of(Site("received", "token")) is None

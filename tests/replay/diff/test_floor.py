"""A floor is what benign repeats differ by; one of nothing or of zero is refused, and the table stands in elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spectrace.replay.diff.floor import MEASURED, TABLE, Noise, measured, tabled
from spectrace.replay.diff.measure import Distance, Measure
from spectrace.replay.diff.sites import Site
from spectrace.tracer.errors import UserError

SLOT = Site("emitted", "slot", slot=0)


def distance(*errors: float) -> Distance:
    measure = Measure(np.zeros(len(errors), np.bool_))
    a = torch.ones(len(errors), 1, dtype=torch.float64)
    measure.add(np.arange(len(errors)), a, a + torch.tensor(errors, dtype=torch.float64)[:, None])
    return measure.distance()


def test_the_floor_is_the_largest_of_all_repeats() -> None:
    floor = measured([{SLOT: distance(1e-3, 2e-3)}, {SLOT: distance(4e-3, 1e-3)}], ("x", "y"), torch.float32)
    noise = floor.of(SLOT)
    assert noise
    assert noise.largest == pytest.approx(4e-3, rel=1e-4)
    assert noise.factor == MEASURED
    assert noise.above(distance(4e-3, 2e-3)) == pytest.approx(1, rel=0.3)


def test_a_shift_of_all_rows_is_above_the_floor_though_none_is_the_largest() -> None:
    noise = Noise(largest=1e-2, median=1e-5, factor=3)
    found = distance(*[1e-3] * 9)
    assert noise.above(found) == pytest.approx(100, rel=1e-2)
    assert noise.row_limit(found) == pytest.approx(3e-5)
    assert noise.row_limit(distance(1.0)) == pytest.approx(3e-2)


def test_a_floor_of_zero_and_one_of_nothing_are_refused() -> None:
    with pytest.raises(UserError, match="bit-equal"):
        measured([{SLOT: distance(0.0, 0.0)}], ("x",), torch.float32)
    with pytest.raises(UserError, match="nothing could be compared"):
        measured([{}], ("x",), torch.float32)
    with pytest.raises(UserError, match="nothing could be compared"):
        measured([{Site("received", "token"): distance(1.0)}], ("x",), torch.float32)


def test_a_site_that_no_repeat_moves_has_one_unit_in_the_last_place() -> None:
    other = Site("emitted", "slot", slot=1)
    floor = measured([{SLOT: distance(0.0), other: distance(1e-3)}], ("x",), torch.bfloat16)
    noise = floor.of(SLOT)
    assert noise
    assert noise.largest == torch.finfo(torch.bfloat16).eps


def test_the_table_grows_with_coarser_numbers_and_beyond_its_own_depth() -> None:
    sites = [Site("emitted", "slot", slot=slot) for slot in range(3)]
    held = dict(zip(sites, (3, 30, 120), strict=True))
    fine, coarse = tabled(sites, torch.float32, held), tabled(sites, torch.bfloat16, held)
    levels = [[noise.largest for one in sites if (noise := floor.of(one))] for floor in (fine, coarse)]
    assert levels[0][2] == pytest.approx(2 * levels[0][1])
    assert all(one < other for one, other in zip(*levels, strict=True))
    assert {noise.factor for noise in fine.sites.values()} == {TABLE}
    assert tabled([Site("received", "token")], torch.float32, {}).of(Site("received", "token")) is None

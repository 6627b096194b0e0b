"""Errors, units in the last place and shares are what they say, for every type, and a NaN is no equality."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spectrace.replay.diff.measure import ULP_BINS, Distance, Measure

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def measured(a: torch.Tensor, b: torch.Tensor, equal: list[bool] | None = None) -> Measure:
    known = np.array(equal if equal is not None else [False] * len(a))
    measure = Measure(known)
    which = np.flatnonzero(~known)
    measure.add(which, a[torch.from_numpy(which)], b[torch.from_numpy(which)])
    return measure


def test_an_error_is_the_largest_difference_over_the_rows_largest_value() -> None:
    a = torch.tensor([[1.0, -4.0], [2.0, 0.0], [0.0, 0.0]])
    b = torch.tensor([[1.0, -5.0], [2.0, 1.0], [0.0, 0.0]])
    measure = measured(a, b)
    found = measure.distance()
    assert measure.errors.tolist() == [0.25, 0.5, 0.0]
    assert (found.max_error, found.mean_error, found.equal) == (0.5, 0.25, 1)
    assert found.median_error == pytest.approx(0.25, rel=0.05)
    assert found.relative_l2 == pytest.approx((2 / 21) ** 0.5)


def test_rows_whose_hashes_agree_count_as_equal_and_unread_ones_as_nothing() -> None:
    measure = Measure(np.array([True, False, False]))
    measure.add(np.array([1]), torch.ones(1, 2), torch.ones(1, 2) * 2)
    found = measure.distance()
    assert (found.rows, found.equal, found.unread, found.max_error) == (3, 1, 1, 1.0)
    assert not found.bit_equal


def test_what_is_not_finite_is_as_far_as_can_be() -> None:
    found = measured(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, float("nan")]])).distance()
    assert found.max_error == float("inf")


@pytest.mark.parametrize("dtype", DTYPES)
@given(steps=st.integers(0, 300), start=st.floats(-60000, 60000, allow_nan=False, width=16))
def test_neighbours_are_one_unit_apart_across_zero_and_everywhere(dtype: torch.dtype, steps: int, start: float) -> None:
    one = torch.tensor([[start]], dtype=dtype)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    apart = one.view(bits) + (-steps if start < 0 else steps)
    other = apart.view(dtype)
    if not bool(other.isfinite().all()) or (start < 0) != bool((other < 0).all()) or start == 0:
        return
    found = measured(one, other).distance()
    if steps == 0:
        assert found.max_error == 0
        return
    edge = next((f"<={edge}" for edge in ULP_BINS if edge >= steps), f">{ULP_BINS[-1]}")
    assert found.ulps
    assert found.ulps[edge] == 1


def test_zero_is_zero_units_from_minus_zero_and_the_smallest_numbers_two_apart() -> None:
    tiny = torch.tensor([[1]], dtype=torch.int32).view(torch.float32)
    assert measured(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, -0.0]])).distance().equal == 1
    found = measured(torch.cat([tiny, torch.ones(1, 1)], 1), torch.cat([-tiny, torch.ones(1, 1)], 1)).distance()
    assert found.ulps
    assert found.ulps["<=2"] == 0.5


def test_types_that_differ_have_no_units_in_common() -> None:
    a = torch.tensor([[1.0, 1.2]])
    found = measured(a, a.bfloat16()).distance()
    assert found.ulps is None
    assert 0 < (found.max_error or 0) < 4e-3


def test_chunks_add_up_to_the_whole() -> None:
    torch.manual_seed(0)
    a = torch.randn(40, 8)
    b = a + 1e-3 * torch.randn(40, 8)
    b[3:9] = a[3:9]
    whole, parts = measured(a, b), Measure(np.zeros(40, np.bool_))
    for which in np.array_split(np.arange(40), 7):
        parts.add(which, a[which], b[which])
    assert parts.errors.tolist() == whole.errors.tolist()
    alike(parts.distance(), whole.distance())
    blocks = [measured(a[at], b[at]).distance() for at in np.array_split(np.arange(40), 3)]
    alike(blocks[0] + blocks[1] + blocks[2], whole.distance())


@given(errors=st.lists(st.floats(0, 1e6, width=32), min_size=1, max_size=60))
def test_the_median_is_the_lower_one_to_within_four_percent(errors: list[float]) -> None:
    a = torch.ones(len(errors), 1)
    measure = Measure(np.zeros(len(errors), np.bool_))
    measure.add(np.arange(len(errors)), a, a + torch.tensor(errors)[:, None])
    found = measure.distance()
    middle = float(np.sort(measure.errors)[(len(errors) - 1) // 2])
    assert found.median_error == pytest.approx(middle, rel=0.05, abs=1e-12)
    assert found.max_error == float(measure.errors.max())


def alike(found: Distance, whole: Distance) -> None:
    assert (found.rows, found.equal, found.max_error) == (whole.rows, whole.equal, whole.max_error)
    assert found.counts.tolist() == whole.counts.tolist()
    assert found.relative_l2 == pytest.approx(whole.relative_l2)
    assert found.ulps == pytest.approx(whole.ulps)
    assert found.cosine == pytest.approx(whole.cosine)

"""Intervals cover what they should, are paired, and are the same at every call."""

from math import comb

import numpy as np
import pytest

from spectrace.replay.statistics import chance_of, paired_interval, ratio_interval


def test_a_difference_within_every_request_is_sure_however_much_requests_differ() -> None:
    base = [np.full(40, level) for level in (0.0, 5.0, 1.0, 9.0)]
    low, high = paired_interval([one + 0.25 for one in base], base)
    assert low == pytest.approx(0.25) == high


def test_no_difference_is_not_sure() -> None:
    random = np.random.default_rng(3)
    one, other = ([random.normal(size=30) for _ in range(12)] for _ in range(2))
    low, high = paired_interval(one, other)
    assert low < 0 < high


def test_requests_are_drawn_whole() -> None:
    """Rows of one request say the same thing many times: they are one observation, not many."""
    above = np.array([100.0, 0.0, 100.0, 0.0])
    low, high = ratio_interval(above, np.full(4, 100.0))
    assert low < 0.2 and high > 0.8


def test_few_values_are_never_sure() -> None:
    """One request agrees with itself however often it is drawn."""
    assert all(np.isnan(paired_interval([np.ones(60)], [np.zeros(60)])))


def test_nothing_has_no_interval() -> None:
    assert all(np.isnan(ratio_interval(np.empty(0), np.empty(0))))
    assert all(np.isnan(ratio_interval(np.zeros(2), np.zeros(2))))


def test_the_same_data_give_the_same_interval() -> None:
    above, below = np.arange(9.0), np.full(9, 10.0)
    assert ratio_interval(above, below) == ratio_interval(above, below)


@pytest.mark.parametrize("requests", [6, 8, 12, 24])
def test_of_nothing_a_99_percent_interval_is_seldom_sure(requests: int) -> None:
    random = np.random.default_rng(requests)
    sure = 0
    for _ in range(1500):
        low, _ = ratio_interval(random.standard_normal(requests), np.ones(requests), sure=0.99)
        sure += low > 0
    assert sure / 1500 < 0.015


@pytest.mark.parametrize(("of", "each"), [(1, 0.5), (12, 0.5), (40, 0.02), (60, 0.93)])
def test_chances_are_those_of_independent_things(of: int, each: float) -> None:
    ways = [comb(of, k) * each**k * (1 - each) ** (of - k) for k in range(of + 1)]
    assert [chance_of(k, of, each=each) for k in range(of + 2)] == pytest.approx([sum(ways[k:]) for k in range(of + 2)])


def test_chances_of_thousands_are_finite() -> None:
    assert chance_of(3000, 6000, each=0.5) == pytest.approx(0.5, abs=0.01)
    assert chance_of(6000, 6000, each=0.02) == 0 < chance_of(200, 6000, each=0.02) < 1e-8

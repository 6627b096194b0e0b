"""How sure a difference is: paired bootstrap over requests, since rows of one request are not independent.

Where requests are few, over stretches of them: neighbours hang together, places far apart little.
"""

from collections.abc import Sequence
from math import exp, fsum, lgamma, log
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

__all__ = ["Interval", "chance_of", "paired_interval", "ratio_interval"]

Float = npt.NDArray[np.float64]
Interval = tuple[float, float]
_DRAWS = 1000
_FEW_REQUESTS, _STRETCH, _FEWEST = 8, 16, 6
_SEED = 0


def paired_interval(one: Sequence[Float], other: Sequence[Float], *, sure: float = 0.99) -> Interval:
    """The interval of mean(one) - mean(other), both given request by request, value by value; NaN of too few values."""
    differences = [a - b for a, b in zip(one, other, strict=True) if len(a)]
    if len(differences) < _FEW_REQUESTS:
        stretches = [max(round(len(each) / _STRETCH), 1) for each in differences]
        differences = [part for each in zip(differences, stretches, strict=True) for part in np.array_split(*each)]
    if len(differences) < _FEWEST:
        return float("nan"), float("nan")
    sums = np.array([each.sum() for each in differences])
    return ratio_interval(sums, np.array([len(each) for each in differences], np.float64), sure=sure)


def ratio_interval(above: Float, below: Float, *, sure: float = 0.95) -> Interval:
    """The interval of sum(above) / sum(below) over requests."""
    if not len(above) or not below.sum():
        return float("nan"), float("nan")
    random = np.random.Generator(np.random.Philox(_SEED))
    drawn = random.integers(0, len(above), (_DRAWS, len(above)))
    sums, totals = above[drawn].sum(1), below[drawn].sum(1)
    ratios = sums[totals > 0] / totals[totals > 0]
    low, high = np.percentile(ratios, [50 * (1 - sure), 50 * (1 + sure)])
    middle, wider = float(above.sum() / below.sum()), _wider(len(above), sure)
    return middle - wider * (middle - float(low)), middle + wider * (float(high) - middle)


def chance_of(as_many: int, of: int, *, each: float) -> float:
    """The chance that so many or more of some independent things happen, when each happens with a chance of its own."""

    def exactly(k: int) -> float:
        ways = lgamma(of + 1) - lgamma(k + 1) - lgamma(of - k + 1)
        return exp(ways + k * log(each) + (of - k) * log(1 - each))

    return min(fsum(exactly(k) for k in range(as_many, of + 1)), 1.0)


def _wider(requests: int, sure: float) -> float:
    """By how much few requests make an interval too narrow: Student's quantile over the normal one, and Bessel's n - 1.

    The quantile is the expansion of Abramowitz and Stegun, 26.7.5.
    """
    if requests < 2:
        return 1.0
    z, free = NormalDist().inv_cdf((1 + sure) / 2), requests - 1
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    t = z + sum(term / free**power for power, term in enumerate(terms, 1))
    return float(t / z * np.sqrt(requests / free))

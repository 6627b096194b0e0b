"""What rounding does at a site: measured on benign repeats of a run, or else calibrated, by precision and depth.

A difference matters if it is far above what the same computation gives in another batch, in other chunks or on other
threads. Errors are max|Δ| ÷ max|a| of a row.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Final

import torch

from spectrace.replay.diff.measure import Distance
from spectrace.replay.diff.sites import Site
from spectrace.tracer.errors import UserError

__all__ = ["MEASURED", "TABLE", "Floor", "Noise", "measured", "tabled"]

MEASURED: Final = 3.0
"""How far above a measured floor a difference has to be: benign repeats are a sample, and the next may be larger."""
TABLE: Final = 10.0
"""The same for the table, which was calibrated on one model."""


@dataclass(frozen=True, slots=True)
class Noise:
    """The largest and the median error of a row at a site, and above which multiple of them a difference matters."""

    largest: float
    median: float
    factor: float

    def above(self, distance: Distance) -> float:
        """How many times the floor a difference is, by its largest row or by its median one."""
        largest = (distance.max_error or 0.0) / self.largest
        median = (distance.median_error or 0.0) / self.median if self.median else 0.0
        return max(largest, median)

    def row_limit(self, distance: Distance) -> float:
        """The error from which on a row counts as different, of a site that does."""
        limit = self.factor * self.largest
        return limit if (distance.max_error or 0.0) > limit else self.factor * self.median


@dataclass(frozen=True)
class Floor:
    """The noise of every site that has one; `origin` says where from."""

    origin: str
    sites: Mapping[Site, Noise]

    def of(self, site: Site) -> Noise | None:
        return self.sites.get(site)


def measured(repeats: Iterable[Mapping[Site, Distance]], names: Iterable[str], dtype: torch.dtype) -> Floor:
    """The floor by benign repeats of a run, each compared with it.

    Raises UserError when nothing was compared or not one bit differs: then the repeats show nothing of what rounds.
    """
    seen: dict[Site, list[Distance]] = {}
    for repeat in repeats:
        for site, distance in repeat.items():
            seen.setdefault(site, []).append(distance)
    listed = ", ".join(names)
    known = {
        site: [one for one in found if one.max_error is not None] for site, found in seen.items() if not site.exact
    }
    if not any(known.values()):
        raise UserError(f"--benign {listed}: nothing could be compared with A, so it gives no floor; record it like A")
    least = torch.finfo(dtype).eps
    floors = {
        site: (max(one.max_error or 0.0 for one in found), max(one.median_error or 0.0 for one in found))
        for site, found in known.items()
        if found
    }
    if not any(largest for largest, _ in floors.values()):
        raise UserError(
            f"--benign {listed}: every row is bit-equal to A's, a floor of zero; give a run with another batch size, "
            "chunk or number of threads, or leave --benign out for the table"
        )
    noise = {site: Noise(max(largest, least), median, MEASURED) for site, (largest, median) in floors.items()}
    return Floor(f"benign repeats: {listed}", noise)


def tabled(sites: Iterable[Site], dtype: torch.dtype, held: Mapping[Site, int]) -> Floor:
    """The calibrated floor of sites, for the coarser precision of two runs; `held` is the boundary that a site is."""
    name = str(dtype).removeprefix("torch.")
    table = _table()["floors"].get(name) or _table()["floors"]["bfloat16"]
    found = {}
    for site in sites:
        if not site.exact:
            largest, median = _row(table, site, held.get(site))
            found[site] = Noise(max(largest, torch.finfo(dtype).eps), median, TABLE)
    return Floor(f"the table for {name}, calibrated on {_table()['model']}", found)


def _row(table: Mapping[str, Any], site: Site, boundary: int | None) -> tuple[float, float]:
    """The nearest entry that is not shallower; beyond the deepest one, rounding grows with the root of the depth."""
    if site.what in ("boundary", "slot"):
        entries = {int(at): row for at, row in table["boundary"].items()}
        deepest = max(entries)
        at = deepest if boundary is None else boundary
        largest, median = entries[min((one for one in entries if one >= at), default=deepest)]
        growth = max(at / deepest, 1.0) ** 0.5
        return largest * growth, median * growth
    kind = "target logits" if site.family == "emitted" else "draft logits" if "log" in site.what else "draft"
    largest, median = table[kind]
    return largest, median


@cache
def _table() -> dict[str, Any]:
    """The shipped calibration; `bench/noise_floor.py` writes it."""
    read: dict[str, Any] = json.loads(resources.files(__package__).joinpath("floors.json").read_text("utf-8"))
    return read

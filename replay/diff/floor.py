"""What rounding does at a site: measured on benign repeats of a run, or else calibrated, by precision and depth.

A difference matters if it is far above what the same computation gives in another batch, in other chunks or on other
threads. Errors are max|Δ| ÷ max|a| of a row.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Final, Protocol

import torch

from spectrace.replay.diff.measure import Distance
from spectrace.replay.diff.sites import Site
from spectrace.tracer.errors import UserError

__all__ = ["MEASURED", "TABLE", "Floor", "Measured", "Noise", "Table", "measured"]

MEASURED: Final = 3.0
"""How far above a measured floor a difference has to be: benign repeats are a sample, and the next may be larger."""
TABLE: Final = 10.0
"""The same for the table, which was calibrated on one model."""
_BENIGN: Final = 100.0
"""How many times the table's floor a benign repeat may be apart from A."""


@dataclass(frozen=True, slots=True)
class Noise:
    """The largest and the median error of a row at a site, and above which multiple of them a difference matters."""

    largest: float
    median: float
    factor: float

    def above(self, distance: Distance) -> float:
        """How many times the floor a difference is, by its largest row or by its median one."""
        return max((distance.max_error or 0.0) / self.largest, self.shift(distance))

    def shift(self, distance: Distance) -> float:
        """The same by its median row alone: what has moved all rows."""
        return (distance.median_error or 0.0) / self.median if self.median else 0.0

    @property
    def limits(self) -> tuple[float, float]:
        """The errors from which on a row is beyond the floor: the largest's, and the median's, which is stricter."""
        return self.factor * self.largest, self.factor * self.median


class Floor(Protocol):
    """The noise of every site that has one; `origin` says where from."""

    @property
    def origin(self) -> str: ...

    def of(self, site: Site) -> Noise | None: ...


@dataclass(frozen=True, slots=True)
class Table:
    """The calibrated floor for the coarser precision of two runs; `held` are the boundaries of the slots of each."""

    dtype: torch.dtype
    held: tuple[tuple[int, ...], tuple[int, ...]]

    @property
    def origin(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"the table for {name}, calibrated on {_table()['model']}"

    def of(self, site: Site) -> Noise | None:
        """What the table says of it, at least a unit in the last place; None for what is never rounded."""
        if site.exact:
            return None
        floors = _table()["floors"]
        table = floors.get(str(self.dtype).removeprefix("torch.")) or floors["bfloat16"]
        largest, median = _row(table, site, self._boundary(site))
        return Noise(max(largest, torch.finfo(self.dtype).eps), median, TABLE)

    def _boundary(self, site: Site) -> int | None:
        if site.what == "boundary" or site.slot is None:
            return site.slot
        a, b = self.held
        held = b if site.family.startswith("reference/") else a or b
        return held[site.slot] if site.slot < len(held) else None


@dataclass(frozen=True, slots=True)
class Measured:
    """The floor by benign repeats, and the table for sites that they lack."""

    origin: str
    sites: Mapping[Site, Noise]
    table: Table

    def of(self, site: Site) -> Noise | None:
        return self.sites.get(site) or self.table.of(site)


def measured(repeats: Sequence[Mapping[Site, Distance]], names: Sequence[str], table: Table) -> Measured:
    """The floor by benign repeats of a run, each compared with it: the largest of all.

    Raises UserError when nothing was compared or not one bit differs: then the repeats show nothing of what rounds; and
    where one was fed something else, or is far beyond what rounding does.
    """
    for name, repeat in zip(names, repeats, strict=True):
        _check_benign(name, repeat, table)
    seen: dict[Site, list[Distance]] = {}
    for repeat in repeats:
        for site, distance in repeat.items():
            if not site.exact and distance.max_error is not None:
                seen.setdefault(site, []).append(distance)
    listed = ", ".join(names)
    if not seen:
        raise UserError(f"--benign {listed}: nothing could be compared with A, so it gives no floor; record it like A")
    floors = {
        site: (max(one.max_error or 0.0 for one in found), max(one.median_error or 0.0 for one in found))
        for site, found in seen.items()
    }
    if not any(largest for largest, _ in floors.values()):
        raise UserError(
            f"--benign {listed}: every row is bit-equal to A's, a floor of zero; give a run with another batch size, "
            "chunk or number of threads, or leave --benign out for the table"
        )
    noise = {site: _at_least(table.of(site), largest, median) for site, (largest, median) in floors.items()}
    return Measured(f"benign repeats: {listed}", noise, table)


def _at_least(tabled: Noise | None, largest: float, median: float) -> Noise:
    """What repeats show, but no less than the table: what they leave alone by chance the next one may not."""
    known = (tabled.largest, tabled.median) if tabled else (0.0, 0.0)
    return Noise(max(largest, known[0]), max(median, known[1]), MEASURED)


def _check_benign(name: str, repeat: Mapping[Site, Distance], table: Table) -> None:
    for site, distance in repeat.items():
        noise = table.of(site)
        above = noise.above(distance) if noise else 0.0
        fed = site.exact and site.family == "received" and not distance.bit_equal
        if fed or above > _BENIGN:
            how = f"{above:.0f} times what rounding does" if above else f"in {distance.rows - distance.equal} rows"
            raise UserError(
                f"--benign {name}: it differs from A at {site}, {how}, so it is no benign repeat; give a run of A's "
                "configuration in another batch, in other chunks or on other threads"
            )


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

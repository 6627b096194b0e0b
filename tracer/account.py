"""What became of every row: expected = recorded + sampled away + dropped + failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Final

from spectrace.tracer.ledger import Reason

__all__ = ["Account", "FamilyAccount"]

_COUNTED: Final = {Reason.SAMPLED: "sampled_away", Reason.DROPPED: "dropped", Reason.FAILED: "failed"}


@dataclass(frozen=True, slots=True)
class FamilyAccount:
    """Rows of one family; `torn` counts segments whose tail was never acknowledged (how many rows is unknown)."""

    recorded: int = 0
    sampled_away: int = 0
    dropped: int = 0
    failed: int = 0
    torn: int = 0

    @property
    def expected(self) -> int:
        return self.recorded + self.sampled_away + self.dropped + self.failed

    @property
    def lost(self) -> int:
        """Rows that should be here and are not."""
        return self.dropped + self.failed

    def plus(self, *, recorded: int = 0, torn: int = 0) -> FamilyAccount:
        return replace(self, recorded=self.recorded + recorded, torn=self.torn + torn)

    def minus(self, reason: Reason, rows: int) -> FamilyAccount:
        """With rows that are missing for a reason."""
        name = _COUNTED[reason]
        return replace(self, **{name: getattr(self, name) + rows})

    def to_json(self) -> dict[str, int]:
        return {"expected": self.expected, **asdict(self)}


@dataclass(frozen=True, slots=True)
class Account:
    """One `FamilyAccount` per family, by name."""

    families: Mapping[str, FamilyAccount]

    @property
    def lost(self) -> int:
        return sum(family.lost for family in self.families.values())

    def __getitem__(self, family: str) -> FamilyAccount:
        return self.families[family]

    def to_json(self) -> dict[str, dict[str, int]]:
        return {name: family.to_json() for name, family in self.families.items()}

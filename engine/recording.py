"""Where one call of the deployment records to: what every process needs to open its own writer."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spectrace.engine.parallel import Group
from spectrace.tracer.recorder import Recorder
from spectrace.tracer.rows import Level

__all__ = ["Recording", "shut"]


@dataclass(frozen=True, slots=True)
class Recording:
    """A trace's folder and level, and what each role says about itself: `expects` are the families it promises."""

    folder: Path
    level: Level
    facts: Mapping[str, Mapping[str, Any]]

    def open(self, role: str, group: Group | None = None, **facts: Any) -> Recorder:
        """A recorder for this process, one rank of a group or alone; `facts` are what only this process knows."""
        rank, known = group.rank if group else 0, self.facts.get(role, {})
        return Recorder(self.folder, role=role, rank=rank, level=self.level, facts={**known, **facts})


def shut(recorder: Recorder | None) -> str | None:
    """Close a recorder; returns what was lost and why, or None when the record is whole."""
    if recorder is None:
        return None
    account = recorder.close()
    lost = {name: counts.dropped + counts.failed for name, counts in account.families.items()}
    if recorder.failure or any(lost.values()):
        rows = ", ".join(f"{count} {name}" for name, count in lost.items() if count)
        return f"{recorder.name}: rows lost: {rows or 'none'}; {recorder.failure or 'the queue was full'}"
    return None

"""The page out of what was found: every number on it is from there."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["render"]

_EXACT = 1e-6
_HEAD = """# Faulty drafts that vLLM serves

Drafts, each broken in one place, served by unmodified vLLM through `spectrace record`, and diagnosed from the trace.

```
python bench/faulty_drafts/run.py
```

*Served* and *sound* are vLLM's own counters: the mean acceptance length of the faulty draft, and of the sound one on
the same prompts. *Foretold* is the acceptance length over whole rounds that the diagnosis promises of its first repair,
*real* that of the sound draft. *Right*: the first cause is the link that was broken, and the edit repairs it. A command
was done to a copy of the faulty folder, and that served: vLLM then accepts what it accepts of the sound draft. Words
have to say the tensor or the field, and the folder that has the fault in it.
"""
_SAID = "The engine was given a copy with the fault in it; `--draft` named the folder that the team believes it serves."
_OWN = "The same traces, with `--draft` the faulty folder: its team exported it so, and has no other."

Found = Mapping[str, Any]


def render(found: Sequence[Found]) -> str:
    """The page."""
    silent = [one for one in found if not one["failure"]]
    loud = [one for one in found if one["failure"]]
    copies, folders = (_table(_COLUMNS, (_row(one, name) for one in silent if name in one)) for name in ("said", "own"))
    parts = [
        _HEAD,
        _table(("", ""), _totals(found, silent)),
        f"## A copy that is broken\n\n{_SAID}\n\n{copies}",
        f"## A folder that is broken\n\n{_OWN}\n\n{folders}",
        f"## What is to be edited\n\n{_table(('fault', 'pair', 'evidence', 'edit'), map(_edit, silent))}",
        f"## Not served\n\n{_table(('fault', 'pair', 'vLLM says'), map(_loud, loud))}",
    ]
    return "\n".join(f"{part}\n" for part in parts)


def _totals(found: Sequence[Found], silent: Sequence[Found]) -> Iterable[Sequence[str]]:
    yield "drafts served", f"{len(silent)} of {len(found)}"
    yield "of these without a warning", str(sum(not one["warnings"] for one in silent))
    yield "of these with the sound draft's text", str(sum(one["same_text"] for one in silent))
    for name, title in (("said", "a broken copy: right"), ("own", "a broken folder: right")):
        said = [one[name] for one in silent if name in one]
        yield title, f"{sum(one['right'] for one in said)} of {len(said)}"
    told = [one for one in silent if "said" in one and one["said"]["foretold"] is not None]
    exact = sum(abs(one["said"]["foretold"] - one["sound_whole"]) <= _EXACT for one in told)
    yield "acceptance of the sound draft foretold exactly", f"{exact} of {len(told)}"


_COLUMNS = ("fault", "pair", "served", "sound", "verdict", "first cause", "foretold", "real", "right")


def _row(one: Found, name: str) -> Sequence[str]:
    said = one.get(name) or {}
    cause = f"{said['fault']} {said['variant']}: {said['title']}" if said.get("fault") else said.get("title", "-")
    before, after = (one["served"], one["sound"]), (said.get("foretold"), one["sound_whole"])
    numbers = [*map(_number, before), said.get("verdict", "-"), cause, *map(_number, after)]
    return one["kind"], one["pair"], *numbers, _right(said)


def _right(said: Found) -> str:
    if not said:
        return "-"
    if said["named"] and said["edit"] is None:
        return "yes, its edit not served"
    return "yes" if said["right"] else "**no**, the edit" if said["named"] else "**no**"


def _edit(one: Found) -> Sequence[str]:
    said = one.get("said") or {}
    return one["kind"], one["pair"], " ".join(said.get("evidence", ())[:1]), said.get("fix", "-")


def _loud(one: Found) -> Sequence[str]:
    return one["kind"], one["pair"], one["failure"]


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    body = [f"| {' | '.join(cell.replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in row)} |" for row in rows]
    return "\n".join((f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}", *body)) if body else "Nothing."


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"

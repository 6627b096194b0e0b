"""docs/scoreboard.md out of docs/scoreboard.json: every number on the page is from there."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scoreboard.scoring import Run
from scoreboard.thin import OUTCOMES

__all__ = ["render"]

_HEAD = """# Scoreboard

Faults seeded into running deployments, recorded, and diagnosed from the trace alone: `spectrace diagnose` was given the
trace, the draft that the team believes it serves, and the target. What is seeded: `bench/scoreboard/`.

```
{command}
```
"""
_PLACES = """
*engine*: switched on in the engine. *config*: the folder that the team believes is wrong. *conversion*: what is
served is not that folder. A cause names a fault by its own id or by an id that it says cannot be told
from it, for one and the same edit; of several faults each needs a cause of its own. Acceptance lengths are over whole
rounds; *real* is a run with the fault repaired. At a temperature that is itself drawn: it is then the mean over so many
runs as stand behind it, each with other draws. On SmolLM2 it is not measured then, nor in bfloat16, where a repaired
run answers otherwise, too: of other texts, ten answers say too little. An edit of a config mends it where its command,
run on a copy of the folder that is wrong, makes that folder mean what the right one does.
"""


def render(document: Mapping[str, Any]) -> str:
    """The page."""
    runs, found = [Run(**run) for run in document["runs"]], document["totals"]
    faults = [run for run in runs if run.single]
    parts = [
        _HEAD.format(command=document["command"]),
        _totals(found),
        _PLACES,
        _section("By fault and pair", _by_pair(faults)),
        _section("Every fault", _by_fault(faults)),
        _section("Several faults at once", _stacked([run for run in runs if run.stacked])),
        _section("Clean runs", _clean([run for run in runs if run.clean])),
        _section("Missed", _missed(runs)),
        _section("Causes that are not there", _others([run for run in runs if run.others and not run.clean])),
        _section("Edits that do not mend", _edits([run for run in runs if run.edit_right is False])),
        _section("Not scored", _unscored(runs)),
        _section("With less in the trace", _thin(runs, found.get("thin", {}))),
    ]
    return "\n".join(part for part in parts if part)


def _section(title: str, body: str) -> str:
    return f"## {title}\n\n{body}\n" if body else ""


def _totals(found: Mapping[str, Any]) -> str:
    told, stacked = found["predictions"], found["stacked"]
    lines = [
        ("seeds", ", ".join(map(str, found["seeds"]))),
        ("single faults scored", f"{found['scored']} of {found['faults']} ({_percent(found['unscored_share'])} not)"),
        ("cause named first", f"{found['first']} of {found['scored']} ({_percent(found['first_share'])})"),
        ("among the first three", f"{found['top3']} of {found['scored']} ({_percent(found['top3_share'])})"),
        ("false alarms on clean runs", f"{found['false_alarms']} of {found['clean']}"),
        ("clean runs undecided", f"{found['clean_undecided']} of {found['clean']}"),
        ("runs with a cause named that is not there", f"{found['false_causes']} of {found['scored']}"),
        ("runs that raised", str(found["errors"])),
        ("acceptance after the repair foretold, greedy float32", _foretold(told["greedy"])),
        ("the same, drawn or in bfloat16", _foretold(told["other"])),
        ("named, and not foretold", str(told["not_foretold"])),
        ("foretold, and not measured (the repaired run answers otherwise, too little)", str(told["not_measured"])),
        ("edits of wrong configs that mend them", f"{found['edits']['right']} of {found['edits']['checked']}"),
        ("two faults at once, both named", f"{stacked['all_named']} of {stacked['scored']}"),
        ("of these with a cause that is not there", f"{stacked['false_causes']} of {stacked['scored']}"),
        ("of these, acceptance with all repaired foretold", _foretold(stacked["predictions"])),
        ("ids scored on one pair only", ", ".join(found["one_pair_only"]) or "none"),
    ]
    return _table(("", ""), lines) + "\n"


def _foretold(told: Mapping[str, Any]) -> str:
    return (
        f"exactly in {told['exact']} of {told['compared']}, within 0.10 in {told['within_0.10']}; "
        f"largest error {_number(told['max_error'])}"
    )


def _by_pair(runs: Sequence[Run]) -> str:
    """How many of the scored were named first."""
    pairs = list(dict.fromkeys(run.pair for run in runs))
    ids = list(dict.fromkeys(run.faults[0] for run in runs))
    cells = {(id, pair): [r for r in runs if (r.faults[0], r.pair) == (id, pair)] for id in ids for pair in pairs}
    table = _table(("fault", *pairs), ((id, *(_first_of(cells[id, pair]) for pair in pairs)) for id in ids))
    return table and f"{table}\n\nNamed first, of those scored."


def _first_of(runs: Sequence[Run]) -> str:
    scored = [run for run in runs if run.scored]
    first = sum(run.rank == 1 for run in scored)
    return f"{first}/{len(scored)}" if scored else "not scored" if runs else ""


def _by_fault(runs: Sequence[Run]) -> str:
    columns = (*_SEEDED, "named", "place", "served", "foretold", "real", "secs")
    return _table(columns, (_row(run) for run in runs if run.scored))


def _row(run: Run) -> tuple[str, ...]:
    named = f"{run.named} {run.named_variant}".strip() if run.named else run.verdict
    place = str(run.rank) + ", other edit" * (run.edit_right is False) if run.rank else "**missed**"
    lengths = (_number(run.served), _number(run.predicted), _real(run))
    return *_seeded(run), named, place, *lengths, f"{run.seconds:.0f}"


def _real(run: Run) -> str:
    """With the number of runs that it is the mean of, where they are several."""
    return f"{_number(run.real)} ({run.real_runs})" if run.real_runs > 1 else _number(run.real)


def _stacked(runs: Sequence[Run]) -> str:
    columns = ("faults", "pair", "seed", "places", "served", "foretold", "real", "with one repaired: foretold / real")
    rows = []
    for run in (run for run in runs if run.scored):
        places = ", ".join(f"{id} {place or '**missed**'}" for id, place in run.ranks.items())
        each = "; ".join(f"{id} {_number(told)} / {_number(real)}" for id, (told, real) in run.each.items())
        lengths = (_number(run.served), _number(run.predicted), _real(run))
        rows.append((" + ".join(run.faults), run.pair, str(run.seed), places, *lengths, each))
    return _table(columns, rows)


def _clean(runs: Sequence[Run]) -> str:
    columns = ("case", "pair", "seed", "verdict", "acceptance length", "secs")
    return _table(
        columns,
        (
            (
                run.variant, run.pair, str(run.seed),
                f"**{run.verdict}: {run.named}**" if run.named else run.verdict,
                _number(run.served), f"{run.seconds:.0f}",
            )
            for run in runs if run.scored
        ),
    )  # fmt: skip


def _missed(runs: Sequence[Run]) -> str:
    wrong = [run for run in runs if run.wrong]
    columns = (*_SEEDED, "place", "reason")
    rows = ((*_seeded(run), str(run.rank or "-"), run.reason) for run in wrong)
    return _table(columns, rows) if wrong else "Nothing."


def _others(runs: Sequence[Run]) -> str:
    """Beside the right cause, or in its place."""
    columns = (*_SEEDED, "place", "not there")
    return _table(columns, ((*_seeded(run), str(run.rank or "-"), ", ".join(run.others)) for run in runs))


def _edits(runs: Sequence[Run]) -> str:
    return _table((*_SEEDED, "edit"), ((*_seeded(run), run.fix) for run in runs))


def _unscored(runs: Sequence[Run]) -> str:
    left = [run for run in runs if not run.scored]
    rows = ((*_seeded(run), run.reason) for run in left)
    return _table((*_SEEDED, "why"), rows) if left else "Nothing."


_LISTED = ("in part", "no sign", "silent", "wrong", "raised")
_THIN = """
*In part*: of several faults one comes first, and not all are named. *Insufficient*: no cause is named, and it is not
said that all is well. *Silent*: it is, though the rows show what was seeded; *no sign*: they do not, they are those of
the repaired run. *Wrong*: a cause comes first that is not there. No trace here says that rows are missing."""


def _thin(runs: Sequence[Run], counts: Mapping[str, Mapping[str, int]]) -> str:
    """Counts by view, and every view of which something wrong was said, or nothing."""
    rows = ((view, *(str(found.get(outcome, 0)) for outcome in OUTCOMES)) for view, found in counts.items())
    listed = [
        (*_seeded(run), view, said["outcome"], _said(said), run.named or run.verdict, said["said"])
        for run in runs for view, said in run.thinned.items() if said["outcome"] in _LISTED
    ]  # fmt: skip
    columns = (*_SEEDED, "trace", "outcome", "said", "of the whole trace", "because")
    parts = (_table(("trace", *OUTCOMES), rows), _THIN.strip(), _table(columns, listed))
    return "\n\n".join(part for part in parts if part) if counts else ""


def _said(said: Mapping[str, Any]) -> str:
    return f"{said['named']} ({said['confidence']:.2f})" if said["named"] else said["verdict"]


_SEEDED = ("fault", "pair", "seed", "where", "variant", "served as")


def _seeded(run: Run) -> tuple[str, ...]:
    """What was seeded, where and how."""
    return " + ".join(run.faults) or "clean", run.pair, str(run.seed), run.kind, run.variant, run.served_as


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    body = [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows]
    if not body:
        return ""
    return "\n".join((f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}", *body))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"

"""The page that `diagnose` prints: what to do first, and what it rests on after that.

Written for a reader who has never seen the tool and is in a hurry; every number says what it is of.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from spectrace.replay.diagnosis import Cause, Diagnosis, Identified, Reading, Verdict
from spectrace.replay.links import LINK_OF

__all__ = ["render_causes", "render_diagnosis"]

_WIDTH = 80
_NOTHING = "Nothing is to be repaired"
_MEANING = {
    Verdict.HEALTHY: f"{_NOTHING}: what the draft was fed and what it computed are what it was trained for, as far as "
    "this trace shows.",
    Verdict.WEAK_DRAFT: f"{_NOTHING}: the draft does what training reported, and that is too little. Train it further.",
    Verdict.OTHER_DATA: f"{_NOTHING}: fed rightly, the draft falls short of its trained accuracy, so these texts are "
    "other than those that it was trained on. Train it on texts like these.",
    Verdict.FAULT: "Make what is said below right, and serve again.",
    Verdict.ENGINE_STATE: "The draft was given what it should be given, and the engine made something else of it. No "
    "edit is known; where it happens, and where to look:",
    Verdict.INSUFFICIENT: "This trace cannot tell whether anything is broken. Why, and what to run next:",
}
_PROMISED = (
    "If training promised more, give what it reported, step by step (--trained-accuracy 0.75,0.71,0.69): the same "
    "accuracy is then measured on these texts."
)
_UNPARTED = (
    f"{_NOTHING}: no fault was found. Either the draft is weak, or these texts are other than those that it was "
    "trained on, or rounds cost more than they bring (deep drafts, large trees). What training reported, step by step "
    "(--trained-accuracy 0.75,0.71,0.69), tells the first two apart."
)
_OTHERS = {"weights": "other weights"}  # beside those that are links of their own
_NO_GAIN = 1.02
_HARMLESS = "What is said below is wrong, but no gain is foretold here: make it right for its own sake, without haste."
_TITLE = {
    Verdict.HEALTHY: ("HEALTHY", "bold green"),
    Verdict.WEAK_DRAFT: ("WEAK DRAFT", "bold yellow"),
    Verdict.OTHER_DATA: ("OTHER DATA", "bold yellow"),
    Verdict.FAULT: ("FAULT", "bold red"),
    Verdict.ENGINE_STATE: ("ENGINE STATE", "bold red"),
    Verdict.INSUFFICIENT: ("INSUFFICIENT", "bold yellow"),
}


def render_diagnosis(trace: Path, diagnosis: Diagnosis) -> RenderableType:
    """The page a person reads. Print it with `crop=False`: commands are as long as they are."""
    shown = [cause.command for cause in diagnosis.causes]
    parts: list[RenderableType] = [render_causes(trace, diagnosis)]
    if diagnosis.verdict is Verdict.FAULT and diagnosis.notes:
        parts += _section("Notes", _bullets(diagnosis.notes))
    parts += _readings(diagnosis.readings)
    parts += _slots(diagnosis.identified)
    parts += _ladder(diagnosis.coverage.get("ladder"))
    parts += _worth(diagnosis.worth)
    parts += _coverage({name: value for name, value in diagnosis.coverage.items() if name != "ladder"})
    if diagnosis.next_command and diagnosis.next_command not in shown and diagnosis.verdict is not Verdict.INSUFFICIENT:
        parts += _section("Next", _command(diagnosis.next_command))
    return Group(*parts)


def render_causes(trace: Path, diagnosis: Diagnosis) -> RenderableType:
    """The verdict and what to repair, without what it rests on."""
    causes = [part for number, cause in enumerate(diagnosis.causes, 1) for part in _cause(number, cause)]
    return Group(*_headline(trace, diagnosis), *causes)


def _headline(trace: Path, diagnosis: Diagnosis) -> Iterator[RenderableType]:
    """Verdict, what it means, acceptance now and after all repairs; and where nothing else follows, what to do."""
    verdict, measured = diagnosis.verdict, bool(diagnosis.coverage.get("ladder"))
    title, style = _TITLE[verdict]
    if verdict is Verdict.FAULT:
        count = len(diagnosis.causes)
        title += f": {diagnosis.causes[0].title}" if count == 1 else f": {count} links are broken"
    elif verdict is Verdict.WEAK_DRAFT and not measured:
        title += ", or other data"
    yield Text(title, style=style)
    yield Text(str(trace), style="dim", overflow="fold")
    yield Text()
    yield Text(_meaning(diagnosis, measured=measured))
    yield from _acceptance(diagnosis)
    if verdict is Verdict.HEALTHY and not measured:
        yield Text(_PROMISED)
    if verdict is not Verdict.FAULT and diagnosis.notes:
        yield from (Text(), _bullets(diagnosis.notes))
    if verdict is Verdict.INSUFFICIENT and diagnosis.next_command:
        yield from (Text(), _command(diagnosis.next_command))


def _meaning(diagnosis: Diagnosis, *, measured: bool) -> str:
    if diagnosis.verdict is Verdict.WEAK_DRAFT and not measured:
        return _UNPARTED
    now, then = diagnosis.served_acceptance, diagnosis.repaired_acceptance
    if diagnosis.verdict is Verdict.FAULT and now is not None and then is not None and then < _NO_GAIN * now:
        return _HARMLESS
    return _MEANING[diagnosis.verdict]


def _acceptance(diagnosis: Diagnosis) -> Iterator[Text]:
    now, then = diagnosis.served_acceptance, diagnosis.repaired_acceptance
    if now is None:
        return
    line = f"Acceptance length (mean tokens per verification, the bonus token included): {now:.3f} now"
    if diagnosis.causes and then is not None:
        every = "once it is repaired" if len(diagnosis.causes) == 1 else "once all are repaired"
        line += f", {then:.3f} {every}"
    yield Text(f"{line}.")
    even = diagnosis.worth.get("break_even_acceptance")
    if even is None or now >= even or _mostly_cut(diagnosis.coverage):
        return
    line = f"{now:.3f} is below the break-even length of at least {even:.2f}: decoding without a draft is faster"
    if plain := diagnosis.worth.get("plain_seconds_per_token"):
        without, served = (f"{speed:.1f}" for speed in (1 / plain, now / even / plain))
        line += f" (at least {without} tokens per second, now {served})" if without != served else ""
    yield Text(f"{line}.")
    if diagnosis.causes and then is not None and then < even:
        yield Text(f"Once repaired, {then:.3f} is below it still: serve without a draft until there is a better one.")


def _mostly_cut(coverage: Mapping[str, Any]) -> bool:
    """Whether acceptance is of so few rounds that nothing can be urged by it."""
    rounds = coverage.get("rounds") or {"whole": 0, "cut": 0}
    return bool(rounds["whole"] < rounds["cut"])


def _cause(number: int, cause: Cause) -> Iterator[RenderableType]:
    name = f"{cause.fault}, variant {cause.variant}," if cause.variant else cause.fault
    yield Text()
    yield _hanging(f"{number}.", Text(_capital(cause.title), style="bold"))
    facts = [f"Fault {name} of the catalogue; confidence {cause.confidence:.2f}."]
    if cause.alike:
        others = ", ".join(f"{id} ({LINK_OF[id]})" if id in LINK_OF else id for id in cause.alike)
        facts.append(f"These data cannot tell it from {others}: make the edit below, and look again before any other.")
    now, then = cause.served_acceptance, cause.predicted_acceptance
    if now is not None:
        foretold = "not foretold" if then is None else f"{then:.3f}"
        facts.append(f"Acceptance length {now:.3f} now; with this link alone repaired: {foretold}.")
    yield _indented(Text(" ".join(facts)))
    if cause.evidence:
        yield _indented(Text("How it is known:"))
        yield _indented(_bullets(cause.evidence))
    yield Text()
    yield Text("   WHAT TO EDIT", style="bold reverse" if cause.fix else "bold")
    yield _indented(Text(_capital(cause.fix), overflow="fold"))
    if cause.command:
        yield from (Text(), _command(cause.command))


def _readings(readings: Mapping[str, Reading]) -> Iterator[RenderableType]:
    shown = {link: one for link, one in readings.items() if link == "wiring" or _differ(one)}
    if not shown:
        return
    table = Table("link", "configured (C)", "engine (E)", "trained (T)", box=None, pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"
    for link, one in shown.items():
        table.add_row(*(Text(said or "not decided") for said in (link, one.configured, one.engine, one.trained)))
    legend = (
        "C: what checkpoint and config mean. E: what the engine did, by replay and by value. T: what the draft "
        "was trained for, found by running it on true features. Where C and E agree and T differs, the config or "
        "checkpoint is wrong; where C and T agree and E differs, the engine is wrong."
    )
    same = [_OTHERS.get(link, link) for link, one in readings.items() if link not in shown and len(_known(one)) > 1]
    said = f" No difference found in the draft's own {', '.join(same)}." if same else ""
    yield from _section("Three readings of each link", table, Text(legend + said, style="dim"))


def _known(one: Reading) -> list[str]:
    return [said for said in (one.configured, one.engine, one.trained) if said is not None]


def _differ(one: Reading) -> bool:
    return len(set(_known(one))) > 1


def _slots(identified: Sequence[Identified]) -> Iterator[RenderableType]:
    if not identified:
        return
    table = Table("slot", "configured", "held", box=None, pad_edge=False)
    table.add_column("error", justify="right")
    table.add_column("closest other")
    table.add_column("its error", justify="right")
    for one in identified:
        texts = (str(one.slot), one.configured, one.best, _error(one.error), one.runner_up, _error(one.runner_up_error))
        table.add_row(*(Text(text) for text in texts), style="" if one.best == one.configured else "bold")
    legend = (
        "Slots are the parts of the draft's input, in order. Boundary b is the stream that enters the target's layer b "
        "(0: the embedding), so the output of layer b-1. Errors are the largest difference over the row's largest "
        "value, median over rows. Rows that were exchanged or changed on their way are left out here."
    )
    yield from _section("What the draft's input held, by value", table, Text(legend, style="dim"))


def _error(error: float) -> str:
    return f"{error:.1e}" if isfinite(error) else "-"


def _ladder(ladder: Mapping[str, Any] | None) -> Iterator[RenderableType]:
    """Trained accuracy against what was measured on these texts."""
    if not ladder:
        return
    table = Table("step", box=None, pad_edge=False)
    for column in ("trained", "measured here", "95 % interval", "answers"):
        table.add_column(column, justify="right")
    for rung in ladder["rungs"]:
        low, high = rung["low"], rung["high"]
        interval = "-" if low is None or high is None else f"{low:.3f} to {high:.3f}"
        shares = (_share(rung["trained"]), _share(rung["measured"]))
        table.add_row(str(rung["step"]), *shares, interval, str(rung["answers"]))
    legend = f"Accuracy by the definition {ladder['definition']}: {ladder['says']}."
    lengths = [("over all starts", ladder["expected_length"]), ("over starts of rounds", ladder["walked_length"])]
    told = ", ".join(f"{length:.3f} {over}" for over, length in lengths if length is not None)
    if told:
        legend += f" Acceptance length on true features: {told}."
    more = [_bullets(ladder["notes"])] if ladder.get("notes") else []
    yield from _section("Trained accuracy, measured again on these texts", table, Text(legend, style="dim"), *more)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _worth(worth: Mapping[str, Any]) -> Iterator[RenderableType]:
    lines = [*_round_lines(worth), *_speed_lines(worth), *_break_even_lines(worth)]
    if lines:
        yield from _section("What speculation is worth", _bullets(lines))


def _round_lines(worth: Mapping[str, Any]) -> Iterator[str]:
    if (secs := worth.get("seconds_per_round")) is None:
        return
    parts = [
        ("target", "target_seconds"),
        ("draft", "draft_seconds"),
        ("the rest (scheduling, sampling, recording)", "rest_seconds"),
    ]
    told = ", ".join(f"{name} {_secs(worth[key])}" for name, key in parts if worth.get(key) is not None)
    line = f"A round takes {_secs(secs)}{f': {told}' if told else ''}."
    if worth.get("draft_share") is not None:
        line += f" The draft takes {worth['draft_share']:.0%} of it."
    if worth.get("requests_per_pass") is not None:
        line += f" {worth['requests_per_pass']:.1f} requests share a pass on average."
    yield line


def _speed_lines(worth: Mapping[str, Any]) -> Iterator[str]:
    if worth.get("tokens_per_second") is None:
        return
    after = [(name, one["tokens_per_second"]) for name, one in (worth.get("after") or {}).items()]
    told = "".join(f"; {speed:.1f} with {name} repaired" for name, speed in after if speed is not None)
    yield f"Tokens per second of one request: {worth['tokens_per_second']:.1f} now{told}."


def _break_even_lines(worth: Mapping[str, Any]) -> Iterator[str]:
    if (length := worth.get("break_even_acceptance")) is None:
        return
    if (most := worth.get("break_even_at_most")) is None:
        said = (
            f"{length:.2f} at least (a plain step is taken to be as slow as a round without its draft, and may be "
            "faster). Below it, decoding without a draft is faster; above it, this trace does not tell"
        )
    else:
        said = (
            f"{length:.2f} to {most:.2f} (a plain step's target pass is estimated from passes with different numbers "
            "of rows; what it has of the round's rest, this trace does not tell). Below, decoding without a draft is "
            "faster; above, speculation is"
        )
    yield f"Break-even acceptance length: {said}."


def _secs(secs: float) -> str:
    return f"{secs:.2f} s" if secs >= 1 else f"{secs * 1e3:.1f} ms"


def _coverage(coverage: Mapping[str, Any]) -> Iterator[RenderableType]:
    if not coverage:
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in coverage.items():
        table.add_row(Text(name.replace("_", " ")), Text(_said(value)))
    yield from _section("What this rests on", table)


def _said(value: Any) -> str:
    """A value of the coverage in words."""
    if isinstance(value, Mapping):
        return ", ".join(f"{str(name).replace('_', ' ')} {_said(one)}" for name, one in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(_said, value)) or "none"
    if value is None or isinstance(value, bool):
        return {None: "not known", True: "yes", False: "no"}[value]
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _section(title: str, *parts: RenderableType) -> list[RenderableType]:
    return [Text(), Text(title, style="bold"), *parts]


def _bullets(lines: Sequence[str]) -> RenderableType:
    return Group(*(_hanging("-", Text(line, overflow="fold")) for line in lines))


def _hanging(mark: str, text: Text) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_row(Text(mark), text)
    return grid


def _indented(part: RenderableType) -> Padding:
    return Padding(part, (0, 0, 0, 3))


def _capital(text: str) -> str:
    """A sentence's first letter; a path keeps its own."""
    path = "/" in text.split(maxsplit=1)[0] if text else False
    return text if path else text[:1].upper() + text[1:]


def _command(command: str) -> RenderableType:
    """A command to copy: at the left edge, and broken only where a shell lets it be."""
    if "\n" not in command and len(command) > _WIDTH:
        command = _broken(command)
    return Text(command, style="cyan", no_wrap=True, overflow="ignore")


def _broken(command: str) -> str:
    """A long command over several lines, each but the last ending in a backslash."""
    parts: list[list[str]] = [[]]
    for word in shlex.split(command):
        if word.startswith("--"):
            parts.append([])
        parts[-1].append(word)
    first, *options = map(shlex.join, parts)
    lines = [first]
    for option in options:
        if len(lines[-1]) + len(option) + 3 <= _WIDTH:
            lines[-1] += f" {option}"
        else:
            lines.append(f"    {option}")
    return " \\\n".join(lines)

"""What a diagnosis says of a draft that vLLM served, and whether that is right."""

import io
import json
import re
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from faulty_drafts.kinds import Kind
from rich.console import Console
from safetensors import safe_open

from spectrace.cli.diagnose import diagnosis_json
from spectrace.cli.diagnosis_page import render_diagnosis
from spectrace.engine.checkpoint import read_draft
from spectrace.replay.diagnose import diagnose
from spectrace.replay.diagnosis import Cause, Diagnosis, Verdict
from spectrace.tracer.errors import SpectraceError
from spectrace.tracer.trace import Trace

__all__ = ["Said", "judge"]

_WIDTH = 110
_CODE = "python -c "

Mends = Callable[[Cause], bool | None]
"""Whether a cause's command, done to a copy of the faulty folder, makes vLLM serve it as it serves the sound one.

None where that was not served, and is not known.
"""


@dataclass(frozen=True, slots=True)
class Said:
    """A diagnosis, as far as it is judged. `verdict` is "refused" or "raised" where there was none; `title` says why.

    `named`: the first cause is the link that was broken. `edit`: what is to be edited repairs it: served again after
    the cause's command, vLLM accepts as many drafts as of the sound draft; without a command, the words say the tensor
    or the field, and the faulty folder.
    """

    verdict: str
    named: bool
    edit: bool | None
    fault: str = ""
    alike: tuple[str, ...] = ()
    variant: str = ""
    title: str = ""
    evidence: tuple[str, ...] = ()
    fix: str = ""
    command: str = ""
    served: float | None = None
    foretold: float | None = None
    repaired: float | None = None
    others: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    secs: float = 0.0

    @property
    def right(self) -> bool:
        return self.named and self.edit is not False


def judge(
    kind: Kind, trace: Path, believed: Path, target: Path, *, wrong: Path, mends: Mends, page: Path, budget_secs: float
) -> Said:
    """Diagnose a trace for a team that believes in a folder; `page` gets what it would read.

    `wrong` is the folder with the fault in it, where every edit has to be.
    """
    started = time.perf_counter()
    try:
        opened, checkpoint = Trace.open(trace), read_draft(believed)
        found = diagnose(opened, checkpoint, target=target, budget_secs=budget_secs)
    except SpectraceError as error:
        page.write_text(f"Error: {error}\n", "utf-8")
        named = _names(kind, str(error))
        return Said("refused", named, named, title=_without_folders(str(error)), secs=time.perf_counter() - started)
    except Exception as error:
        page.write_text(traceback.format_exc(), "utf-8")
        return Said("raised", False, False, title=f"{type(error).__name__}: {error}")
    secs = time.perf_counter() - started
    page.write_text(_text(trace, found), "utf-8")
    page.with_suffix(".json").write_text(json.dumps(diagnosis_json(found), indent=1), "utf-8")
    if found.causes and not _can_be_done(kind, found.causes[0], believed):
        return replace(_judged(kind, found, wrong, mends, secs), edit=False)
    return _judged(kind, found, wrong, mends, secs)


def _text(trace: Path, found: Diagnosis) -> str:
    console = Console(width=_WIDTH, file=io.StringIO(), record=True)
    console.print(render_diagnosis(trace, found), crop=False)
    return console.export_text()


def _judged(kind: Kind, found: Diagnosis, wrong: Path, mends: Mends, secs: float) -> Said:
    told = {
        "served": found.served_acceptance, "repaired": found.repaired_acceptance, "notes": found.notes,
        "verdict": str(found.verdict), "secs": secs,
    }  # fmt: skip
    if not found.causes:
        fine = not kind.ids and found.verdict in (Verdict.HEALTHY, Verdict.WEAK_DRAFT)
        return Said(named=fine, edit=fine, foretold=found.served_acceptance, **told)
    first = found.causes[0]
    there = str(wrong) in first.fix + first.command
    return Said(
        named=bool({first.fault, *first.alike} & set(kind.ids)),
        edit=there and (mends(first) if first.command.startswith(_CODE) else _names(kind, first.fix)),
        fault=first.fault,
        alike=first.alike,
        variant=first.variant,
        title=first.title,
        evidence=first.evidence,
        fix=_without_folders(first.fix),
        command=first.command,
        foretold=first.predicted_acceptance,
        others=tuple(f"{cause.fault} {cause.title}" for cause in found.causes[1:]),
        **told,
    )


def _can_be_done(kind: Kind, cause: Cause, believed: Path) -> bool:
    """Whether a tensor that is to be copied from the believed folder is in there."""
    if "copy the tensor" not in cause.fix:
        return True
    with safe_open(believed / "model.safetensors", "pt") as file:
        return any(name in tensor for tensor in file.keys() for name in kind.names)  # noqa: SIM118


def _names(kind: Kind, text: str) -> bool:
    return any(name in _without_folders(text) for name in kind.names)


def _without_folders(text: str) -> str:
    """Of every absolute path the last part: folders are this machine's, and are called after the fault."""
    return re.sub(r"(?<![\w.])(?:/[\w.@+-]+)+/", ".../", text)

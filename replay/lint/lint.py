"""A draft's folder held against itself, its target, and the engine that will serve it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from spectrace.engine.checkpoint import survey_draft
from spectrace.engine.fields import read_config
from spectrace.engine.problem import DraftProblem
from spectrace.engine.stored import StoredTensors
from spectrace.replay.lint import config, served, tables, target, tensors, wiring
from spectrace.replay.lint.finding import LintFinding, Severity
from spectrace.replay.lint.subject import Subject, Target
from spectrace.replay.profiles.profile import Given, Profile
from spectrace.replay.profiles.running import run_by
from spectrace.tracer.errors import UserError

__all__ = ["Linted", "lint_draft"]

Check = Callable[[Subject], Iterator[LintFinding]]

_CHECKS: Final[tuple[Check, ...]] = (
    tensors.problems,
    tensors.files,
    tensors.names,
    tensors.contents,
    tables.table,
    tables.head_rows,
    wiring.meant,
    wiring.as_served,
    served.refusals,
    served.departures,
    served.tensors,
    target.sizes,
    target.tokenizer,
    target.embedding,
    target.rope,
    target.context,
    target.dtypes,
    target.weights,
    config.untrained,
    config.unread,
    config.assumed,
    config.odd,
)


@dataclass(frozen=True, slots=True)
class Linted:
    """What is to be said of a draft, most severe first; `subject` is None where it could not be read at all."""

    findings: tuple[LintFinding, ...]
    subject: Subject | None

    @property
    def failed(self) -> bool:
        """Whether there is an error."""
        return any(one.severity is Severity.ERROR for one in self.findings)


def lint_draft(folder: Path, *, target_folder: Path | None = None, profile: Profile | None = None) -> Linted:
    """Everything that files alone say of a draft; with a target and an engine, of it there.

    Raises UserError for a folder that is not there, and for a target without a config that says what it is.
    """
    beside = Target(target_folder) if target_folder else None
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; expected the folder of a draft, with config.json and *.safetensors")
    try:
        values = read_config(folder)
        draft, problems = survey_draft(folder)
    except DraftProblem as problem:
        return Linted((_unread(problem, problem.code),), None)
    except UserError as error:
        return Linted((_unread(error, "unreadable"),), None)
    stored = StoredTensors(folder)
    given = Given(draft, values, frozenset(stored), beside.facts if beside else None)
    running = run_by(profile, given) if profile else None
    subject = Subject(draft, stored, values, tuple(problems), beside, profile, given, running)
    found = [finding for check in _CHECKS for finding in check(subject)]
    return Linted(tuple(sorted(found, key=lambda one: one.place)), subject)


def _unread(error: UserError, code: str) -> LintFinding:
    what, _, fix = error.message.partition("; ")
    return LintFinding(
        code=code,
        severity=Severity.ERROR,
        title=what.partition(": ")[2] or what,
        evidence=(error.message,),
        consequence="no engine serves it as an EAGLE-3 draft, or none as it was meant",
        fix=fix or "export the draft again",
    )

"""The recorder and the trace: rows and tensors in, rows and tensors out. Knows no model and no engine.

A name loads its module when it is first used: an engine that finds our plugin, and is not recorded, loads nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spectrace.tracer.account import Account, FamilyAccount
    from spectrace.tracer.errors import NotATrace, RecordingFailed, RunFailed, SpectraceError, TraceDamaged, UserError
    from spectrace.tracer.keys import Keys
    from spectrace.tracer.manifest import create_trace, seal_trace
    from spectrace.tracer.problem import Problem
    from spectrace.tracer.recorder import Recorder
    from spectrace.tracer.rows import Level, Phase
    from spectrace.tracer.rowset import Rows
    from spectrace.tracer.trace import Trace

_MODULES = {
    "account": ("Account", "FamilyAccount"),
    "errors": ("NotATrace", "RecordingFailed", "RunFailed", "SpectraceError", "TraceDamaged", "UserError"),
    "keys": ("Keys",),
    "manifest": ("create_trace", "seal_trace"),
    "problem": ("Problem",),
    "recorder": ("Recorder",),
    "rows": ("Level", "Phase"),
    "rowset": ("Rows",),
    "trace": ("Trace",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Account",
    "FamilyAccount",
    "Keys",
    "Level",
    "NotATrace",
    "Phase",
    "Problem",
    "Recorder",
    "RecordingFailed",
    "Rows",
    "RunFailed",
    "SpectraceError",
    "Trace",
    "TraceDamaged",
    "UserError",
    "create_trace",
    "seal_trace",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

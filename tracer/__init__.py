"""The recorder and the trace: rows and tensors in, rows and tensors out. Knows no model and no engine."""

from spectrace.tracer.account import Account, FamilyAccount
from spectrace.tracer.errors import NotATrace, RecordingFailed, RunFailed, SpectraceError, TraceDamaged, UserError
from spectrace.tracer.keys import Keys
from spectrace.tracer.manifest import create_trace, seal_trace
from spectrace.tracer.problem import Problem
from spectrace.tracer.recorder import Recorder
from spectrace.tracer.rows import Level, Phase
from spectrace.tracer.rowset import Rows
from spectrace.tracer.trace import Trace

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

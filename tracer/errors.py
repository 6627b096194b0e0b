"""Every error spectrace raises on purpose.

SpectraceError                    (exit code 4)
├── UserError                     (2)  the input is wrong; the message says what to do
│   └── NotATrace                 (2)  the folder is not a trace
├── TraceDamaged                  (3)  bytes on disk are not the bytes that were written
└── RunFailed                     (4)  the run itself failed
    └── RecordingFailed           (4)  rows were lost and the recorder is strict

A message names the file, the field, what was found, what was expected and the next thing to do.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = ["NotATrace", "RecordingFailed", "RunFailed", "SpectraceError", "TraceDamaged", "UserError"]


class SpectraceError(Exception):
    """The root of the tree; `exit_code` is what the command line returns for it."""

    exit_code: ClassVar[int] = 4

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class UserError(SpectraceError):
    """The user's input is wrong."""

    exit_code = 2


class NotATrace(UserError):
    """The folder is not a trace."""


class TraceDamaged(SpectraceError):
    """Bytes on disk are not the bytes that were written."""

    exit_code = 3


class RunFailed(SpectraceError):
    """The run itself failed."""

    exit_code = 4


class RecordingFailed(RunFailed):
    """A strict recorder lost rows."""

"""What makes a folder of no use as an EAGLE-3 draft."""

from spectrace.tracer.errors import UserError

__all__ = ["DraftProblem"]


class DraftProblem(UserError):
    """One such thing; `code` says of which kind it is, and `subject` which tensor or field it is about."""

    def __init__(self, code: str, message: str, subject: str = "") -> None:
        super().__init__(message)
        self.code, self.subject = code, subject

"""The command line as a user has it: arguments in, exit code and both streams out."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from spectrace.cli.main import main


@dataclass(frozen=True, slots=True)
class Said:
    """What a command came to."""

    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """The one line that an error is allowed."""
        lines = [line for line in self.err.splitlines() if line.startswith("spectrace: ")]
        assert len(lines) == 1, self.err
        assert "Traceback" not in self.err
        return lines[0]


@pytest.fixture
def spectrace(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """`spectrace("info", path)` runs the command in this process."""

    def call(*arguments: object) -> Said:
        monkeypatch.setattr("sys.argv", ["spectrace", *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capfd.readouterr()
        return Said(code, out, err)

    return call

"""The command `spectrace`: mounts the commands and turns errors into one line and an exit code.

Exit codes: 0 fine; 1 different, or a fault named; 2 the input is wrong, or nobody takes the output; 3 the trace is
damaged; 4 the run failed; 130 ended by Ctrl-C, 143 by SIGTERM.
"""

import errno
import importlib
import io
import os
import signal
import sys
from types import FrameType

import click

from spectrace.tracer.errors import SpectraceError

__all__ = ["cli", "main"]

_EXTRA = ("ray", "transformers", "accelerate")
_COMMANDS = (
    "demo", "run", "record", "reference", "replay", "diagnose", "diff", "import", "lint", "convert", "info", "check",
)  # fmt: skip
_ELSEWHERE = {"import": ("importing", "import_")}  # module and name of commands whose own name is a word of Python's


class _Lazy(click.Group):
    """Loads a command's module when it is used, so that `info` and `check` never import torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, name = _ELSEWHERE.get(cmd_name, (cmd_name, cmd_name))
        command: click.Command = getattr(importlib.import_module(f"spectrace.cli.{module}"), name)
        return command


@click.command(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="spectrace")
def cli() -> None:
    """Flight recorder and replay lab for speculative decoding."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # commands have bars of their own


class _Terminator:
    """Makes SIGTERM end a command as Ctrl-C does, in order, and remembers that it was SIGTERM."""

    came = False

    def __call__(self, _signal: int, _frame: FrameType | None) -> None:
        self.came = True
        raise KeyboardInterrupt


def _run() -> int:
    """The exit code of a command all of whose output has arrived; raises OSError where it has not."""
    if sys.stdout is None:
        raise OSError(errno.EBADF, "closed, and there is nowhere to write to", "stdout")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a path may have characters that the terminal has not
    try:
        code = cli.main(standalone_mode=False)  # without standalone mode, click returns the code of an exit
        sys.stdout.flush()
    except (SystemExit, BrokenPipeError) as stop:  # click and rich exit with 1 by themselves for a closed pipe
        if isinstance(stop, SystemExit) and stop.code != 1:
            raise
        raise OSError(errno.EPIPE, "closed before all was written", "stdout") from None
    return code if isinstance(code, int) else 0


def _let_go_of_stdout() -> None:
    """What could not be written is not tried again when Python ends, which would set another exit code."""
    try:
        if sys.stdout:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    """Run the command line; never shows a traceback for an error that has a message."""
    terminator = _Terminator()
    before = signal.signal(signal.SIGTERM, terminator)
    try:
        sys.exit(_run())
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except OSError as error:
        click.echo(f"spectrace: {error.filename or 'the system'}: {error.strerror or error}", err=True)
        _let_go_of_stdout()
        sys.exit(2)
    except RecursionError:
        click.echo("spectrace: a JSON file is nested too deeply to be one of ours; check the files given", err=True)
        sys.exit(2)
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        click.echo(f"spectrace: this command needs {error.name}: pip install 'spectrace[engine]'", err=True)
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        click.echo("terminated" if terminator.came else "interrupted", err=True)
        sys.exit(143 if terminator.came else 130)
    except SpectraceError as error:
        click.echo(f"spectrace: {error.message}", err=True)
        sys.exit(error.exit_code)
    finally:
        signal.signal(signal.SIGTERM, before)

"""Options that several commands share, checked as they are parsed."""

import json
import os
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from spectrace.tracer.errors import UserError

if TYPE_CHECKING:
    from spectrace.engine.checkpoint import LoadReport

__all__ = [
    "DTYPES", "PATH", "THREADS", "as_json_option", "check_finite", "parse_boundaries", "parse_capture", "print_json",
    "say_leftovers", "torch_dtype",
]  # fmt: skip

DTYPES = ("float32", "bfloat16", "float16")
THREADS = click.IntRange(1, 1024)  # more than any machine has, fewer than break one


class _SomePath(click.Path):
    """A path that is one: an empty string, of a shell variable that is not set, say, would be the current folder."""

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        if not os.fspath(value):
            name = param.human_readable_name if isinstance(param, click.Argument) else param.opts[0] if param else ""
            raise UserError(f"{name} is empty: expected a path")
        return super().convert(value, param, ctx)


PATH = _SomePath(path_type=Path)


def parse_boundaries(_ctx: click.Context, option: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """A list such as 0,3,16, as a click callback."""
    if value is None:
        return None
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError:
        name = option.opts[0]
        raise UserError(f"{name} {value!r}: expected boundaries separated by commas, such as 0,3,16") from None


def parse_capture(
    ctx: click.Context, option: click.Parameter, value: str | None
) -> tuple[int, ...] | Literal["all"] | None:
    """Boundaries, or all of them."""
    return "all" if value == "all" else parse_boundaries(ctx, option, value)


def check_finite(_ctx: click.Context, option: click.Parameter, value: float) -> float:
    """A number that is one, as a click callback: nan lies in every range."""
    if not isfinite(value):
        raise UserError(f"{option.opts[0]} {value}: expected a finite number")
    return value


as_json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, nothing else.")


def say_leftovers(report: "LoadReport") -> None:
    """Tell on stderr what a draft's folder holds that nothing was computed from, what was assumed, and what is odd."""
    for what, names in (("tensor not used", report.unused_tensors), ("config field not read", report.unread_fields)):
        for name in names:
            click.echo(f"draft: {what}: {name}", err=True)
    for name, value in report.assumed.items():
        click.echo(f"draft: config field absent, assumed: {name} = {value}", err=True)
    for note in report.notes:
        click.echo(f"draft: {note}", err=True)


def print_json(document: Mapping[str, Any]) -> None:
    """The one document of --json."""
    click.echo(json.dumps(document, indent=1))


def torch_dtype(name: str) -> Any:
    """torch's dtype of a name in `DTYPES`."""
    import torch

    return getattr(torch, name)

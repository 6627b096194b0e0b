"""Options that several commands share, checked as they are parsed."""

import json
from collections.abc import Mapping
from typing import Any

import click

from spectrace.tracer.errors import UserError

__all__ = ["BOUNDARIES", "DTYPES", "as_json_option", "print_json", "torch_dtype"]

DTYPES = ("float32", "bfloat16", "float16")


class _Boundaries(click.ParamType):
    """A list such as 0,3,16."""

    name = "boundaries"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(part) for part in str(value).split(","))
        except ValueError:
            name = param.opts[0] if param else "boundaries"
            raise UserError(f"{name} {value!r}: expected boundaries separated by commas, such as 0,3,16") from None


BOUNDARIES = _Boundaries()
as_json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, nothing else.")


def print_json(document: Mapping[str, Any]) -> None:
    """The one document of --json."""
    click.echo(json.dumps(document, indent=1))


def torch_dtype(name: str) -> Any:
    """torch's dtype of a name in `DTYPES`."""
    import torch

    return getattr(torch, name)

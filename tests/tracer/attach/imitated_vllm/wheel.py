"""Classes and records of vLLM as fakes: what parameters, fields and attributes they have was read from its source."""

from __future__ import annotations

import json
from collections.abc import Callable
from inspect import Parameter, Signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

__all__ = ["SIGNATURES", "Wheel"]

SIGNATURES = Path(__file__).with_name("signatures.json")
KINDS = {"*": Parameter.VAR_POSITIONAL, "**": Parameter.VAR_KEYWORD}


class Wheel:
    """vLLM 0.32.0, as `signatures.json` has it."""

    def __init__(self) -> None:
        self.read: dict[str, dict[str, dict[str, Any]]] = json.loads(SIGNATURES.read_text("utf-8"))

    def made(self, file: str, name: str, **methods: Callable[[Any, SimpleNamespace], Any]) -> type:
        """A class whose methods take what the wheel's do; each is told its arguments by name, as one record."""
        known = self.read[file][name]
        return type(name, (), {method: _stub(method, known[method], act) for method, act in methods.items()})

    def record(self, file: str, name: str, **values: Any) -> SimpleNamespace:
        """An object with some of the fields that the wheel's have."""
        assert set(values) <= set(self.read[file][name])
        return SimpleNamespace(**values)


def _stub(name: str, parameters: list[str], act: Callable[[Any, SimpleNamespace], Any]) -> Any:
    signature = Signature([_parameter(one, parameters[:at]) for at, one in enumerate(parameters) if one != "*"])

    def stub(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        host, *_ = bound.arguments.values()
        return act(host, SimpleNamespace(**bound.arguments))

    stub.__signature__ = signature  # type: ignore[attr-defined]
    stub.__name__ = stub.__qualname__ = name
    return stub


def _parameter(told: str, before: list[str]) -> Parameter:
    name, stars = told.strip("*="), "*" * told.count("*")
    default = None if told.endswith("=") else Parameter.empty
    keyword = any(one.startswith("*") for one in before)
    return Parameter(
        name,
        KINDS.get(stars, Parameter.KEYWORD_ONLY if keyword else Parameter.POSITIONAL_OR_KEYWORD),
        default=default,
    )

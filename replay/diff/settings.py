"""What two runs say of themselves, side by side: most differences between traces begin here."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from spectrace.tracer.trace import Trace

__all__ = ["Setting", "settings"]

_OWN: Final = ("format", "format_version", "row_hash", "weight_hash", "created_unix_secs", "machine", "path", "source")
_OF_WRITERS: Final = ("loaded", "shared", "capture")
_ORDER: Final = ("target", "draft", "wiring", "dtype", "tensor_parallel", "serving", "engine")


@dataclass(frozen=True, slots=True)
class Setting:
    """A field of the manifests by its path, with what each trace says; None where one does not have it."""

    name: str
    a: Any
    b: Any

    @property
    def weights(self) -> bool:
        """Whether it is a fingerprint of weights."""
        return ".fingerprints." in self.name or ".loaded." in self.name

    def __str__(self) -> str:
        return f"{self.name}: {_shown(self.a)} in A, {_shown(self.b)} in B"


def settings(a: Trace, b: Trace) -> list[Setting]:
    """Every field in which the manifests and what their processes loaded are not the same; first what decides most."""
    said = [dict(_said(trace)) for trace in (a, b)]
    names = {name for one in said for name in one}
    found = [
        Setting(name, *(one.get(name) for one in said)) for name in names if said[0].get(name) != said[1].get(name)
    ]
    return sorted(found, key=_rank)


def _rank(setting: Setting) -> tuple[bool, int, str]:
    first = setting.name.partition(".")[0]
    at = _ORDER.index(first) if first in _ORDER else len(_ORDER)
    return (setting.a is None or setting.b is None, at, setting.name)


def _said(trace: Trace) -> Iterator[tuple[str, Any]]:
    """Path and value of every leaf; of the processes only rank 0's word on what it loaded."""
    yield from _leaves("", trace.manifest)
    for facts in trace.writers.values():
        if facts.get("rank") == 0:
            yield from _leaves(f"{facts.get('role')}", {name: facts[name] for name in _OF_WRITERS if name in facts})


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, one in value.items():
            if name not in _OWN:
                yield from _leaves(f"{path}.{name}" if path else str(name), one)
    else:
        yield path, value


def _shown(value: Any) -> str:
    text = "not said" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

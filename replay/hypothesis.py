"""One step away from a configuration, as data: the link it changes, the fault it stands for, and how it is taken."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from torch import Tensor

from spectrace.replay.configuration import Configuration

__all__ = ["Apply", "Hypothesis", "replacing", "switching"]

Apply: TypeAlias = Callable[[Configuration], Configuration]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One step: the `link` that it changes, the fault it stands for, and the step itself.

    `deeper` hypotheses show at depth 1 and beyond only. `alike` are faults that no data tell from it.
    """

    link: str
    fault: str
    title: str
    apply: Apply
    variant: str = ""
    deeper: bool = False
    alike: tuple[str, ...] = ()


def switching(**changes: object) -> Apply:
    """The step to other switches."""
    return lambda at: replace(at, spec=replace(at.spec, **changes))  # type: ignore[arg-type]


def replacing(link: str, said: str, make: Callable[[Configuration], Mapping[str, Tensor]]) -> Apply:
    """The step to other tensors, those that `make` returns, in the types of those in their place.

    Of a link that several steps change, all that is said of them is.
    """
    return partial(_replaced, link, said, make)


def _replaced(
    link: str, said: str, make: Callable[[Configuration], Mapping[str, Tensor]], at: Configuration
) -> Configuration:
    new = {name: tensor.to(at.tensors[name]) for name, tensor in make(at).items()}
    told = ", ".join(filter(None, (at.said.get(link), said)))
    return replace(at, tensors={**at.tensors, **new}, said={**at.said, link: told})

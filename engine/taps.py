"""What can be taken from a target's layers while it runs: boundaries, branches, and one rank's part of a boundary.

Boundary b is what enters layer b (b = L: the final norm). Branch b is what the MLP of layer b-1 adds to the stream, so
boundary b without its residual; where a norm stands behind the MLP, it is the norm's output that is added. Branch 0 is
boundary 0, the embedding. The parts of a boundary sum to it over the ranks: rank 0's holds the residual.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from spectrace.engine.parallel import Group
from spectrace.tracer.errors import UserError

__all__ = ["Taken", "Taps"]

_NORM_BEHIND = "post_feedforward_layernorm"


@dataclass(frozen=True, slots=True)
class Taken:
    """What a pass gave, by boundary, [T, F] each; complete once the pass is over."""

    boundaries: dict[int, Tensor] = field(default_factory=dict)
    branches: dict[int, Tensor] = field(default_factory=dict)
    parts: dict[int, Tensor] = field(default_factory=dict)


class Taps:
    """Where a target is tapped: its `layers` and final `norm`. Hooks stand only while a pass is taken from."""

    def __init__(self, layers: nn.ModuleList, norm: nn.Module, group: Group | None = None) -> None:
        self._entered: list[Any] = [*layers, norm]
        self._group = group

    @contextmanager
    def taken(
        self, *, boundaries: Iterable[int] = (), branches: Iterable[int] = (), parts: Iterable[int] = ()
    ) -> Iterator[Taken]:
        """Take these of the forward that runs inside.

        Raises UserError for branches of layers without an MLP, and for parts where ranks do not sum into the stream.
        """
        wanted, apart, split = sorted(set(boundaries)), sorted(set(branches)), sorted(set(parts))
        entering: dict[int, Tensor] = {}
        added: dict[int, Tensor] = {}
        terms: dict[int, list[Tensor]] = {b: [] for b in split}
        taken = Taken()
        with ExitStack() as hooks:
            for b in {*wanted, *split, *(b for b in apart if b == 0)}:
                hooks.enter_context(_input_of(self._entered[b], b, entering))
            for b in {*apart, *split} - {0}:
                hooks.enter_context(_output_of(self.adding(b), b, added))
            for b in {*split} - {0}:
                hooks.enter_context(_sums_in(self._split(b), terms[b]))
            yield taken
        added |= {0: entering[0]} if 0 in entering else {}
        taken.boundaries.update((b, entering[b]) for b in wanted)
        taken.branches.update((b, added[b]) for b in apart)
        taken.parts.update((b, self._part(entering[b], added[b], terms[b])) for b in split)

    def adding(self, boundary: int) -> nn.Module:
        """The module whose output layer b-1 adds to the stream last; raises UserError where there is none."""
        layer = self._entered[boundary - 1]
        for name in (_NORM_BEHIND, "mlp"):
            if isinstance(module := getattr(layer, name, None), nn.Module):
                return module
        raise UserError(f"{type(layer).__name__} has no `mlp`, so what it adds to the stream cannot be taken apart")

    def _split(self, boundary: int) -> nn.Module:
        """The MLP of layer b-1 whose sums over the ranks enter the stream; raises UserError where none do."""
        layer = self._entered[boundary - 1]
        if self._group is None or hasattr(layer, _NORM_BEHIND):
            raise UserError(
                f"{type(layer).__name__}: what it adds to the stream is no sum over ranks: nobody has a part"
            )
        return self.adding(boundary)

    def _part(self, whole: Tensor, added: Tensor, terms: list[Tensor]) -> Tensor:
        own = sum((term.reshape(whole.shape) for term in terms), torch.zeros_like(whole))
        first = self._group is None or self._group.rank == 0
        return whole if first and whole is added else whole - added + own if first else own


@contextmanager
def _removed(*handles: Any) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _input_of(module: nn.Module, boundary: int, kept: dict[int, Tensor]) -> Any:
    """Keep what enters a module."""

    def keep(_module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        kept[boundary] = (args[0] if args else kwargs["hidden_states"])[0]

    return _removed(module.register_forward_pre_hook(keep, with_kwargs=True))


def _output_of(module: nn.Module, boundary: int, kept: dict[int, Tensor]) -> Any:
    """Keep what leaves a module; experts may tell their routing behind it."""

    def keep(_module: nn.Module, _args: object, output: Any) -> None:
        kept[boundary] = (output[0] if isinstance(output, tuple) else output)[0]

    return _removed(module.register_forward_hook(keep))


@contextmanager
def _sums_in(module: nn.Module, terms: list[Tensor]) -> Iterator[None]:
    """Keep this rank's side of every sum over ranks inside a module, which transformers takes in place."""
    import torch.distributed as dist

    reduce: Any = dist.all_reduce

    def reducing(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        terms.append(tensor.clone())
        return reduce(tensor, *args, **kwargs)

    def begin(*_: object) -> None:
        setattr(dist, "all_reduce", reducing)  # noqa: B010 (mypy knows the function)

    def end(*_: object) -> None:
        setattr(dist, "all_reduce", reduce)  # noqa: B010

    with _removed(module.register_forward_pre_hook(begin), module.register_forward_hook(end)):
        try:
            yield
        finally:
            end()

"""A target run layer by layer over many texts, with one layer's weights in memory at a time.

The model's own forward runs for every layer, with all the others letting through what they are handed: masks, RoPE and
whatever else a family's decoder does around its layers are its own. What enters the layer is put there from outside.

Shapes: T rows of a group, F target width, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spectrace.engine.packing import PackedRows
from spectrace.engine.parts import EMBEDDING, HEAD, Parts, layer_part
from spectrace.engine.target import TargetModel, TargetRows, empty_target
from spectrace.tracer.errors import UserError

__all__ = ["LayerwiseTarget"]


class LayerwiseTarget:
    """A target whose layers come from disk one by one; a group of rows is whole texts.

    Raises UserError for a folder that is no target, for weights that cannot be read part by part, and for a model whose
    layers hand each other more than one hidden state.
    """

    def __init__(self, folder: Path, *, dtype: torch.dtype, device: str = "cpu") -> None:
        model = empty_target(folder, dtype=dtype)
        self.folder, self.dtype = folder, dtype
        self.target = TargetModel(folder, dtype=dtype, device=device, empty=model)
        self.parts = Parts(folder, model, dtype=dtype, device=self.target.device)
        self.layers = len(self.target.layers)
        self.width, self.vocab = self.target.width, self.target.vocab
        self._idle = [*self.target.layers, model.get_input_embeddings(), model.get_output_embeddings()]
        self._embedding, self._head = self._idle[-2:]
        self._let_through()
        self._check_chain()

    @property
    def largest_bytes(self) -> int:
        """What the largest part takes in memory."""
        parts = (EMBEDDING, HEAD, *map(layer_part, range(self.layers)))
        return max(self.parts.nbytes(part) for part in parts)

    def boundaries(self, groups: Sequence[PackedRows]) -> Iterator[tuple[int, list[Tensor]]]:
        """Boundary 0, 1, ... L of all groups, one after another: [T, F] of each group, on the host.

        The list is the same one every time, and the next boundary is computed into it.
        """
        with self._in_use(EMBEDDING, self._embedding):
            hidden = [self._run(rows, 0).boundaries[0].cpu() for rows in groups]
        yield 0, hidden
        for layer in range(self.layers):
            with self._in_use(layer_part(layer), self.target.layers[layer]):
                for at, rows in enumerate(groups):
                    with _entering(self.target.layers[layer], hidden[at].to(self.target.device)):
                        hidden[at] = self._run(rows, layer + 1).boundaries[layer + 1].cpu()
            yield layer + 1, hidden

    def logits(self, groups: Sequence[PackedRows], last: Sequence[Tensor]) -> Iterator[Tensor]:
        """The logits [T, V] of each group, of what leaves its last layer."""
        with self._in_use(HEAD, self._head):
            for rows, hidden in zip(groups, last, strict=True):
                with _entering(self.target.layers[-1], hidden.to(self.target.device)):
                    yield self._run(rows, self.layers).logits

    def _run(self, rows: PackedRows, boundary: int) -> TargetRows:
        self.target.reset()
        out = self.target.forward(rows, boundaries=(boundary,))
        self.target.reset()
        return out

    def _let_through(self) -> None:
        for module in self._idle:
            _replace(module, _through)
        _replace(self._embedding, self._blank)

    def _blank(self, tokens: Tensor, *_: object, **__: object) -> Tensor:
        """In the place of embeddings, which only the first layer needs."""
        return torch.zeros(*tokens.shape, self.width, dtype=self.dtype, device=tokens.device)

    @contextmanager
    def _in_use(self, part: str, module: nn.Module) -> Iterator[None]:
        """The part's weights in memory, and its module computing."""
        idle = vars(module).pop("forward")
        try:
            self.parts.load(part)
            yield
        finally:
            _replace(module, idle)
            self.parts.drop(part, *((EMBEDDING,) if part == HEAD else ()))

    def _check_chain(self) -> None:
        """What enters a layer that lets it through has to arrive at the next, and behind the last one."""
        text = PackedRows(*(np.array(column, np.int64) for column in ([0, 0], [0, 0], [0, 1], [-1, 0])))
        marked = torch.arange(2.0 * self.width).reshape(2, self.width).to(self.target.device, self.dtype)
        name = type(self.target.model).__name__
        try:
            with _entering(self.target.layers[0], marked):
                arrived = self._run(text, self.layers).boundaries[self.layers]
            whole = torch.equal(arrived, marked)
        except (IndexError, RuntimeError, TypeError, ValueError):
            whole = False
        config: Any = self.target.model.config
        shared = getattr(config.get_text_config(), "num_kv_shared_layers", None)
        if shared or not whole:
            raise UserError(
                f"{self.folder}: the layers of {name} hand each other more than one hidden state, so they cannot be "
                f"run one by one; record with spectrace run --capture, which loads the whole target"
            )


def _through(hidden: Any, *_: object, **__: object) -> Any:
    return hidden


def _replace(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Have a module do something else, for as long as this stands in its own dictionary."""
    vars(module)["forward"] = forward


@contextmanager
def _entering(layer: nn.Module, hidden_TF: Tensor) -> Iterator[None]:
    """Whatever a layer is handed, this is what enters it."""

    def put(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = hidden_TF[None]
        return ((given, *args[1:]), kwargs) if args else ((), {**kwargs, "hidden_states": given})

    handle = layer.register_forward_pre_hook(put, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()

"""MLPs written neuron by neuron: products of two coordinates, copies of one, and the addition of codes to digits.

Shapes: H stream width, I neurons.
"""

from collections.abc import Mapping

import torch
from analytic.codes import BASE, DIGITS, KEYS, STEPS, Table
from analytic.stream import WIDTH
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Neurons", "add_codes", "look_up"]

_SHARP = 40.0
_OPEN = 8.0


class Neurons:
    """The three matrices of a SwiGLU MLP, filled from the first neuron on; the stream's coordinate `one` is `loud`."""

    def __init__(self, inner: int, *, one: int, loud: float) -> None:
        self.gate, self.up, self.down = torch.zeros(inner, WIDTH), torch.zeros(inner, WIDTH), torch.zeros(WIDTH, inner)
        self.one, self.loud, self.used = one, loud, 0

    def both(self, a: int, b: int, writes: Mapping[int, float]) -> None:
        """Write where coordinates a and b are both 1: silu is nearly linear above zero, nearly nothing below."""
        self._gate(-1.5 * _SHARP, at=_SHARP / 2, writes=writes)
        self.gate[self.used, [a, b]] += _SHARP
        self.up[self.used, self.one] = 1 / self.loud
        self.used += 1

    def copy(self, source: int, writes: Mapping[int, float]) -> None:
        """Write a multiple of a coordinate, whatever it holds."""
        self._gate(_OPEN, at=_OPEN, writes=writes)
        self.up[self.used, source] = 1
        self.used += 1

    def _gate(self, bias: float, *, at: float, writes: Mapping[int, float]) -> None:
        """A constant into the gate, and writes scaled so that a gate of `at` lets them through as they are."""
        self.gate[self.used, self.one] = bias / self.loud
        for target, value in writes.items():
            self.down[target, self.used] += value / float(F.silu(torch.tensor(at)))

    def weights(self) -> dict[str, Tensor]:
        """Under the names that every family gives them."""
        return {"gate_proj.weight": self.gate, "up_proj.weight": self.up, "down_proj.weight": self.down}


def look_up(neurons: Neurons, table: Table, *, word: int, writes: tuple[int, ...]) -> None:
    """Write the entry of a table for the word's two keys into some blocks."""
    for a, row in enumerate(table):
        for b, entry in enumerate(row):
            keys = word + KEYS[0] * BASE + a, word + KEYS[1] * BASE + b
            neurons.both(*keys, {block + entry: 1.0 for block in writes})


def add_codes(neurons: Neurons, codes: tuple[int, ...], *, word: int, out: int) -> None:
    """Write the next token: the word moved up a place, each digit turned on by the code in its block.

    A block that holds no code turns nothing, as does code 0.
    """
    for place, block in enumerate(codes):
        source, target = word + (place + 1) % DIGITS * BASE, out + place * BASE
        for digit in range(BASE):
            moved = (digit + STEPS[place]) % BASE
            neurons.copy(source + digit, {target + moved: 1.0})
            for code in range(1, BASE):
                turned = {target + moved: -1.0, target + (moved + code) % BASE: 1.0}
                neurons.both(block + code, source + digit, turned)

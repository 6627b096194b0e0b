"""Which coordinates of the two residual streams mean what. Everything is one-hot, but for ONE, which is always there.

Since every block holds exactly one hot coordinate wherever it is written, the root mean square of a stream depends on
the boundary alone, and a norm whose weight is that number changes nothing.
"""

import math

from analytic.codes import BASE, DIGITS, LAYERS

__all__ = ["WIDTH", "DraftStream", "TargetStream", "rms"]

WIDTH = 128


class TargetStream:
    """The target's coordinates; LOUD is the value at ONE, so that boundaries differ little in their norms."""

    ONE = 0
    LOUD = 8.0
    WORD = 1  # the token's digits
    REGISTER = WORD + DIGITS * BASE  # the boundary's code
    WRITTEN = REGISTER + BASE  # the codes of all boundaries so far, each in a block of its own
    FETCHED = WRITTEN + (LAYERS + 1) * BASE  # the codes of earlier tokens that the next token needs
    NEXT = FETCHED + DIGITS * BASE  # the next token's digits

    @classmethod
    def written(cls, boundary: int) -> int:
        """Where the block of a boundary's code begins."""
        return cls.WRITTEN + boundary * BASE

    @staticmethod
    def square_at(boundary: int) -> float:
        """ONE, the word, the register, the codes so far; at L also what was fetched and the next token."""
        return TargetStream.LOUD**2 + DIGITS + 1 + boundary + 1 + (2 * DIGITS if boundary == LAYERS else 0)

    @classmethod
    def square_within(cls, layer: int) -> float:
        """Between a layer's attention and its MLP: the last one's attention has fetched, and brought the last code."""
        return cls.square_at(layer) + (DIGITS + 1 if layer == LAYERS - 1 else 0)


class DraftStream:
    """The draft's coordinates. What a row is fed has the slots and FILL, or the slots and the NEXT of the row above.

    LOUD is the value at ONE inside the layer, so large that what a slot lacks hardly moves a norm.
    """

    ONE = 0
    LOUD = 32.0
    WORD = 1
    SLOTS = WORD + DIGITS * BASE
    BACK = SLOTS + 3 * BASE  # the first slot's code, from some rows back
    NEXT = BACK + BASE
    FILL = NEXT + DIGITS * BASE  # weighs in a first row what NEXT weighs in a deeper one

    SQUARE_FED = 3.0 + DIGITS
    SQUARE_WITHIN = SQUARE_FED + LOUD**2 + DIGITS + 1
    FILLING = DIGITS**0.5

    @classmethod
    def slot(cls, number: int) -> int:
        """Where the block of a slot's code begins."""
        return cls.SLOTS + number * BASE


def rms(square: float, width: int = WIDTH) -> float:
    """The root mean square of a row whose squares add up to `square`."""
    return math.sqrt(square / width)

"""The rule behind the analytic pairs: what a token says, what each layer writes, and which token comes next.

A token is four digits to base 4. Boundary b of the target holds one more digit in its register, the *code* of b: a
table looked up by two digits of a token. The next token is the last one with its digits moved up a place, and codes of
earlier tokens added to them.

Generator and expectation share this file and nothing else; it knows no tensor.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "BASE", "DIGITS", "DRAFT_TOKENS", "END_TOKENS", "FAMILIES", "KEYS", "LAYERS", "REACH", "STEPS", "VOCAB", "Rule",
    "Wiring", "digits_of", "rule_of", "token_of",
]  # fmt: skip

Wiring = tuple[int, int, int]
Table = tuple[tuple[int, ...], ...]

BASE, DIGITS, LAYERS = 4, 4, 6
VOCAB = BASE**DIGITS
KEYS = (0, 2)  # the two digits of a token that tables are looked up by
STEPS = (0, 0, 0, 1)  # added to the digits of every next token, so that they do not go round in four steps
REACH = 4  # how many rows back the draft's attention looks
DRAFT_TOKENS = tuple(token for token in range(VOCAB) if token % BASE != BASE - 1)
END_TOKENS = (77, 200)

# For each family the wiring of its draft, and a number that gives long texts, and every fault an effect of its own.
FAMILIES: dict[str, tuple[Wiring, int]] = {
    "llama": ((0, 3, LAYERS), 947),
    "qwen3": ((1, 3, LAYERS), 2486),
    "deepseek_v3": ((0, 4, LAYERS), 2629),
    "kimi_k25": ((1, 4, LAYERS), 3128),
}


def digits_of(token: int) -> tuple[int, ...]:
    """The digits, the most significant first."""
    return tuple(token // BASE ** (DIGITS - 1 - place) % BASE for place in range(DIGITS))


def token_of(digits: Sequence[int]) -> int:
    """The token of some digits."""
    token = 0
    for digit in digits:
        token = token * BASE + digit
    return token


@dataclass(frozen=True, slots=True)
class Rule:
    """One pair: `wiring` is what its draft was made for and ends at L; `tables[b]` gives the code of boundary b < L.

    The code of L is that of the second slot's boundary, of the token before: the last layer's attention brings it.
    """

    family: str
    wiring: Wiring
    tables: tuple[Table, ...]

    def code(self, boundary: int, tokens: Sequence[int], position: int) -> int:
        """What the register of a boundary holds at a position; before the text comes its first token, for ever."""
        if boundary == LAYERS:
            boundary, position = self.wiring[1], position - 1
        digits = digits_of(tokens[max(position, 0)])
        return self.tables[boundary][digits[KEYS[0]]][digits[KEYS[1]]]


def rule_of(family: str) -> Rule:
    """The rule of a family, the same at every call."""
    wiring, seed = FAMILIES[family]
    return Rule(family, wiring, _tables(random.Random(f"{family} {seed}")))


def _tables(rng: random.Random) -> tuple[Table, ...]:
    """Ten of sixteen entries are zero; each table is the one before with two pairs of entries exchanged."""
    entries = [0] * 10 + [1, 1, 2, 2, 3, 3]
    rng.shuffle(entries)
    tables = []
    for _ in range(LAYERS):
        tables.append(tuple(tuple(entries[row * BASE : (row + 1) * BASE]) for row in range(BASE)))
        free = list(range(len(entries)))
        for _ in range(2):
            a, b = rng.sample([(i, j) for i in free for j in free if entries[i] != entries[j]], 1)[0]
            entries[a], entries[b] = entries[b], entries[a]
            free = [place for place in free if place not in (a, b)]
    return tuple(tables)

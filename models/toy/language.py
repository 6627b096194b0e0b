"""The toy pair's language: made-up texts in which every next token hangs on tokens far back, and on how far back.

A text opens with a header: BEGIN, a lag marker that says L, every key with a value of this text's own, GO, and L random
letters. From there each token follows from those before it, with a little noise:

- after a key: the value that the header gave it;
- after an echo marker: the token that stands so many places before the marker;
- after any other token: the letter that follows the token L places back in one of two orders of the alphabet; which
  order, the last token says.

So a reader needs exact distances (lags, echoes), look-ups by content (keys), the last token and the header. Texts never
end, and take long to come back to where they were.

Shapes: B texts, T tokens.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["VOCAB", "Language"]

VOCAB = 128
_LAGS, _ECHOES = (6, 8, 11, 13), (2, 4, 7, 10)
_LETTERS, _KEYS, _ORDERS = 98, 6, 2
_RARE_VALUES, _NOISE = 0.15, 0.02
_SHORTEST_PROMPT, _SPARE_TOKENS = 24, 12

Int = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Language:
    """What each token id means: keys and echo markers are letters too, and all other letters are `plain`.

    `echo_of` and `key_of` say of every id how far its echo reaches and its key's number, 0 and -1 where it has none;
    `next_of[order, id]` is the letter that follows in an order.
    """

    begin: int
    go: int
    lag_markers: Int
    letters: Int
    plain: Int
    keys: Int
    rare: Int
    echo_of: Int
    key_of: Int
    order_of: Int
    next_of: Int

    @classmethod
    def drawn(cls, seed: int = 0) -> "Language":
        """Roles scattered over the ids and random orders of the alphabet, by a seed."""
        generator = np.random.default_rng(seed)
        ids = generator.permutation(VOCAB)
        begin, go, lag_markers, letters, rare = np.split(ids, np.cumsum([1, 1, len(_LAGS), _LETTERS]))
        keys, echo_markers, plain = np.split(letters, np.cumsum([_KEYS, len(_ECHOES)]))
        echo_of, key_of = np.zeros(VOCAB, np.int64), np.full(VOCAB, -1)
        echo_of[echo_markers], key_of[keys] = _ECHOES, np.arange(_KEYS)
        order_of, next_of = generator.integers(0, _ORDERS, VOCAB), np.zeros((_ORDERS, VOCAB), np.int64)
        for order in next_of:
            ring = generator.permutation(letters)
            order[:] = generator.choice(letters, VOCAB)
            order[ring] = np.roll(ring, -1)
        return cls(
            int(begin[0]), int(go[0]), lag_markers, letters, plain, keys, rare, echo_of, key_of, order_of, next_of
        )  # fmt: skip

    def write(self, texts: int, length: int, generator: np.random.Generator) -> tuple[Int, Int]:
        """Texts [B, T], and for each where its rules begin to hold: at least so much of it makes a prompt."""
        rows = np.arange(texts)
        lag_numbers = generator.integers(0, len(_LAGS), texts)
        lags, values = np.array(_LAGS)[lag_numbers], self._values(texts, generator)
        header = self._header(lag_numbers, values, generator)
        starts = header.shape[1] + lags
        tokens = np.concatenate((header, np.zeros((texts, length - header.shape[1]), np.int64)), axis=1)
        for t in range(header.shape[1], length):
            last = tokens[:, t - 1]
            echoed = tokens[rows, t - 1 - self.echo_of[last]]
            stepped = self.next_of[self.order_of[last], tokens[rows, t - lags]]
            ruled = np.where(self.echo_of[last] > 0, echoed, stepped)
            ruled = np.where(self.key_of[last] >= 0, values[rows, self.key_of[last]], ruled)
            free = (generator.random(texts) < _NOISE) | (t < starts)
            tokens[:, t] = np.where(free, generator.choice(self.letters, texts), ruled)
        return tokens, starts

    def prompts(self, texts: int, generator: np.random.Generator) -> list[list[int]]:
        """Beginnings of texts, cut where the rules begin to hold or up to some tokens later."""
        tokens, starts = self.write(texts, 64, generator)
        ends = np.maximum(starts, _SHORTEST_PROMPT) + generator.integers(0, _SPARE_TOKENS, texts)
        return [text[:end].tolist() for text, end in zip(tokens, ends, strict=True)]

    def _values(self, texts: int, generator: np.random.Generator) -> Int:
        values = generator.choice(self.plain, (texts, _KEYS))
        rare = generator.random(values.shape) < _RARE_VALUES
        values[rare] = generator.choice(self.rare, rare.sum())
        return values

    def _header(self, lag_numbers: Int, values: Int, generator: np.random.Generator) -> Int:
        texts = len(lag_numbers)
        order = np.argsort(generator.random((texts, _KEYS)), axis=1)
        pairs = np.stack((self.keys[order], np.take_along_axis(values, order, 1)), axis=-1).reshape(texts, -1)
        begin, go = np.full((texts, 1), self.begin), np.full((texts, 1), self.go)
        return np.concatenate((begin, self.lag_markers[lag_numbers, None], pairs, go), axis=1)

"""A draft over whole texts, ready to branch below any of their rows: nothing in it depends on where rounds began.

Shapes: T rows of the texts, M base rows, N rows of a depth, K depths, H draft width, V draft vocabulary.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spectrace.engine.draft import DraftModel
from spectrace.replay.attend import BranchAttend, PrefixAttend
from spectrace.replay.configuration import ADVANCING, Steps
from spectrace.replay.features import Fed, tokens_and_positions
from spectrace.replay.inputs import Int

__all__ = ["Branches"]


class Branches:
    """The texts of a block; their base rows are those that a round may stand below, one for every start t >= 1.

    The base row of start t is position P + t - 2, with P the length of the prompt. `logits` [N, V] are those of the
    depth reached: first the base rows', in order.
    """

    def __init__(self, model: DraftModel, block: Sequence[Fed], steps: Steps = ADVANCING) -> None:
        self.model, self.block, self.steps = model, block, steps
        weight = next(model.parameters())
        self.device = weight.device
        borders = np.cumsum([0, *(len(one) for one in block)])
        counts = [len(one) - len(one.text.prompt) for one in block]
        first = [start + len(one.text.prompt) - 1 for start, one in zip(borders.tolist(), block, strict=False)]
        self.bases: Int = np.concatenate([at + np.arange(count) for at, count in zip(first, counts, strict=True)])
        self._borders: Int = np.cumsum([0, *counts])
        given = zip(*(tokens_and_positions(one) for one in block), strict=True)
        tokens, positions = (np.concatenate(parts) for parts in given)
        features = torch.cat([one.load() for one in block]).to(self.device, weight.dtype)
        prefix = PrefixAttend(borders, positions)
        self._branch = BranchAttend(prefix)
        hidden, state = model(self._there(tokens), model.fuse(features), self._there(positions), prefix)
        index = self._there(self.bases)
        self._state, self._positions = state[index], positions[self.bases]
        self._rows, self._depth = self.bases, 0
        self.logits: Tensor = self._answers(hidden[index])

    def _there(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def starts(self) -> list[tuple[int, range, slice]]:
        """Each request, the starts t that its base rows stand for, and where these are among all base rows."""
        spans = pairwise(self._borders.tolist())
        return [
            (one.request, range(1, end - begin + 1), slice(begin, end))
            for one, (begin, end) in zip(self.block, spans, strict=True)
        ]

    def windows(self, of_each: Sequence[npt.ArrayLike], depth: int) -> npt.NDArray[Any]:
        """Of each text's values, one per output token: t .. t + K - 1 for every start t [M, K], -1 past the end."""
        found = []
        for values, (_, starts, _) in zip(of_each, self.starts(), strict=True):
            padded = np.pad(np.asarray(values), (0, depth), constant_values=-1)
            found.append(np.lib.stride_tricks.sliding_window_view(padded, depth)[1 : len(starts) + 1])
        return np.concatenate(found)

    def forced(self, tokens_MK: Int) -> Iterator[Tensor]:
        """The logits [M, V] of K depths, one row below every base row, fed these tokens and never the draft's own."""
        for at in range(tokens_MK.shape[1]):
            if at:
                self.descend(np.maximum(tokens_MK[:, at - 1 : at], 0), np.zeros((len(tokens_MK), 1), np.int64))
            yield self.logits

    def descend(self, tokens_Mk: Int, above_Mk: Int) -> None:
        """One depth on: k rows below every base row, fed these tokens and the states of these rows one depth up."""
        bases, width = len(self.bases), len(self._rows) // len(self.bases)
        parents = (np.arange(bases)[:, None] * width + above_Mk).reshape(-1)
        topk = tokens_Mk.shape[1]
        above = self.bases[parents] if self._depth == 0 else parents
        self._positions = self._positions[parents] + self.steps.to(self._depth + 1)
        self._branch.enter(np.repeat(self.bases, topk), self._borders * topk, above, self._positions)
        tokens, state = self._there(tokens_Mk.reshape(-1)), self._state[self._there(parents)]
        hidden, self._state = self.model(tokens, state, self._there(self._positions), self._branch)
        self._rows, self._depth = parents, self._depth + 1
        self.logits = self._answers(hidden)

    def _answers(self, hidden_NH: Tensor) -> Tensor:
        """The logits [N, V]; beyond the end of the draft's context its first token is the best."""
        logits_NV = self.model.logits(hidden_NH)
        if self.steps.end is None:
            return logits_NV
        beyond = self._there(self._positions >= self.steps.end)
        first = torch.zeros_like(logits_NV[0]).index_fill(0, torch.tensor([0], device=self.device), 1.0)
        return torch.where(beyond[:, None], first, logits_NV)

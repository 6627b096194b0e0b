"""The tokens below a depth's rows: the best ones, or one drawn from the draft's distribution.

Shapes: N answering rows, R requests, D depths, k topk, V draft vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from spectrace.engine.plan import DraftGroup, DraftProbs
from spectrace.engine.sampling import Float, Purpose, Sampling, choose, softmax, uniforms
from spectrace.engine.tree import Candidates, top_candidates

__all__ = ["Picker"]


class Picker:
    """Picks for the requests of one step, depth after depth; drawn drafts are chains, so they have a row each."""

    def __init__(self, sampling: Sampling, topk: int, groups: Sequence[DraftGroup]) -> None:
        self.sampling, self.topk, self.groups = sampling, topk, groups
        self._drawn: list[Float] = []

    def pick(self, logits_NV: Tensor) -> Candidates:
        """The candidates below every row."""
        if not self.sampling.sampled_drafts:
            return top_candidates(logits_NV, self.topk)
        depth = len(self._drawn)
        self._drawn.append(softmax(logits_NV.float().cpu().numpy(), self.sampling.temperature))
        drawn = [self._draw(group, probs, depth) for group, probs in zip(self.groups, self._drawn[-1], strict=True)]
        ids_Nk = np.array(drawn, np.int64)[:, None]
        return Candidates(ids_Nk, np.log(np.take_along_axis(self._drawn[-1], ids_Nk, 1)))

    def probs(self, ids_V: Tensor) -> DraftProbs | None:
        """What the drafts were drawn from, None where they were chosen; `ids_V` are the tokens of the draft ids."""
        if not self._drawn:
            return None
        probs_RDV = torch.from_numpy(np.stack(self._drawn, axis=1))
        return DraftProbs(tuple(group.request for group in self.groups), probs_RDV, ids_V)

    def _draw(self, group: DraftGroup, probs_V: Float, depth: int) -> int:
        below = group.position + group.live - 1
        return choose(probs_V, uniforms(self.sampling, Purpose.DRAFT, group.request, below, depth + 1)[depth])

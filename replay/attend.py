"""Attention over whole requests: every depth-0 row at once, then every branch row of a depth at once.

A depth-0 row sees its request's rows up to itself; a deeper row sees the prefix of its base row, its ancestors and
itself. The prefix is computed once and shared by all rounds, which is what makes replay K forwards and not rounds x K.

Shapes: T rows of a request, M branch rows, N query heads, D key width, E value width.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from spectrace.engine.attention import attend_dense
from spectrace.replay.inputs import Int

__all__ = ["BranchAttend", "PrefixAttend"]


class PrefixAttend:
    """Depth 0: rows packed request by request, `ends` [requests + 1] their borders; causal inside each."""

    def __init__(self, borders: Int) -> None:
        self.spans = [slice(start, end) for start, end in pairwise(borders.tolist())]
        self.keys = self.values = torch.empty(0)

    def __call__(self, q_TND: Tensor, k_TMD: Tensor, v_TME: Tensor, *, scale: float) -> Tensor:
        self.keys, self.values = k_TMD, v_TME
        return torch.cat([_causal(q_TND[span], k_TMD[span], v_TME[span], scale) for span in self.spans])


class BranchAttend:
    """Deeper: `enter` a depth with its rows' places, then call once."""

    def __init__(self, prefix: PrefixAttend) -> None:
        self.prefix = prefix
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.spans: list[list[slice]] = []
        self.ancestors: list[Int] = []
        self.bases: Int = np.empty(0, np.int64)

    def enter(self, bases: Int, borders: Int, parents: Int) -> None:
        """The next depth's rows, packed by request: base row of each, borders by request, parent in the depth above."""
        self.bases = bases
        self.spans.append([slice(start, end) for start, end in pairwise(borders.tolist())])
        self.ancestors = [above[parents] for above in self.ancestors[:-1]]
        self.ancestors += [parents] * (len(self.spans) > 1) + [np.arange(len(bases))]

    def __call__(self, q_MND: Tensor, k_MMD: Tensor, v_MME: Tensor, *, scale: float) -> Tensor:
        self.keys.append(k_MMD)
        self.values.append(v_MME)
        mixed = [self._request(i, q_MND, scale) for i, span in enumerate(self.spans[-1]) if span.stop > span.start]
        return torch.cat(mixed) if mixed else v_MME.new_empty(q_MND.shape[0], q_MND.shape[1], v_MME.shape[-1])

    def _request(self, i: int, q_MND: Tensor, scale: float) -> Tensor:
        rows, prefix = self.spans[-1][i], self.prefix.spans[i]
        branches = [spans[i] for spans in self.spans]
        seen = [np.arange(prefix.start, prefix.stop) <= self.bases[rows, None]]
        for branch, ancestors in zip(branches, self.ancestors, strict=True):
            seen.append(np.arange(branch.start, branch.stop) == ancestors[rows, None])
        keys = torch.cat([self.prefix.keys[prefix], *_cut(self.keys, branches)])
        values = torch.cat([self.prefix.values[prefix], *_cut(self.values, branches)])
        mask = torch.from_numpy(np.concatenate(seen, axis=1)).to(keys.device)
        return attend_dense(q_MND[rows], keys, values, mask, scale=scale)


def _cut(tensors: Sequence[Tensor], spans: Sequence[slice]) -> list[Tensor]:
    return [tensor[span] for tensor, span in zip(tensors, spans, strict=True)]


def _causal(q_TND: Tensor, k_TMD: Tensor, v_TME: Tensor, scale: float) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q_TND, k_TMD, v_TME))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out[0].transpose(0, 1)

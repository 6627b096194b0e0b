"""Attention over whole requests: every depth-0 row at once, then every branch row of a depth at once.

A depth-0 row sees its request's rows up to itself; a deeper row sees the prefix of its base row, its ancestors and
itself. The prefix is computed once and shared by all rounds, which is what makes replay K forwards and not rounds x K.
A sliding window counts positions.

Shapes: T rows of a request, M branch rows, N query heads, D key width, E value width.
"""

from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from spectrace.engine.attention import Reach, attend_dense
from spectrace.replay.inputs import Int

__all__ = ["BranchAttend", "PrefixAttend"]

Bool: TypeAlias = npt.NDArray[np.bool_]


class PrefixAttend:
    """Depth 0: rows packed request by request, `borders` [requests + 1] between them; causal inside each."""

    def __init__(self, borders: Int, positions: Int) -> None:
        self.spans = [slice(start, end) for start, end in pairwise(borders.tolist())]
        self.positions = positions
        self.cached: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, q_TND: Tensor, k_TMD: Tensor, v_TME: Tensor, *, reach: Reach, scale: float) -> Tensor:
        self.cached[reach.layer] = k_TMD, v_TME
        return torch.cat([self._request(span, q_TND, k_TMD, v_TME, reach.at(0), scale) for span in self.spans])

    def _request(
        self, span: slice, q_TND: Tensor, k_TMD: Tensor, v_TME: Tensor, window: int | None, scale: float
    ) -> Tensor:
        q, k, v = q_TND[span], k_TMD[span], v_TME[span]
        if window is None:
            return _causal(q, k, v, scale)
        at = self.positions[span]
        seen = np.tri(len(at), dtype=np.bool_) & _within(at, at, window)
        return attend_dense(q, k, v, torch.from_numpy(seen).to(k.device), scale=scale)


class BranchAttend:
    """Deeper: `enter` a depth with its rows' places, then call once a layer."""

    def __init__(self, prefix: PrefixAttend) -> None:
        self.prefix = prefix
        self.cached: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.spans: list[list[slice]] = []
        self.positions: list[Int] = []
        self.ancestors: list[Int] = []
        self.bases: Int = np.empty(0, np.int64)

    def enter(self, bases: Int, borders: Int, parents: Int, positions: Int) -> None:
        """The next depth's rows, packed by request: base row of each, borders by request, parent in the depth above."""
        self.bases = bases
        self.spans.append([slice(start, end) for start, end in pairwise(borders.tolist())])
        self.positions.append(positions)
        self.ancestors = [above[parents] for above in self.ancestors[:-1]]
        self.ancestors += [parents] * (len(self.spans) > 1) + [np.arange(len(bases))]

    def __call__(self, q_MND: Tensor, k_MMD: Tensor, v_MME: Tensor, *, reach: Reach, scale: float) -> Tensor:
        self.cached.setdefault(reach.layer, []).append((k_MMD, v_MME))
        mixed = [self._request(i, q_MND, reach, scale) for i, span in enumerate(self.spans[-1]) if _any(span)]
        return torch.cat(mixed) if mixed else v_MME.new_empty(q_MND.shape[0], q_MND.shape[1], v_MME.shape[-1])

    def _request(self, i: int, q_MND: Tensor, reach: Reach, scale: float) -> Tensor:
        rows, spans = self.spans[-1][i], [self.prefix.spans[i], *(spans[i] for spans in self.spans)]
        cached = [self.prefix.cached[reach.layer], *self.cached[reach.layer]]
        seen, window = self._seen(i), reach.at(len(self.spans))
        if window is not None:
            stands = zip((self.prefix.positions, *self.positions), spans, strict=True)
            keys_at = np.concatenate([positions[span] for positions, span in stands])
            seen &= _within(self.positions[-1][rows], keys_at, window)
        keys = torch.cat([k[span] for (k, _), span in zip(cached, spans, strict=True)])
        values = torch.cat([v[span] for (_, v), span in zip(cached, spans, strict=True)])
        return attend_dense(q_MND[rows], keys, values, torch.from_numpy(seen).to(keys.device), scale=scale)

    def _seen(self, i: int) -> Bool:
        """Which rows of the prefix and of each depth's branches a request's new rows see, whatever the window."""
        rows, prefix = self.spans[-1][i], self.prefix.spans[i]
        seen = [np.arange(prefix.start, prefix.stop) <= self.bases[rows, None]]
        for spans, ancestors in zip(self.spans, self.ancestors, strict=True):
            seen.append(np.arange(spans[i].start, spans[i].stop) == ancestors[rows, None])
        return np.concatenate(seen, axis=1)


def _any(span: slice) -> bool:
    return bool(span.stop > span.start)


def _within(queries: Int, keys: Int, window: int) -> Bool:
    near: Bool = keys > queries[:, None] - window
    return near


def _causal(q_TND: Tensor, k_TMD: Tensor, v_TME: Tensor, scale: float) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q_TND, k_TMD, v_TME))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out[0].transpose(0, 1)

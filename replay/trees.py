"""The trees of a trace: the shape they were served in, and the same trees grown again from replayed logits."""

from collections.abc import Iterator

import numpy as np
import torch

from spectrace.engine.draft import DraftModel
from spectrace.engine.tree import Growth, Tree, TreeShape, top_candidates
from spectrace.replay.inputs import DepthRows, DraftInputs, Int
from spectrace.replay.replay import DepthOutput
from spectrace.tracer.trace import Trace

__all__ = ["Regrowth", "served_shape"]


def served_shape(trace: Trace) -> TreeShape:
    """The shape of the trees as the trace's rows have it; depth 0 where nothing was verified."""
    verified, received = trace.rows("verified"), trace.rows("received", depth=1, live=True, rank=0)
    nodes = int(verified["node"].max(initial=0)) + 1
    depth = int(trace.rows("requests")["depth_limit"].max(initial=0))
    topk = int(received["node"].max(initial=0)) + 1 if depth > 1 else max(nodes - 1, 1)
    return TreeShape(depth, topk, nodes)


class Regrowth:
    """Grows the trees of a block's rounds from what replay computed for the rows that were really drafted.

    Hand it every depth in turn. A round that lacks a row (a torn tail) is left out.
    """

    def __init__(self, model: DraftModel, inputs: DraftInputs, shape: TreeShape) -> None:
        self.model, self.inputs, self.shape = model, inputs, shape
        self.bases = _whole_rounds(inputs, shape)
        self.growth = Growth(shape, len(self.bases))
        self._rows: Int = np.empty(0, np.int64)

    def add(self, rows: DepthRows, output: DepthOutput) -> None:
        """Take one depth in."""
        if not len(self.bases):
            return
        mine = np.flatnonzero(np.isin(rows.bases[rows.answering], self.bases))
        above, self._rows = self._rows, rows.answering[mine]
        if output.depth:
            trees, width = (len(self.bases), self.shape.topk), len(above) // len(self.bases)
            within = np.searchsorted(above, rows.parents[self._rows]) % width
            self.growth.follow(rows.tokens[self._rows].reshape(trees), within.reshape(trees))
        below = top_candidates(output.logits[torch.from_numpy(mine).to(output.logits.device)], self.shape.topk)
        tokens = self.model.to_target(torch.from_numpy(below.ids).to(output.logits.device))
        self.growth.add(tokens.cpu().numpy(), below.log_probs)

    def trees(self) -> Iterator[tuple[int, int, Tree]]:
        """Of every round: the request, the position of the row that its tree stands below, and the tree."""
        zero = self.inputs.depths[0]
        if not len(self.bases):
            return
        for base, tree in zip(self.bases, self.growth.trees(), strict=True):
            yield int(zero.received["request"][base]), int(zero.positions[base]), tree


def _whole_rounds(inputs: DraftInputs, shape: TreeShape) -> Int:
    """The depth-0 rows below which every row of a tree's depths is there."""
    zero, bases = inputs.depths[0], inputs.depths[0].answering
    if len(inputs.depths) < shape.depth:
        return bases[:0]
    for rows in inputs.depths[1:]:
        counts = np.bincount(rows.bases[rows.answering], minlength=len(zero.tokens))
        bases = bases[counts[bases] == shape.topk]
    return bases

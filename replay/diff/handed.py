"""Rows that both targets emitted bit for bit alike and one draft received otherwise: no rounding does that.

Between a target and its draft rows are copied, not computed, so that these differences count however small they are.
"""

import numpy as np

from spectrace.replay.diff.placing import Side, columns
from spectrace.replay.diff.tensors import Group
from spectrace.replay.inputs import places
from spectrace.replay.pairing import Bool, pair_rows
from spectrace.tracer.rowset import Rows

__all__ = ["handed_otherwise"]


def handed_otherwise(group: Group, a: Side, b: Side) -> Bool:
    """Of slots that drafts received, which pairs [N, S] differ though what was emitted for them is the same bits."""
    none = np.zeros(group.equal.shape, np.bool_)
    if group.sites[0].family != "received" or group.sites[0].what != "slot":
        return none
    ours, theirs = _emitted(a, group.pairs.a), _emitted(b, group.pairs.b)
    if ours is None or theirs is None or ours.shape != none.shape or theirs.shape != none.shape:
        return none
    return np.asarray(~group.equal & (ours == theirs) & (ours != 0))


def _emitted(side: Side, received: Rows) -> np.ndarray | None:
    """The hashes of the row emitted for each of these, 0 where that is not known; None where rows are ragged."""
    pairing = pair_rows(side.trace)
    hashes = pairing.emitted["hashes"]
    if hashes.ndim != 2 or not len(hashes):
        return None
    at = places(*(columns(rows, "request", "pass", "node") for rows in (pairing.received, received)))
    source = np.where(at >= 0, pairing.sources[at], -1)
    return np.where((source >= 0)[:, None], hashes[source], 0)

"""Verification: which drafted nodes are accepted, and the token that the target adds after the last of them.

Greedy verification follows the target's own choices. Sampled verification is speculative sampling (Leviathan et al.,
arXiv 2211.17192; siblings one after the other as in SpecInfer, arXiv 2305.09781): a child is accepted with probability
min(1, r(x)/q(x)), where r is the target's distribution less what its rejected siblings took; a child that was chosen
rather than drawn has q(x) = 1. The emitted tokens then follow the target's distribution whatever the draft is.

Shapes: N nodes of a tree (node 0 is its root), V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from spectrace.engine.sampling import Float, choose

__all__ = ["RIGHT", "Draws", "SampledRule", "Verdict", "verify_greedy", "verify_sampled"]


@dataclass(frozen=True, slots=True)
class Draws:
    """What a sampled verdict rests on, per node; NaN where it does not apply.

    The target's and the draft's probability of the node's token, `p` and `q`; the target's probability of the token
    emitted after it; and the draw that decided it, for the root the draw of the bonus token.
    """

    p: tuple[float, ...]
    q: tuple[float, ...]
    p_emitted: tuple[float, ...]
    uniform: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Accepted nodes from the root on (the root always is), and the bonus token that the target adds after the last."""

    path: tuple[int, ...]
    bonus: int
    draws: Draws | None = None


@dataclass(frozen=True, slots=True)
class SampledRule:
    """How a child is accepted: `share` of the right probability, and whether what rejection leaves is renormalised.

    Anything but the defaults is wrong, and there to be found.
    """

    share: float = 1.0
    renormalise: bool = True


RIGHT: Final = SampledRule()


def verify_greedy(parents: Sequence[int], tokens: Sequence[int], target_tokens: Sequence[int]) -> Verdict:
    """Walk down from node 0: a child is accepted when its token is the target's choice after its parent."""
    children: dict[tuple[int, int], int] = {}
    for node, (parent, token) in enumerate(zip(parents, tokens, strict=True)):
        children.setdefault((parent, token), node)
    path = [0]
    while (child := children.get((path[-1], target_tokens[path[-1]]))) is not None:
        path.append(child)
    return Verdict(tuple(path), target_tokens[path[-1]])


def verify_sampled(
    parents: Sequence[int],
    tokens: Sequence[int],
    p_NV: Float,
    draws_N: Float,
    *,
    q_NV: Float | None = None,
    rule: SampledRule = RIGHT,
) -> Verdict:
    """Walk down from node 0, deciding each child by its draw; draw 0 is for the bonus token.

    `q_NV` is what each node's token was drawn from (row 0 unused), None where drafts were chosen.
    """
    p, q, p_emitted, used = (np.full(len(tokens), np.nan) for _ in range(4))
    path, left_V = [0], p_NV[0]
    for node in range(1, len(tokens)):  # children come after their parents
        if parents[node] != path[-1]:
            continue
        token, q_V = tokens[node], None if q_NV is None else q_NV[node]
        p[node], q[node], used[node] = p_NV[path[-1], token], 1.0 if q_V is None else q_V[token], draws_N[node]
        if used[node] * q[node] < rule.share * left_V[token]:
            p_emitted[path[-1]] = p[node]
            path.append(node)
            left_V = p_NV[node]
        else:
            left_V = _without(left_V, token, q_V, rule)
    used[0] = draws_N[0]
    bonus = choose(left_V, float(draws_N[0]), total=None if rule.renormalise else 1.0)
    p_emitted[path[-1]] = p_NV[path[-1], bonus]
    return Verdict(tuple(path), bonus, Draws(*(tuple(x.tolist()) for x in (p, q, p_emitted, used))))


def _without(left_V: Float, token: int, q_V: Float | None, rule: SampledRule) -> Float:
    """What a rejected child leaves of the target's distribution: max(r - q, 0), its sum made 1 again."""
    if q_V is None:
        rest_V = left_V.copy()
        rest_V[token] = 0.0
    else:
        rest_V = np.maximum(left_V - q_V, 0.0)
    if not rule.renormalise:
        return rest_V
    total = rest_V.sum()
    return rest_V / total if total > 0 else left_V  # where p equals q, rounding alone can reject

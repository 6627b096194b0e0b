"""Deciding a whole pass: every group of it by greedy or by sampled verification.

Shapes: T rows of a pass, N of one group, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from torch import Tensor

from spectrace.engine.fault import Fault, Verifying, broken
from spectrace.engine.plan import Decision, DraftProbs, TargetGroup
from spectrace.engine.sampling import Float, Purpose, Sampling, choose, softmax, uniforms
from spectrace.engine.verify import RIGHT, verify_greedy, verify_sampled
from spectrace.tracer.rows import Phase

__all__ = ["Greedy", "Sampled", "Verifier"]


class Verifier(Protocol):
    """A decision per group, given the logits [T, V] of the pass and the target's best token after each row [T]."""

    def decide(
        self, groups: Sequence[TargetGroup], logits_TV: Tensor, targets: Sequence[int], probs: DraftProbs | None
    ) -> list[Decision]: ...


class Greedy:
    """The target's own choices alone count."""

    def decide(
        self, groups: Sequence[TargetGroup], logits_TV: Tensor, targets: Sequence[int], probs: DraftProbs | None
    ) -> list[Decision]:
        """See `Verifier`."""
        return [self._one(group, tuple(targets[rows])) for group, rows in _spans(groups)]

    def _one(self, group: TargetGroup, own: tuple[int, ...]) -> Decision:
        if group.phase is Phase.PREFILL:
            return Decision(group.request, own, tuple(range(len(own))), own[-1] if group.answers else None)
        verdict = verify_greedy(group.parents, group.tokens, own)
        return Decision(group.request, own, verdict.path, verdict.bonus)


class Sampled:
    """Speculative sampling at a temperature; `faults` may bend the rule."""

    def __init__(self, sampling: Sampling, faults: Sequence[Fault] = ()) -> None:
        self.sampling, self.broken, self.rule = sampling, broken(faults, Verifying), RIGHT
        for fault in self.broken:
            self.rule = fault.rule(self.rule)

    def decide(
        self, groups: Sequence[TargetGroup], logits_TV: Tensor, targets: Sequence[int], probs: DraftProbs | None
    ) -> list[Decision]:
        """See `Verifier`."""
        for fault in self.broken:
            probs = probs and replace(probs, probs=fault.draft_probs(probs.probs))
        return [self._one(group, logits_TV[rows], tuple(targets[rows]), probs) for group, rows in _spans(groups)]

    def _one(self, group: TargetGroup, logits_NV: Tensor, own: tuple[int, ...], probs: DraftProbs | None) -> Decision:
        prompt = group.phase is Phase.PREFILL
        root = group.position + (len(own) - 1 if prompt else 0)
        draws_N = uniforms(self.sampling, Purpose.VERIFY, group.request, root, len(own))
        if prompt:
            bonus = choose(self._softmax(logits_NV[-1]), draws_N[0]) if group.answers else None
            after = own if bonus is None else (*own[:-1], bonus)
            return Decision(group.request, after, tuple(range(len(own))), bonus)
        p_NV = self._softmax(logits_NV)
        q_NV = None if probs is None else _drawn_from(probs, group, p_NV.shape)
        verdict = verify_sampled(group.parents, group.tokens, p_NV, draws_N, q_NV=q_NV, rule=self.rule)
        tokens = list(own)
        emitted = (*(group.tokens[node] for node in verdict.path[1:]), verdict.bonus)
        for node, token in zip(verdict.path, emitted, strict=True):
            tokens[node] = token
        return Decision(group.request, tuple(tokens), verdict.path, verdict.bonus, verdict.draws)

    def _softmax(self, logits: Tensor) -> Float:
        return softmax(logits.float().cpu().numpy(), self.sampling.temperature)


def _spans(groups: Sequence[TargetGroup]) -> list[tuple[TargetGroup, slice]]:
    """Each group with its rows of the pass."""
    ends = np.cumsum([len(group.tokens) for group in groups]).tolist()
    return [(group, slice(end - len(group.tokens), end)) for group, end in zip(groups, ends, strict=True)]


def _drawn_from(probs: DraftProbs, group: TargetGroup, shape: tuple[int, ...]) -> Float:
    """The draft's distribution over the target's vocabulary for every node of a chain [N, V]; row 0 is nobody's."""
    q_NV = np.zeros(shape)
    drawn_DV = probs.probs[probs.requests.index(group.request)].numpy()
    np.add.at(q_NV[1:].T, probs.ids.numpy(), drawn_DV[: len(q_NV) - 1].T)  # several ids may stand for one token
    return q_NV

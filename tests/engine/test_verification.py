"""What sampled verification emits follows the target's distribution, whatever the draft; a wrong rule is found out.

A toy language of four words over which the target and the draft are tables. Every trial is one round through the
verifier that a deployment runs; tokens past the round's own are drawn from the target, so that the joint of the K + 1
tokens after the root is the target's exactly when the round's part of it is right.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
import torch

from spectrace.engine.faults import find_faults
from spectrace.engine.picking import Picker
from spectrace.engine.plan import DraftGroup, DraftProbs, TargetGroup
from spectrace.engine.sampling import Sampling, softmax
from spectrace.engine.tree import Growth, TreeShape
from spectrace.engine.verification import Sampled
from spectrace.tracer.rows import Phase

VOCAB, DEPTH, TRIALS, AT_ONCE = 4, 3, 100_000, 1000
TEMPERATURE = 0.7
Logits = Callable[[tuple[int, ...]], npt.NDArray[np.float32]]
CHAIN = TreeShape(DEPTH, 1, DEPTH + 1)


def table(seed: int) -> Logits:
    """Logits [V] after a path of tokens."""

    @cache
    def logits(path: tuple[int, ...]) -> npt.NDArray[np.float32]:
        return np.random.default_rng([seed, *path]).normal(0, 1.5, VOCAB).astype(np.float32)

    return logits


TARGET, DRAFT = table(1), table(2)


@cache
def exact() -> npt.NDArray[np.float64]:
    """The target's joint distribution of the DEPTH + 1 tokens after the root."""
    joint = np.zeros((VOCAB,) * (DEPTH + 1))
    for path in np.ndindex(joint.shape):
        joint[path] = np.prod([softmax(TARGET(path[:i]), TEMPERATURE)[path[i]] for i in range(DEPTH + 1)])
    return joint


def p_value(counts: npt.NDArray[np.int64]) -> float:
    """Of Pearson's chi-square test against the exact joint (cells of under ten expected draws taken together)."""
    expected = exact().reshape(-1) * counts.sum()
    small = expected < 10
    seen = np.append(counts.reshape(-1)[~small], counts.reshape(-1)[small].sum())
    wanted = np.append(expected[~small], expected[small].sum())
    statistic = ((seen - wanted) ** 2 / np.maximum(wanted, 1e-12)).sum()
    degrees = torch.tensor((len(seen) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, torch.tensor(statistic / 2, dtype=torch.float64)))


def rounds(
    sampling: Sampling, shape: TreeShape, first: int
) -> tuple[list[TargetGroup], torch.Tensor, DraftProbs | None]:
    """A batch of drafted trees as target groups, the target's logits for their nodes, what drafts were drawn from."""
    groups = [DraftGroup(first + i, 0, 0, 0, i, (0,), 1, True) for i in range(AT_ONCE)]
    picker, growth = Picker(sampling, shape.topk, groups), Growth(shape, AT_ONCE)
    rows: list[list[tuple[int, ...]]] = [[()] for _ in groups]
    while True:
        below = picker.pick(torch.from_numpy(np.stack([DRAFT(path) for paths in rows for path in paths])))
        tokens, above = growth.add(below.ids, below.log_probs)
        if growth.done:
            break
        rows = [
            [(*rows[tree][at], int(token)) for at, token in zip(above[tree], tokens[tree], strict=True)]
            for tree in range(AT_ONCE)
        ]
    verified, logits = [], []
    for group, tree in zip(groups, growth.trees(), strict=True):
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            paths.append((*paths[parent + 1], token))
        parents = (-1, *(parent + 1 for parent in tree.parents))
        verified.append(TargetGroup(group.request, 1, Phase.VERIFY, 0, 5, (0, *tree.tokens), parents, True))
        logits += [TARGET(path) for path in paths]
    return verified, torch.from_numpy(np.stack(logits)), picker.probs(torch.arange(VOCAB))


def drawn(sampling: Sampling, shape: TreeShape, trials: int, fault: str | None = None) -> npt.NDArray[np.int64]:
    """How often each sequence of DEPTH + 1 tokens came out."""
    verifier = Sampled(sampling, find_faults([fault] if fault else []))
    counts = np.zeros((VOCAB,) * (DEPTH + 1), np.int64)
    rest = np.random.default_rng(9)
    for first in range(0, trials, AT_ONCE):
        groups, logits, probs = rounds(sampling, shape, first)
        decisions = verifier.decide(groups, logits, logits.argmax(-1).tolist(), probs)
        for group, decision in zip(groups, decisions, strict=True):
            assert decision.bonus is not None
            text = (*(group.tokens[node] for node in decision.path[1:]), decision.bonus)
            while len(text) < DEPTH + 1:
                text = (*text, int(rest.choice(VOCAB, p=softmax(TARGET(text), TEMPERATURE))))
            counts[text] += 1
    return counts


CASES = {
    "chosen drafts": (Sampling(TEMPERATURE, seed=1), CHAIN),
    "drawn drafts": (Sampling(TEMPERATURE, seed=2, sampled_drafts=True), CHAIN),
    "a tree": (Sampling(TEMPERATURE, seed=3), TreeShape(DEPTH, 2, 7)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_round_emits_what_the_target_alone_would(case: str) -> None:
    counts = drawn(*CASES[case], TRIALS)
    assert counts.sum() == TRIALS
    assert p_value(counts) > 1e-3


@pytest.mark.parametrize("fault", ["S1", "S1:residual", "S2"])
def test_a_wrong_rule_is_found_out(fault: str) -> None:
    """With a fifth of the trials."""
    assert p_value(drawn(*CASES["drawn drafts"], TRIALS // 5, fault)) < 1e-6


def test_the_verdict_rests_on_what_it_says() -> None:
    """Accept decisions follow from the recorded p, q and draws; the path's probabilities are those of its tokens."""
    sampling, shape = CASES["drawn drafts"]
    groups, logits, probs = rounds(sampling, shape, 0)
    p = softmax(logits.numpy(), TEMPERATURE).reshape(AT_ONCE, DEPTH + 1, VOCAB)
    decisions = Sampled(sampling).decide(groups, logits, logits.argmax(-1).tolist(), probs)
    tested = 0
    for i, (group, decision) in enumerate(zip(groups, decisions, strict=True)):
        draws, reached = decision.draws, len(decision.path)
        assert draws and probs
        for node in range(1, DEPTH + 1):
            if node > reached:
                assert np.isnan([draws.p[node], draws.q[node], draws.uniform[node]]).all()
                continue
            token = group.tokens[node]
            assert draws.p[node] == p[i, node - 1, token]
            assert draws.q[node] == float(probs.probs[i, node - 1, token])
            assert (draws.uniform[node] * draws.q[node] < draws.p[node]) == (node in decision.path)
            tested += 1
        emitted = [*(group.tokens[node] for node in decision.path[1:]), decision.bonus]
        assert [draws.p_emitted[node] for node in decision.path] == [p[i, n, t] for n, t in enumerate(emitted)]
        assert decision.target_tokens[:reached] == tuple(emitted)
    assert tested > AT_ONCE


def test_the_answer_to_a_prompt_is_drawn_too() -> None:
    sampling, counts = Sampling(TEMPERATURE, seed=4), np.zeros(VOCAB)
    groups = [TargetGroup(i, 0, Phase.PREFILL, -1, 0, (1, 2), (-1, 0), True) for i in range(20_000)]
    logits = torch.from_numpy(np.stack([TARGET((3,)), TARGET(())])).repeat(len(groups), 1)
    for decision in Sampled(sampling).decide(groups, logits, logits.argmax(-1).tolist(), None):
        assert decision.bonus is not None and decision.path == (0, 1)
        counts[decision.bonus] += 1
    expected = softmax(TARGET(()), TEMPERATURE) * len(groups)
    assert ((counts - expected) ** 2 / expected).sum() < 21  # 3 degrees of freedom: p = 1e-4


def test_ids_that_stand_for_one_token_count_together() -> None:
    probs = DraftProbs((0,), torch.tensor([[[0.25, 0.25, 0.5]]]), torch.tensor([2, 2, 3]))
    group = TargetGroup(0, 1, Phase.VERIFY, 0, 5, (1, 2), (-1, 0), True)
    logits = torch.zeros(2, VOCAB)
    [decision] = Sampled(Sampling(1.0)).decide([group], logits, [0, 0], probs)
    assert decision.draws and decision.draws.q[1] == 0.5

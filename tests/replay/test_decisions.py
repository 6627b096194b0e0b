"""Verification is decided again from what is recorded, and only a decision that is not the rule's is a finding."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from spectrace.engine.sampling import Float
from spectrace.engine.verify import RIGHT, Draws, SampledRule, Verdict, verify_greedy, verify_sampled
from spectrace.replay.decisions import decisions
from spectrace.tracer.keys import Keys
from spectrace.tracer.manifest import create_trace, seal_trace
from spectrace.tracer.recorder import Recorder
from spectrace.tracer.rows import Phase
from spectrace.tracer.trace import Trace

VOCAB, ROUNDS = 6, 200
CHAIN, TREE = (-1, 0, 1, 2), (-1, 0, 0, 1, 2)


@dataclass(frozen=True)
class Round:
    """One round's tree and what was decided of it."""

    parents: tuple[int, ...]
    tokens: tuple[int, ...]
    targets: tuple[int, ...]
    verdict: Verdict


def _trace(folder: Path, rounds: list[Round], *, temperature: float, cut: bool = False) -> Trace:
    create_trace(folder, {})
    recorder = Recorder(folder, role="scheduler", strict=True)
    for number, one in enumerate(rounds):
        nodes = range(len(one.tokens))
        draws = one.verdict.draws
        told = {name: list(getattr(draws, name)) for name in Draws.__slots__} if draws else {}
        recorder.verified(
            Keys(request=[0] * len(nodes), pass_=number, node=nodes, position=nodes, phase=Phase.VERIFY, round=number),
            parent=list(one.parents),
            token=list(one.tokens),
            target_token=list(one.targets),
            accepted=[node in one.verdict.path for node in nodes],
            cut=cut,
            source_row=list(nodes),
            **told,
        )
    recorder.requests(
        Keys(request=[0], pass_=0, node=0, position=0), id=["0"], prompt_tokens=[[1]], output_tokens=[[1]],
        cached_prefix=0, temperature=temperature, finish_reason="length", rounds=len(rounds), correct_drafts=0,
        depth_limit=3,
    )  # fmt: skip
    recorder.close()
    seal_trace(folder)
    return Trace.open(folder)


def _distributions(random: np.random.Generator, count: int) -> Float:
    return random.dirichlet([0.7] * VOCAB, count)


def _sampled(parents: tuple[int, ...], *, drawn: bool, rule: SampledRule = RIGHT, blind: bool = False) -> list[Round]:
    """Rounds at a temperature: drafts drawn or chosen; `blind` hands verification draft probabilities of 0."""
    random, found = np.random.default_rng(3), []
    for _ in range(ROUNDS):
        p, q = _distributions(random, len(parents)), _distributions(random, len(parents))
        tokens = _drafts(random, parents, q if drawn else p)
        given = None if not drawn else np.zeros_like(q) if blind else q
        verdict = verify_sampled(parents, tokens, p, random.random(len(parents)), q_NV=given, rule=rule)
        found.append(Round(parents, tokens, tokens, verdict))
    return found


def _drafts(random: np.random.Generator, parents: tuple[int, ...], weights: Float) -> tuple[int, ...]:
    """Siblings are different tokens."""
    tokens = [int(random.choice(VOCAB, p=row)) for row in weights]
    for node, parent in enumerate(parents):
        taken = {tokens[other] for other in range(node) if parents[other] == parent}
        tokens[node] = next(t for t in (tokens[node], *range(VOCAB)) if t not in taken)
    return tuple(tokens)


def _greedy(parents: tuple[int, ...]) -> list[Round]:
    random, found = np.random.default_rng(5), []
    for _ in range(ROUNDS):
        tokens = tuple(random.integers(0, 3, len(parents)).tolist())
        targets = tuple(random.integers(0, 3, len(parents)).tolist())
        found.append(Round(parents, tokens, targets, verify_greedy(parents, tokens, targets)))
    return found


@pytest.mark.parametrize("parents", [CHAIN, TREE])
def test_verification_by_the_rule_leaves_nothing_to_find(tmp_path: Path, parents: tuple[int, ...]) -> None:
    for name, rounds in (("choice", _greedy(parents)), ("draw", _sampled(parents, drawn=False))):
        found = decisions(_trace(tmp_path / name, rounds, temperature=float(name == "draw")))
        assert found.compared > ROUNDS and not found.findings


def test_drawn_drafts_are_decided_again_by_both_probabilities(tmp_path: Path) -> None:
    found = decisions(_trace(tmp_path / "trace", _sampled(CHAIN, drawn=True), temperature=1.0))
    assert found.compared > ROUNDS and not found.findings


@pytest.mark.parametrize("drawn", [False, True])
def test_a_stricter_rule_is_named_with_its_factor(tmp_path: Path, drawn: bool) -> None:
    rounds = _sampled(CHAIN, drawn=drawn, rule=SampledRule(share=0.8))
    (finding,) = decisions(_trace(tmp_path / "trace", rounds, temperature=1.0)).findings
    assert finding.fault == "S1" and "refuse" in finding.evidence[0]
    low, high = (float(word) for word in finding.evidence[1].split() if word[0].isdigit())
    assert low <= 0.8 <= high and high - low < 0.1


def test_what_refused_siblings_leave_has_to_be_made_whole_again(tmp_path: Path) -> None:
    rounds = _sampled(TREE, drawn=False, rule=SampledRule(renormalise=False))
    assert [one.fault for one in decisions(_trace(tmp_path / "trace", rounds, temperature=1.0)).findings] == ["S1"]


def test_draft_probabilities_of_nothing_are_named(tmp_path: Path) -> None:
    rounds = _sampled(CHAIN, drawn=True, blind=True)
    (finding,) = decisions(_trace(tmp_path / "trace", rounds, temperature=1.0)).findings
    assert finding.fault == "S2"


def test_drafts_accepted_whatever_the_target_says_are_named(tmp_path: Path) -> None:
    rounds = [Round(one.parents, one.tokens, one.targets, Verdict((0, 1, 2, 3), 0)) for one in _greedy(CHAIN)]
    (finding,) = decisions(_trace(tmp_path / "trace", rounds, temperature=0.0)).findings
    assert finding.fault == "S3"


@pytest.mark.parametrize(("temperature", "cut"), [(1.0, False), (0.0, True)])
def test_nothing_is_decided_again_without_what_it_rested_on(tmp_path: Path, temperature: float, cut: bool) -> None:
    rounds = [Round(one.parents, one.tokens, one.targets, Verdict((0, 1, 2, 3), 0)) for one in _greedy(CHAIN)]
    found = decisions(_trace(tmp_path / "trace", rounds, temperature=temperature, cut=cut))
    assert (found.compared, found.findings) == (0, ())

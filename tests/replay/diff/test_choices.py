"""A flip is a tie only where rounding moves logits as much; divergences are never overstated."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from spectrace.replay.diff.alignment import PairedRows, align
from spectrace.replay.diff.choices import find_flips, find_likeness, find_splits
from spectrace.replay.diff.floor import Noise
from spectrace.replay.diff.placing import read_side
from spectrace.tracer import Keys, Recorder, Trace, create_trace, seal_trace
from spectrace.tracer.rows import Level

NOISE = Noise(largest=1e-3, median=1e-3, factor=3)
KEPT = 4


def trace(folder: Path, logits: torch.Tensor, tokens: list[int]) -> Trace:
    """One request: a prompt of one token, then tokens, with the logits of each row."""
    create_trace(folder, {"dtype": "float32"})
    text = [1, *tokens]
    with Recorder(folder, role="target", level=Level.FULL, strict=True) as recorder:
        best = logits.topk(KEPT)
        recorder.emitted(
            Keys(request=0, pass_=0, position=np.arange(len(logits))),
            token=text[: len(logits)],
            slots=torch.ones(len(logits), 2),
            target_token=text[1 : len(logits) + 1],
            logits=(best.indices.int(), best.values),
            logsumexp=logits.logsumexp(-1),
        )
        recorder.requests(
            Keys(request=0, pass_=0, position=0), id=["x"], prompt_tokens=[text[:1]], output_tokens=[text[1:]],
            cached_prefix=0, temperature=0.0, finish_reason=["length"], rounds=0, correct_drafts=0, depth_limit=0,
        )  # fmt: skip
    seal_trace(folder)
    return Trace.open(folder)


def pairs(a: Trace, b: Trace) -> PairedRows:
    return align(read_side(a), read_side(b)).families["emitted"]


def logits_of(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows)


@pytest.mark.parametrize(("gap", "tie"), [(1e-3, True), (0.2, False)])
def test_a_split_is_a_tie_where_rounding_moves_logits_as_much(tmp_path: Path, gap: float, tie: bool) -> None:
    base = [0.0, 1.0, 2.0, 0.5, -1.0, 0.3]
    high, low = [*base[:3], 5.0, 5.0 - gap, 0.0], [*base[:3], 5.0 - gap, 5.0, 0.0]
    a = trace(tmp_path / "a", logits_of(base, high, base), [2, 3, 2])
    b = trace(tmp_path / "b", logits_of(base, low, base), [2, 4, 2])
    [split] = find_splits(align(read_side(a), read_side(b)), NOISE)
    assert (split.position, split.token_a, split.token_b, split.tie) == (2, 3, 4, tie)
    assert split.margin == pytest.approx(2 * gap / 5, rel=1e-3)
    flips = find_flips(pairs(a, b), None, NOISE)
    assert (flips.rows, flips.flips, flips.ties, flips.open) == (2, 1, int(tie), 0)
    assert find_flips(pairs(a, b), None, None).open == 1


def test_equal_rows_are_alike_and_not_read(tmp_path: Path) -> None:
    logits = torch.randn(3, 9)
    tokens = logits.argmax(-1).tolist()
    a, b = trace(tmp_path / "a", logits, tokens), trace(tmp_path / "b", logits, tokens)
    found = find_likeness(pairs(a, b), None)
    assert found
    assert (found.same_best, found.overlap, found.kl, found.total_variation, found.shared) == (1, 1, 0, 0, 1)


def test_divergence_is_never_more_than_that_of_the_whole_distributions(tmp_path: Path) -> None:
    torch.manual_seed(1)
    for at in range(20):
        one = torch.randn(4, 12) * (at % 5 + 0.5)
        other = one + torch.randn(4, 12) * 0.3 * (at % 4)
        tokens = one.argmax(-1).tolist()
        a, b = trace(tmp_path / f"a{at}", one, tokens), trace(tmp_path / f"b{at}", other, tokens)
        found = find_likeness(pairs(a, b), None)
        assert found
        p, q = one.double().softmax(-1), other.double().softmax(-1)
        rows = found.rows
        assert found.shared >= float(torch.minimum(p, q).sum(-1)[:rows].mean()) - 1e-6
        assert found.kl <= float((p * (p.log() - q.log())).sum(-1)[:rows].mean()) + 1e-6
        assert found.total_variation == pytest.approx(1 - found.shared, abs=1e-6)

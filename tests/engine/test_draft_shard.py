"""Packed, chunked, interleaved and rolled back, the draft's rows are those of one causal forward over each request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from spectrace.engine.attention import KeyValueCache, PackedAttend
from spectrace.engine.draft import DraftModel
from spectrace.engine.draft_shard import DraftShard
from spectrace.engine.plan import CaptureHiddenMode, DraftGroup, DraftStep, DraftTree, LogitsProcessorOutput
from spectrace.engine.recording import Recording
from spectrace.tracer.manifest import create_trace
from spectrace.tracer.rows import Level
from spectrace.tracer.trace import Trace


@dataclass
class Text:
    """A request's text, what a target would have handed over for it, and where its draft is asked to draft."""

    tokens: list[int]
    features: Tensor
    done: int = 0
    asked: dict[int, DraftTree] = field(default_factory=dict)


def serve(shard: DraftShard, *, seed: int) -> dict[int, Text]:
    """Texts that join at random steps and grow by random pieces, some of which ask for a chain of random depth."""
    random = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    texts: dict[int, Text] = {}
    finished: list[int] = []
    released: list[int] = []
    for step in range(25):
        if len(texts) < 8 and random.random() < 0.5:
            length = int(random.integers(3, 20))
            tokens = random.integers(0, 96, length + 1).tolist()
            texts[len(texts)] = Text(tokens, torch.randn(length, 144, generator=generator))
        groups: list[DraftGroup] = []
        handed: list[Tensor] = []
        for number, text in texts.items():
            left = len(text.features) - text.done
            if not left or random.random() < 0.3:
                continue
            count, depth = int(random.integers(1, left + 1)), int(random.integers(0, 4))
            piece = slice(text.done, text.done + count)
            others = int(random.integers(0, 2))  # rows that nobody asks for, as of a request that has finished
            source = sum(len(rows) for rows in handed) + others
            handed.append(torch.randn(others, 144))
            handed.append(text.features[piece])
            tokens = tuple(text.tokens[piece.start + 1 : piece.stop + 1])
            groups.append(DraftGroup(number, step, step, text.done, source, tokens, depth))
            text.done += count
        if not groups:
            continue
        gone = tuple(number for number in finished if number not in released)
        output = LogitsProcessorOutput(torch.cat(handed), CaptureHiddenMode.FULL)
        _, trees = shard.step(output, DraftStep(step, tuple(groups), gone))
        released += gone
        assert [tree.request for tree in trees] == [group.request for group in groups if group.depth]
        for tree in trees:
            group = next(group for group in groups if group.request == tree.request)
            assert (len(tree.tokens), tree.parents) == (group.depth, tuple(range(-1, group.depth - 1)))
            texts[tree.request].asked[group.position + len(group.tokens) - 1] = tree
        finished = [number for number, text in texts.items() if text.done == len(text.features)]
    return texts


def close(found: Tensor, expected: Tensor) -> bool:
    """Largest error of a row over its largest value."""
    return bool(((found - expected).abs().amax(-1) / expected.abs().amax(-1)).max() <= 1e-5)


@torch.inference_mode()
def expected_rows(draft: DraftModel, text: Text) -> dict[tuple[int, int], Tensor]:
    """Hidden rows by (position of the depth-0 row above, depth): one causal forward, then every branch on its own."""
    rows = text.done
    tokens, positions = torch.tensor(text.tokens[1 : rows + 1]), torch.arange(rows)
    mask = torch.ones(rows, rows, dtype=torch.bool).tril()
    hidden, _ = draft(tokens, draft.fuse(text.features[:rows]), positions, PackedAttend(KeyValueCache(), mask))
    found = {(row, 0): hidden[row] for row in range(rows)}
    for root, tree in text.asked.items():
        cache = KeyValueCache()
        seen = root + 1
        attend: Any = PackedAttend(cache, mask[:seen, :seen])
        _, above = draft(tokens[:seen], draft.fuse(text.features[:seen]), positions[:seen], attend)
        above = above[-1:]
        for depth, token in enumerate(tree.tokens[:-1], 1):
            attend = PackedAttend(cache, torch.ones(1, len(cache) + 1, dtype=torch.bool))
            out, above = draft(torch.tensor([token]), above, torch.tensor([root + depth]), attend)
            found[root, depth] = out[0]
    return found


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("attention", ["gqa", "mla"])
def test_packed_rows_are_those_of_one_causal_forward(
    attention: str, seed: int, target_of: Callable[..., Path], draft_of: Callable[..., Path], tmp_path: Path
) -> None:
    """Eight requests in pieces, chains of unequal depth below some of them, caches compacted underway."""
    shard = DraftShard(draft_of("llama", attention), target_of("llama"), dtype=torch.float32, threads=1)
    create_trace(tmp_path / "trace", {})
    shard.serve(Recording(tmp_path / "trace", Level.FULL, {}))
    texts = serve(shard, seed=seed)
    assert shard.finish() is None
    drafted = Trace.open(tmp_path / "trace").rows("drafted")
    assert set(drafted["depth"].tolist()) == {0, 1, 2}
    compared = 0
    for number, text in texts.items():
        expected = expected_rows(shard.model, text)
        mine = drafted.where(request=number)
        roots = (mine["position"] - mine["depth"]).tolist()
        keys = list(zip(roots, mine["depth"].tolist(), strict=True))
        assert sorted(keys) == sorted(expected)
        if keys:
            hidden = torch.stack([expected[key] for key in keys])
            assert close(mine.tensor("hidden"), hidden)
            answers = shard.model.to_target(shard.model.logits(hidden).argmax(-1))
            told = torch.from_numpy(mine["token"].astype(np.int64))
            assert torch.equal(told[told >= 0], answers[told >= 0])
            compared += len(keys)
    assert compared == len(drafted) > 50


def test_rows_on_trial_and_of_the_finished_do_not_stay(
    target_of: Callable[..., Path], draft_of: Callable[..., Path]
) -> None:
    """The cache stays within a third more than what requests in flight need, however long the call."""
    shard = DraftShard(draft_of("llama", "gqa"), target_of("llama"), dtype=torch.float32, threads=1)
    shard.serve(None)
    for number in range(60):
        group = DraftGroup(number, 0, 0, 0, 0, (5, 6, 7, 8), 4)
        output = LogitsProcessorOutput(torch.randn(4, 144), CaptureHiddenMode.FULL)
        shard.step(output, DraftStep(number, (group,), (number - 1,) if number else ()))
        assert len(shard.cache) == len(shard.table) <= 16
    shard.serve(None)
    assert len(shard.cache) == 0


def test_a_step_that_only_extends_drafts_nothing(target_of: Callable[..., Path], draft_of: Callable[..., Path]) -> None:
    shard = DraftShard(draft_of("llama", "gqa"), target_of("llama"), dtype=torch.float32, threads=1)
    shard.serve(None)
    output = LogitsProcessorOutput(torch.randn(2, 144), CaptureHiddenMode.FULL)
    assert shard.step(output, DraftStep(0, (DraftGroup(0, 0, -1, 0, 0, (5, 6), 0),), ())) == (None, [])
    assert len(shard.cache) == 2

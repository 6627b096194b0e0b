"""Packed, chunked, interleaved and rolled back, the draft's rows are those of one causal forward over each request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from spectrace.engine.attention import KeyValueCache, PackedAttend
from spectrace.engine.draft import DraftModel
from spectrace.engine.draft_shard import DraftServing, DraftShard
from spectrace.engine.plan import CaptureHiddenMode, DraftGroup, DraftStep, LogitsProcessorOutput
from spectrace.engine.recording import Recording
from spectrace.engine.sampling import GREEDY
from spectrace.engine.tree import Tree, TreeShape
from spectrace.tracer.manifest import create_trace
from spectrace.tracer.rows import Level
from spectrace.tracer.rowset import Rows
from spectrace.tracer.trace import Trace

CHAIN, TREE = TreeShape(3, 1, 4), TreeShape(4, 3, 9)


@dataclass
class Text:
    """A request's text, what a target would have handed over for it, and where its draft is asked to draft."""

    tokens: list[int]
    features: Tensor
    done: int = 0
    asked: dict[int, Tree] = field(default_factory=dict)


def serve(shard: DraftShard, *, seed: int) -> dict[int, Text]:
    """Texts that join at random steps and grow by random pieces, some with garbage behind, some asking for a tree."""
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
            count, garbage = int(random.integers(1, left + 1)), int(random.integers(0, 3))
            piece = slice(text.done, text.done + count)
            others = int(random.integers(0, 2))  # rows that nobody asks for, as of a request that has finished
            source = sum(len(rows) for rows in handed) + others
            handed.append(torch.randn(others, 144))
            handed += [text.features[piece], torch.randn(garbage, 144)]
            tokens = (*text.tokens[piece.start + 1 : piece.stop + 1], *random.integers(0, 96, garbage).tolist())
            groups.append(DraftGroup(number, step, step, text.done, source, tokens, count, bool(random.random() < 0.7)))
            text.done += count
        if not groups:
            continue
        gone = tuple(number for number in finished if number not in released)
        output = LogitsProcessorOutput(torch.cat(handed), CaptureHiddenMode.FULL)
        _, trees = shard.step(output, DraftStep(step, tuple(groups), gone))
        released += gone
        assert [tree.request for tree in trees] == [group.request for group in groups if group.drafts]
        for tree in trees:
            group = next(group for group in groups if group.request == tree.request)
            assert len(tree.tree.tokens) == shard.serving.shape.nodes - 1
            texts[tree.request].asked[group.position + group.live - 1] = tree.tree
        finished = [number for number, text in texts.items() if text.done == len(text.features)]
    return texts


def close(found: Tensor, expected: Tensor) -> bool:
    """Largest error of a row over its largest value."""
    return bool(((found - expected).abs().amax(-1) / expected.abs().amax(-1)).max() <= 1e-5)


def path_of(rows: Rows, row: int) -> tuple[int, tuple[int, ...]]:
    """The position of the text's row that a drafted row stands below, and the drafted tokens down to it."""
    place = {key: at for at, key in enumerate(zip(*(rows[c].tolist() for c in ("pass", "depth", "node")), strict=True))}
    tokens: list[int] = []
    while depth := int(rows["depth"][row]):
        tokens.insert(0, int(rows["token"][row]))
        row = place[int(rows["pass"][row]), depth - 1, int(rows["parent"][row])]
    return int(rows["position"][row]), tuple(tokens)


def behind(cache: KeyValueCache, new: int) -> PackedAttend:
    """New rows of one text, behind those that are cached."""
    at = torch.arange(len(cache) + new)
    rows = at[-new:, None]
    return PackedAttend(cache, at <= rows, lambda window: at > rows - window)


class Alone:
    """What a text's rows come to when computed on their own: one causal forward, then every branch by itself."""

    def __init__(self, draft: DraftModel, text: Text) -> None:
        self.draft, self.text = draft, text
        self.hidden, _ = self._rows(text.done, KeyValueCache())

    def _rows(self, count: int, cache: KeyValueCache) -> tuple[Tensor, Tensor]:
        tokens, features = torch.tensor(self.text.tokens[1 : count + 1]), self.draft.fuse(self.text.features[:count])
        out: tuple[Tensor, Tensor] = self.draft(tokens, features, torch.arange(count), behind(cache, count))
        return out

    @torch.inference_mode()
    def below(self, position: int, path: tuple[int, ...]) -> Tensor:
        """The hidden row at the end of a path below a position."""
        if not path:
            return self.hidden[position]
        cache = KeyValueCache()
        hidden, state = self._rows(position + 1, cache)
        for depth, token in enumerate(path, 1):
            place = torch.tensor([position + depth])
            hidden, state = self.draft(torch.tensor([token]), state[-1:], place, behind(cache, 1))
        return hidden[-1]


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("attention", ["gqa", "mla", "deep"])
def test_packed_rows_are_those_of_one_causal_forward(
    attention: str, shape: TreeShape, target_of: Callable[..., Path], draft_of: Callable[..., Path], tmp_path: Path
) -> None:
    """Eight requests in pieces, garbage behind some, trees below some, caches compacted underway."""
    shard = DraftShard(draft_of("llama", attention), target_of("llama"), dtype=torch.float32, threads=1)
    create_trace(tmp_path / "trace", {})
    shard.serve(DraftServing(shape, GREEDY), Recording(tmp_path / "trace", Level.FULL, {}))
    texts = serve(shard, seed=shape.topk)
    assert shard.finish() is None
    trace = Trace.open(tmp_path / "trace")
    assert set(trace.rows("received")["depth"].tolist()) == set(range(shape.depth))
    compared = 0
    for number, text in texts.items():
        received, drafted = (trace.rows(family, request=number, live=True) for family in ("received", "drafted"))
        if not len(received):
            continue
        with torch.inference_mode():
            alone = Alone(shard.model, text)
        keys = [
            list(zip(*(rows[c].tolist() for c in ("pass", "depth", "node")), strict=True))
            for rows in (received, drafted)
        ]
        drafted = drafted.take(np.array([keys[1].index(key) for key in keys[0]]))
        paths = [path_of(received, row) for row in range(len(received))]
        assert len(set(paths)) == len(paths)
        hidden = torch.stack([alone.below(*path) for path in paths])
        assert close(drafted.tensor("hidden"), hidden)
        answers = shard.model.to_target(shard.model.logits(hidden).argmax(-1))
        told = torch.from_numpy(drafted["token"].astype(np.int64))
        assert torch.equal(told[told >= 0], answers[told >= 0])
        compared += len(paths)
    assert compared > 50 * shape.topk
    assert len(trace.rows("received", live=False)) > 5


def test_rows_on_trial_and_of_the_finished_do_not_stay(
    target_of: Callable[..., Path], draft_of: Callable[..., Path]
) -> None:
    """The cache stays within a third more than what requests in flight need, however long the call."""
    shard = DraftShard(draft_of("llama", "gqa"), target_of("llama"), dtype=torch.float32, threads=1)
    shard.serve(DraftServing(CHAIN, GREEDY), None)
    for number in range(60):
        group = DraftGroup(number, 0, 0, 0, 0, (5, 6, 7, 8), 4, True)
        output = LogitsProcessorOutput(torch.randn(4, 144), CaptureHiddenMode.FULL)
        shard.step(output, DraftStep(number, (group,), (number - 1,) if number else ()))
        assert len(shard.cache) == len(shard.table) <= 16
    shard.serve(DraftServing(CHAIN, GREEDY), None)
    assert len(shard.cache) == 0


def test_a_step_that_only_extends_drafts_nothing(target_of: Callable[..., Path], draft_of: Callable[..., Path]) -> None:
    shard = DraftShard(draft_of("llama", "gqa"), target_of("llama"), dtype=torch.float32, threads=1)
    shard.serve(DraftServing(CHAIN, GREEDY), None)
    output = LogitsProcessorOutput(torch.randn(2, 144), CaptureHiddenMode.FULL)
    assert shard.step(output, DraftStep(0, (DraftGroup(0, 0, -1, 0, 0, (5, 6), 2, False),), ())) == (None, [])
    assert len(shard.cache) == 2

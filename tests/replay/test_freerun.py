"""A free run holds against whatever table a checkpoint has."""

import torch
from toy.target import TARGET
from toy.train import DRAFT

from spectrace.engine.checkpoint import build_draft, read_draft
from spectrace.engine.tree import TreeShape
from spectrace.replay.freerun import free_run
from spectrace.replay.texts import Text
from spectrace.replay.truth import Wired


def test_drafts_that_a_wrong_table_puts_outside_the_vocabulary_are_misses() -> None:
    """As tokens where offsets belong: what id k stands for is k + its token."""
    right = build_draft(read_draft(DRAFT), target=TARGET, dtype=torch.float32)
    spec, table = right.spec, right.table()
    wrong = right.variant(tensors={"d2t": table})
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(spec.target_vocab, (40,), generator=generator).tolist()
    slots = tuple(torch.randn(40, spec.target_width, generator=generator) for _ in range(spec.slots))
    text = Wired(0, Text(tuple(tokens[:8]), tuple(tokens[8:]), 3), tuple(slot[:39] for slot in slots))
    [trees] = free_run(wrong, [text], TreeShape(3, 1, 4)).values()
    outside = [(t, max(tree.tokens)) for t, tree in trees.items() if max(tree.tokens) >= spec.target_vocab]
    assert outside
    for t, worst in outside:
        assert trees[t].run(tokens[8 + t :]) <= trees[t].tokens.index(worst)

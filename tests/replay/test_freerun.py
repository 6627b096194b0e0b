"""A free run holds against whatever table a checkpoint has."""

import torch
from toy.target import TARGET
from toy.train import DRAFT

from spectrace.engine.checkpoint import build_draft, read_draft
from spectrace.engine.tree import TreeShape
from spectrace.replay.configuration import Steps
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


def test_beyond_the_end_of_its_context_a_draft_answers_its_first_token() -> None:
    draft = build_draft(read_draft(DRAFT), target=TARGET, dtype=torch.float32)
    spec, generator = draft.spec, torch.Generator().manual_seed(2)
    tokens = torch.randint(spec.target_vocab, (40,), generator=generator).tolist()
    slots = tuple(torch.randn(40, spec.target_width, generator=generator) for _ in range(spec.slots))
    text = Wired(0, Text(tuple(tokens[:8]), tuple(tokens[8:]), 3), tuple(slot[:39] for slot in slots))
    shape, end, first = TreeShape(3, 1, 4), 20, int(draft.table()[0])
    [whole], [ended] = (free_run(draft, [text], shape, Steps(end=end)).values() for end in (None, end))
    changed = 0
    for start, tree in ended.items():
        positions = [8 + start - 2 + depth for depth in range(3)]  # of the rows that draft below start t
        drafted, before = tree.tokens, whole[start].tokens
        assert [token for token, at in zip(drafted, positions, strict=True) if at >= end] == [
            first for at in positions if at >= end
        ]
        assert drafted[0] == (before[0] if positions[0] < end else first)
        changed += list(drafted) != list(before)
    assert changed > 10

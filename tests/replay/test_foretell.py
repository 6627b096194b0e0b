"""What cannot be foretold is not, and still tells configurations apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from spectrace.engine.checkpoint import build_draft, read_draft
from spectrace.engine.sampling import Sampling
from spectrace.replay.configuration import Configuration, Slot
from spectrace.replay.expected import expected, expected_walk
from spectrace.replay.foretell import Foreteller, acceptance_length
from spectrace.replay.texts import read_texts
from spectrace.replay.truth import Recomputed, Truth
from spectrace.tracer.errors import UserError
from spectrace.tracer.rowset import Rows
from spectrace.tracer.trace import Trace


class Silent(Trace):
    """A trace of an engine that does not say how likely the target held what it emitted."""

    def rows(self, family: str, **equals: object) -> Rows:
        rows = super().rows(family, **equals)
        if family != "verified":
            return rows
        at = rows._table.column_names.index("p_emitted")
        nothing = pa.nulls(len(rows), rows._table.schema.field(at).type)
        table = rows._table.set_column(at, rows._table.schema.field(at), nothing)
        return Rows(rows.family, table, rows._writers, rows._segments)


def test_drawn_drafts_without_the_target_s_probabilities_are_not_foretold_but_told_apart(
    record: Callable[..., Trace], folders: tuple[Path, Path]
) -> None:
    full = record(sampling=Sampling(1.0, seed=5, sampled_drafts=True))
    silent, (target, draft) = Silent(full._found), folders
    checkpoint = read_draft(draft)
    texts = {request: text for request, text in read_texts(full).items() if len(text.output) > 4}
    model = build_draft(checkpoint, target=target, dtype=torch.float32)
    assert checkpoint.wiring
    right = Configuration(model.spec, model.state_dict(), tuple(map(Slot, checkpoint.wiring.boundaries)))
    other: Any = {**right.tensors, "head.weight": -right.tensors["head.weight"]}
    wrong = Configuration(right.spec, other, right.wiring)
    true = Truth(texts, [Recomputed(target, dtype=torch.float32)], None).read(list(texts), set(right.wiring))
    assert acceptance_length(Foreteller(full).walks(right, true)) is not None
    found, others = (Foreteller(silent).walks(one, true) for one in (right, wrong))
    assert acceptance_length(found) is None
    assert any((one.runs != another.runs).any() for one, another in zip(found, others, strict=True))
    assert np.concatenate([one.runs for one in found]).max() <= 3
    with pytest.raises(UserError, match="p_emitted"):
        expected_walk(silent, model)


def test_drawn_rounds_are_counted_to_the_end_of_a_text_without_those_that_it_cuts() -> None:
    random = np.random.default_rng(2)
    chances_SK = random.random((7, 3))  # eight tokens: the first is no round's
    rounds, correct = expected(chances_SK, to_the_end=True)
    walked = []
    for _ in range(40_000):
        at, whole = 0, [0, 0]
        while at < 7:
            run = int(np.cumprod(random.random(3) < chances_SK[at]).sum())
            if at + run + 1 <= 7:
                whole = [whole[0] + 1, whole[1] + run]
            at += run + 1
        walked.append(whole)
    found, errors = np.mean(walked, 0), np.std(walked, 0) / np.sqrt(len(walked))
    assert np.all(np.abs(found - (rounds, correct)) < 5 * errors)

"""A request that starts on a cached prefix is replayed with the rows that another request was fed for the same text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spectrace.replay.donors import BEFORE
from spectrace.replay.inputs import read_served
from spectrace.tracer import Keys, Recorder, Trace, create_trace, seal_trace

TEXT = (7, 8, 9, 10, 11, 12)


def written(folder: Path, *requests: dict[str, Any]) -> Trace:
    """Depth-0 rows of each request from `first` on, whose features say request and position."""
    create_trace(folder, {})
    with Recorder(folder, role="draft") as draft, Recorder(folder, role="scheduler") as scheduler:
        for number, asked in enumerate(requests):
            text, first = asked.get("text", TEXT), asked.get("first", 0)
            positions = np.arange(first, len(text) - 1)
            key = Keys(request=number, pass_=0, position=positions)
            features = torch.tensor([[float(number), float(position)] for position in positions])
            tokens = [text[position + 1] for position in positions]
            draft.received(key, token=tokens, features=features)
            draft.drafted(key, token=np.full(len(positions), 1), draft_token=np.full(len(positions), 1))
            scheduler.requests(
                Keys(request=number, pass_=0, position=0, node=0), id=[str(number)], prompt_tokens=[text[:-1]],
                output_tokens=[text[-1:]], cached_prefix=asked.get("cached", first), temperature=0.0,
                finish_reason="length", rounds=0, correct_drafts=0, depth_limit=3,
            )  # fmt: skip
    assert seal_trace(folder) == []
    return Trace.open(folder)


def test_rows_of_a_cached_prefix_are_lent_and_answer_nothing(tmp_path: Path) -> None:
    trace = written(tmp_path / "trace", {}, {"first": 3}, {"first": 4, "text": (*TEXT, 13)})
    served = read_served(trace)
    assert served.requests.tolist() == [0, 1, 2] and not len(served.incomplete)
    [depth] = served.inputs(np.array([1, 2])).depths
    assert depth.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]
    assert depth.tokens.tolist() == [8, 9, 10, 11, 12, 8, 9, 10, 11, 12, 13]
    lenders = depth.received.tensor("features")[:, 0].int().tolist()
    assert lenders == [0, 0, 0, 1, 1, 0, 0, 0, 0, 2, 2], "the first that had computed so much, of itself or by a loan"
    assert depth.received["pass"].tolist() == [BEFORE] * 3 + [0, 0] + [BEFORE] * 4 + [0, 0]
    assert depth.answering.tolist() == [3, 4, 9, 10]


@pytest.mark.parametrize(
    "asked",
    [
        {"first": 3, "text": (7, 8, 9, 99, 11, 12)},
        {"first": 3, "text": (99, 8, 9, 10, 11, 12)},
        {"first": 3, "cached": 0},
        {"first": 2, "cached": 3},
    ],
    ids=["another token after the prefix", "another prefix", "nothing was cached", "something else was cached"],
)
def test_nothing_is_lent_that_is_not_the_same_text(tmp_path: Path, asked: dict[str, Any]) -> None:
    served = read_served(written(tmp_path / "trace", {}, asked))
    assert served.requests.tolist() == [0] and served.incomplete.tolist() == [1]

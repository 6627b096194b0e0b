"""What is taken from the draft's own methods while a step runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spectrace.tracer.attach.capture import Capture, begins
from spectrace.tracer.attach.steps import Forward
from spectrace.tracer.staging import stage


def answered(logits: list[float], offsets: list[int] | None, *, full: bool = False) -> Forward:
    """A forward of one row, after the engine has spread these logits over its vocabulary."""
    session: Any = SimpleNamespace(room=lambda: True, put=lambda *_: None)
    capture = Capture(session, full=full)
    nothing = stage(torch.zeros(1))
    forward = Forward(nothing, nothing)
    capture.begin().forwards.append(forward)
    table = None if offsets is None else torch.tensor(offsets)
    watching = capture.compute_logits(SimpleNamespace(draft_id_to_target_id=table), {})
    next(watching)
    with pytest.raises(StopIteration):
        watching.send(torch.tensor([logits]))
    return forward


@pytest.mark.parametrize(
    ("logits", "offsets", "draft_id"),
    [
        ([0.0, 3.0, 1.0, 0.0], None, 1),
        ([0.0, -9.0, 1.0, 5.0], [0, 1, 1], 2),
        ([7.0, -9.0, 1.0, 7.0], [3, 1, -2], 2),
        ([-9.0, 4.0, 1.0, 4.0], [3, 0, 0], 1),
    ],
    ids=["no table", "ids in order", "a tie, taken by its token", "the first token of a tie"],
)
def test_the_draft_id_is_that_of_the_token_which_the_engine_takes(
    logits: list[float], offsets: list[int] | None, draft_id: int
) -> None:
    tokens = answered(logits, offsets).draft_tokens
    assert tokens and tokens.wait().array.tolist() == [draft_id]


def test_logits_are_kept_in_the_draft_s_own_vocabulary() -> None:
    kept = answered([0.0, -9.0, 1.0, 5.0], [0, 1, 1], full=True).logits
    assert kept and kept.ids.wait().array.tolist() == [[2, 1, 0]]
    assert kept.values.wait().array.tolist() == [[5.0, 1.0, 0.0]]
    assert answered([0.0, 1.0], None).logits is None


@pytest.mark.parametrize(("asked", "limit"), [(40, 40), (1000, 509), (None, 509)])
def test_an_answer_ends_where_the_text_is_as_long_as_it_may_be(asked: int | None, limit: int) -> None:
    sampling = SimpleNamespace(stop_token_ids=[7], eos_token_id=2, max_tokens=asked, temperature=0.0, seed=None)
    known = begins([1, 2, 3], sampling, 512)
    assert known["max_new"] == limit and known["ends"] == {2, 7} and known["prompt"] == (1, 2, 3)

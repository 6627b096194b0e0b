"""An answer is met where it is the best, or as good as the best to within what rounding does in its precision."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from spectrace.replay import reproduce as module
from spectrace.replay.compare import Drawn
from spectrace.replay.configuration import ADVANCING, Steps
from spectrace.replay.replay import DepthOutput
from spectrace.replay.reproduce import reproduce

TABLE = torch.tensor([5, 3, 9, 3])
UNSEEN = -1


class Columns(dict[str, Any]):
    """Rows with some columns, none of them a tensor."""

    def take(self, index: Any) -> "Columns":
        return Columns({name: values[index] for name, values in self.items()})

    def has(self, _: str) -> Any:
        return np.zeros(len(self["request"]), bool)


def met(
    monkeypatch: pytest.MonkeyPatch,
    logits: Tensor,
    ids: list[int],
    tokens: list[int],
    drawn: Drawn | None = None,
    steps: Steps = ADVANCING,
) -> list[bool]:
    """Of one depth: the rows' logits replayed, and the draft ids and tokens served; row i is at position i."""
    count = np.arange(len(ids))
    held = Columns(request=count * 0, depth=count * 0, round=count, position=count)
    served = Columns(held, draft_token=np.array(ids), token=np.array(tokens))
    rows = SimpleNamespace(received=held, drafted=served, answering=count)
    output = DepthOutput(0, None, logits, logits, logits, TABLE[logits.argmax(-1)], 0.0)
    monkeypatch.setattr(module, "replay_inputs", lambda *_: [output])
    at: Any = SimpleNamespace(build=lambda: SimpleNamespace(table=lambda: TABLE), steps=steps)
    inputs: Any = SimpleNamespace(depths=[rows])
    return reproduce(at, [inputs], drawn, tolerance=1e-3).met.tolist()


def test_what_rounding_decides_is_met_in_the_precision_that_rounds_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit in the last place of 10 is 1/16 in bfloat16, 1/128 in float16."""
    logits = torch.tensor([[10.0, 10.0 - below, -3.0, -4.0] for below in (0.0, 1 / 1024, 1 / 128, 1 / 16, 1 / 4, 2.0)])
    served = ([1] * 6, [3] * 6)
    assert met(monkeypatch, logits, *served) == [True, True, True, False, False, False]
    assert met(monkeypatch, logits.half(), *served) == [True, True, True, False, False, False]
    assert met(monkeypatch, logits.bfloat16(), *served) == [True, True, True, True, False, False]


def test_where_only_a_token_was_seen_the_best_of_its_ids_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 8.0], [1.0, 8.0, 3.0, 8.0], [9.0, 2.0, 3.0, 8.0], [9.0, 2.0, 3.0, 8.0]])
    assert met(monkeypatch, logits, [UNSEEN] * 4, [3, 3, 3, 77]) == [True, True, False, False]


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_drawn_draft_is_met_where_its_probability_is_but_for_rounding(
    monkeypatch: pytest.MonkeyPatch, temperature: float, dtype: torch.dtype
) -> None:
    """By one unit in the last place of its logit a draft's probability changes by 6 %, in bfloat16."""
    logits = torch.tensor([[14.0, 13.0, 12.0, 9.0]] * 3)
    served, ulp = logits.clone(), 14 * torch.finfo(dtype).eps
    served[1, 2] += ulp
    served[2, 2] += 0.5
    q = (served / temperature).softmax(-1)[:, 2].tolist()
    assert dtype == torch.float32 or q[1] > 1.05 * q[0]
    drawn = Drawn({0: temperature}, {(0, round_, 0): q[round_] for round_ in range(3)})
    assert met(monkeypatch, logits.to(dtype), [2] * 3, [9] * 3, drawn) == [True, True, False]


def test_logits_that_are_no_numbers_meet_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert met(monkeypatch, torch.full((1, 4), torch.nan), [0], [5]) == [False]


def test_beyond_the_end_of_a_context_the_first_id_is_met_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([[9.0, 1.0, 2.0, 3.0]] * 2 + [[1.0, 9.0, 2.0, 3.0]] * 2)
    served = ([0, 1, 0, 1], [5, 3, 5, 3])
    assert met(monkeypatch, logits, *served) == [True, False, False, True]
    assert met(monkeypatch, logits, *served, steps=Steps(end=2)) == [True, False, True, False]

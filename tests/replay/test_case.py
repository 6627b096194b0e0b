"""A diagnosis works on the trace of one start of an engine."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from toy.train import DRAFT

from spectrace.engine.checkpoint import read_draft
from spectrace.replay.case import open_case
from spectrace.tracer.errors import UserError


def test_a_trace_of_two_starts_is_refused_in_one_message() -> None:
    trace: Any = SimpleNamespace(folder=Path("T"), manifest={}, rows=lambda *_, **__: {"incarnation": np.array([0, 1])})
    with pytest.raises(UserError, match=r"^T: it holds 2 starts of the engine, .* record again without a restart$"):
        open_case(trace, read_draft(DRAFT), None)

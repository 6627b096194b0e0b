"""What speculation is worth is arithmetic on recorded seconds, and a number without its timings is none."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from spectrace.replay.worth import Plain, Worth, worth
from spectrace.tracer.keys import Keys
from spectrace.tracer.manifest import create_trace, seal_trace
from spectrace.tracer.recorder import Recorder
from spectrace.tracer.rows import Phase
from spectrace.tracer.trace import Trace

DEPTH = 3


def _record(
    folder: Path,
    *,
    pass_secs: Sequence[float],
    draft_secs: float | None = 0.02,
    rest_secs: float = 0.01,
    width: Sequence[int] = (),
    prompts: Sequence[float] = (),
    every: int = 4,
) -> Trace:
    """Rounds of a request, each verified in a pass that takes so long, whose rows are `width` of them (4, else).

    The first row of all rounds but one of `every` is followed by one accepted draft. `prompts` are seconds that a
    prompt of another request, of ten rows, adds to each pass; none where they are 0.
    """
    create_trace(folder, {})
    recorders = {name: Recorder(folder, role=name, strict=True) for name in ("target", "draft", "scheduler")}
    widths = width or [1 + DEPTH] * len(pass_secs)
    for round_, (secs, nodes) in enumerate(zip(pass_secs, widths, strict=True)):
        keys = {"request": [0] * nodes, "pass_": round_ + 1, "round": round_, "step": round_ + 1}
        rows = Keys(**keys, node=range(nodes), position=range(nodes), phase=Phase.VERIFY)
        recorders["target"].emitted(rows, token=[1] * nodes, forward_secs=secs / nodes)
        if prompts and prompts[round_]:
            other = {**keys, "request": [1] * 10}
            chunk = Keys(**other, node=0, position=range(10), phase=Phase.PREFILL)
            recorders["target"].emitted(chunk, token=[1] * 10, forward_secs=prompts[round_] / 10)
        recorders["scheduler"].verified(
            rows,
            parent=range(-1, nodes - 1),
            token=[1] * nodes,
            target_token=[1] * nodes,
            accepted=[node == 0 or (node == 1 and round_ % every > 0) for node in range(nodes)],
            cut=False,
            source_row=range(nodes),
        )
        for depth in range(DEPTH):
            one = Keys(request=[0], pass_=round_, round=round_, step=round_, depth=depth, node=0, position=0)
            forward = None if draft_secs is None else draft_secs / DEPTH
            recorders["draft"].drafted(one, draft_token=[1], token=[1], forward_secs=forward)
    wall = sum(pass_secs) + sum(prompts) + len(pass_secs) * ((draft_secs or 0.02) + rest_secs)
    recorders["scheduler"].requests(
        Keys(request=[0], pass_=0, node=0, position=0),
        id=["0"],
        prompt_tokens=[[1, 2]],
        output_tokens=[[3, 4]],
        cached_prefix=0,
        temperature=0.0,
        finish_reason="length",
        rounds=len(pass_secs),
        correct_drafts=0,
        depth_limit=DEPTH,
        first_token_secs=100.0,
        finished_secs=100.0 + wall,
    )
    for recorder in recorders.values():
        recorder.close()
    seal_trace(folder)
    return Trace.open(folder)


def test_the_case_that_started_this_breaks_even_at_three_tokens_a_round(tmp_path: Path) -> None:
    """Acceptance length 1.8 at 54.8 tokens/s, against 90.0 without: by seconds as by speeds, 1.8 * 90 / 54.8."""
    round_secs, plain_secs, rest_secs = 1.8 / 54.8, 1 / 90.0, 0.001
    trace = _record(
        tmp_path / "trace",
        pass_secs=[plain_secs - rest_secs] * 10,
        draft_secs=round_secs - plain_secs,
        rest_secs=rest_secs,
        every=5,
    )
    found = worth(trace, {})
    assert (found.acceptance, found.tokens_per_second) == (pytest.approx(1.8), pytest.approx(54.8))
    assert found.break_even_acceptance == pytest.approx(2.956, abs=5e-4)


def test_parts_of_a_round_add_up_and_every_repair_has_its_speed(tmp_path: Path) -> None:
    found = worth(_record(tmp_path / "trace", pass_secs=[0.07] * 8), {"W3": 2.5, "N3": None})
    assert found.seconds_per_round == pytest.approx(0.1)
    assert (found.target_seconds, found.draft_seconds) == (pytest.approx(0.07), pytest.approx(0.02))
    assert found.rest_seconds == pytest.approx(0.01) and found.draft_share == pytest.approx(0.2)
    assert found.requests_per_pass == 1.0
    assert found.acceptance == 1.75 and found.tokens_per_second == pytest.approx(17.5)
    assert found.after and found.after["W3"].tokens_per_second == pytest.approx(25.0)
    assert found.after["N3"].tokens_per_second is None


def test_equal_passes_give_a_bound_and_unequal_ones_a_slope(tmp_path: Path) -> None:
    bound = worth(_record(tmp_path / "equal", pass_secs=[0.07] * 8), {})
    assert bound.plain_from is Plain.BOUND and bound.plain_seconds_per_token == pytest.approx(0.08)
    assert bound.break_even_acceptance == pytest.approx(0.1 / 0.08) and bound.break_even_at_most is None
    widths = [2, 4] * 4  # a pass of n rows takes 0.05 + 0.01 n
    slope = worth(_record(tmp_path / "slope", pass_secs=[0.05 + 0.01 * n for n in widths], width=widths), {})
    assert slope.plain_from is Plain.SLOPE and slope.plain_seconds_per_token == pytest.approx(0.06 + 0.01, rel=1e-4)
    assert slope.break_even_acceptance == pytest.approx((0.08 + 0.02 + 0.01) / 0.07, rel=1e-4)
    assert slope.break_even_at_most == pytest.approx((0.08 + 0.02 + 0.01) / 0.06, rel=1e-4)


def test_passes_that_grow_faster_than_their_rows_leave_no_negative_time(tmp_path: Path) -> None:
    widths = [2, 4] * 4
    found = worth(_record(tmp_path / "trace", pass_secs=[0.01 if n == 2 else 0.09 for n in widths], width=widths), {})
    assert found.plain_seconds_per_token and found.plain_seconds_per_token > 0.01


def test_prompts_that_share_passes_make_no_plain_step_faster(tmp_path: Path) -> None:
    widths, prompts = [2, 4] * 8, [0.0, 0.0, 0.0, 0.4] * 4
    secs = [0.05 + 0.01 * n for n in widths]  # a pass of n rows; a plain step waits for prompts as a round does
    found = worth(_record(tmp_path / "trace", pass_secs=secs, width=widths, prompts=prompts), {})
    assert found.plain_from is Plain.SLOPE
    assert found.plain_seconds_per_token == pytest.approx(0.06 + 0.1 + 0.01, rel=1e-4)


@pytest.mark.parametrize("missing", ["draft", "rounds"])
def test_what_was_not_timed_is_not_made_up(tmp_path: Path, missing: str) -> None:
    if missing == "draft":
        trace = _record(tmp_path / "trace", pass_secs=[0.07] * 8, draft_secs=None)
    else:
        create_trace(tmp_path / "trace", {})
        seal_trace(tmp_path / "trace")
        trace = Trace.open(tmp_path / "trace")
    found = worth(trace, {"W3": 2.5})
    assert found.draft_share is None and found.break_even_acceptance is None and found.plain_from is None
    if missing == "rounds":
        assert found.after and found == Worth(after={"W3": found.after["W3"]})
        assert found.after["W3"].acceptance == 2.5 and found.after["W3"].tokens_per_second is None
    else:
        assert found.target_seconds == pytest.approx(0.07) and found.tokens_per_second


def test_it_is_json(tmp_path: Path) -> None:
    document = worth(_record(tmp_path / "trace", pass_secs=[0.07] * 8), {"W3": 2.5}).to_json()
    assert set(document) == set(Worth.__slots__)
    assert document["plain_from"] == "bound" and document["after"]["W3"].keys() == {"acceptance", "tokens_per_second"}
    assert all(value is None or isinstance(value, float | str | dict) for value in document.values())
    assert not any(isinstance(value, np.generic) for value in document.values())

"""Each fault does what its title says, and the engine keeps it to itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spectrace.engine.deployment import Deployment, Serving
from spectrace.engine.faults import FAULTS, find_faults
from spectrace.engine.sampling import Sampling
from spectrace.tracer.errors import UserError
from spectrace.tracer.rows import Level
from spectrace.tracer.trace import Trace

LAYERS = 30
CASES: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {
    "W1": {(0, 3, 16): (0, 2, 15), (1, 2, 30): (0, 1, 29)},
    "W2": {(0, 3, 16): (1, 4, 17), (1, 29, 30): (2, 30, 30)},
    "W3": {(0, 3, 16): (3, 16, 27), (2, 15, 27): (15, 27, 27)},
    "W4": {(0, 3, 16): (2, 15, 27), (2, 15, 27): (2, 15, 27)},
    "W5": {(0, 3, 16): (16, 3, 0), (1, 2): (2, 1)},
    "W6": {(0, 3, 16): (0, 0, 3), (1, 2): (1, 1)},
    "W7": {(0, 3, 30): (0, 3, 30), (30, 30): (30, 30)},
    "M3": {(0, 3, 16): (0, 3, 16)},
    "S1": {(0, 3, 16): (0, 3, 16)},
    "S1:residual": {(0, 3, 16): (0, 3, 16)},
    "S2": {(0, 3, 16): (0, 3, 16)},
}


def test_every_fault_is_covered_here() -> None:
    assert set(CASES) == set(FAULTS)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_changes_the_boundaries_as_its_title_says(name: str) -> None:
    for healthy, broken in CASES[name].items():
        assert FAULTS[name].wiring(healthy, LAYERS) == broken
    assert FAULTS[name].name == name and name.startswith(FAULTS[name].id)


@pytest.mark.parametrize("name", FAULTS)
def test_only_m3_touches_the_features(name: str) -> None:
    features = torch.arange(6.0).reshape(2, 3)
    expected = torch.zeros(2, 3) if name == "M3" else features
    assert torch.equal(FAULTS[name].hand_off(features), expected)


@pytest.mark.parametrize("name", FAULTS)
def test_only_w7_takes_the_last_slot_from_behind_the_final_norm(name: str) -> None:
    """And leaves alone what hooks on the norm took from the pass."""
    norm, entered = torch.nn.RMSNorm(2), []
    norm.register_forward_pre_hook(lambda _module, args: entered.append(args))
    features = torch.tensor([[1.0, 7.0, 3.0, -4.0], [0.0, 2.0, 0.5, 0.5]])
    captured = FAULTS[name].capture(features, norm)
    assert torch.equal(captured[:, :2], features[:, :2])
    root = 0.5**0.5
    expected = torch.tensor([[1.2 * root, -1.6 * root], [1.0, 1.0]]) if name == "W7" else features[:, 2:]
    torch.testing.assert_close(captured[:, 2:], expected, rtol=1e-5, atol=0)
    assert entered == []


def test_w7_is_refused_where_no_slot_holds_the_last_boundary(pair_of: Callable[..., Deployment]) -> None:
    with pytest.raises(UserError, match="--fault W7: needs a wiring whose last slot is L, boundary 5; here it is 4"):
        pair_of("llama", "gqa").check(Serving(faults=("W7",)))


def test_an_unknown_fault_is_named_with_those_that_exist() -> None:
    with pytest.raises(UserError, match="--fault W9: no such fault; known are W1, W2"):
        find_faults(["W1", "W9"])


@pytest.mark.parametrize("name", FAULTS)
def test_a_trace_of_a_fault_holds_the_fault_and_does_not_name_it(
    name: str, pair_of: Callable[..., Deployment], prompts: list[list[int]], tmp_path: Path
) -> None:
    """Emitted slots are what was captured, received ones what arrived; the manifest says what the engine believes."""
    pair = pair_of("llama", "gqa")
    serving = Serving(max_new=12, concurrency=3, chunk=7, capture=tuple(range(6)), level=Level.FULL, ignore_end=True)
    if name.startswith("S"):
        serving = replace(serving, max_new=48, sampling=Sampling(1.0, sampled_drafts=True))
    believed = (0, 2, 5) if name == "W7" else (0, 2, 4)
    serving = replace(serving, wiring=believed)
    healthy_run = pair.serve(prompts[2:5], serving, trace=tmp_path / "healthy")
    broken_run = pair.serve(prompts[2:5], replace(serving, faults=(name,)), trace=tmp_path / "broken")
    same_answers = [r.output for r in broken_run.requests] == [r.output for r in healthy_run.requests]
    assert same_answers == (not name.startswith("S"))
    healthy, trace = Trace.open(tmp_path / "healthy"), Trace.open(tmp_path / "broken")
    wiring = FAULTS[name].wiring(believed, 5)
    emitted, reference = trace.rows("emitted"), trace.rows("reference")
    as_named = emitted["hashes"] == reference["hashes"][:, list(wiring)]
    assert as_named[:, :2].all() and (as_named[:, 2] == (name != "W7")).all()
    features = trace.rows("received", depth=0).tensor("features")
    assert (features == 0).all() == (name == "M3")

    own = {"created_unix_secs", "started_unix_secs", "trace"}
    for told, same in (
        (trace.manifest, healthy.manifest),
        *zip(trace.writers.values(), healthy.writers.values(), strict=True),
    ):
        assert {k: v for k, v in told.items() if k not in own} == {k: v for k, v in same.items() if k not in own}


def test_a_wrong_wiring_costs_acceptance(pair_of: Callable[..., Deployment], prompts: list[list[int]]) -> None:
    """Which is what the recorder is there to explain."""

    def correct(**changes: object) -> int:
        serving = Serving(max_new=40, ignore_end=True, **changes)  # type: ignore[arg-type]
        return sum(request.correct_drafts for request in pair_of("llama", "gqa").serve(prompts, serving).requests)

    healthy = correct()
    assert correct(faults=("W5",)) < healthy
    assert correct(faults=("M3",)) < healthy
    assert correct(wiring=(0, 2, 4)) == healthy

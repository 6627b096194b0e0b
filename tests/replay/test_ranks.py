"""Ranks that agree are called equal; of those that do not, the first family that differs is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spectrace.engine.checkpoint import build_draft, read_draft
from spectrace.engine.deployment import Deployment, Serving
from spectrace.engine.sampling import Sampling
from spectrace.replay.finding import Finding
from spectrace.replay.handoff import hand_off
from spectrace.replay.invariants import invariants
from spectrace.replay.ranks import Ranks, ranks
from spectrace.replay.weights import loaded_weights
from spectrace.tracer.keys import Keys
from spectrace.tracer.manifest import create_trace
from spectrace.tracer.recorder import Recorder
from spectrace.tracer.rows import Level
from spectrace.tracer.trace import Trace

TREE = {"topk": 3, "draft_tokens": 8}
SHAPES = {"chain": {}, "tree": TREE, "light": {"level": Level.LIGHT}, "features": {"level": Level.FEATURES}}


@pytest.fixture(scope="module")
def split(
    cluster: None, folders: tuple[Path, Path], prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Trace]]:
    """`split(fault, **changes)`: a trace of a pair on two ranks each."""
    root = tmp_path_factory.mktemp("split")
    with Deployment(*folders, threads=1, tp=2, draft_tp=2) as pair:

        def record(*faults: str, **changes: object) -> Trace:
            usual = {"max_new": 12, "chunk": 7, "ignore_end": True, "level": Level.FULL, "capture": (0, 2, 4)}
            folder = root / str(len(list(root.iterdir())))
            pair.serve(prompts[2:5], Serving(**{**usual, **changes, "faults": faults}), trace=folder)  # type: ignore[arg-type]
            return Trace.open(folder)

        yield record


def parted(found: Ranks) -> tuple[list[Finding], list[Finding]]:
    """What is sure, and what is a doubt."""
    return [one for one in found.findings if not one.doubt], [one for one in found.findings if one.doubt]


@pytest.mark.parametrize("shape", [*SHAPES, "drawn"])
def test_ranks_of_a_clean_run_agree(shape: str, split: Callable[..., Trace], folders: tuple[Path, Path]) -> None:
    drawn = {"sampling": Sampling(1.0, seed=5, sampled_drafts=True)}
    trace = split(**SHAPES.get(shape, drawn))
    found = ranks(trace)
    assert found.findings == () and found.rounding == () and found.compared == found.equal
    assert set(found.compared) == {"emitted", "received", "drafted"} and min(found.compared.values()) > 20
    assert hand_off(trace).findings == invariants(trace).findings == ()
    target, draft = folders
    model = build_draft(read_draft(draft), target=target, dtype=torch.float32)
    weights = loaded_weights(trace, read_draft(draft), model)
    assert weights.compared == weights.equal == len(model.state_dict()) and weights.skipped == ()


@pytest.mark.parametrize("shape", SHAPES)
def test_partial_sums_are_named_and_what_follows_from_them_is_not(shape: str, split: Callable[..., Trace]) -> None:
    trace = split("W9", **SHAPES[shape])
    [found] = ranks(trace).findings
    assert (found.fault, found.masks, found.doubt) == ("W9", shape != "light", shape == "light")
    assert any("so do" in told for told in found.evidence)
    summed = [told for told in found.evidence if "the sum over ranks" in told]
    assert len(summed) == (3 if shape in ("chain", "tree") else 0)
    assert hand_off(trace).findings == ()


@pytest.mark.parametrize("shape", SHAPES)
def test_draft_tokens_that_differ_between_ranks_are_named(shape: str, split: Callable[..., Trace]) -> None:
    trace = split("Q1", **SHAPES[shape])
    [found] = ranks(trace).findings
    assert (found.fault, found.variant, found.masks) == ("Q1", "", False)
    assert any("differently at depth 0" in told for told in found.evidence)
    assert hand_off(trace).findings == invariants(trace).findings == ()


@pytest.mark.parametrize("fault", ["M3", "X2", "T1", "R2", "W5"])
def test_faults_of_all_ranks_are_none_between_them(fault: str, split: Callable[..., Trace]) -> None:
    assert ranks(split(fault)).findings == ()


def test_one_rank_has_nothing_to_be_compared(clean: Trace) -> None:
    found = ranks(clean)
    assert found.compared == found.equal == {} and found.findings == ()


def two_ranks(
    folder: Path,
    *,
    features: tuple[Tensor, Tensor],
    states: tuple[Tensor, Tensor],
    emitted: tuple[Tensor, Tensor] | None = None,
    level: Level = Level.FULL,
) -> Trace:
    """What the two ranks of a target emitted, if any, and of a draft received and made of it."""
    create_trace(folder, {})
    keys = Keys(request=[0] * len(features[0]), pass_=0, position=0)
    for rank, slots in enumerate(emitted or ()):
        with Recorder(folder, role="target", rank=rank, level=level, strict=True) as target:
            target.emitted(keys, token=[1] * len(slots), target_token=[2] * len(slots), slots=slots)
    for rank, (feature, state) in enumerate(zip(features, states, strict=True)):
        with Recorder(folder, role="draft", rank=rank, level=level, strict=True) as draft:
            draft.received(keys, token=[1] * len(feature), features=feature)
            draft.drafted(keys, draft_token=[2] * len(feature), token=[3] * len(feature), state=state)
    return Trace.open(folder)


def rounded(rows: Tensor) -> Tensor:
    """One unit of the last place of each row's largest value away."""
    return rows + torch.finfo(rows.dtype).eps * rows.abs().amax(-1, keepdim=True)


def test_the_first_thing_that_ranks_have_otherwise_is_named(tmp_path: Path) -> None:
    rows, other = torch.randn(8, 4), torch.randn(8, 4)
    fed = ranks(two_ranks(tmp_path / "fed", features=(rows, other), states=(rows, other))).findings
    assert [(one.fault, one.variant) for one in fed] == [("Q1", "features")]
    made = ranks(two_ranks(tmp_path / "made", features=(rows, rows), states=(rows, other))).findings
    assert [(one.fault, one.alike) for one in made] == [("Q4", ("Q2", "Q3"))] and made[0].confidence < 1


@pytest.mark.parametrize("level", Level)
def test_what_rounding_may_do_is_no_fault(level: Level, tmp_path: Path) -> None:
    """It is told; and where no value was recorded to show that it is rounding, it is a doubt, too."""
    rows, made = torch.randn(8, 4), torch.randn(8, 4)
    both, states = (rows, rounded(rows)), (made, rounded(made))
    found = ranks(two_ranks(tmp_path / "all", emitted=both, features=both, states=states, level=level))
    sure, doubts = parted(found)
    assert sure == [] and set(found.equal.values()) == {0}
    assert [one.fault for one in doubts] == (["W9"] if level is Level.LIGHT else [])
    assert ("emitted" in found.rounding) == ("received" in found.rounding) == (level is not Level.LIGHT)
    found = ranks(two_ranks(tmp_path / "states", features=(rows, rows), states=states, level=level))
    sure, doubts = parted(found)
    assert sure == [] and [one.fault for one in doubts] == ([] if level is Level.FULL else ["Q4"])
    assert found.rounding == (("drafted",) if level is Level.FULL else ())
    assert all("--level full" in one.evidence[-1] for one in doubts)


@pytest.mark.parametrize("level", Level)
def test_features_that_are_far_apart_are_partial_sums_wherever_values_show_it(level: Level, tmp_path: Path) -> None:
    both, states = (torch.randn(8, 4), torch.randn(8, 4)), (torch.randn(8, 4), torch.randn(8, 4))
    found = ranks(two_ranks(tmp_path / "all", emitted=both, features=both, states=states, level=level))
    [one] = found.findings
    assert one.fault == "W9" and one.doubt == (level is Level.LIGHT)
    # What the draft's ranks received says nothing of what the target's emitted unless it carries their hashes.
    fed = (both[0], both[0])
    found = ranks(two_ranks(tmp_path / "one", emitted=both, features=fed, states=fed, level=level))
    assert [(one.fault, one.doubt) for one in found.findings] == [("W9", level is not Level.FULL)]


@pytest.mark.parametrize("level", Level)
def test_features_that_part_behind_the_target_s_ranks_are_not_its_own(level: Level, tmp_path: Path) -> None:
    """What is handed over is not rounded on its way: hashes alone show that it is not the same."""
    rows, other = torch.randn(8, 4), torch.randn(8, 4)
    alike, fed = (rows, rows), (rows, other)
    found = ranks(two_ranks(tmp_path / "alike", emitted=alike, features=fed, states=fed, level=level))
    assert [(one.fault, one.variant) for one in found.findings] == [("Q1", "features")]
    found = ranks(two_ranks(tmp_path / "unknown", features=fed, states=fed, level=level))
    [one] = found.findings
    assert (one.fault, one.variant, one.doubt) == ("Q1", "features", level is Level.LIGHT)


def test_tokens_that_part_by_rounding_are_a_matter_of_tokens(tmp_path: Path) -> None:
    create_trace(tmp_path / "trace", {})
    rows = torch.randn(8, 4)
    for rank, slots in enumerate((rows, rounded(rows))):
        with Recorder(tmp_path / "trace", role="target", rank=rank, level=Level.FULL, strict=True) as target:
            keys = Keys(request=[0] * 8, pass_=0, position=0)
            target.emitted(keys, token=[1] * 8, target_token=[2 + rank] * 8, slots=slots)
    [found] = ranks(Trace.open(tmp_path / "trace")).findings
    assert (found.fault, found.variant, found.masks) == ("Q1", "target", False)

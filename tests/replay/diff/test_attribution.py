"""What a draft loses is put down to the input that cost it, and to nothing that is the same or made no difference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from spectrace.engine.checkpoint import build_draft, read_draft
from spectrace.engine.deployment import Deployment, Serving
from spectrace.engine.draft import DraftModel
from spectrace.engine.fault import Drafting, Source
from spectrace.engine.faults import FAULTS
from spectrace.engine.fields import read_config
from spectrace.engine.sampling import Sampling
from spectrace.replay.diff.alignment import align
from spectrace.replay.diff.attribution import Attribution, Factor, Swap, attribute
from spectrace.replay.diff.placing import read_side
from spectrace.tracer.errors import UserError
from spectrace.tracer.rows import Level
from spectrace.tracer.rowset import Rows
from spectrace.tracer.trace import Trace

Record: TypeAlias = Callable[..., Trace]
PROMPTS = [[(37 * i + 11 * j) % 250 + 1 for j in range(9)] for i in range(10)]


@pytest.fixture(scope="module")
def pair(analytic_pair: Callable[[str], tuple[Path, Path]]) -> tuple[Path, Path]:
    return analytic_pair("llama")


@pytest.fixture(scope="module")
def served(cluster: None, pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Record]:
    """`served(*faults, draft=, **changes)`: the analytic target and its draft, or another, over ten prompts."""
    root = tmp_path_factory.mktemp("served")
    with Deployment(*pair, threads=1) as running:

        @cache
        def record(*faults: str, draft: Path = pair[1], **changes: Any) -> Trace:
            if running.draft_folder != draft:
                running.swap(pair[0], draft)
            usual = {"max_new": 36, "ignore_end": True, "level": Level.FEATURES, "faults": faults}
            folder = root / str(len(list(root.iterdir())))
            assert not running.serve(PROMPTS, Serving(**{**usual, **changes}), trace=folder).losses
            return Trace.open(folder)

        yield record


@pytest.fixture(scope="module")
def draft(pair: tuple[Path, Path]) -> DraftModel:
    return build_draft(read_draft(pair[1]), target=pair[0], dtype=torch.float32)


class Coarse(Trace):
    """A trace that says it was served in bfloat16."""

    @property
    def manifest(self) -> dict[str, Any]:
        return {**super().manifest, "dtype": "bfloat16"}


class Moved(Trace):
    """A trace whose draft was given other positions at depth 0, so many times as far and further; they go on by one."""

    times, further = 1, 0

    def rows(self, family: str, **equals: object) -> Rows:
        rows = super().rows(family, **equals)
        if family != "received":
            return rows
        depth = rows["depth"].astype(np.int32)
        return rows.replaced(position=(rows["position"] - depth) * self.times + self.further + depth)


def attributed(a: Trace, b: Trace, *drafts: DraftModel, **options: int) -> Attribution:
    return attribute(a, b, align(read_side(a), read_side(b)), (drafts[0], drafts[-1]), **options)


def swap_of(found: Attribution, factor: Factor) -> Swap:
    return next(one for one in found.swaps if one.factors == (factor,))


def broken_draft(fault: str, right: DraftModel, target: Path) -> DraftModel:
    """The draft as a fault leaves it in an engine's memory."""
    breaks = FAULTS[fault].breaks
    assert isinstance(breaks, Drafting)
    assert breaks.weights
    return right.variant(tensors=breaks.weights(right.state_dict(), Source(right.spec, target)))


@pytest.mark.parametrize(
    ("fault", "factor"),
    [
        ("W1", Factor.FEATURES),
        ("M3", Factor.FEATURES),
        ("X2", Factor.FEATURES),
        ("T1", Factor.TOKENS),
        ("R1", Factor.POSITIONS),
        ("R2", Factor.POSITIONS),
    ],
)
def test_the_broken_input_is_the_culprit_and_all_of_the_difference(
    fault: str, factor: Factor, served: Record, draft: DraftModel
) -> None:
    found = attributed(served(), served(fault), draft)
    assert found.differs
    assert found.difference > 0.1
    assert (found.culprit, found.together) == (factor, None)
    culprit = swap_of(found, factor)
    assert (culprit.a_with_b, culprit.b_with_a) == (found.b, found.a)
    assert culprit.share == pytest.approx(1.0)
    for other in (one for one in found.swaps if one is not culprit):
        assert (other.a_with_b, other.b_with_a, other.share) == (found.a, found.b, 0.0)
    assert swap_of(found, Factor.DRAFT).same
    for side in found.served:
        assert (side.residue, side.unlike, side.apart) == (0.0, 0, False)
    assert f"comes with {factor} alone" in str(found)


def test_turned_round_the_same_input_is_the_culprit_of_the_gain(served: Record, draft: DraftModel) -> None:
    there, back = attributed(served(), served("W1"), draft), attributed(served("W1"), served(), draft)
    assert (back.culprit, back.difference) == (Factor.FEATURES, -there.difference)
    assert swap_of(back, Factor.FEATURES).share == pytest.approx(1.0)


def test_positions_at_depth_zero_cost_what_replay_says_and_an_offset_of_all_costs_nothing(
    served: Record, draft: DraftModel
) -> None:
    moved = Moved(served()._found)
    moved.further = 5
    found = attributed(served(), moved, draft)
    assert (found.differs, swap_of(found, Factor.POSITIONS).same) == (False, False)
    moved.times = 2
    found = attributed(served(), moved, draft)
    assert found.culprit is Factor.POSITIONS
    assert [side.apart for side in found.served] == [False, True]


def test_another_draft_is_the_culprit_where_it_is_known_and_a_residue_where_it_is_not(
    served: Record, draft: DraftModel, pair: tuple[Path, Path]
) -> None:
    a, b = served(), served("P1:mlp")
    known = attributed(a, b, draft, broken_draft("P1:mlp", draft, pair[0]))
    assert known.culprit is Factor.DRAFT
    assert not swap_of(known, Factor.DRAFT).same
    assert [side.unlike for side in known.served] == [0, 0]
    believed = attributed(a, b, draft)
    assert (believed.culprit, believed.together, believed.differs) == (None, None, False)
    ours, theirs = believed.served
    assert (ours.residue, ours.apart) == (0.0, False)
    assert theirs.apart
    assert theirs.residue == pytest.approx(known.b - known.a)
    assert "B's engine did something beyond its inputs" in str(believed)


@pytest.mark.parametrize("changes", [{"concurrency": 1}, {"chunk": 4}, {"fixed_window": True}])
def test_runs_that_differ_in_nothing_that_matters_have_no_culprit(
    changes: dict[str, Any], served: Record, draft: DraftModel
) -> None:
    found = attributed(served(), served(**changes), draft)
    assert (found.culprit, found.together, found.differs, found.difference) == (None, None, False, 0.0)
    assert all(one.share is None for one in found.swaps)
    assert "no difference" in str(found)


def test_two_faults_that_each_suffice_are_named_together(served: Record, draft: DraftModel) -> None:
    found = attributed(served(), served("M3", "T1"), draft)
    assert found.culprit is None
    assert found.together
    assert found.together.factors == (Factor.FEATURES, Factor.TOKENS)
    assert found.together.share == pytest.approx(1.0)
    assert "features and tokens together" in str(found)


def test_each_side_s_residue_is_of_the_trees_it_was_served_in(served: Record, draft: DraftModel) -> None:
    chains, trees = served(), served(topk=3, draft_tokens=8)
    for one, other in ((chains, trees), (trees, chains)):
        found = attributed(one, other, draft)
        assert [side.unlike for side in found.served] == [0, 0]
        assert (found.difference, found.culprit) == (0.0, None)
        assert any("in A's shape" in note for note in found.notes)


def test_no_more_places_are_replayed_than_asked_for(served: Record, draft: DraftModel) -> None:
    found = attributed(served(), served("W1"), draft, most_places=70)
    assert (found.places, found.requests) == (70, 3)
    assert sum(found.left_out.values()) == len(PROMPTS) - 3


def test_features_that_fit_one_draft_alone_go_with_it(
    served: Record,
    draft: DraftModel,
    pair: tuple[Path, Path],
    write_draft: Callable[..., Path],
    tmp_path: Path,
) -> None:
    target, of_three = pair
    config = read_config(of_three) | {"eagle_aux_hidden_state_layer_ids": [0, 3]}
    tensors = load_file(of_three / "model.safetensors")
    width = draft.spec.target_width
    of_two = write_draft(tmp_path / "draft", config, tensors | {"fc.weight": tensors["fc.weight"][:, : 2 * width]})
    b, other = served(draft=of_two), build_draft(read_draft(of_two), target=target, dtype=torch.float32)
    found = attributed(served(), b, draft, other)
    for factor in (Factor.FEATURES, Factor.DRAFT):
        assert swap_of(found, factor).a_with_b is None
        assert "together only" in swap_of(found, factor).told
    assert found.differs
    assert found.together
    assert found.together.factors == (Factor.FEATURES, Factor.DRAFT)
    with pytest.raises(UserError, match="fc takes"):
        attributed(served(), b, draft)


def test_runs_of_two_precisions_are_replayed_in_float32_and_this_is_said(served: Record, draft: DraftModel) -> None:
    mixed = attributed(served(), Coarse(served("W1")._found), draft)
    assert mixed.culprit is Factor.FEATURES
    assert mixed.notes == ("A was served in torch.float32, B in torch.bfloat16: both are replayed in float32",)
    assert not attributed(Coarse(served()._found), Coarse(served("W1")._found), draft).notes


def test_what_cannot_be_compared_is_said(served: Record, draft: DraftModel) -> None:
    with pytest.raises(UserError, match="drawn"):
        attributed(served(), served(sampling=Sampling(1.0, seed=5, sampled_drafts=True)), draft)
    with pytest.raises(UserError, match="level features or full"):
        attributed(served(), served(level=Level.LIGHT), draft)
    with pytest.raises(UserError, match="10: one of the traces has not all rows"):
        attributed(served(), served("M1"), draft)
    with pytest.raises(UserError, match="10: too little of an answer"):
        attributed(served(), served(max_new=4), draft)

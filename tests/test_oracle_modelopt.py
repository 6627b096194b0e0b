"""What ModelOpt 0.47.0 trains is not what its exported files say, to us or to engines: held against its own forward.

Its first layer is a decoder layer of transformers, which norms what comes in with `input_layernorm`; a hook on its
attention norms that once more with `hidden_norm`, and takes `input_layernorm` for the embedding, too. So q, k and v
are trained on hidden_norm(input_layernorm(g)), where every reader of the files computes hidden_norm(g). The two agree
as long as the gain of `input_layernorm` is the same everywhere. The residual is g itself, whatever a converted config
says.

SPECTRACE_MODELOPT is the folder of an environment with what run_modelopt.py imports.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from spectrace.engine.checkpoint import DraftCheckpoint, build_draft, default_wiring, read_draft, unscaled
from spectrace.engine.draft import DraftModel
from spectrace.engine.spec import RopeKind, Stream
from spectrace.replay.attend import BranchAttend, PrefixAttend
from spectrace.replay.compare import row_error

pytestmark = pytest.mark.oracles

TOLERANCE, CLEARLY = 1e-5, 1e-2
DEPTHS, TARGET_LAYERS = 4, 8
_SCRIPT = Path(__file__).resolve().parents[1] / "bench" / "oracles" / "run_modelopt.py"
_PATIENCE_SECS = 400
_VARIED = ("plain", "two-layers", "full-vocabulary", "attention-bias", "head-dim", "layer-ids", "theta")


@dataclass(frozen=True, slots=True)
class Trained:
    """A draft as its files describe it, and what ModelOpt's training forward took and made."""

    checkpoint: DraftCheckpoint
    draft: DraftModel
    inputs: Mapping[str, Tensor]
    found: Mapping[str, Tensor]

    @property
    def read(self) -> DraftModel:
        """The draft as it is read, under the RoPE that it was trained with: the export puts a scaling in its place."""
        return DraftModel.over(unscaled(self.draft.spec), self.draft.state_dict())

    @property
    def twice(self) -> DraftModel:
        """The same with what the first layer is fed normed by both of its norms, one behind the other."""
        return _twice(self.read)


def _twice(draft: DraftModel) -> DraftModel:
    return draft.variant(spec=replace(draft.spec, normed_twice=True))


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (environment := os.environ.get("SPECTRACE_MODELOPT")):
        pytest.skip("SPECTRACE_MODELOPT is not set")
    folder = tmp_path_factory.mktemp("modelopt")
    python = Path(environment).absolute() / "bin" / "python"
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    with (folder / "log.txt").open("w") as log:
        subprocess.run(
            [python, _SCRIPT, folder], env=variables, stdout=log, stderr=log, check=True, timeout=_PATIENCE_SECS
        )
    return folder


def trained(cases: Path, name: str) -> Trained:
    checkpoint = read_draft(cases / name / "draft")
    draft = build_draft(checkpoint, target=cases / name / "target", dtype=torch.float32)
    return Trained(
        checkpoint,
        draft,
        load_file(cases / name / "inputs.safetensors"),
        load_file(cases / name / "outputs.safetensors"),
    )


@torch.inference_mode()
def _run(draft: DraftModel, case: Trained) -> Iterator[tuple[Tensor, Tensor]]:
    """What the head reads and what is fed back, at each depth; every row has one below it."""
    found, starts = case.found, np.cumsum([0, *case.inputs["lengths"].tolist()])
    prefix = PrefixAttend(starts, found["positions.0"].numpy())
    branch, rows = BranchAttend(prefix), np.arange(starts[-1])
    hidden, state = draft(found["tokens.0"], draft.fuse(case.inputs["features"]), found["positions.0"], prefix)
    yield hidden, state
    for depth in range(1, DEPTHS):
        positions = found[f"positions.{depth}"]
        branch.enter(rows, starts, rows, positions.numpy())
        hidden, state = draft(found[f"tokens.{depth}"], state, positions, branch)
        yield hidden, state


def errors(draft: DraftModel, case: Trained) -> list[float]:
    """The largest error at each depth, over what the head reads, its scores and what is fed back."""
    found, worst = case.found, []
    for depth, (hidden, state) in enumerate(_run(draft, case)):
        stages = {"hidden": hidden, "logits": draft.logits(hidden), "state": state}
        worst.append(max(float(row_error(found[f"{name}.{depth}"], ours).max()) for name, ours in stages.items()))
    return worst


def other_tokens(draft: DraftModel, case: Trained) -> int:
    """In how many rows of all depths the best token is another one."""
    choices = [draft.to_target(draft.logits(hidden).argmax(-1)) for hidden, _ in _run(draft, case)]
    return sum(int((ours != case.found[f"choice.{depth}"]).sum()) for depth, ours in enumerate(choices))


@pytest.mark.parametrize("name", _VARIED)
def test_training_norms_twice_what_the_first_layer_is_fed(cases: Path, name: str) -> None:
    case = trained(cases, name)
    assert max(errors(case.twice, case)) <= TOLERANCE
    assert other_tokens(case.twice, case) == 0
    assert min(errors(case.read, case)) > CLEARLY
    assert other_tokens(case.read, case) > 0


def test_a_gain_that_is_the_same_everywhere_hides_it(cases: Path) -> None:
    case = trained(cases, "constant-gain")
    assert max(errors(case.read, case)) <= TOLERANCE
    assert max(errors(case.twice, case)) <= TOLERANCE
    assert other_tokens(case.read, case) == 0


@torch.inference_mode()
def test_its_query_projection_takes_the_doubly_normed_hidden(cases: Path) -> None:
    case = trained(cases, "plain")
    once = case.read
    for depth in range(DEPTHS):
        embedded, normed = case.found[f"attended.{depth}"].chunk(2, dim=-1)
        fed = case.found[f"fed.{depth}"]
        assert row_error(embedded, once.embedding_norm(once.embed(case.found[f"tokens.{depth}"]))).max() <= TOLERANCE
        assert row_error(normed, once.feature_norm(once.embedding_norm(fed))).max() <= TOLERANCE
        assert row_error(normed, once.feature_norm(fed)).max() > CLEARLY
    assert row_error(case.found["fed.0"], once.fuse(case.inputs["features"])).max() <= TOLERANCE


@pytest.mark.parametrize("name", ["plain", "constant-gain"])
def test_its_residual_is_what_the_layer_is_fed_not_its_norm(cases: Path, name: str) -> None:
    """The script that converts an export for vLLM writes `norm_before_residual: true`."""
    case = trained(cases, name)
    assert case.read.spec.residual is Stream.PRE_NORM
    told = DraftModel.over(replace(case.read.spec, residual=Stream.POST_NORM), case.read.state_dict())
    for draft in (told, _twice(told)):
        assert min(errors(draft, case)) > 10 * CLEARLY


def test_its_export_scales_rope_that_was_trained_plain(cases: Path) -> None:
    case = trained(cases, "constant-gain")
    assert case.draft.spec.rope.kind is RopeKind.YARN
    assert min(errors(case.draft, case)) > CLEARLY
    assert max(errors(case.read, case)) <= TOLERANCE


@pytest.mark.parametrize("name", ["plain", "layer-ids"])
def test_its_layer_ids_are_those_of_the_layers_that_streams_leave(cases: Path, name: str) -> None:
    case = trained(cases, name)
    assert case.checkpoint.wiring
    boundaries = case.checkpoint.wiring.boundaries
    assert torch.equal(case.inputs["features"], torch.cat([case.found["streams"][b] for b in boundaries], dim=-1))
    assert (boundaries == default_wiring(TARGET_LAYERS)) == (name == "plain"), "what a config without ids would mean"


def test_its_slots_are_in_the_order_of_the_layers_whatever_the_order_of_the_ids(cases: Path) -> None:
    case = trained(cases, "unsorted-ids")
    assert case.checkpoint.wiring
    assert case.checkpoint.wiring.raw_ids == (6, 0, 3), "as they are exported"
    streams = [case.found["streams"][b] for b in (1, 4, 7)]
    assert torch.equal(case.inputs["features"], torch.cat(streams, dim=-1))

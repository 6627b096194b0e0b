"""Tensors that a folder lacks, or has too many, are told by the names they have in its files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spectrace.engine.checkpoint import DraftCheckpoint, read_draft
from spectrace.replay.fed import ONE_SLOT, one_slot
from spectrace.replay.missing import lost_in_copy, missing_weights, shipped_by_copy, stand_in
from spectrace.replay.profiles.known import PROFILES
from spectrace.replay.profiles.spectrace import GENERIC
from spectrace.tracer import Keys, Recorder, Trace, create_trace, seal_trace

VLLM = PROFILES["vllm"]
Read = Callable[..., DraftCheckpoint]


@pytest.fixture
def read(new_draft: Any, write_draft: Any, tmp_path: Path) -> Read:
    """`read("fc.weight")`: a draft without these tensors."""

    def without(*names: str) -> DraftCheckpoint:
        config, tensors = new_draft()
        kept = {name: tensor for name, tensor in tensors.items() if name not in names}
        assert len(kept) == len(tensors) - len(names)
        return read_draft(write_draft(tmp_path / "draft", config, kept))

    return without


@pytest.mark.parametrize(
    ("name", "fault", "variant", "taken"),
    [
        ("fc.weight", "P1", "fc", "whatever the memory held"),
        ("midlayer.hidden_norm.weight", "P1", "norm", "ones"),
        ("midlayer.self_attn.q_proj.weight", "P1", "attention", "whatever the memory held"),
        ("midlayer.mlp.up_proj.weight", "P1", "mlp", "whatever the memory held"),
        ("lm_head.weight", "P2", "head", "the first rows of the target's head"),
    ],
)
def test_a_checkpoint_that_lacks_a_tensor_says_so_and_what_is_taken_for_it(
    name: str, fault: str, variant: str, taken: str, read: Read
) -> None:
    [finding] = missing_weights(read(name), VLLM)
    assert (finding.fault, finding.variant, finding.title) == (fault, "checkpoint", f"the checkpoint has no {name}")
    assert finding.evidence == (f"without {name}, vllm takes {taken}",)
    [unknown] = missing_weights(read(name), GENERIC)
    assert unknown.evidence == (unknown.title,), "of an unknown engine nothing is said"


def test_a_whole_checkpoint_and_one_without_its_table_lack_no_weights(read: Read) -> None:
    assert list(missing_weights(read(), VLLM)) == list(missing_weights(read("d2t"), VLLM)) == []
    assert stand_in(VLLM, "d2t") == "vllm takes zeros, so that draft id k is token k"


def served(folder: Path, tensors: dict[str, list[int]] | None, width: int = 4) -> Trace:
    create_trace(folder, {"engine": "vllm", "draft": {"path": "/served", "tensors": tensors}})
    with Recorder(folder, role="draft") as recorder:
        recorder.received(Keys(request=0, pass_=0, position=[0, 1]), token=[1, 2], features=[[0.0] * width] * 2)
    assert seal_trace(folder) == []
    return Trace.open(folder)


def test_what_a_copy_lost_or_added_is_told_by_its_own_names(read: Read, tmp_path: Path) -> None:
    checkpoint = read()
    layers = {name.replace("midlayer", "layers.0"): [1] for name in checkpoint.names.values()}
    whole = served(tmp_path / "whole", layers)
    assert lost_in_copy(whole, checkpoint) == {} and shipped_by_copy(whole, checkpoint, "head.weight") == ""
    assert shipped_by_copy(whole, checkpoint, "embedding.weight") == "embed_tokens.weight"
    less = {name: shape for name, shape in layers.items() if "q_proj" not in name and "embed" not in name}
    lost = served(tmp_path / "less", less)
    assert lost_in_copy(lost, checkpoint) == {"attention.q.weight": "layers.0.self_attn.q_proj.weight"}
    assert shipped_by_copy(lost, checkpoint, "embedding.weight") == ""
    unknown = served(tmp_path / "unknown", None)
    assert lost_in_copy(unknown, checkpoint) == {} and shipped_by_copy(unknown, checkpoint, "embedding.weight") == ""


def test_one_boundary_in_the_place_of_all_slots_is_told_by_its_width(read: Read, tmp_path: Path) -> None:
    checkpoint = read()
    width, whole = checkpoint.spec.target_width, checkpoint.spec.features_width
    [finding] = one_slot(served(tmp_path / "one", None, width), checkpoint)
    assert (finding.fault, finding.variant, finding.masks) == ("M2", ONE_SLOT, True)
    assert f"is {width} wide" in finding.evidence[0] and f"fc takes {whole}" in finding.evidence[0]
    assert not list(one_slot(served(tmp_path / "all", None, whole), checkpoint))
    assert not list(one_slot(served(tmp_path / "other", None, width + 1), checkpoint)), "of another draft"

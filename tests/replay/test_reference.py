"""Boundaries of another target are never taken for true; the same weights in other files are."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from spectrace.replay.reference import is_another, is_of_this_target, is_this_target, said_of
from spectrace.replay.truth import Answered
from spectrace.tracer.errors import UserError
from spectrace.tracer.fingerprint import file_fingerprints


def weights() -> dict[str, Tensor]:
    """Twelve layers, in float32 that bfloat16 does not hold."""
    torch.manual_seed(0)
    return {f"model.layers.{layer}.up.weight": torch.randn(4, 4) for layer in range(12)}


def saved(folder: Path, tensors: dict[str, Tensor], files: int = 1) -> Path:
    folder.mkdir()
    for at in range(files):
        part = dict(list(tensors.items())[at::files])
        save_file(part, folder / f"model-{at}-of-{files}.safetensors")
    return folder


def trace_of(target: Path, dtype: str = "float32", *, prints: bool = True) -> Any:
    """A trace that was served with what this folder holds now."""
    files = file_fingerprints(target)
    told = {"path": str(target), "fingerprints": files if prints else {}}
    return SimpleNamespace(folder=Path("T"), manifest=json.loads(json.dumps({"target": told, "dtype": dtype})))


@pytest.fixture
def served(tmp_path: Path) -> Path:
    return saved(tmp_path / "served", weights())


def test_the_target_that_was_served_is_known_by_its_files(served: Path, tmp_path: Path) -> None:
    trace = trace_of(served)
    assert is_this_target(trace, served)
    (served / "consolidated.safetensors").write_bytes(b"the same once more, as some publish it")
    assert is_this_target(trace, served)
    assert is_of_this_target(trace, trace_of(saved(tmp_path / "copied", weights())))


def test_another_target_is_refused_by_its_first_tensors_in_the_order_of_layers(served: Path, tmp_path: Path) -> None:
    changed = {name: tensor * (1.1 if int(name.split(".")[2]) > 1 else 1) for name, tensor in weights().items()}
    other = saved(tmp_path / "other", changed)
    said = r"layers\.2\.up\.weight, model\.layers\.3\.up\.weight, model\.layers\.4\.up\.weight to begin with"
    with pytest.raises(UserError, match=rf"other: not the target that was served: .*{said}; .*--no-target"):
        is_this_target(trace_of(served), other)
    with pytest.raises(UserError, match=rf"^T: recorded from another target than T: .*{said}"):
        is_of_this_target(trace_of(served), trace_of(other))


def test_where_the_served_weights_are_gone_the_files_that_differ_are_named(served: Path, tmp_path: Path) -> None:
    other = saved(tmp_path / "other", {name: 1.1 * tensor for name, tensor in weights().items()})
    trace = trace_of(served)
    (served / "model-0-of-1.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-0-of-1\.safetensors is not as it was"):
        is_this_target(trace, other)


def test_a_file_that_is_cut_is_named(served: Path, tmp_path: Path) -> None:
    other = saved(tmp_path / "other", weights())
    file = other / "model-0-of-1.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UserError, match=r"model-0-of-1\.safetensors is not as it was"):
        is_this_target(trace_of(served), other)


def test_the_same_tensors_in_other_files_or_in_the_type_that_was_served_are_the_same_target(
    served: Path, tmp_path: Path
) -> None:
    assert is_this_target(trace_of(served), saved(tmp_path / "in-three", weights(), files=3))
    cast = saved(tmp_path / "cast", {name: tensor.bfloat16() for name, tensor in weights().items()})
    assert is_this_target(trace_of(served, "bfloat16"), cast)
    with pytest.raises(UserError):
        is_this_target(trace_of(served, "float32"), cast)


def test_without_fingerprints_nothing_is_known_and_tokens_decide(served: Path) -> None:
    assert not is_this_target(trace_of(served, prints=False), served)
    assert not is_of_this_target(trace_of(served), trace_of(served, prints=False))
    assert "not known" in said_of("X", Answered(0, 0)) and not is_another(Answered(0, 0))
    assert said_of("X", Answered(200, 195)) == "" and not is_another(Answered(200, 195))
    assert "answers 120" in said_of("X", Answered(200, 120)) and is_another(Answered(200, 120))

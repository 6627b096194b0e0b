"""Faults of what only some drafts have, seeded into one that has it all: named blind, their repair foretold exactly."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from toy.switches import prompts
from toy.target import TARGET
from toy.train import DRAFT

from spectrace.engine.checkpoint import read_draft
from spectrace.engine.deployment import Deployment, Serving
from spectrace.replay.diagnose import diagnose
from spectrace.replay.diagnosis import Cause, Diagnosis, Verdict
from spectrace.tracer.acceptance import acceptance_of_rows
from spectrace.tracer.trace import Trace

Record = Callable[..., Trace]
Edited = Callable[..., Path]
DEEP, GQA = DRAFT.with_name("deep"), DRAFT.with_name("gqa")


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory, cluster: None) -> Iterator[Record]:
    """`record(*faults, draft=, **changes)`: a trace of the deep draft, or of another one for its target."""
    root = tmp_path_factory.mktemp("diagnosed")
    with Deployment(TARGET, DEEP, threads=1) as pair:

        def record(*faults: str, draft: Path = DEEP, count: int = 12, **changes: Any) -> Trace:
            if pair.draft_folder != draft:
                pair.swap(TARGET, draft)
            folder = root / str(len(list(root.iterdir())))
            serving = Serving(**{"depth": 3, "max_new": 40, "concurrency": 4, **changes, "faults": faults})
            assert not pair.serve(prompts(count), serving, trace=folder).losses
            return Trace.open(folder)

        yield record


@pytest.fixture
def edited(tmp_path: Path) -> Edited:
    """`edited(change, **config)`: a copy of the deep draft with other fields, None taking one away, and tensors."""

    def make(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = dict, **config: Any) -> Path:
        folder = shutil.copytree(DEEP, tmp_path / str(len(list(tmp_path.iterdir()))))
        held = {**json.loads((folder / "config.json").read_text("utf-8")), **config}
        held = {name: value for name, value in held.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(held), "utf-8")
        save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")
        return folder

    return make


def served(trace: Trace) -> float:
    length = acceptance_of_rows(trace.rows("verified")).acceptance_length
    assert length is not None
    return length


def told(trace: Trace, draft: Path = DEEP) -> Diagnosis:
    return diagnose(trace, read_draft(draft), target=TARGET)


def the_cause(found: Diagnosis) -> Cause:
    assert found.verdict is Verdict.FAULT
    [cause] = found.causes
    return cause


def test_nothing_is_named_where_nothing_is_broken(record: Record) -> None:
    trace = record()
    found = told(trace)
    assert found.verdict in (Verdict.HEALTHY, Verdict.WEAK_DRAFT) and found.causes == ()
    assert found.repaired_acceptance == served(trace)
    assert all(one.configured == one.engine == one.trained for one in found.readings.values())


@pytest.mark.parametrize("fault", ["P5", "P6", "P7", "N4", "A1:head", "A1:unscaled", "A2"])
def test_a_fault_of_the_engine_is_named_and_its_repair_foretold_exactly(fault: str, record: Record) -> None:
    cause = the_cause(told(record(fault)))
    assert cause.fault == fault.partition(":")[0] and cause.evidence and cause.fix
    assert cause.predicted_acceptance == served(record())


def test_drafts_that_end_where_the_config_says_are_named_by_where_they_end(record: Record, edited: Edited) -> None:
    short = edited(max_position_embeddings=32)
    cause = the_cause(told(record("A3", draft=short), short))
    assert cause.fault == "A3" and cause.predicted_acceptance == served(record())
    assert "from position 32 on" in cause.evidence[0] and "max_position_embeddings" in cause.fix


def test_quantised_weights_without_their_scales_are_named(record: Record, tmp_path: Path) -> None:
    draft = shutil.copytree(GQA, tmp_path / "fp8")
    tensors = load_file(draft / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight") or name == "fc.weight"]:
        scale = tensors[name].float().abs().amax(1, keepdim=True) / 448
        tensors[name] = (tensors[name].float() / scale).to(torch.float8_e4m3fn)
        tensors[name.replace("weight", "weight_scale")] = scale
    save_file(tensors, draft / "model.safetensors")
    cause = the_cause(told(record("P8", draft=draft), draft))
    assert cause.fault == "P8" and cause.predicted_acceptance == served(record(draft=draft))


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "P7": ({"attention_bias": False}, "attention_bias to true"),
    "A1": ({"embedding_scale": None}, "embedding_scale to 8.94427"),
    "A2": ({"use_sliding_window": False}, "use_sliding_window to true"),
}


@pytest.mark.parametrize(("fault", "kind"), [*((fault, "config") for fault in CONFIGS), ("P7", "conversion")])
def test_a_config_that_lost_a_switch_is_named_with_its_edit(
    fault: str, kind: str, record: Record, edited: Edited
) -> None:
    changes, edit = CONFIGS[fault]
    wrong = edited(**changes)
    cause = the_cause(told(record(draft=wrong), wrong if kind == "config" else DEEP))
    assert cause.fault == fault and edit in cause.fix and str(wrong / "config.json") in cause.command
    assert cause.predicted_acceptance == served(record())
    assert ("convert" in cause.fix) == (kind == "conversion")


def moved(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A few steps of training later."""
    torch.manual_seed(0)
    return {name: (one.float() * (1 + 0.1 * torch.randn(one.shape))).to(one.dtype) for name, one in tensors.items()}


def test_a_folder_of_another_step_is_named_with_how_far_it_is_off(record: Record, edited: Edited) -> None:
    other = edited(moved)
    cause = the_cause(told(record(draft=other)))
    assert cause.fault == "P6" and cause.predicted_acceptance == served(record())
    assert f"they are those of {other}" in cause.evidence[1] and "differ, by 10." in cause.evidence[1]
    assert f"serve {DEEP}, not {other}" in cause.fix and cause.command


def test_what_is_broken_beside_weights_of_another_step_is_named_too(record: Record, edited: Edited) -> None:
    found = told(record("N1", draft=edited(moved)))
    assert {cause.fault for cause in found.causes} == {"P6", "N1"}
    assert found.repaired_acceptance == served(record())


def test_rows_that_an_export_put_into_another_order_are_put_back(record: Record, edited: Edited) -> None:
    """What the edit makes of the folder is what was trained."""

    def turned(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """As for pairs (2i, 2i + 1), of heads of 24."""
        order = torch.arange(24).reshape(2, 12).T.flatten()
        rows = {name for name in tensors if ".q_proj." in name or ".k_proj." in name}
        return {
            name: one.reshape(-1, 24, *one.shape[1:])[:, order].reshape(one.shape).contiguous() if name in rows else one
            for name, one in tensors.items()
        }

    wrong = edited(turned)
    cause = the_cause(told(record(draft=wrong), wrong))
    assert "P5" in (cause.fault, *cause.alike) and cause.predicted_acceptance == served(record())
    command = cause.command.replace("python -c", f"'{sys.executable}' -c", 1)
    subprocess.run(command, shell=True, check=True)
    right = load_file(DEEP / "model.safetensors")
    assert all(torch.equal(tensor, right[name]) for name, tensor in load_file(wrong / "model.safetensors").items())

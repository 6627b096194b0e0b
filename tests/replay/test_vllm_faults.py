"""Faulty drafts that real vLLM served without a word, as it was recorded then: each is named, and its edit mends it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spectrace.cli.check import examine
from spectrace.engine.checkpoint import read_draft
from spectrace.replay.diagnose import diagnose
from spectrace.replay.diagnosis import Verdict
from spectrace.replay.profiles.known import PROFILES
from spectrace.tracer.trace import Trace

TRACES = Path(__file__).with_name("vllm_faults")
IDS, NESTED = "eagle_aux_hidden_state_layer_ids", "eagle_config"
LAYERS = 6


@dataclass(frozen=True, slots=True)
class Expected:
    """What is named, what the evidence and the edit say of it, and what the repair is foretold to bring at least."""

    family: str
    fault: str
    evidence: str
    edit: str
    gain: float = 1.0


EXPECTED = {
    "no-d2t": Expected("llama", "V1", "no d2t: vllm takes zeros, so that draft id k is token k", "copy the tensor"),
    "no-head": Expected("llama", "P2", "no lm_head.weight: vllm takes the first rows of the target", "copy the tensor"),
    "no-fc": Expected("llama", "P1", "no fc.weight: vllm takes whatever the memory held", "copy the tensor"),
    "output-ids": Expected("qwen3", "W1", "the engine took boundaries [0, 2, 5], from eagle_config", "[1, 3, 6]"),
    "not-in-order": Expected("llama", "W5", "the engine took boundaries [0, 3, 6]", "vllm sorts layer ids"),
}
Pair = Callable[[str], tuple[Path, Path]]


def configured(draft: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((draft / "config.json").read_text("utf-8"))
    change(config)
    (draft / "config.json").write_text(json.dumps(config), "utf-8")


def nest_output_ids(config: dict[str, Any]) -> None:
    config[NESTED] = {IDS: [one - 1 for one in config.pop(IDS)]}


def believed(name: str, draft: Path, folder: Path) -> Path:
    """The draft that the team believes it serves."""
    copy = shutil.copytree(draft, folder / "draft")
    if name == "output-ids":
        configured(copy, nest_output_ids)
    if name == "not-in-order":
        configured(copy, lambda config: config.update({IDS: [3, 0, 6]}))
        [weights] = copy.glob("*.safetensors")
        tensors = load_file(weights)
        first, second, third = tensors["fc.weight"].chunk(3, 1)
        tensors["fc.weight"] = torch.cat([second, first, third], 1)
        save_file(tensors, weights)
    return copy


@pytest.mark.parametrize("name", EXPECTED)
def test_a_fault_that_vllm_served_is_named(name: str, analytic_pair: Pair, tmp_path: Path) -> None:
    expected = EXPECTED[name]
    target, draft = analytic_pair(expected.family)
    trace = Trace.open(TRACES / name)
    assert examine(trace.folder).ok and trace.manifest["engine"] == "vllm"
    told = diagnose(trace, read_draft(believed(name, draft, tmp_path)), target=target)
    assert told.verdict is Verdict.FAULT, told
    [cause] = told.causes
    assert cause.fault == expected.fault
    assert expected.evidence in " ".join(cause.evidence) and expected.edit in cause.fix
    assert cause.served_acceptance and cause.predicted_acceptance
    assert cause.predicted_acceptance > cause.served_acceptance + expected.gain


@pytest.mark.parametrize("name", ["output-ids", "not-in-order"])
def test_the_printed_command_makes_a_config_that_vllm_reads_as_it_is_meant(
    name: str, analytic_pair: Pair, tmp_path: Path
) -> None:
    target, draft = analytic_pair(EXPECTED[name].family)
    folder = believed(name, draft, tmp_path)
    [cause] = diagnose(Trace.open(TRACES / name), read_draft(folder), target=target).causes
    command = cause.command.replace("python -c", f"'{sys.executable}' -c")
    assert subprocess.run(command, shell=True, capture_output=True).returncode == 0
    config = json.loads((folder / "config.json").read_text("utf-8"))
    assert PROFILES["vllm"].resolve(config, LAYERS) == ((1, 3, 6) if name == "output-ids" else (0, 3, 6))
    if name == "not-in-order":
        mended, right = (load_file(next(one.glob("*.safetensors")))["fc.weight"] for one in (folder, draft))
        assert mended.equal(right)


@pytest.mark.parametrize(("name", "lost"), [("no-d2t", "d2t"), ("no-head", "lm_head.weight"), ("no-fc", "fc.weight")])
def test_a_folder_that_lacks_a_tensor_is_named_by_itself(
    name: str, lost: str, analytic_pair: Pair, tmp_path: Path
) -> None:
    """The team believes in the very folder that it serves."""
    target, draft = analytic_pair("llama")
    folder = believed(name, draft, tmp_path)
    [weights] = folder.glob("*.safetensors")
    save_file({key: tensor for key, tensor in load_file(weights).items() if key != lost}, weights)
    told = diagnose(Trace.open(TRACES / name), read_draft(folder), target=target)
    assert told.verdict is Verdict.FAULT and told.causes[0].fault == EXPECTED[name].fault
    assert lost in told.causes[0].title and told.causes[0].fix.startswith(f"export {folder} again")

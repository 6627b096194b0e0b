"""The check of a GPU says what it found, claim by claim, and on a machine without one that nothing can be found."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))

import gpu_check
from gpu_check import MODES, Runs, Skipped, changes_nothing, claims, costs_little, graphs_run, is_recorded, line, main

from spectrace.tracer.status import HookAccount, Status

COUNTERS = {"vllm:spec_decode_num_drafts": 1, "vllm:spec_decode_num_accepted_tokens": 1}
NODES = {
    "request": [0, 0, 0], "pass": [1, 1, 1], "round": [0, 0, 0], "node": [0, 1, 2], "depth": [0, 0, 0],
    "rank": [0, 0, 0], "incarnation": [0, 0, 0], "parent": [-1, 0, 1], "accepted": [True, True, False],
    "cut": [False] * 3, "position": [5, 6, 7],
}  # fmt: skip


class Rows(dict[str, np.ndarray]):
    """Rows of some family: a round of two drafts, one of them correct."""

    def __len__(self) -> int:
        return 3

    def has(self, kind: str) -> np.ndarray:
        return np.array([kind == "state"])


def run(**changes: Any) -> SimpleNamespace:
    """An engine that was recorded whole, but for `changes`."""
    status = Status({"GPUModelRunner.execute_model": HookAccount(calls=1, secs=0.1, host_secs=2.0)})
    status.hooks["SpeculatorCudaGraphManager.run_fullgraph"] = HookAccount(calls=4)
    status.inside = ("GPUModelRunner.execute_model",)
    trace = {
        "sealed": True, "verify": list, "manifest": {"mode": {"runner": "V2"}}, "statuses": {"target-0": status},
        "rows": lambda _family, **_equals: Rows({name: np.array(values) for name, values in NODES.items()}),
    } | changes.pop("trace", {})  # fmt: skip
    given = {"outputs": [[1, 2], [3, 4]], "counters": COUNTERS, "secs": 2.0, **changes}
    return SimpleNamespace(trace=SimpleNamespace(**trace), **given)


def runs(recorded: Any, plain: Any = None, again: Any = None) -> Any:
    def told(_mode: str, *, recorded: bool = True, again: bool = False) -> Any:
        return with_us if recorded else (twice if again else without)

    with_us, without, twice = recorded, plain or run(), again or plain or run()
    return told


def test_without_cuda_it_says_so_in_a_line_and_exits_with_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(main, [])
    assert done.exit_code == 2 and done.output == "no CUDA device here: nothing of this can be checked\n"


def test_a_target_goes_with_its_draft(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["--target", str(tmp_path)])
    assert done.exit_code == 2 and "go together" in done.output


def test_every_claim_is_a_line_and_a_failed_one_says_what_to_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "some GPU")
    monkeypatch.setattr(gpu_check, "pair", lambda folder: (folder, folder))

    def fails() -> str:
        raise AssertionError("3 of 4 values are wrong")

    def skips() -> str:
        raise Skipped("no vLLM")

    acts: dict[str, Callable[[], str]] = {
        "one": lambda: "1.02",
        "two": fails,
        "three": skips,
        "four": lambda: f"{1 / 0}",
    }
    monkeypatch.setattr(gpu_check, "claims", lambda _: iter(acts.items()))
    done = CliRunner().invoke(main, [])
    lines = done.output.splitlines()
    assert done.exit_code == 1 and lines[0] == "pass     one: 1.02" and lines[3] == "skipped  three: no vLLM"
    assert (
        lines[1] == "FAIL     two: 3 of 4 values are wrong"
        and "report this line" in lines[2]
        and "some GPU" in lines[2]
    )
    assert "ZeroDivisionError" in lines[4] and lines[-1].startswith("2 claims failed")


def test_of_engines_nothing_is_said_where_there_is_no_vllm(tmp_path: Path) -> None:
    told = [
        line(claim, act, "")[0]
        for claim, act in claims(Runs(tmp_path, tmp_path, tmp_path))
        if claim[:2] in ("V1", "V2")
    ]
    assert len(told) == 4 * len(MODES) + 1 and all(one.startswith("skipped") for one in told)


def test_a_whole_trace_passes_and_shows_what_was_visible() -> None:
    assert is_recorded(runs(run()), "V2 graphs").startswith("1 rounds with 1 correct drafts; depth 0: 3 rows, state; ")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"trace": {"sealed": False}}, "not sealed"),
        ({"trace": {"verify": lambda: [SimpleNamespace(message="a hook never fired")]}}, "a hook never fired"),
        ({"trace": {"manifest": {"mode": {"runner": "V1"}}}}, "vLLM ran its V1 runner"),
        ({"counters": COUNTERS | {"vllm:spec_decode_num_drafts": 2}}, "recorded are"),
    ],
)
def test_what_is_wrong_with_a_trace_is_why_it_fails(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        is_recorded(runs(run(**changes)), "V2 eager")


def test_answers_that_recording_changes_fail_unless_the_engine_changes_them_itself() -> None:
    other = run(outputs=[[1, 2], [3, 5]])
    assert changes_nothing(runs(run(secs=2.2)), "V2 eager") == "2 answers; 1.10 times as long"
    with pytest.raises(AssertionError, match="1 of 2 answers differ, the first is 1"):
        changes_nothing(runs(other), "V2 eager")
    with pytest.raises(Skipped, match="from run to run"):
        changes_nothing(runs(other, run(), again=run(outputs=[[7], [8]])), "V2 eager")


def test_hooks_that_cost_too_much_and_graphs_that_never_ran_fail() -> None:
    assert (
        costs_little(runs(run()), "V2 graphs") == "4.8%" and graphs_run(runs(run()), "V2 graphs") == "4 graphs replayed"
    )
    told = run()
    told.trace.statuses["target-0"].hooks = {
        "GPUModelRunner.execute_model": HookAccount(calls=1, secs=1.0, host_secs=2.0)
    }
    with pytest.raises(AssertionError, match=r"33\.3%"):
        costs_little(runs(told), "V2 graphs")
    with pytest.raises(AssertionError, match="no graph"):
        graphs_run(runs(told), "V2 graphs")


def test_an_engine_is_started_once_for_each_mode_with_and_without_the_recorder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[str, bool]] = []

    def start(_runs: Runs, mode: str, recorded: bool) -> Any:
        started.append((mode, recorded))
        return run()

    monkeypatch.setattr(gpu_check.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(Runs, "_start", start)
    engines = Runs(tmp_path, tmp_path, tmp_path)
    for mode in MODES:
        is_recorded(engines, mode) if mode != "V1 eager" else changes_nothing(engines, mode)
        changes_nothing(engines, mode)
    assert sorted(started) == sorted((mode, recorded) for mode in MODES for recorded in (True, False))


def test_what_an_engine_is_asked_and_says_survives_the_way_to_its_process_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "serve.py").write_text(
        "import json, pathlib, sys\n"
        "given = json.loads(sys.argv[1])\n"
        "folder = pathlib.Path(given['folder'])\n"
        "(folder / 'log').write_text('no room left')\n"
        "given['eager'] or sys.exit(3)\n"
        "(folder / 'said.json').write_text(json.dumps({'outputs': [[given['depth']]], 'counters': {}, 'secs': 1.0}))\n",
        "utf-8",
    )
    monkeypatch.setattr(gpu_check, "SERVE", tmp_path / "serve.py")
    monkeypatch.setattr(gpu_check.importlib.util, "find_spec", lambda _: object())
    engines = Runs(tmp_path, tmp_path, tmp_path)
    assert engines("V2 eager", recorded=False).outputs == [[gpu_check.DEPTH]]
    with pytest.raises(AssertionError, match="the engine ended with 3, and last said: no room left"):
        engines("V2 graphs", recorded=False)

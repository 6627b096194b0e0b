"""Whatever becomes of a server or of its recording: the server behaves as without us, and the trace accounts for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spectrace.cli.check import examine
from spectrace.tracer.acceptance import acceptance_of_rows
from spectrace.tracer.trace import Trace

pytestmark = pytest.mark.vllm

Pair = Callable[[str], tuple[Path, Path]]
Serve = Callable[..., Any]
Start = Callable[..., subprocess.Popen[str]]
ENDLESS = {"prompts": [[5, 9, 30]] * 4, "max_new": 400}
PATIENCE_SECS = 240


def wait_for(arrived: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECS
    while not arrived():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def children_of(parent: int) -> Iterator[int]:
    """All processes below one."""
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text("utf-8").split():
        yield int(child)
        yield from children_of(int(child))


def writer_pid(trace: Path, name: str) -> int:
    return int(json.loads((trace / name / "manifest.json").read_text("utf-8"))["pid"])


@pytest.fixture
def started(vllm: Path, environment: dict[str, str], analytic_pair: Pair, tmp_path: Path) -> Iterator[Start]:
    """`started(asked, variables)`: a server under `spectrace record`, which goes on until it is ended."""
    target, draft = analytic_pair("llama")
    running: list[subprocess.Popen[str]] = []

    def start(asked: dict[str, Any], **variables: str) -> subprocess.Popen[str]:
        (tmp_path / "asked.json").write_text(json.dumps(asked), "utf-8")
        serve = [vllm / "python", Path(__file__).with_name("serve_vllm.py"), target, draft]
        command = [vllm / "spectrace", "record", "--out", tmp_path / "trace", "--", *serve, "asked.json", "said.json"]
        with (tmp_path / "log").open("w", encoding="utf-8") as log:
            running.append(
                subprocess.Popen(
                    list(map(str, command)), env={**environment, **variables}, text=True, cwd=tmp_path,
                    stdout=log, stderr=log,
                )
            )  # fmt: skip
        return running[-1]

    yield start
    for one in running:
        if one.poll() is None:
            for child in children_of(one.pid):
                os.kill(child, signal.SIGKILL)
            one.wait(60)


def steps_in(trace: Path) -> int:
    """Steps that the target's writer has acknowledged so far."""
    try:
        return len(np.unique(Trace.open(trace, tolerant=True).rows("emitted", rank=0)["step"]))
    except Exception:
        return 0


def test_a_server_killed_with_nine_leaves_what_was_acknowledged(started: Start, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    server = started(ENDLESS, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    wait_for(lambda: steps_in(trace) > 20)
    os.kill(writer_pid(trace, "target-0"), signal.SIGKILL)
    assert server.wait(60) == 128 + signal.SIGKILL
    found = examine(trace)
    assert (found.exit_code, found.sealed) == (1, False)
    opened = Trace.open(trace)
    assert len(opened.rows("received", depth=0)) > 20 and opened.manifest["engine"] == "vllm"
    assert opened.statuses["target-0"].steps, "what it said of itself last is there"


def test_a_rank_that_is_killed_ends_the_server_as_without_us_and_is_told(started: Start, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    asked = {**ENDLESS, "options": {"tensor_parallel_size": 2}}
    server = started(asked, VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_CPU_OMP_THREADS_BIND="0|1")
    wait_for(lambda: steps_in(trace) > 10)
    os.kill(writer_pid(trace, "target-1"), signal.SIGKILL)
    assert server.wait(PATIENCE_SECS) not in (0, None), "vLLM gives up without one of its ranks"
    log = (tmp_path / "log").read_text("utf-8")
    assert "EngineDeadError" in log or "died" in log
    found = examine(trace)
    assert found.exit_code == 1 and not found.sealed
    assert "target-1" in log, "the page says which writers did not seal"
    assert len(Trace.open(trace).rows("emitted", rank=0)) > 10


def test_a_full_disk_costs_rows_and_no_answer(serve: Serve, analytic_pair: Pair) -> None:
    pair = analytic_pair("llama")
    plain = serve(*pair, level=None)
    served = serve(*pair, level="full", asked={"disk_bytes": 300_000})
    assert served.outputs == plain.outputs and served.counters == plain.counters
    found = examine(served.folder)
    assert found.exit_code == 1 and {problem.kind for problem in found.problems} >= {"lost"}
    lost = served.trace.account().lost
    assert lost > 0, "every row that is not here is counted"


def test_two_engines_under_one_command_are_two_starts(serve: Serve, analytic_pair: Pair) -> None:
    served = serve(*analytic_pair("llama"), level="features", asked={"engines": 2})
    trace = served.trace
    assert examine(served.folder).ok
    rows = trace.rows("verified")
    halves = [acceptance_of_rows(rows.where(incarnation=start)) for start in (0, 1)]
    assert halves[0] == halves[1] and halves[0].rounds_untrimmed == served.counters["spec_decode_num_drafts"]


def test_a_second_server_is_refused_a_folder_that_is_taken(started: Start, tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "something").write_text("", "utf-8")
    second = started(ENDLESS)
    assert second.wait(60) == 2
    assert "exists and is not an empty folder" in (tmp_path / "log").read_text("utf-8")


def test_the_openai_server_is_recorded_as_it_is(
    vllm: Path, environment: dict[str, str], smollm2: tuple[Path, Path], prompts: list[list[int]], tmp_path: Path
) -> None:
    """`vllm serve`, asked over HTTP: answers and counters are its own, and the trace has them."""
    from urllib.request import Request, urlopen

    target, draft = smollm2
    port = 18_000 + os.getpid() % 1_000
    told = tmp_path / "stub" / "vllm-0.32.0+cpu.dist-info" / "METADATA"  # vllm-cpu's `serve` looks for a package vllm
    told.parent.mkdir(parents=True)
    told.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n", "utf-8")
    speculative = {"method": "eagle3", "model": str(draft), "num_speculative_tokens": 3}
    command = [
        vllm / "spectrace", "record", "--out", tmp_path / "trace", "--level", "full", "--", "vllm", "serve", target,
        "--speculative-config", json.dumps(speculative), "--dtype", "float32", "--max-model-len", 512,
        "--host", "127.0.0.1", "--port", port, "--served-model-name", "it",
    ]  # fmt: skip
    path = os.pathsep.join(filter(None, (str(tmp_path / "stub"), environment.get("PYTHONPATH"))))
    with (tmp_path / "log").open("w", encoding="utf-8") as log:
        server = subprocess.Popen(
            list(map(str, command)), env={**environment, "PYTHONPATH": path}, stdout=log, stderr=log, cwd=tmp_path
        )

    def ask(page: str, **body: Any) -> str:
        data = json.dumps(body).encode() if body else None
        request = Request(f"http://127.0.0.1:{port}{page}", data, {"Content-Type": "application/json"})
        with urlopen(request, timeout=120) as response:
            return str(response.read().decode())

    def healthy() -> bool:
        assert server.poll() is None, (tmp_path / "log").read_text("utf-8")[-3000:]
        try:
            return ask("/health") == ""
        except OSError:
            return False

    try:
        wait_for(healthy)
        for prompt in prompts:
            ask("/v1/completions", model="it", prompt=prompt, temperature=0, max_tokens=30, ignore_eos=True)
        metrics = ask("/metrics")
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    counts = {
        line.split("{")[0]: float(line.rsplit(" ", 1)[1])
        for line in metrics.splitlines()
        if line.startswith("vllm:spec")
    }
    trace = Trace.open(tmp_path / "trace")
    assert examine(trace.folder).ok, examine(trace.folder)
    found = acceptance_of_rows(trace.rows("verified"))
    assert found.rounds_untrimmed == counts["vllm:spec_decode_num_drafts_total"] > 0
    assert found.correct_drafts_untrimmed == counts["vllm:spec_decode_num_accepted_tokens_total"]
    assert len(trace.rows("requests")) == len(prompts)

"""Real vLLM on the CPU, nobody's edits: what it records is what it served, and replays to the token.

vLLM lives in an environment of its own, SPECTRACE_VLLM, which `make test-vllm` makes; here its traces are read.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from analytic.pair import make_pair

from spectrace.cli.check import examine
from spectrace.engine.checkpoint import build_draft, read_draft
from spectrace.replay.compare import served_dtype
from spectrace.replay.diagnose import diagnose
from spectrace.replay.diagnosis import Verdict
from spectrace.replay.lab import replay_trace
from spectrace.tracer.acceptance import acceptance_of_rows
from spectrace.tracer.trace import Trace

pytestmark = pytest.mark.vllm

SERVE = Path(__file__).with_name("serve_vllm.py")
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
SEVERAL = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
LENGTHS = (3, 5, 20, 1, 9, 14)


@dataclass(frozen=True, slots=True)
class Served:
    """What came of one run: outputs and counters by the engine's own account, and the trace, if it was recorded."""

    outputs: list[list[int]]
    counters: dict[str, Any]
    trace: Trace | None


Serve = Callable[..., Served]


@pytest.fixture(scope="session")
def vllm() -> Path:
    """The environment that serves."""
    home = os.environ.get("SPECTRACE_VLLM")
    if not home:
        pytest.fail("SPECTRACE_VLLM names no environment with vLLM: run these tests with `make test-vllm`")
    return Path(home).absolute() / "bin"


@pytest.fixture(scope="module")
def serve(vllm: Path, tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """`serve(target, draft, level=, processes=, **options)`: a few prompts through an `LLM`; no level: not recorded."""

    def run(
        target: Path,
        draft: Path,
        *,
        level: str | None = "full",
        processes: dict[str, str] = ONE_PROCESS,
        **options: Any,
    ) -> Served:
        folder = tmp_path_factory.mktemp("served")
        drawn = random.Random(1)
        prompts = [[drawn.randrange(5, 60) for _ in range(length)] for length in LENGTHS]
        (folder / "asked.json").write_text(json.dumps({"prompts": prompts, "options": options}), "utf-8")
        command = [vllm / "python", SERVE, target, draft, folder / "asked.json", folder / "said.json"]
        if level:
            command = [vllm / "spectrace", "record", "--out", folder / "trace", "--level", level, "--", *command]
        path = os.pathsep.join((str(vllm), os.environ["PATH"]))
        done = subprocess.run(
            list(map(str, command)), env={**os.environ, **processes, "PATH": path}, capture_output=True, text=True,
            timeout=600, cwd=folder,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        said = json.loads((folder / "said.json").read_text("utf-8"))
        return Served(said["outputs"], said["counters"], Trace.open(folder / "trace") if level else None)

    return run


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """The analytic pair of a family."""

    def make(family: str) -> tuple[Path, Path]:
        target, draft, _ = make_pair(family, tmp_path_factory.mktemp(family))
        return target, draft

    return make


RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "llama, two ranks": ("llama", {"tensor_parallel_size": 2, "processes": SEVERAL}),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_trace_of_vllm_is_what_vllm_counted_and_replays_to_the_token(
    name: str, serve: Serve, pair_of: Callable[[str], tuple[Path, Path]]
) -> None:
    family, options = RUNS[name]
    target, draft = pair_of(family)
    served = serve(target, draft, **options)
    trace = served.trace
    assert trace and examine(trace.folder).ok
    found = acceptance_of_rows(trace.rows("verified"))
    assert found.rounds_untrimmed == served.counters["num_drafts"]
    assert found.correct_drafts_untrimmed == served.counters["num_accepted_tokens"]
    assert sorted(map(list, trace.rows("requests")["output_tokens"].tolist())) == sorted(served.outputs)

    checkpoint = read_draft(draft)
    replayed = replay_trace(trace, build_draft(checkpoint, target=target, dtype=served_dtype(trace)))
    comparison = replayed.comparison
    assert comparison.tokens_equal == comparison.answers > 200 and replayed.agrees
    assert max(stage.max_error for stage in comparison.stages) < 1e-5

    told = diagnose(trace, checkpoint, target=target)
    assert told.verdict is Verdict.HEALTHY and told.causes == ()
    assert [one.best for one in told.identified] == [one.configured for one in told.identified]
    assert max(one.error for one in told.identified) < 1e-5 < 1e-2 < min(one.runner_up_error for one in told.identified)
    assert told.coverage["loaded tensors compared"] > 12 and told.coverage["received rows equal"] > 250
    assert bool(told.coverage["rows compared between ranks"]) == ("ranks" in name)


def test_recording_changes_nothing_that_is_served(serve: Serve, pair_of: Callable[[str], tuple[Path, Path]]) -> None:
    pair = pair_of("llama")
    with_us, without = serve(*pair, level="features"), serve(*pair, level=None)
    assert with_us.outputs == without.outputs and with_us.counters == without.counters

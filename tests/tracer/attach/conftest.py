"""Real vLLM, in an environment of its own: SPECTRACE_VLLM, which `make test-vllm` makes. Its traces are read here."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from spectrace.tracer.trace import Trace

SERVE = Path(__file__).with_name("serve_vllm.py")
SMOLLM2 = Path.home() / ".cache" / "spectrace" / "SmolLM2-135M-Instruct"
PROCESSES = {
    "one": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    "several": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    "ranks": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
}
SERVING = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
LENGTHS = (3, 5, 20, 1, 9, 14)


@dataclass(frozen=True, slots=True)
class Served:
    """What came of one run: outputs and counters by the engine's own account, and the folder of the trace, if any.

    `code` is the exit code of the command, `log` what it wrote to stderr.
    """

    outputs: list[list[int]]
    counters: dict[str, Any]
    folder: Path
    code: int = 0
    log: str = ""

    @property
    def trace(self) -> Trace:
        return Trace.open(self.folder)


Serve = Callable[..., Served]
Tell = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def vllm() -> Path:
    """The programs of the environment that serves."""
    home = os.environ.get("SPECTRACE_VLLM")
    if not home:
        pytest.fail("SPECTRACE_VLLM names no environment with vLLM: run these tests with `make test-vllm`")
    return Path(home).absolute() / "bin"


@pytest.fixture(scope="session")
def environment(vllm: Path) -> dict[str, str]:
    """Of a process that serves: its programs first, and little memory for the cache."""
    return {**os.environ, **SERVING, "PATH": os.pathsep.join((str(vllm), os.environ["PATH"]))}


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    drawn = random.Random(1)
    return [[drawn.randrange(5, 60) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="session")
def serve(vllm: Path, environment: dict[str, str], prompts: list[list[int]], tmp_path_factory: Any) -> Serve:
    """`serve(target, draft, level=, processes=, fails=, asked={}, **options)`: prompts through an `LLM`.

    `level` None does not record; a command that `fails` is not looked at further.
    """

    def run(
        target: Path,
        draft: Path,
        *,
        level: str | None = "full",
        processes: str = "one",
        asked: dict[str, Any] | None = None,
        fails: bool = False,
        **options: Any,
    ) -> Served:
        folder: Path = tmp_path_factory.mktemp("served")
        given = {"prompts": prompts, "options": options, **(asked or {})}
        (folder / "asked.json").write_text(json.dumps(given), "utf-8")
        command = [vllm / "python", SERVE, target, draft, folder / "asked.json", folder / "said.json"]
        if level:
            command = [vllm / "spectrace", "record", "--out", folder / "trace", "--level", level, "--", *command]
        done = subprocess.run(
            list(map(str, command)), env={**environment, **PROCESSES[processes]}, capture_output=True, text=True,
            timeout=600, cwd=folder,
        )  # fmt: skip
        if fails:
            return Served([], {}, folder / "trace", done.returncode, done.stderr)
        assert done.returncode == 0, done.stderr[-4000:]
        said = json.loads((folder / "said.json").read_text("utf-8"))
        return Served(said["outputs"], said["counters"], folder / "trace", 0, done.stderr)

    return run


@pytest.fixture(scope="session")
def smollm2() -> tuple[Path, Path]:
    """The real target, and the draft that is shipped."""
    target = SMOLLM2
    assert target.is_dir(), "run `make target`"
    return target, Path(__file__).parents[3] / "models" / "smollm2" / "draft"


@pytest.fixture(scope="session")
def spectrace(environment: dict[str, str]) -> Tell:
    """`spectrace("run", ...)`: a command of this project, in the environment that tests run in."""

    def tell(*command: object) -> subprocess.CompletedProcess[str]:
        program = Path(sys.executable).with_name("spectrace")
        return subprocess.run([str(program), *map(str, command)], env=environment, capture_output=True, text=True)

    return tell

"""An engine that cannot be hooked is served as it would be without us, and the trace says that it was not recorded."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from spectrace.cli.check import examine
from spectrace.tracer.launch import record
from spectrace.tracer.rows import Level
from spectrace.tracer.trace import Trace

SERVE = "from spectrace.tracer.attach import attach_vllm; attach_vllm(); import vllm; vllm.serve()"
FILES = {
    "vllm/__init__.py": "def serve():\n    print('served', file=open('said', 'w'))\n",
    "vllm/model_executor/model_loader/base_loader.py": "def process_weights_after_loading(model):\n    pass\n",
    "vllm/v1/core/sched/scheduler.py": "class Scheduler:\n    pass\n",
    "vllm/v1/engine/core.py": "class EngineCoreProc:\n    def shutdown(self):\n        pass\n",
    "vllm/v1/engine/utils.py": "class CoreEngineProcManager:\n    def shutdown(self):\n        pass\n",
    "vllm/v1/worker/gpu_worker.py": "class Worker:\n    def load_model(self):\n        pass\n",
}


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to serve in; its `vllm` is what a test writes there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    return tmp_path


def put(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


def test_a_vllm_of_another_shape_is_served_and_said_not_to_be_recorded(served: Path) -> None:
    put(served, {"vllm/__init__.py": FILES["vllm/__init__.py"]})
    done = record([sys.executable, "-c", SERVE], served / "trace", level=Level.FEATURES)
    assert done.exit_code == 0 and (served / "said").read_text("utf-8") == "served\n"
    assert done.writers == ("attach-0",)
    found = examine(served / "trace")
    assert found.exit_code == 1 and [problem.kind for problem in found.problems] == ["hook"]
    assert "vLLM is not hooked: ModuleNotFoundError" in found.problems[0].message


def test_a_model_runner_of_another_shape_is_said_not_to_be_recorded(served: Path) -> None:
    """Everything is where it should be, until a worker shows its runner."""
    serve = (
        "import types; from vllm.v1.worker.gpu_worker import Worker\n"
        "worker = Worker(); worker.model_runner = types.SimpleNamespace(); worker.load_model(); print('done')"
    )
    put(served, FILES)
    code = f"from spectrace.tracer.attach import attach_vllm; attach_vllm()\n{serve}"
    done = record([sys.executable, "-c", code], served / "trace", level=Level.LIGHT)
    assert done.exit_code == 0 and done.writers == ("attach-0",) and not done.unsealed
    [status] = Trace.open(served / "trace").statuses.values()
    assert status.hooks["vLLM"].refused
    assert examine(served / "trace").exit_code == 1


def test_without_a_trace_to_write_nothing_is_loaded(served: Path) -> None:
    code = (
        "import sys; from spectrace.tracer.attach import attach_vllm; attach_vllm()\n"
        "assert not [name for name in sys.modules if name.startswith(('torch', 'numpy', 'pyarrow', 'vllm'))]\n"
        "print(sorted(name for name in sys.modules if name.startswith('spectrace')), file=open('said', 'w'))"
    )
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0
    assert (served / "said").read_text("utf-8").count("spectrace.") == 2, "the package, and the module of a few lines"

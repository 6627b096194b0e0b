"""A killed rank is an error within seconds, a killed driver leaves no process, and the trace stays readable."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from spectrace.cli.check import examine
from spectrace.engine.deployment import Deployment, Serving
from spectrace.engine.reaper import descendants
from spectrace.tracer.errors import RunFailed
from spectrace.tracer.trace import Trace

ENDLESS = Serving(depth=3, max_new=100_000, ignore_end=True)
MOMENTS = range(5)


def alive(pid: int) -> bool:
    """There is such a process, and it is no zombie waiting to be reaped."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text("utf-8")
    except OSError:
        return False


def left_of(pids: Iterable[int], *, secs: float) -> list[int]:
    """Which of some processes are still there after so many seconds."""
    deadline = time.monotonic() + secs
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def await_rows(folder: Path) -> None:
    """Until draft and target have begun to write, or two minutes have passed."""
    deadline = time.monotonic() + 120
    while not all([*folder.glob(f"{role}-0/*.arrow")] for role in ("target", "draft")) and time.monotonic() < deadline:
        time.sleep(0.02)


def check_readable(folder: Path) -> None:
    """Unsealed, whole as far as it goes, and `spectrace check` says so; what one rank lacks of another's is counted."""
    verdict, trace = examine(folder), Trace.open(folder)
    assert verdict.exit_code == 1 and not verdict.sealed
    assert {problem.kind for problem in verdict.problems} <= {"torn", "silent", "behind"}
    for family in ("emitted", "received", "drafted"):
        rows = {name: len(trace.rows(family).where(rank=rank)) for name, rank in ranks_of(trace, family)}
        behind = {found.segment: found.rows_lost for found in verdict.problems if f" {family} " in found.message}
        assert max(rows.values()) > 0
        assert all(behind.get(f"{name}/ledger", 0) == max(rows.values()) - rows[name] for name in rows)


def ranks_of(trace: Trace, family: str) -> Sequence[tuple[str, int]]:
    """The writers of a family, by name and rank."""
    return [(name, facts["rank"]) for name, facts in trace.writers.items() if family in facts["expects"]]


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_killed_rank_is_an_error_within_seconds(
    role: str, moment: int, cluster: None, target_of: Callable[..., Path], draft_of: Callable[..., Path], tmp_path: Path
) -> None:
    """At a random moment; the rank beside it is then in the middle of a collective."""
    chance = random.Random(f"{role} {moment}")
    rank, wait_secs = chance.randrange(2), chance.uniform(0, 1)
    tp, draft_tp = (2, 1) if role == "target" else (1, 2)
    killed: list[float] = []
    with Deployment(target_of("llama"), draft_of("llama", "gqa"), threads=1, tp=tp, draft_tp=draft_tp) as pair:

        def kill() -> None:
            await_rows(tmp_path / "trace")
            time.sleep(wait_secs)
            os.kill(pair.pids[f"{role} rank {rank}"], signal.SIGKILL)
            killed.append(time.monotonic())

        killer = threading.Thread(target=kill)
        killer.start()
        expected = f"^the {role} rank {rank} process died .*what was recorded before is readable"
        with pytest.raises(RunFailed, match=expected) as raised:
            pair.serve([[1, 2, 3], [4, 5, 6, 7]], ENDLESS, trace=tmp_path / "trace")
        secs = time.monotonic() - killed[0]
        killer.join()
    print(f"{role} rank {rank} killed after {wait_secs:.2f} s: error {secs:.2f} s later")
    assert secs < 30 and "\n" not in raised.value.message
    assert left_of(pair.pids.values(), secs=10) == []
    check_readable(tmp_path / "trace")


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_when_the_others_lose_patience(
    cluster: None, target_of: Callable[..., Path], draft_of: Callable[..., Path]
) -> None:
    """Long before the driver would; and it is ended like all others."""
    pair = target_of("llama"), draft_of("llama", "gqa")
    with Deployment(*pair, threads=1, draft_tp=2, patience_secs=3, answer_secs=60) as deployment:
        deployment.serve([[1, 2, 3]], Serving(max_new=4, ignore_end=True))
        started = time.monotonic()
        threading.Timer(1.0, os.kill, (deployment.pids["draft rank 1"], signal.SIGSTOP)).start()
        with pytest.raises(RunFailed, match=r"^the draft rank 1 does not answer, and the draft rank 0 failed: "):
            deployment.serve([[1, 2, 3]], ENDLESS)
        assert time.monotonic() - started < 40
    assert left_of(deployment.pids.values(), secs=10) == []


DRIVER = """
import json, os, sys
from pathlib import Path

from spectrace.engine.deployment import Deployment, Serving
from spectrace.engine.reaper import descendants

target, draft, trace = map(Path, sys.argv[1:4])
with Deployment(target, draft, threads=1, tp=int(sys.argv[4]), draft_tp=int(sys.argv[5])) as pair:
    print(json.dumps([*descendants(os.getpid())]), flush=True)
    pair.serve([[1, 2, 3], [4, 5, 6, 7]], Serving(depth=3, max_new=100_000, ignore_end=True), trace=trace)
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_driver_leaves_no_process(
    moment: int, target_of: Callable[..., Path], draft_of: Callable[..., Path], tmp_path: Path
) -> None:
    """At a random moment: neither ranks nor anything else of the cluster that it had started."""
    tp, draft_tp = [(1, 1), (2, 1), (1, 2)][moment % 3]
    command = [sys.executable, "-c", DRIVER, target_of("llama"), draft_of("llama", "gqa"), tmp_path / "trace"]
    with subprocess.Popen([*map(str, command), str(tp), str(draft_tp)], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout
        started = json.loads(driver.stdout.readline())
        await_rows(tmp_path / "trace")
        time.sleep(random.Random(moment).uniform(0, 1))
        every = {*started, *descendants(driver.pid)}
        os.kill(driver.pid, signal.SIGKILL)
        killed = time.monotonic()
    assert len(every) > tp + draft_tp + 4
    left = left_of(every, secs=30)
    print(f"driver killed: no process left {time.monotonic() - killed:.2f} s later")
    assert left == []
    check_readable(tmp_path / "trace")


@pytest.mark.slow
def test_sigterm_and_a_dead_actor_end_a_run_in_order(
    target_of: Callable[..., Path], draft_of: Callable[..., Path], tmp_path: Path
) -> None:
    """One line, an exit code, nothing on stdout, where Ray likes to talk of dead actors, and no process."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(f'{{"tokens": [{a}, {b}]}}' for a in range(20) for b in range(20)), "utf-8")
    command = [
        sys.executable, "-c", "from spectrace.cli.main import main; main()", "run", "--target", target_of("llama"),
        "--draft", draft_of("llama", "gqa"), "--prompts", prompts, "--max-new", 300, "--threads", 1, "--json",
        "--draft-tp", 2,
    ]  # fmt: skip
    for name, end, code, said in (
        ("terminated", lambda driver, _rank: driver.terminate(), 143, "terminated"),
        ("killed", lambda _driver, rank: os.kill(rank, signal.SIGKILL), 4, "spectrace: the draft rank 1 process died"),
    ):
        out = tmp_path / name
        with subprocess.Popen(
            [*map(str, command), "--out", str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as driver:
            await_rows(out)
            every = descendants(driver.pid)
            end(driver, json.loads((out / "draft-1" / "manifest.json").read_text("utf-8"))["pid"])
            printed, complaint = driver.communicate(timeout=60)
        lines = [line for line in complaint.splitlines() if line.strip() and "serving" not in line]
        assert (driver.returncode, printed) == (code, "") and "Traceback" not in complaint, complaint
        assert len(lines) == 1 and lines[0].startswith(said), complaint
        assert left_of(every, secs=10) == []
        check_readable(out)

"""What actors tell the driver: references and tokens, never hidden states; and what happens when one dies."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from spectrace.engine import actors, cluster
from spectrace.engine.deployment import Deployment, Serving
from spectrace.engine.plan import Decision, DraftTree
from spectrace.engine.tree import Tree
from spectrace.tracer.errors import RunFailed
from spectrace.tracer.trace import Trace

ROOT = Path(__file__).parents[2]
QUICK = Serving(depth=3, max_new=12, concurrency=3, chunk=5, ignore_end=True)
ENDLESS = Serving(depth=3, max_new=100_000, ignore_end=True)


def parts(value: object) -> Iterator[object]:
    """A value and everything inside it."""
    yield value
    inside: Any = ()
    if dataclasses.is_dataclass(value):
        inside = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif isinstance(value, (list, tuple, set)):
        inside = value
    elif isinstance(value, Mapping):
        inside = [*value.keys(), *value.values()]
    for part in inside:
        yield from parts(part)


def references(group: Any) -> int:
    """How many objects a rank's process holds references to, once those that are on their way out are gone."""
    import ray

    def count(_self: object) -> int:
        import gc

        gc.collect()
        return len(ray._private.worker.global_worker.core_worker.get_all_reference_counts())

    [actor] = group.actors
    return int(ray.get(actor.__ray_call__.remote(count)))


def test_the_driver_never_holds_a_hidden_state(
    pair_of: Callable[..., Deployment], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    seen: list[object] = []
    real = actors.answers

    def spy(asked: Mapping[str, Any], *, secs: float) -> list[Any]:
        seen.append(real(asked, secs=secs))
        return seen[-1]

    monkeypatch.setattr(actors, "answers", spy)
    pair_of("llama", "gqa").serve(prompts, QUICK)
    inside = [part for value in seen for part in parts(value)]
    assert sum(isinstance(part, ray.ObjectRef) for part in inside) > 10
    allowed = (ray.ObjectRef, list, tuple, dict, int, str, type(None), actors.Loaded, Decision, DraftTree, Tree)
    assert {type(part) for part in inside if not isinstance(part, allowed)} == set()
    assert not any(isinstance(part, torch.Tensor) for part in inside)


def test_what_was_handed_over_is_freed(
    pair_of: Callable[..., Deployment], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where all requests of a step have finished and nobody fetches it. First held on to, to see that we count."""
    import ray

    pair = pair_of("llama", "gqa")
    serving = Serving(depth=2, max_new=(1, 1, 9, 1, 3, 1, 2, 1), concurrency=1, ignore_end=True)
    held: list[object] = []
    real = actors.answers

    def keep(asked: Mapping[str, Any], *, secs: float) -> list[Any]:
        held.append(real(asked, secs=secs))
        return held[-1]

    with monkeypatch.context() as patch:
        patch.setattr(actors, "answers", keep)
        pair.serve(prompts, serving)
    handed = sum(isinstance(part, ray.ObjectRef) for value in held for part in parts(value))
    assert references(pair.target) == handed > 10
    held.clear()
    deadline = time.monotonic() + 20
    while references(pair.target) + references(pair.draft) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert (references(pair.target), references(pair.draft)) == (0, 0)


@pytest.fixture
def mortal(cluster: None, target_of: Callable[..., Path], draft_of: Callable[..., Path]) -> Iterator[Deployment]:
    """A pair of its own, to be killed; when the test is over, no process of it may be left."""
    with Deployment(target_of("llama"), draft_of("llama", "gqa"), threads=1) as pair:
        yield pair
    deadline = time.monotonic() + 10
    while (left := [pid for pid in pair.pids.values() if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def alive(pid: int) -> bool:
    """There is such a process, and it is no zombie waiting to be reaped."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text("utf-8")
    except OSError:
        return False


def secs_to_error(who: str, at: str, pair: Deployment, trace: Path, monkeypatch: pytest.MonkeyPatch) -> float:
    """Serve without end and kill an actor around its 30th call, which comes in turn; returns how long the error took.

    `during` a call: it is stopped before it gets the call, and killed once it has been called.
    """
    killed: list[float] = []
    calls: list[str] = []
    real = actors.answers

    def answers(references: Mapping[str, Any], *, secs: float) -> list[Any]:
        [asked] = references
        calls.append(asked)
        if at == "during" and asked == who and calls.count(who) == 30:
            os.kill(pair.pids[who], signal.SIGKILL)
            killed.append(time.monotonic())
        told = real(references, secs=secs)
        if at == "during" and asked != who and len(calls) == (58 if who == "target" else 59):
            time.sleep(0.5)  # so that the recorders, which write twice a second at least, have written
            os.kill(pair.pids[who], signal.SIGSTOP)
        if at == "after" and asked == who and calls.count(who) == 30:
            time.sleep(0.5)
            os.kill(pair.pids[who], signal.SIGKILL)
            killed.append(time.monotonic())
        return told

    monkeypatch.setattr(actors, "answers", answers)
    with pytest.raises(RunFailed, match=f"^the {who} process died .*what was recorded before is readable") as raised:
        pair.serve([[1, 2, 3], [4, 5, 6, 7]], ENDLESS, trace=trace)
    assert "\n" not in raised.value.message
    return time.monotonic() - killed[0]


@pytest.mark.parametrize(("who", "at"), [("target", "during"), ("target", "after"), ("draft", "during")])
def test_a_killed_process_is_an_error_within_seconds_and_the_trace_stays_readable(
    who: str, at: str, mortal: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of its work, or when the target has answered and the draft is yet to fetch what it handed over."""
    assert secs_to_error(who, at, mortal, tmp_path / "trace", monkeypatch) < 10
    trace = Trace.open(tmp_path / "trace")
    assert not trace.sealed
    for family in ("emitted", "received", "drafted", "verified"):
        assert len(trace.rows(family)) > 20
    assert not [problem for problem in trace.verify() if problem.damage]
    with pytest.raises(RunFailed, match=f"the {who} process died"):
        mortal.serve([[1, 2, 3]], QUICK)


def test_an_actor_that_does_not_answer_is_an_error_and_not_a_hang(
    pair_of: Callable[..., Deployment], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pair_of("qwen3", "gqa")
    os.kill(pair.pids["draft"], signal.SIGSTOP)
    try:
        with monkeypatch.context() as patch, pytest.raises(RunFailed, match="the draft did not answer within 1 s"):
            patch.setattr(pair, "answer_secs", 1.0)
            patch.setattr("spectrace.engine.deployment._FAREWELL_SECS", 1.0)
            pair.serve([[1, 2, 3]], QUICK)
    finally:
        os.kill(pair.pids["draft"], signal.SIGCONT)
    assert len(pair.serve([[1, 2, 3]], QUICK).requests[0].output) == 12


def test_a_cluster_that_does_not_start_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_options: object) -> None:
        raise Exception("The current node timed out during startup.\nThis could have reasons.")

    monkeypatch.setattr("ray.init", refuse)
    with pytest.raises(RunFailed, match=r"^Ray did not start: The current node timed out during startup\.$"):
        cluster.start_cluster()


OWN_CLUSTER = """
import json, os, sys
from pathlib import Path

import ray

from spectrace.engine.deployment import Deployment, Serving

BARE = ("tracer", "engine", "replay", "cli")


def descendants(pid):
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue
        parents[int(stat.parent.name)] = int(text[text.rindex(")") :].split()[2])
    found, new = set(), {pid}
    while new := {child for child, parent in parents.items() if parent in new} - found:
        found |= new
    return sorted(found)


def bare(_actor=None):
    return [name for name in BARE if name in sys.modules]


with Deployment(Path(sys.argv[1]), Path(sys.argv[2]), threads=1) as pair:
    served = pair.serve([[1, 2, 3]], Serving(depth=2, max_new=5))
    loaded = [bare(), *(ray.get(group.actors[0].__ray_call__.remote(bare)) for group in pair.groups)]
    processes = descendants(os.getpid())
    actors = pair.pids
print(json.dumps({"loaded": loaded, "processes": processes, "actors": actors, "running": ray.is_initialized()}))
"""


def test_a_deployment_on_its_own_leaves_no_process_and_no_bare_module(
    target_of: Callable[..., Path], draft_of: Callable[..., Path]
) -> None:
    """Run from the root of the sources, where `import engine` would find a folder of that name."""
    command = [sys.executable, "-c", OWN_CLUSTER, str(target_of("llama")), str(draft_of("llama", "gqa"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["loaded"] == [[], [], []]
    assert not told["running"]
    assert set(told["actors"].values()) < set(told["processes"])
    assert [pid for pid in told["processes"] if alive(pid)] == []


def test_bare_names_of_the_packages_are_never_imported(pair_of: Callable[..., Deployment]) -> None:
    """Neither in this process, whatever other tests have loaded, nor in the workers."""
    import ray

    def bare(_actor: object = None) -> list[str]:
        import sys

        return [name for name in ("tracer", "engine", "replay", "cli") if name in sys.modules]

    pair = pair_of("llama", "gqa")
    assert bare() == []
    assert ray.get([actor.__ray_call__.remote(bare) for group in pair.groups for actor in group.actors]) == [[], []]

"""Target and draft on nodes of their own: lossless, one trace, and no payload through the driver."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from spectrace.cli.run import run
from spectrace.engine.cluster import connect_cluster
from spectrace.engine.deployment import Deployment
from spectrace.tracer.errors import UserError
from spectrace.tracer.trace import Trace

ALLOWED = {"Decision", "DraftTree", "Loaded", "NoneType", "ObjectRef", "Tree", "dict", "int", "list", "str", "tuple"}

REQUIRED = ("--target", "t", "--prompts", "p", "--out", "o")


@pytest.mark.slow
def test_target_and_draft_run_on_the_nodes_of_choice(
    target_of: Callable[..., Path],
    draft_of: Callable[..., Path],
    prompts: list[list[int]],
    alone: Callable[..., list[int]],
    tmp_path: Path,
) -> None:
    """Three nodes of a running cluster, all on this machine; where they are not, the folders are shared."""
    script, pair = Path(__file__).with_name("on_nodes.py"), (target_of("llama"), draft_of("llama", "gqa"))
    command = [sys.executable, script, *pair, json.dumps(prompts[:3]), tmp_path / "trace"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["where"] == {"target rank 0": ["big"], "target rank 1": ["big"], "draft": ["small"]}
    assert said["outputs"] == [alone("llama", prompt, 9) for prompt in prompts[:3]]
    assert "ObjectRef" in said["kinds"] and set(said["kinds"]) <= ALLOWED
    assert said["refused"] == "the ranks need 4 big, but the Ray cluster has 3 big; see `ray status`"
    trace = Trace.open(tmp_path / "trace")
    assert said["losses"] == [] and trace.sealed and trace.verify() == []
    assert set(trace.writers) == {"target-0", "target-1", "draft-0", "scheduler-0"}


def test_a_role_that_does_not_exist_is_placed_nowhere(target_of: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match="placement of drafts: there is no such role; place target and draft"):
        Deployment(target_of("llama"), None, placement={"drafts": {"big": 1}})


@pytest.mark.parametrize(
    ("value", "means"), [("target=big", {"target": {"big": 1.0}}), ("draft=GPU:0.5", {"draft": {"GPU": 0.5}})]
)
def test_a_placement_on_the_command_line(value: str, means: object) -> None:
    assert run.make_context("run", [*REQUIRED, "--place", value]).params["placement"] == means


@pytest.mark.parametrize("resources", [{"CPU": 1}, {"memory": 0.5}, {"big": 0}], ids=str)
def test_what_ray_counts_itself_is_no_place(resources: dict[str, float], target_of: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match=r"placement of target by .*: give GPU, or a resource of your own"):
        Deployment(target_of("llama"), None, placement={"target": resources})


def test_an_address_where_nobody_listens_is_not_waited_for() -> None:
    with pytest.raises(UserError, match=r"--address 127\.0\.0\.1:1: nobody listens there"):
        connect_cluster("127.0.0.1:1")


def test_gpus_that_are_not_there_are_an_error_and_not_a_wait(cluster: None, target_of: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match="the ranks need 2 GPU, but the Ray cluster has 0 GPU"):
        Deployment(target_of("llama"), None, tp=2, device="cuda").__enter__()


@pytest.mark.skipif(importlib.util.find_spec("grpc") is not None, reason="grpcio is installed")
def test_a_client_address_without_grpcio_says_what_to_install() -> None:
    with pytest.raises(UserError, match=r"--address ray://head:10001: Ray's client needs grpcio: pip install"):
        connect_cluster("ray://head:10001")


def test_an_address_where_nobody_is_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_options: object) -> None:
        raise ConnectionError("Could not find a running Ray instance.\nPlease specify one.")

    monkeypatch.setattr("ray.init", refuse)
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(UserError, match=f"--address {address}: no cluster to use there: Could not find"):
            connect_cluster(address)

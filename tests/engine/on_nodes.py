"""Run by test_nodes.py: a Ray cluster of three nodes on this machine, a deployment on two of them, what was seen."""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
sys.path.insert(0, str(Path(__file__).parent))

import ray
from ray.cluster_utils import Cluster
from test_actors import parts

from spectrace.engine import actors
from spectrace.engine.deployment import Deployment, Serving
from spectrace.tracer.errors import UserError

SEEN: list[Any] = []
listen_to = actors.answers


def spy(asked: dict[str, Any], *, secs: float) -> list[Any]:
    told = listen_to(asked, secs=secs)
    SEEN.append(told)
    return told


def serve(nodes: Cluster, target: str, draft: str, prompts: list[list[int]], out: str) -> dict[str, Any]:
    pair = Path(target), Path(draft)
    placement = {"target": {"big": 1.0}, "draft": {"small": 1.0}}
    options: dict[str, Any] = {"threads": 1, "tp": 2, "address": nodes.address}
    with Deployment(*pair, placement=placement, **options) as deployment:
        served = deployment.serve(prompts, Serving(max_new=9, ignore_end=True), trace=Path(out))
        resources = {node["NodeID"]: {"big", "small"} & node["Resources"].keys() for node in ray.nodes()}
        where = {rank: sorted(resources[node]) for rank, node in deployment.nodes.items()}
    kinds = {type(part).__name__ for part in parts(SEEN)}
    try:
        Deployment(*pair, placement={"target": {"big": 2.0}}, **options).__enter__()
        refused = ""
    except UserError as error:
        refused = error.message
    outputs = [request.output for request in served.requests]
    return {"outputs": outputs, "where": where, "kinds": sorted(kinds), "refused": refused, "losses": served.losses}


if __name__ == "__main__":
    actors.answers = spy
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for resource in ("big", "small"):
        cluster.add_node(num_cpus=1, resources={resource: 3}, object_store_memory=100 << 20)
    try:
        print(json.dumps(serve(cluster, *sys.argv[1:3], json.loads(sys.argv[3]), sys.argv[4])))
    finally:
        cluster.shutdown()

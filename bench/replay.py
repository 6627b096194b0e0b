"""How fast replay is: against the draft forwards that served the same rows, and against the bare matrix products.

One table of ratios from one run. Replay and matrix products are interleaved, repeated, and given as medians with
their spread; served times are those that the draft's own process recorded. Run with `make bench`.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F

from spectrace.engine.checkpoint import build_draft, read_draft
from spectrace.engine.deployment import Deployment, Serving
from spectrace.engine.draft import DraftModel
from spectrace.engine.prompts import read_prompts
from spectrace.replay.inputs import DraftInputs, read_served
from spectrace.replay.replay import replay_inputs
from spectrace.tracer.rows import Level
from spectrace.tracer.trace import Trace

MODELS = Path(__file__).resolve().parents[1] / "models" / "smollm2"
sys.path.insert(0, str(MODELS))


def matmuls(model: DraftModel, inputs: DraftInputs) -> Callable[[], None]:
    """The matrix products of a replay, and nothing else: same weights, same rows, same order."""
    linears = [
        module
        for module in model.modules()
        if isinstance(module, torch.nn.Linear) and module not in (model.fc, model.head)
    ]
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []
    for depth, rows in enumerate(inputs.depths):
        count = len(rows.tokens)
        if depth == 0:
            calls.append((torch.randn(count, model.fc.in_features), model.fc.weight))
        calls += [(torch.randn(count, linear.in_features), linear.weight) for linear in linears]
        calls.append((torch.randn(len(rows.answering), model.head.in_features), model.head.weight))

    @torch.inference_mode()
    def run() -> None:
        for x, weight in calls:
            F.linear(x, weight)

    return run


def timed(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


@click.command()
@click.option("--threads", default=os.cpu_count(), show_default=True)
@click.option("--repeats", default=7, show_default=True)
@click.option("--max-new", default=64, show_default=True)
def main(threads: int, repeats: int, max_new: int) -> None:
    """Serve the demo prompts at one and at eight requests in flight, then time their replay."""
    from target import ensure_target

    target = ensure_target()
    torch.set_num_threads(threads)
    model = build_draft(read_draft(MODELS / "draft"), target=target, dtype=torch.float32)
    prompts = read_prompts(MODELS / "prompts" / "demo.jsonl", target)
    table = Table(
        "in flight",
        "draft rows",
        "served rows/s",
        "replay rows/s (min-max)",
        "÷ served",
        "bare matmul rows/s",
        "÷ matmul",
    )
    with tempfile.TemporaryDirectory() as folder, Deployment(target, MODELS / "draft", threads=threads) as pair:
        traces = {}
        for concurrency in (1, 8):
            traces[concurrency] = Path(folder) / str(concurrency)
            serving = Serving(depth=3, max_new=max_new, concurrency=concurrency, level=Level.FULL)
            pair.serve(prompts, serving, trace=traces[concurrency])
        for concurrency, trace in traces.items():
            served = read_served(Trace.open(trace))
            inputs = served.inputs(served.requests)
            rows = sum(len(depth.tokens) for depth in inputs.depths)
            served_secs = sum(float(depth.drafted["forward_secs"].sum()) for depth in inputs.depths)
            bare = matmuls(model, inputs)
            replays, products = [], []
            for _ in range(repeats + 1):
                replays.append(sum(output.secs for output in replay_inputs(model, inputs)))
                products.append(timed(bare))
            replays, products = replays[1:], products[1:]
            replay, product = statistics.median(replays), statistics.median(products)
            table.add_row(
                str(concurrency), str(rows), f"{rows / served_secs:,.0f}",
                f"{rows / replay:,.0f} ({rows / max(replays):,.0f}-{rows / min(replays):,.0f})",
                f"{served_secs / replay:.1f}", f"{rows / product:,.0f}", f"{product / replay:.2f}",
            )  # fmt: skip
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    Console(width=140).print(table, f"{threads} threads, {repeats} repeats, load {load}")


if __name__ == "__main__":
    main()

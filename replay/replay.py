"""Run the draft again on exactly what it was given: all rounds of many requests in K forwards.

Shapes: T rows of a depth, A slots, F target width, H draft width, N answering rows, V draft vocabulary.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from spectrace.engine.draft import DraftModel
from spectrace.replay.attend import BranchAttend, PrefixAttend
from spectrace.replay.inputs import DepthRows, DraftInputs

__all__ = ["DepthOutput", "replay_inputs"]


@dataclass(frozen=True, slots=True)
class DepthOutput:
    """One depth replayed, row by row as in `DepthRows`: fc's output (depth 0), the head's input, the state fed back.

    `logits` [N, V] and `tokens` [N] are of the answering rows alone. `secs` is the forward's time.
    """

    depth: int
    fused: Tensor | None
    hidden: Tensor
    state: Tensor
    logits: Tensor
    tokens: Tensor
    secs: float


@torch.inference_mode()
def replay_inputs(model: DraftModel, inputs: DraftInputs) -> Iterator[DepthOutput]:
    """Replay whole requests, a depth at a time.

    Depth 0 is fed the recorded features. A deeper row is fed the state recorded for it or, where the trace's level
    leaves states out, the one that replay itself computed for its parent; tokens are always the recorded ones.
    """
    device = next(model.parameters()).device
    prefix = PrefixAttend(inputs.depths[0].borders, inputs.depths[0].positions)
    branch = BranchAttend(prefix)
    state = torch.empty(0)
    for depth, rows in enumerate(inputs.depths):
        fed = _fed(rows, depth, state).to(device, next(model.parameters()).dtype)
        tokens, positions = torch.from_numpy(rows.tokens).to(device), torch.from_numpy(rows.positions).to(device)
        answering = torch.from_numpy(rows.answering).to(device)
        if depth:
            branch.enter(rows.bases, rows.borders, rows.parents, rows.positions)
        started = _now(device)
        fused = fed if depth else model.fuse(fed)
        hidden, state = model(tokens, fused, positions, branch if depth else prefix)
        logits = model.logits(hidden[answering])
        tokens = model.to_target(logits.argmax(-1))
        secs = _now(device) - started
        yield DepthOutput(depth, None if depth else fused, hidden, state, logits, tokens, secs)


def _fed(rows: DepthRows, depth: int, above: Tensor) -> Tensor:
    if depth == 0:
        return rows.received.tensor("features")
    if bool(rows.received.has("state").all()):
        return rows.received.tensor("state")
    return above[torch.from_numpy(rows.parents)]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()

"""The draft's side of the deployment: extend its cache by what the target handed over, then draft, one depth a forward.

Shapes: T rows of a forward, N of them answering, A slots, F target width, H draft width, V draft vocabulary.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from spectrace.engine.attention import KeyValueCache, PackedAttend
from spectrace.engine.checkpoint import build_draft, read_draft
from spectrace.engine.packing import Int, PackedRows, RowTable
from spectrace.engine.plan import DraftGroup, DraftProbs, DraftStep, DraftTree, LogitsProcessorOutput
from spectrace.engine.recording import Recording, shut
from spectrace.tracer.keys import Keys
from spectrace.tracer.recorder import Recorder
from spectrace.tracer.rows import Level, Phase

__all__ = ["DraftShard"]

TOP_K = 16


@dataclass(frozen=True, slots=True)
class _Forward:
    """The rows of one draft forward, the group of each, and which rows answer with a token (indices [N])."""

    rows: PackedRows
    groups: tuple[DraftGroup, ...]
    nodes: Int
    depth: int
    answering: Int


@dataclass(frozen=True, slots=True)
class _Result:
    """Head input and fed-back state [T, H] of every row, logits [N, V] and tokens [N] of the answering ones."""

    fused: Tensor
    hidden: Tensor
    state: Tensor
    logits: Tensor
    draft_tokens: Tensor
    tokens: Tensor
    secs: float


class DraftShard:
    """One process of the draft. `step` runs every forward that one target pass feeds."""

    def __init__(self, folder: Path, target: Path, *, dtype: torch.dtype, threads: int) -> None:
        torch.set_num_threads(threads)
        self.model = build_draft(read_draft(folder), target=target, dtype=dtype)
        self.recorder: Recorder | None = None

    def serve(self, recording: Recording | None) -> None:
        """Start a call with an empty cache, recording into a trace if there is one."""
        self.cache, self.table = KeyValueCache(), RowTable()
        self.recorder = recording.open("draft") if recording else None
        self.level = recording.level if recording else Level.LIGHT

    def finish(self) -> str | None:
        """End the call; returns what went wrong with the recording, if anything did."""
        return shut(self.recorder)

    @torch.inference_mode()
    def step(self, handed: LogitsProcessorOutput, step: DraftStep) -> tuple[DraftProbs | None, list[DraftTree]]:
        """Extend by the accepted rows, then draft a chain for every group that asks for one."""
        self._release(step.released)
        sources = np.concatenate([group.source + np.arange(len(group.tokens)) for group in step.groups])
        forward, inputs = _extension(step.groups), handed.hidden_states[torch.from_numpy(sources)]
        chains: dict[int, list[int]] = {group.request: [] for group in step.groups if group.depth}
        while True:
            result = self._run(forward, inputs)
            if self.recorder:
                self._record(self.recorder, step.number, forward, inputs, result)
            places = self.table.append(forward.rows)
            if forward.depth == 0:
                self.table.settle(places)
            tokens = result.tokens.tolist()
            for row, token in zip(forward.answering, tokens, strict=True):
                chains[forward.groups[row].request].append(token)
            going = [i for i, row in enumerate(forward.answering) if forward.groups[row].depth > forward.depth + 1]
            if not going:
                break
            rows = forward.answering[going]
            inputs = result.state[torch.from_numpy(rows)]
            forward = _deeper(forward, rows, [tokens[i] for i in going], places)
        self.table.settle(np.empty(0, np.int64))
        return None, [
            DraftTree(request, tuple(chain), tuple(range(-1, len(chain) - 1))) for request, chain in chains.items()
        ]

    def _release(self, requests: Sequence[int]) -> None:
        self.table.release(requests)
        kept = self.table.compact()
        if kept is not None:
            self.cache.keep(torch.from_numpy(kept))

    def _run(self, forward: _Forward, inputs: Tensor) -> _Result:
        """One forward: `inputs` are features [T, A*F] at depth 0, fed-back states [T, H] deeper."""
        rows, started = forward.rows, time.perf_counter()
        attend = PackedAttend(self.cache, torch.from_numpy(self.table.mask(rows)))
        fused = self.model.fuse(inputs) if forward.depth == 0 else inputs
        hidden, state = self.model(torch.from_numpy(rows.tokens), fused, torch.from_numpy(rows.positions), attend)
        logits = self.model.logits(hidden[torch.from_numpy(forward.answering)])
        draft_tokens = logits.argmax(-1)
        tokens = self.model.to_target(draft_tokens)
        return _Result(fused, hidden, state, logits, draft_tokens, tokens, time.perf_counter() - started)

    def _record(self, recorder: Recorder, step: int, forward: _Forward, inputs: Tensor, result: _Result) -> None:
        extends, secs = forward.depth == 0, result.secs / len(forward.rows)
        recorder.received(
            _keys(step, forward, np.arange(len(forward.rows))),
            token=forward.rows.tokens,
            features=inputs if extends else None,
            slot_width=self.model.spec.target_width if extends else None,
            state=None if extends else inputs,
        )
        silent = np.setdiff1d(np.arange(len(forward.rows)), forward.answering)
        top = result.logits.float().topk(min(TOP_K, result.logits.shape[-1])) if self.level is Level.FULL else None
        for rows, answers in ((silent, False), (forward.answering, True)):
            if not len(rows):
                continue
            index = torch.from_numpy(rows)
            recorder.drafted(
                _keys(step, forward, rows),
                draft_token=result.draft_tokens if answers else None,
                token=result.tokens if answers else None,
                fused=result.fused[index] if extends else None,
                hidden=result.hidden[index],
                state=result.state[index],
                logits=(top.indices.int(), top.values) if answers and top else None,
                logsumexp=result.logits.float().logsumexp(-1) if answers and top else None,
                forward_secs=secs,
            )


def _extension(groups: Sequence[DraftGroup]) -> _Forward:
    """The depth-0 rows of all groups: causal within a group, behind what its request has committed."""
    lengths = [len(group.tokens) for group in groups]
    ends = np.cumsum(lengths)
    nodes = np.concatenate([np.arange(length) for length in lengths])
    rows = PackedRows(
        tokens=np.asarray([token for group in groups for token in group.tokens], np.int64),
        owners=np.repeat([group.request for group in groups], lengths),
        positions=np.repeat([group.position for group in groups], lengths) + nodes,
        parents=np.where(nodes == 0, -1, np.arange(len(nodes)) - 1),
    )
    owners = tuple(group for group in groups for _ in group.tokens)
    answering = np.asarray([end - 1 for end, group in zip(ends, groups, strict=True) if group.depth], np.int64)
    return _Forward(rows, owners, nodes, 0, answering)


def _deeper(above: _Forward, rows: Int, tokens: Sequence[int], places: Int) -> _Forward:
    """The next depth: one row below each of `rows`, fed its token and state, one position on."""
    count = len(rows)
    new = PackedRows(
        tokens=np.asarray(tokens, np.int64),
        owners=above.rows.owners[rows],
        positions=above.rows.positions[rows] + 1,
        parents=np.full(count, -1) if above.depth == 0 else -2 - places[rows],
    )
    groups = tuple(above.groups[row] for row in rows)
    return _Forward(new, groups, np.zeros(count, np.int64), above.depth + 1, np.arange(count))


def _keys(step: int, forward: _Forward, rows: Int) -> Keys:
    groups = [forward.groups[row] for row in rows]
    return Keys(
        request=forward.rows.owners[rows],
        pass_=[group.pass_ for group in groups],
        depth=forward.depth,
        node=forward.nodes[rows],
        position=forward.rows.positions[rows],
        phase=Phase.DRAFT_DECODE if forward.depth else Phase.DRAFT_EXTEND,
        round=[group.round for group in groups],
        step=step,
    )

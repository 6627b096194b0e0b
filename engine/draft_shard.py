"""The draft's side of the deployment: extend its cache by what the target handed over, then draft, one depth a forward.

Shapes: T rows of a forward, N of them answering, A slots, F target width, H draft width, V draft vocabulary.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from spectrace.engine.attention import KeyValueCache, PackedAttend
from spectrace.engine.checkpoint import build_draft, read_draft, weight_fingerprints
from spectrace.engine.draft import DraftModel
from spectrace.engine.fault import Answering, Drafting, Source, broken
from spectrace.engine.faults import find_faults
from spectrace.engine.packing import Bool, Int, PackedRows, RowTable
from spectrace.engine.parallel import Group, split_draft
from spectrace.engine.picking import Picker
from spectrace.engine.plan import DraftGroup, DraftProbs, DraftStep, DraftTree, LogitsProcessorOutput
from spectrace.engine.recording import Recording, shut
from spectrace.engine.sampling import Sampling
from spectrace.engine.tree import Candidates, Growth, TreeShape
from spectrace.tracer.keys import Keys
from spectrace.tracer.recorder import Recorder
from spectrace.tracer.rows import TOP_K, Level, Phase

__all__ = ["DraftServing", "DraftShard"]


@dataclass(frozen=True, slots=True)
class DraftServing:
    """How to serve one call: the shape of the trees, how their tokens are chosen, and the faults switched on."""

    shape: TreeShape
    sampling: Sampling
    faults: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Forward:
    """The rows of one draft forward, the group and the node of each, and which node of the depth above it is below.

    `live` tells rows of text and drafts from what fills a fixed window; `answering` are the rows that answer with
    tokens (indices [N]), request by request.
    """

    rows: PackedRows
    groups: tuple[DraftGroup, ...]
    nodes: Int
    parents: Int
    live: Bool
    depth: int
    answering: Int


@dataclass(frozen=True, slots=True)
class _Result:
    """Head input and fed-back state [T, H] of every row, logits [N, V] of the answering ones."""

    fused: Tensor
    hidden: Tensor
    state: Tensor
    logits: Tensor
    secs: float


class DraftShard:
    """One process of the draft. `step` runs every forward that one target pass feeds."""

    def __init__(
        self,
        folder: Path,
        target: Path,
        *,
        dtype: torch.dtype,
        threads: int,
        device: str = "cpu",
        group: Group | None = None,
    ) -> None:
        torch.set_num_threads(threads)
        checkpoint = read_draft(folder)
        self.loaded = build_draft(checkpoint, target=target, dtype=dtype, device=device)
        split_draft(self.loaded, group)
        self.model = self.loaded
        self.device, self.group = torch.device(device), group
        self.source = Source(checkpoint.spec, target, checkpoint.scales)
        self.recorder: Recorder | None = None

    def serve(self, serving: DraftServing, recording: Recording | None) -> None:
        """Start a call with an empty cache, recording into a trace if there is one."""
        self.serving = serving
        self.broken = broken(find_faults(serving.faults), Drafting)
        self.model = self._serving()
        self.cache, self.table = KeyValueCache(), RowTable()
        self.recorder = recording.open("draft", self.group, loaded=self._fingerprints()) if recording else None
        self.level = recording.level if recording else Level.LIGHT

    def _serving(self) -> DraftModel:
        """The draft that serves this call: the one that was loaded, unless a fault makes another of it."""
        model = self.loaded
        for fault in self.broken:
            if fault.spec:
                model = model.variant(spec=fault.spec(model.spec))
            if fault.weights:
                source = replace(self.source, spec=model.spec)
                model = model.variant(tensors=fault.weights(model.state_dict(), source))
        return model

    def _fingerprints(self) -> dict[str, str]:
        return self._unbroken_fingerprints if self.model is self.loaded else weight_fingerprints(self.model)

    @cached_property
    def _unbroken_fingerprints(self) -> dict[str, str]:
        return weight_fingerprints(self.loaded)

    def finish(self) -> str | None:
        """End the call; returns what went wrong with the recording, if anything did."""
        return shut(self.recorder)

    @torch.inference_mode()
    def step(self, handed: LogitsProcessorOutput, step: DraftStep) -> tuple[DraftProbs | None, list[DraftTree]]:
        """Extend by what was handed over, then draft a tree for every group that asks for one."""
        self._release(step.released)
        sources = np.concatenate([group.source + np.arange(len(group.tokens)) for group in step.groups])
        forward, inputs = _extension(step.groups), handed.hidden_states[torch.from_numpy(sources)].to(self.device)
        asking = [group for group in step.groups if group.drafts]
        growth = Growth(self.serving.shape, len(asking))
        picker = Picker(self.serving.sampling, self.serving.shape.topk, asking)
        while True:
            result = self._run(forward, inputs)
            below = self._pick(picker, result.logits, forward)
            tokens = self.model.to_target(self._on_device(below.ids)).cpu()
            if self.recorder:
                self._record(self.recorder, step.number, forward, inputs, result, below.ids[:, 0], tokens[:, 0])
            places = self.table.append(forward.rows)
            if forward.depth == 0:
                self.table.settle(places[forward.live])
            if not asking:
                return None, []
            chosen, above = growth.add(tokens.numpy(), below.log_probs)
            if growth.done:
                break
            forward, rows = _deeper(forward, chosen, above, places, beyond=self._beyond(forward.depth + 1))
            inputs = result.state[torch.from_numpy(rows)]
        self.table.settle(np.empty(0, np.int64))
        trees = [DraftTree(group.request, tree) for group, tree in zip(asking, growth.trees(), strict=True)]
        return picker.probs(self.model.table()), trees

    def _pick(self, picker: Picker, logits_NV: Tensor, forward: _Forward) -> Candidates:
        below, positions = picker.pick(logits_NV), forward.rows.positions[forward.answering]
        rows = Answering(forward.depth, positions, self.group.rank if self.group else 0, self.model.spec)
        for fault in self.broken:
            below = fault.pick(logits_NV, below, rows)
        return below

    def _beyond(self, depth: int) -> int:
        """How many positions a row of a depth stands behind the row of text that it is below."""
        for fault in self.broken:
            depth = fault.advance(depth)
        return depth

    def _release(self, requests: Sequence[int]) -> None:
        self.table.release(requests)
        kept = self.table.compact()
        if kept is not None:
            self.cache.keep(self._on_device(kept))

    def _on_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _run(self, forward: _Forward, inputs: Tensor) -> _Result:
        """One forward: `inputs` are features [T, A*F] at depth 0, fed-back states [T, H] deeper."""
        rows, started = forward.rows, time.perf_counter()
        seen = self._on_device(self.table.mask(rows))
        attend = PackedAttend(
            self.cache, seen, lambda window: self._on_device(self.table.within(rows, window)), depth=forward.depth
        )
        fused = self.model.fuse(inputs) if forward.depth == 0 else inputs
        hidden, state = self.model(self._on_device(rows.tokens), fused, self._on_device(rows.positions), attend)
        logits = self.model.logits(hidden[torch.from_numpy(forward.answering)])
        return _Result(fused, hidden, state, logits, time.perf_counter() - started)

    def _record(
        self,
        recorder: Recorder,
        step: int,
        forward: _Forward,
        inputs: Tensor,
        result: _Result,
        draft_tokens: Int,
        tokens: Tensor,
    ) -> None:
        extends, secs = forward.depth == 0, result.secs / len(forward.rows)
        top = result.logits.float().topk(min(TOP_K, result.logits.shape[-1])) if self.level is Level.FULL else None
        made = (result.fused, result.hidden, result.state, *(top or ()))
        hash_only = bool(self.group and self.group.repeats(inputs, *made))
        recorder.received(
            _keys(step, forward, np.arange(len(forward.rows))),
            token=forward.rows.tokens,
            features=inputs if extends else None,
            slot_width=self.model.spec.target_width if extends else None,
            state=None if extends else inputs,
            parent=forward.parents,
            hash_only=hash_only,
        )
        silent = np.setdiff1d(np.arange(len(forward.rows)), forward.answering)
        for rows, answers in ((silent, False), (forward.answering, True)):
            if not len(rows):
                continue
            index = torch.from_numpy(rows)
            recorder.drafted(
                _keys(step, forward, rows),
                draft_token=draft_tokens if answers else None,
                token=tokens if answers else None,
                fused=result.fused[index] if extends else None,
                hidden=result.hidden[index],
                state=result.state[index],
                logits=(top.indices.int(), top.values) if answers and top else None,
                logsumexp=result.logits.float().logsumexp(-1) if answers and top else None,
                forward_secs=secs,
                hash_only=hash_only,
            )


def _extension(groups: Sequence[DraftGroup]) -> _Forward:
    """The depth-0 rows of all groups: causal within a group, behind what its request has committed."""
    lengths = [len(group.tokens) for group in groups]
    starts = np.cumsum([0, *lengths[:-1]])
    nodes = np.concatenate([np.arange(length) for length in lengths])
    rows = PackedRows(
        tokens=np.asarray([token for group in groups for token in group.tokens], np.int64),
        owners=np.repeat([group.request for group in groups], lengths),
        positions=np.repeat([group.position for group in groups], lengths) + nodes,
        parents=np.where(nodes == 0, -1, np.arange(len(nodes)) - 1),
    )
    last = [start + group.live - 1 for start, group in zip(starts, groups, strict=True) if group.drafts]
    return _Forward(
        rows,
        groups=tuple(group for group in groups for _ in group.tokens),
        nodes=nodes,
        parents=np.full(len(nodes), -1),
        live=nodes < np.repeat([group.live for group in groups], lengths),
        depth=0,
        answering=np.asarray(last, np.int64),
    )


def _deeper(above: _Forward, tokens_Rk: Int, parents_Rk: Int, places: Int, *, beyond: int) -> tuple[_Forward, Int]:
    """The next depth, k rows a tree, so many positions below the text; also the parents' places in `above`."""
    trees, topk = tokens_Rk.shape
    rows: Int = np.take_along_axis(above.answering.reshape(trees, -1), parents_Rk, 1).reshape(-1)
    groups = tuple(above.groups[row] for row in rows)
    new = PackedRows(
        tokens=tokens_Rk.reshape(-1),
        owners=above.rows.owners[rows],
        positions=np.asarray([group.position + group.live - 1 + beyond for group in groups], np.int64),
        parents=np.full(len(rows), -1) if above.depth == 0 else -2 - places[rows],
    )
    forward = _Forward(
        new,
        groups=groups,
        nodes=np.tile(np.arange(topk), trees),
        parents=above.nodes[rows],
        live=np.ones(len(rows), np.bool_),
        depth=above.depth + 1,
        answering=np.arange(len(rows)),
    )
    return forward, rows


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
        live=forward.live[rows],
    )

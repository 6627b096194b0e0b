"""What an engine's thread copies while a step runs: one `Step` at a time, handed over when the step is over.

The draft's own methods are the same for every runner of vLLM, and lie here; a runner adds where a step begins and
ends. Everything here runs in the server's thread: it copies, and does nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spectrace.tracer.attach.hooks import Watching
from spectrace.tracer.attach.session import Session
from spectrace.tracer.attach.steps import Forward, Logits, Step
from spectrace.tracer.rows import TOP_K
from spectrace.tracer.staging import Staged, bits_of, stage

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Capture", "Spot", "begins", "draft_spots", "fed", "text_positions", "unwrapped"]


@dataclass(frozen=True, slots=True)
class Spot:
    """A method of an object's class to watch: by the capture's method `by`, or else by the one of the same name.

    Without the arguments that it `needs` it is left alone. Of an `optional` one it is no news that it never fires.
    """

    host: Any
    method: str
    needs: tuple[str, ...] = ()
    by: str = ""
    optional: bool = False


class Capture:
    """The step that is running, None between steps; `full` asks for all tensors."""

    def __init__(self, session: Session, *, full: bool) -> None:
        self.session, self.full = session, full
        self.step: Step | None = None
        self.wrapping = False
        self.nbytes = 0
        self.features: tuple[Staged, Staged | None] | None = None
        self.met: set[str] = set()
        self.left: set[str] = set()
        self.number = 0

    def begin(self) -> Step:
        """A new step; without its tensors where there is no room for them."""
        self.number += 1
        self.nbytes, self.features = 0, None
        self.step = Step(self.number, time.time(), left=self._leaving(), thin=not self.session.room())
        return self.step

    def end(self, *, whole: bool) -> None:
        """Hand the step over, unless something went wrong within it."""
        step, self.step = self.step, None
        if step is not None and whole:
            self.session.put(step, self.nbytes)

    def sample_tokens(self, runner: Any, _arguments: Mapping[str, Any]) -> Watching:
        """A step, from what the target computed to the drafts of the next."""
        if runner.execute_model_state is None:
            return
        whole = False
        try:
            self.computed(runner, self.begin())
            yield
            whole = True
        finally:
            self.end(whole=whole)

    def computed(self, runner: Any, step: Step) -> None:
        """What the target has computed of a step; each runner keeps it elsewhere."""
        raise NotImplementedError

    def leave(self, names: Iterable[str], *, goes_on: bool) -> None:
        """The engine has let go of requests; where no step follows at once, that is one of its own."""
        self.left |= set(names)
        if not goes_on and self.left:
            self.begin()
            self.end(whole=True)

    def _leaving(self) -> tuple[str, ...]:
        left, self.left = tuple(sorted(self.left)), set()
        self.met -= set(left)
        return left

    def copy(self, tensor: Tensor) -> Staged:
        """Of a tensor that the engine goes on using."""
        return self._held(stage(tensor))

    def kept(self, tensor: Tensor) -> Staged:
        """Of a tensor that nobody else holds: without another copy where it is on the host already."""
        return self._held(stage(tensor) if tensor.is_cuda else bits_of(tensor))

    def _held(self, staged: Staged) -> Staged:
        self.nbytes += staged.nbytes
        return staged

    def logits(self, logits: Tensor) -> Logits | None:
        """The best of each row and the logsumexp of all, where everything is asked for."""
        if not self.full:
            return None
        whole = logits.float()
        top = whole.topk(min(TOP_K, whole.shape[-1]))
        return Logits(self.kept(top.indices.int()), self.kept(top.values), self.kept(whole.logsumexp(-1)))

    def combine_hidden_states(self, _model: Any, arguments: Mapping[str, Any]) -> Watching:
        """What is delivered to the draft, and what fc makes of it."""
        step = self.step
        if step is None or step.thin:
            return
        rows = fed(step)
        delivered = self.copy(arguments["hidden_states"][:rows])
        fused = yield
        self.features = delivered, self.copy(fused[:rows]) if self.full else None

    def forward(self, _model: Any, arguments: Mapping[str, Any]) -> Watching:
        """One forward, unless it is a wrapper's."""
        if not self.wrapping:
            yield from self._forward(arguments)

    def wrapped(self, _wrapper: Any, arguments: Mapping[str, Any]) -> Watching:
        """One forward through a wrapper, which may replay CUDA graphs instead of it."""
        self.wrapping = True
        try:
            yield from self._forward(arguments["kwargs"])
        finally:
            self.wrapping = False

    def _forward(self, arguments: Mapping[str, Any]) -> Watching:
        """Inputs are copied before it, since they lie in buffers that the next one writes into."""
        step = self.step
        if step is None or step.thin or arguments["input_ids"] is None:
            return
        first = not step.forwards
        rows = fed(step) if first else len(step.groups)
        forward = Forward(
            self.copy(arguments["input_ids"][:rows]), self.copy(text_positions(arguments["positions"])[:rows])
        )
        if first and self.features:
            forward.inputs, forward.fused = self.features
        elif not first:
            forward.inputs = self.copy(arguments["hidden_states"][:rows])
        step.forwards.append(forward)
        hidden, state = yield
        forward.state = self.copy(state[:rows])
        if self.full:
            forward.hidden = self.copy(hidden[:rows])

    def compute_logits(self, model: Any, _arguments: Mapping[str, Any]) -> Watching:
        """The id of the best token; the engine spreads the draft's logits over the target's vocabulary to find it.

        Where ids tie, the engine takes the first token, which need not be the first id's.
        """
        step = self.step
        logits = yield
        forward = step.forwards[-1] if step and step.forwards else None
        if forward is None or logits is None:
            return
        best, table = logits.argmax(-1), getattr(model, "draft_id_to_target_id", None)
        if table is not None:
            tokens = table + _arange(table)
            best = (tokens == best[:, None]).int().argmax(-1)
            logits = logits[:, tokens] if self.full else logits
        forward.draft_tokens, forward.logits = self.kept(best), self.logits(logits)


def draft_spots(drafter: Any, *, optional: bool = False) -> Iterator[Spot]:
    """The methods of a draft's outer class, which is not compiled, and of what wraps it."""
    model, wrapper = unwrapped(drafter.model), drafter.model
    yield Spot(model, "combine_hidden_states", ("hidden_states",))
    yield Spot(model, "forward", ("input_ids", "positions", "hidden_states"), optional=optional or wrapper is not model)
    if wrapper is not model:
        yield Spot(wrapper, "__call__", ("kwargs",), by="wrapped")
    if not getattr(drafter, "use_local_argmax_reduction", False):
        yield Spot(model, "compute_logits", optional=optional)


def unwrapped(model: Any) -> Any:
    """The model within what replays graphs of it."""
    return model.unwrap() if hasattr(model, "unwrap") else model


def fed(step: Step) -> int:
    """How many rows the draft's first forward is fed."""
    return sum(group.fed for group in step.groups)


def _arange(like: Tensor) -> Tensor:
    import torch

    return torch.arange(len(like), device=like.device)


def text_positions(positions: Tensor) -> Tensor:
    """Of multimodal RoPE's three rows, the first: text stands at the same place in all."""
    return positions[0] if positions.ndim == 2 else positions


def begins(prompt: Sequence[int], sampling: Any, most: int) -> dict[str, Any]:
    """What a `Story` knows of a request from the start; its text is `most` tokens long at most."""
    limit = most - len(prompt)
    ends = {*(sampling.stop_token_ids or ()), *([] if sampling.eos_token_id is None else [sampling.eos_token_id])}
    return {
        "prompt": tuple(prompt),
        "max_new": limit if sampling.max_tokens is None else min(int(sampling.max_tokens), limit),
        "ends": frozenset(ends),
        "temperature": float(sampling.temperature),
        "seed": sampling.seed,
        "arrived_secs": time.time(),
    }

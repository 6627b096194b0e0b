"""Continuous batching: which rows run next, and what a request has become. Pure bookkeeping, no tensors, no Ray.

A request prefills in chunks, answers with its first token, then goes through rounds: its root (the last token emitted,
not yet in the cache) and the drafted tree are verified in one pass. Requests join and leave at any step.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from spectrace.engine.fault import Fault, Feeding, broken
from spectrace.engine.plan import (
    CaptureHiddenMode,
    Decision,
    DraftGroup,
    DraftStep,
    DraftTree,
    TargetGroup,
    TargetStep,
)
from spectrace.engine.tree import NO_TREE, Tree
from spectrace.tracer.rows import Phase

__all__ = ["Request", "Scheduler"]


@dataclass(slots=True)
class Request:
    """A prompt and what has come of it. `computed` counts its committed rows in the target's cache."""

    number: int
    name: str
    prompt: tuple[int, ...]
    max_new: int
    output: list[int] = field(default_factory=list)
    computed: int = 0
    passes: int = 0
    rounds: int = 0
    correct_drafts: int = 0
    finish_reason: str = ""
    tree: Tree = NO_TREE
    arrived_secs: float = field(default_factory=time.time)
    first_token_secs: float | None = None
    finished_secs: float | None = None

    @property
    def untrimmed(self) -> int:
        """Tokens emitted so far, those past the end included: every computed row answers for the token after it."""
        return self.computed - len(self.prompt) + 1

    @property
    def in_prompt(self) -> bool:
        return self.computed < len(self.prompt)


class Scheduler:
    """Up to `concurrency` requests in flight, at most `chunk` prompt rows a step, `depth` tokens drafted a round.

    With `fixed_window` the draft is fed every row of a round, rejected ones behind the accepted, as engines do whose
    shapes must not depend on what was accepted. `mode` says which rows of a piece of a prompt the target hands over.
    """

    def __init__(
        self,
        *,
        depth: int,
        concurrency: int,
        chunk: int | None,
        end_tokens: frozenset[int],
        fixed_window: bool = False,
        mode: CaptureHiddenMode = CaptureHiddenMode.FULL,
        faults: Sequence[Fault] = (),
    ) -> None:
        self.depth, self.concurrency, self.chunk, self.end_tokens = depth, concurrency, chunk, end_tokens
        self.fixed_window, self.mode, self.broken = fixed_window, mode, broken(faults, Feeding)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.finished: list[Request] = []
        self.requests: dict[int, Request] = {}
        self.steps = 0
        self._target_frees: list[int] = []
        self._draft_frees: list[int] = []
        self._planned: dict[int, TargetGroup] = {}

    def add(self, request: Request) -> None:
        """Queue a request; it joins as soon as a place is free."""
        self.requests[request.number] = request
        self.waiting.append(request)

    def plan(self) -> TargetStep | None:
        """The next target pass, or None when every request has finished."""
        while self.waiting and len(self.running) < self.concurrency:
            self.running.append(self.waiting.popleft())
        budget = self.chunk or sum(len(request.prompt) for request in self.running)
        groups: list[TargetGroup] = []
        for request in self.running:
            if not request.in_prompt:
                groups.append(self._round(request))
            elif budget > 0:
                groups.append(self._chunk(request, budget))
                budget -= len(groups[-1].tokens)
        if not groups:
            return None
        self._planned = {group.request: group for group in groups}
        step = TargetStep(self.steps, tuple(groups), tuple(self._target_frees))
        self._target_frees.clear()
        self.steps += 1
        return step

    def _chunk(self, request: Request, budget: int) -> TargetGroup:
        tokens = request.prompt[request.computed : request.computed + budget]
        return TargetGroup(
            request=request.number,
            pass_=request.passes,
            phase=Phase.PREFILL,
            round=-1,
            position=request.computed,
            tokens=tokens,
            parents=tuple(range(-1, len(tokens) - 1)),
            answers=request.computed + len(tokens) == len(request.prompt),
        )

    def _round(self, request: Request) -> TargetGroup:
        return TargetGroup(
            request=request.number,
            pass_=request.passes,
            phase=Phase.VERIFY,
            round=request.rounds if self.depth else -1,
            position=request.computed,
            tokens=(request.output[-1], *request.tree.tokens),
            parents=(-1, *(parent + 1 for parent in request.tree.parents)),
            answers=True,
        )

    def apply(self, decisions: Sequence[Decision]) -> DraftStep:
        """Take the target's decisions in; returns the draft forwards that they call for."""
        groups, handed = [], 0
        for decision in decisions:
            request, group = self.requests[decision.request], self._planned[decision.request]
            fed, skipped = self._fed(group, decision, self._advance(request, group, decision))
            source, handed = handed, handed + len(fed)
            if not request.finish_reason and self.depth:
                # The pass that ends a prompt feeds round 0; a verify pass feeds the round after its own.
                groups.append(
                    DraftGroup(
                        request=request.number,
                        pass_=group.pass_,
                        round=request.rounds if group.answers else -1,
                        position=group.position + skipped,
                        source=source,
                        tokens=fed,
                        live=len(decision.path) - skipped,
                        drafts=group.answers,
                    )
                )
        self._retire()
        if not groups:  # nobody will call the draft: it hears of the finished ones with its next step
            return DraftStep(self.steps - 1, (), ())
        step = DraftStep(self.steps - 1, tuple(groups), tuple(self._draft_frees))
        self._draft_frees.clear()
        return step

    def _advance(self, request: Request, group: TargetGroup, decision: Decision) -> tuple[int, ...]:
        """Move a request past its pass; returns the token after each accepted row."""
        request.passes += 1
        request.computed += len(decision.path)
        accepted = [group.tokens[node] for node in decision.path]
        if decision.bonus is None:
            return (*accepted[1:], request.prompt[request.computed])
        new = [*accepted[1:], decision.bonus]
        if group.phase is Phase.PREFILL:
            request.output.append(decision.bonus)
            request.first_token_secs = time.time()
        else:
            request.rounds += 1 if self.depth else 0
            request.correct_drafts += len(accepted) - 1
            request.output += new
        self._finish(request, emitted=1 if group.phase is Phase.PREFILL else len(new))
        return tuple(new)

    def _fed(self, group: TargetGroup, decision: Decision, after: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
        """The tokens of the draft's rows, and how many rows at the front of the group it does not get."""
        nodes = (*decision.path, *(decision.rejected if self.fixed_window else ()))
        after += tuple(decision.target_tokens[node] for node in nodes[len(after) :])
        for fault in self.broken:
            after = fault.tokens(tuple(group.tokens[node] for node in nodes), after, group.answers)
        last_alone = group.phase is Phase.PREFILL and self.mode is CaptureHiddenMode.LAST
        skipped = len(after) - 1 if last_alone else 0
        return after[skipped:], skipped

    def _finish(self, request: Request, *, emitted: int) -> None:
        """Trim the output at an end token or at the length limit, whichever comes first."""
        before = len(request.output) - emitted
        ends = (i for i in range(before, len(request.output)) if request.output[i] in self.end_tokens)
        end = next(ends, None)
        if end is not None and end < request.max_new:
            del request.output[end + 1 :]
            request.finish_reason = "stop"
        elif len(request.output) >= request.max_new:
            del request.output[request.max_new :]
            request.finish_reason = "length"

    def _retire(self) -> None:
        gone = [request for request in self.running if request.finish_reason]
        for request in gone:
            request.finished_secs = time.time()
            self.running.remove(request)
        self.finished += gone
        self._target_frees += [request.number for request in gone]
        self._draft_frees += [request.number for request in gone]

    def take_drafts(self, trees: Sequence[DraftTree]) -> None:
        """Give each request the tree for its next round."""
        for tree in trees:
            self.requests[tree.request].tree = tree.tree

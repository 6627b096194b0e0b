"""The scheduler's part of a trace: what each round came to (`verified`), and what became of each request."""

from collections.abc import Sequence

from spectrace.engine.plan import Decision, TargetGroup, TargetStep
from spectrace.engine.recording import Recording, shut
from spectrace.engine.sampling import Sampling
from spectrace.engine.scheduler import Request, Scheduler
from spectrace.engine.verify import Draws
from spectrace.tracer.keys import Keys
from spectrace.tracer.rows import Phase

__all__ = ["RequestLog"]


class RequestLog:
    """Writes nothing without a recording."""

    def __init__(self, scheduler: Scheduler, sampling: Sampling, recording: Recording | None) -> None:
        self.scheduler, self.sampling = scheduler, sampling
        self.recorder = recording.open("scheduler") if recording else None

    def step(self, step: TargetStep, decisions: Sequence[Decision]) -> None:
        """Record a pass that the scheduler has just applied."""
        if self.recorder is None:
            return
        for group, decision in zip(step.groups, decisions, strict=True):
            request = self.scheduler.requests[group.request]
            if group.phase is Phase.VERIFY and self.scheduler.depth:
                self._round(step.number, group, decision, cut=request.untrimmed > len(request.output))
            if request.finish_reason:
                self._request(request, step.number)

    def close(self) -> str | None:
        """Seal; returns what was lost."""
        return shut(self.recorder)

    def _round(self, step: int, group: TargetGroup, decision: Decision, *, cut: bool) -> None:
        assert self.recorder
        nodes = range(len(group.tokens))
        self.recorder.verified(
            Keys(
                request=[group.request] * len(nodes),
                pass_=group.pass_,
                node=nodes,
                position=[group.position + level for level in group.levels],
                phase=Phase.VERIFY,
                round=group.round,
                step=step,
            ),
            parent=list(group.parents),
            token=list(group.tokens),
            target_token=list(decision.target_tokens),
            accepted=[node in decision.path for node in nodes],
            cut=cut,
            source_row=list(nodes),
            **({} if decision.draws is None else _draws(decision.draws)),
        )

    def _request(self, request: Request, step: int) -> None:
        assert self.recorder
        self.recorder.requests(
            Keys(request=[request.number], pass_=0, node=0, position=0, step=step),
            id=[request.name],
            prompt_tokens=[request.prompt],
            output_tokens=[request.output],
            cached_prefix=0,
            temperature=self.sampling.temperature,
            seed=self.sampling.seed if self.sampling.temperature else None,
            finish_reason=request.finish_reason,
            rounds=request.rounds,
            correct_drafts=request.correct_drafts,
            depth_limit=self.scheduler.depth,
            arrived_secs=request.arrived_secs,
            first_token_secs=request.first_token_secs,
            finished_secs=request.finished_secs,
        )


def _draws(draws: Draws) -> dict[str, tuple[float, ...]]:
    """What a sampled verdict rests on, by the names of its columns."""
    return {"p": draws.p, "q": draws.q, "p_emitted": draws.p_emitted, "uniform": draws.uniform}

"""Our side: the steps as a sealed trace at level full, by three writers."""

from dataclasses import asdict
from pathlib import Path

from comparator.tensors import DEPTH, WIRING, Flaw, Forward, Sizes, Step, simulate

from spectrace.tracer import Keys, Level, Phase, Recorder, create_trace, seal_trace

__all__ = ["write_trace"]


def write_trace(folder: Path, sizes: Sizes, flaw: Flaw) -> Path:
    """Record a run. What is wrong in it is nobody's to know: the manifest tells only how it was batched."""
    serving = {"depth": DEPTH, **{name: asdict(sizes)[name] for name in ("batch", "chunk", "backwards")}}
    wiring = {"configured": {"boundaries": list(WIRING)}}
    create_trace(folder, {"engine": "synthetic", "dtype": "bfloat16", "wiring": wiring, "serving": serving})
    open_ = {
        role: Recorder(folder, role=role, level=Level.FULL, strict=True, queue_bytes=4 << 30)
        for role in ("target", "draft", "scheduler")
    }
    for step in simulate(sizes, flaw):
        _emitted(open_["target"], step)
        _verified(open_["scheduler"], step)
        for forward in step.drafts:
            _drafted(open_["draft"], step.number, forward)
        for recorder in open_.values():
            recorder.flush()
    for recorder in open_.values():
        recorder.close()
    seal_trace(folder)
    return folder


def _keys(step: int, forward: Forward, *, drafts: bool) -> Keys:
    verifies = forward.spread([run.verifies for run in forward.runs])
    deep = Phase.DRAFT_DECODE if forward.depth else Phase.DRAFT_EXTEND
    return Keys(
        request=forward.spread([run.request.number for run in forward.runs]),
        pass_=forward.spread([run.pass_ for run in forward.runs]),
        depth=forward.depth,
        node=forward.nodes,
        position=forward.positions,
        phase=deep if drafts else [Phase.VERIFY if one else Phase.PREFILL for one in verifies],
        round=forward.spread(
            [run.round + run.verifies if drafts else run.round if run.verifies else -1 for run in forward.runs]
        ),
        step=step,
    )


def _emitted(recorder: Recorder, step: Step) -> None:
    rows = step.target
    recorder.emitted(
        _keys(step.number, rows, drafts=False),
        token=rows.tokens,
        slots=rows.inputs.flatten(1),
        slot_width=rows.inputs.shape[-1],
        target_token=rows.answers,
    )


def _drafted(recorder: Recorder, step: int, rows: Forward) -> None:
    keys, extends = _keys(step, rows, drafts=True), rows.depth == 0
    recorder.received(
        keys,
        token=rows.tokens,
        features=rows.inputs.flatten(1) if extends else None,
        slot_width=rows.inputs.shape[-1] if extends else None,
        state=None if extends else rows.inputs,
        parent=None if extends else [run.accepted - 1 if rows.depth == 1 else 0 for run in rows.runs],
    )
    results = {"hidden": rows.hidden, "state": rows.state, "logits": (rows.best, rows.logits)}
    recorder.drafted(keys, draft_token=rows.answers, token=rows.answers, logsumexp=rows.logits.logsumexp(-1), **results)


def _verified(recorder: Recorder, step: Step) -> None:
    for run in step.target.runs:
        if not run.verifies:
            continue
        nodes = list(range(len(run.tokens)))
        recorder.verified(
            Keys(
                request=[run.request.number] * len(nodes),
                pass_=run.pass_,
                node=nodes,
                position=[run.position + node for node in nodes],
                phase=Phase.VERIFY,
                round=run.round,
                step=step.number,
            ),
            parent=[node - 1 for node in nodes],
            token=run.tokens,
            target_token=run.targets,
            accepted=[node < run.accepted for node in nodes],
            cut=False,
            source_row=nodes,
        )
    for request in step.finished:
        recorder.requests(
            Keys(request=[request.number], pass_=0, node=0, position=0, step=step.number),
            id=[request.name],
            prompt_tokens=[request.prompt],
            output_tokens=[request.output],
            cached_prefix=0,
            temperature=0.0,
            finish_reason="length",
            rounds=request.rounds,
            correct_drafts=request.correct,
            depth_limit=DEPTH,
        )

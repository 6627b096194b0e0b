"""What only an NVIDIA GPU can show of recording, claim by claim, in about five minutes.

python bench/gpu_check.py [--target DIR --draft DIR], in an environment that has vLLM for CUDA and spectrace. A claim is
a function that returns its figure; it fails by an AssertionError, whose text says what was found.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import click
import torch

from spectrace.engine.checkpoint import build_draft, read_draft
from spectrace.replay.compare import served_dtype
from spectrace.replay.lab import replay_trace
from spectrace.tracer.acceptance import acceptance_of_rows
from spectrace.tracer.launch import record
from spectrace.tracer.rows import Level
from spectrace.tracer.staging import stage
from spectrace.tracer.trace import Trace

DEVICE, DEPTH, SERVE = "cuda", 3, Path(__file__).resolve().with_name("gpu_serve.py")
MOST_DELAY, MOST_SHARE, LEAST_EQUAL = 1.05, 0.15, 0.99
MODES: dict[str, tuple[str, bool]] = {"V1 eager": ("0", True), "V2 eager": ("1", True), "V2 graphs": ("1", False)}
"""By name: VLLM_USE_V2_MODEL_RUNNER, and enforce_eager."""


class Skipped(Exception):
    """A claim that nothing can be said of here, and why."""


@dataclass(frozen=True, slots=True)
class Run:
    """One engine from start to end: what it answered and counted, and the folder of its trace, if it was recorded."""

    outputs: list[list[int]]
    counters: dict[str, float]
    secs: float
    folder: Path

    @property
    def trace(self) -> Trace:
        return Trace.open(self.folder)


@dataclass(slots=True)
class Runs:
    """Engines by mode, each started once with the recorder and once without."""

    target: Path
    draft: Path
    folder: Path
    done: dict[tuple[str, bool], Run] = field(default_factory=dict)

    def __call__(self, mode: str, *, recorded: bool = True, again: bool = False) -> Run:
        if importlib.util.find_spec("vllm") is None:
            raise Skipped("vLLM is not installed here")
        if again or (mode, recorded) not in self.done:
            self.done[mode, recorded] = self._start(mode, recorded)
        return self.done[mode, recorded]

    def _start(self, mode: str, recorded: bool) -> Run:
        runner, eager = MODES[mode]
        folder = Path(tempfile.mkdtemp(prefix=f"{mode} ", dir=self.folder))
        given = {"target": str(self.target), "draft": str(self.draft), "eager": eager, "depth": DEPTH}
        command = [sys.executable, str(SERVE), json.dumps({**given, "folder": str(folder)})]
        os.environ |= {"VLLM_USE_V2_MODEL_RUNNER": runner, "VLLM_NO_USAGE_STATS": "1"}
        if recorded:
            code = record(command, folder / "trace", level=Level.FULL).exit_code
        else:
            code = os.spawnv(os.P_WAIT, sys.executable, command)
        assert code == 0, f"the engine ended with {code}, and last said: {(folder / 'log').read_text('utf-8')[-300:]}"
        return Run(**json.loads((folder / "said.json").read_text("utf-8")), folder=folder / "trace")


def busy(matrix: torch.Tensor, products: int = 40) -> torch.Tensor:
    """Queue some milliseconds of work."""
    for _ in range(products):
        matrix = (matrix @ matrix).clamp(-1, 1)
    return matrix


def staging_waits_for_nothing() -> str:
    """A copy is queued while the stream is busy, and holds what was there then though it is overwritten at once."""
    matrix, source = torch.randn(4096, 4096, device="cuda"), torch.arange(1 << 20, device="cuda")
    stage(source).wait()  # its pinned memory comes from a cache from here on
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        busy(matrix)
        source += 7
        started = time.perf_counter()
        staged = stage(source)
        took = time.perf_counter() - started
        source.fill_(-1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().synchronize()
    waited = time.perf_counter() - started
    wrong = int((staged.wait().array != torch.arange(7, (1 << 20) + 7).numpy()).sum())
    assert not wrong, f"{wrong} of {1 << 20} values are not those of the moment"
    assert took < waited / 2, f"staging took {took * 1e3:.2f} ms of the {waited * 1e3:.2f} ms that the stream was busy"
    return f"staged in {took * 1e6:.0f} us, with {waited * 1e3:.1f} ms of work queued before it"


def staging_does_not_stall() -> str:
    """A step's worth of kernels takes as long with its tensors staged as without."""
    matrix, features = torch.randn(4096, 4096, device="cuda"), torch.randn(64, 12288, device="cuda").bfloat16()

    def step_secs(staged: bool) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(20):
            busy(matrix, 10)
            held = [stage(features) for _ in range(2)] if staged else []
            del held
        torch.cuda.synchronize()
        return time.perf_counter() - started

    step_secs(True)
    ratios = sorted(step_secs(True) / step_secs(False) for _ in range(7))
    assert ratios[3] < MOST_DELAY, f"{ratios[3]:.3f} times as long, of 7 {ratios[0]:.3f} to {ratios[-1]:.3f}"
    return f"{ratios[3]:.3f} times as long (of 7: {ratios[0]:.3f} to {ratios[-1]:.3f})"


def is_recorded(runs: Runs, mode: str) -> str:
    """The trace is whole, all hooks fired that had to, and the engine counted the rounds that are in it."""
    run = runs(mode)
    trace = run.trace
    problems = [problem.message for problem in trace.verify()]
    assert trace.sealed and not problems, "; ".join(problems) or "not sealed"
    runner, ran = (trace.manifest.get("mode") or {}).get("runner"), mode.split()[0]
    assert runner == ran, f"vLLM ran its {runner} runner"
    found = acceptance_of_rows(trace.rows("verified"))
    counted = [run.counters.get(f"vllm:spec_decode_num_{what}") for what in ("drafts", "accepted_tokens")]
    rows = [found.rounds_untrimmed, found.correct_drafts_untrimmed]
    assert counted == rows, f"vLLM counted rounds and correct drafts {counted}, recorded are {rows}"
    return f"{rows[0]} rounds with {rows[1]} correct drafts; {'; '.join(shown(trace))}"


def shown(trace: Trace) -> Iterator[str]:
    """What of the draft's rows was there to be seen, depth by depth."""
    for depth in range(DEPTH):
        fed, drafted = (trace.rows(family, depth=depth, live=True) for family in ("received", "drafted"))
        kinds = [kind for kind in ("fused", "hidden", "state", "logits") if drafted.has(kind).any()]
        yield f"depth {depth}: {len(fed)} rows, {', '.join(kinds) or 'tokens alone'}"


def changes_nothing(runs: Runs, mode: str) -> str:
    """Answers and counters are the same with the recorder and without."""
    recorded, plain = runs(mode), runs(mode, recorded=False)
    differ = [at for at, pair in enumerate(zip(recorded.outputs, plain.outputs, strict=True)) if pair[0] != pair[1]]
    if (differ or recorded.counters != plain.counters) and runs(
        mode, recorded=False, again=True
    ).outputs != plain.outputs:
        raise Skipped("the engine's own answers differ from run to run here")
    assert not differ, f"{len(differ)} of {len(plain.outputs)} answers differ, the first is {differ[0]}"
    assert recorded.counters == plain.counters, f"{recorded.counters} with it, {plain.counters} without"
    return f"{len(plain.outputs)} answers; {recorded.secs / plain.secs:.2f} times as long"


def costs_little(runs: Runs, mode: str) -> str:
    """Hooks take a small share of the CPU time of the engine's thread."""
    [share] = [one.share for one in runs(mode).trace.statuses.values() if one.share is not None]
    assert share < MOST_SHARE, f"{share:.1%}"
    return f"{share:.1%}"


def replays(runs: Runs, mode: str) -> str:
    """The draft, run again on this GPU on what it was fed, drafts the tokens that it drafted."""
    trace, checkpoint = runs(mode).trace, read_draft(runs.draft)
    model = build_draft(checkpoint, target=runs.target, dtype=served_dtype(trace), device=DEVICE)
    found = replay_trace(trace, model).comparison
    told = f"{found.tokens_equal} of {found.answers} tokens"
    assert found.answers and found.tokens_equal >= LEAST_EQUAL * found.answers, told
    return told


def graphs_run(runs: Runs, mode: str) -> str:
    """vLLM captured its graphs of the draft, and replayed them while it was recorded."""
    hooks = {name: hook for status in runs(mode).trace.statuses.values() for name, hook in status.hooks.items()}
    replayed = sum(hook.calls for name, hook in hooks.items() if name.endswith(".run_fullgraph"))
    assert replayed, "no graph of the draft ran"
    return f"{replayed} graphs replayed"


def claims(runs: Runs) -> Iterator[tuple[str, Callable[[], str]]]:
    yield "staging waits for nothing and copies what is there", staging_waits_for_nothing
    yield "staging does not stall the stream", staging_does_not_stall
    for mode in MODES:
        yield f"{mode}: recorded whole", partial(is_recorded, runs, mode)
        yield f"{mode}: recording changes nothing", partial(changes_nothing, runs, mode)
        yield f"{mode}: hooks cost little", partial(costs_little, runs, mode)
        yield f"{mode}: replays on this GPU", partial(replays, runs, mode)
    yield "V2 graphs: recording leaves CUDA graphs alone", partial(graphs_run, runs, "V2 graphs")


def line(claim: str, act: Callable[[], str], report: str) -> tuple[str, bool]:
    """A claim's line, and whether it failed."""
    try:
        return f"pass     {claim}: {act()}", False
    except Skipped as skipped:
        return f"skipped  {claim}: {skipped}", False
    except Exception as error:
        why = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        return f"FAIL     {claim}: {why}\n         {report}", True


def pair(folder: Path) -> tuple[Path, Path]:
    sys.path.append(str(Path(__file__).resolve().parents[1] / "models"))
    from analytic.pair import make_pair

    return make_pair("llama", folder)[:2]


@click.command()
@click.option("--target", type=click.Path(path_type=Path, exists=True), help="A target's folder; with --draft.")
@click.option("--draft", type=click.Path(path_type=Path, exists=True), help="Its EAGLE-3 draft's folder.")
def main(target: Path | None, draft: Path | None) -> None:
    """Check on this machine's GPU what a CPU cannot show; without --target and --draft, with a pair made for it."""
    if (target is None) != (draft is None):
        raise click.UsageError("--target and --draft go together")
    if not torch.cuda.is_available():
        click.echo("no CUDA device here: nothing of this can be checked", err=True)
        sys.exit(2)
    folder = Path(tempfile.mkdtemp(prefix="gpu-check-"))
    versions = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    report = f"report this line with {folder} and: {versions}"
    made = (target, draft) if target and draft else pair(folder / "pair")
    failed = 0
    for claim, act in claims(Runs(*made, folder)):
        text, fails = line(claim, act, report)
        click.echo(text)
        failed += fails
    click.echo(f"{failed} claims failed; {versions}; everything is in {folder}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()

"""`spectrace demo`: a real model served rightly and wrongly; the mistake named from its trace, the fix foretold."""

import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from spectrace.cli.diagnose import diagnosis_json
from spectrace.cli.diagnosis_page import render_causes
from spectrace.cli.options import PATH, THREADS, as_json_option, print_json
from spectrace.cli.replay import acceptance_table, replay_json
from spectrace.tracer.acceptance import Acceptance
from spectrace.tracer.errors import RunFailed, UserError
from spectrace.tracer.rows import Level

if TYPE_CHECKING:
    from spectrace.engine.deployment import Served
    from spectrace.replay.compare import Comparison
    from spectrace.replay.diagnosis import Diagnosis
    from spectrace.replay.lab import ReplayReport

__all__ = ["demo", "render_demo"]

_MODELS = Path(__file__).resolve().parents[1] / "models" / "smollm2"
_DEPTH, _MAX_NEW = 3, 64
_MISTAKE = "W3"


@dataclass(frozen=True, slots=True)
class _Recorded:
    """One recorded run: its wiring, where its trace is, what was served, and its replay."""

    wiring: tuple[int, ...]
    trace: Path
    served: "Served"
    report: "ReplayReport"

    def to_json(self) -> dict[str, Any]:
        replay = replay_json(self.report)
        return {**self.report.served.to_json(), "wiring": self.wiring, "trace": str(self.trace), "replay": replay}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything the demo found. `plain` is the target alone, `diagnosis` that of the wrong run."""

    right: _Recorded
    wrong: _Recorded
    after_fix: Acceptance
    diagnosis: "Diagnosis"
    plain: "Served"

    @property
    def lossless(self) -> bool:
        """Both speculative runs gave the target's own tokens."""
        own = [request.output for request in self.plain.requests]
        return all(own == [request.output for request in run.served.requests] for run in (self.right, self.wrong))

    def to_json(self) -> dict[str, Any]:
        return {
            "right": self.right.to_json(),
            "wrong": self.wrong.to_json(),
            "after_fix": {**self.after_fix.to_json(), "wiring": self.right.wiring},
            "diagnosis": diagnosis_json(self.diagnosis),
            "lossless": self.lossless,
            "seconds_per_token": {"on": self.right.served.secs_per_token, "off": self.plain.secs_per_token},
        }


@click.command(name="demo")
@click.option("--out", type=PATH, help="Where the two traces go; a new folder under runs/ otherwise.")
@click.option("--threads", type=THREADS, help="CPU threads; all cores otherwise.")
@as_json_option
def demo(out: Path | None, threads: int | None, as_json: bool) -> None:
    """Serve, record, break, record again, replay both, and foretell what the fix brings."""
    if not (_MODELS / "draft" / "model.safetensors").is_file():
        raise UserError(
            "the demo needs the draft in models/smollm2, which a clone has and an installed package has not"
        )
    out = out or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    console = Console(stderr=True)
    outcome = _play(_target(console), out, threads, console)
    if as_json:
        print_json(outcome.to_json())
    else:
        Console().print(render_demo(outcome, out), crop=False)
    if not outcome.lossless:
        raise RunFailed("a speculative run gave other tokens than the target alone: the deployment is not lossless")


def _target(console: Console) -> Path:
    """The converted target; converts it when it is not in the cache yet."""
    with console.status("looking for SmolLM2-135M-Instruct (converted once, about 20 s)"):
        made = subprocess.run([sys.executable, _MODELS / "target.py"], capture_output=True, text=True)
    if made.returncode:
        reason = made.stderr.strip().splitlines()[-1] if made.stderr.strip() else f"exit code {made.returncode}"
        raise UserError(f"cannot make the target model ({reason}); `make demo` installs what it needs")
    return Path(made.stdout.strip().splitlines()[-1])


def _play(target: Path, out: Path, threads: int | None, console: Console) -> Outcome:
    import torch

    from spectrace.engine.checkpoint import build_draft, read_draft
    from spectrace.engine.deployment import Deployment, Serving
    from spectrace.engine.faults import FAULTS
    from spectrace.engine.prompts import read_prompts
    from spectrace.replay.diagnose import diagnose
    from spectrace.replay.freerun import free_run_acceptance
    from spectrace.replay.lab import replay_trace
    from spectrace.tracer.trace import Trace

    checkpoint = read_draft(_MODELS / "draft")
    assert checkpoint.wiring
    right = checkpoint.wiring.boundaries
    prompts = read_prompts(_MODELS / "prompts" / "demo.jsonl", target)
    pair = Deployment(target, _MODELS / "draft", threads=threads)
    wrong = FAULTS[_MISTAKE].wiring(right, pair.layers)
    capture = tuple(sorted({*right, *wrong}))
    alone = Serving(depth=0, max_new=_MAX_NEW, concurrency=1)
    speculating = replace(alone, depth=_DEPTH, capture=capture, level=Level.FULL)
    served: dict[str, Served] = {}
    with console.status("starting target and draft as Ray actors") as status, pair:
        status.update(f"the target alone: {len(prompts)} prompts of {_MAX_NEW} tokens")
        plain = pair.serve(prompts, alone)
        for name, wiring in (("right", right), ("wrong", wrong)):
            status.update(f"speculating with the {name} wiring {wiring}, recorded")
            served[name] = pair.serve(prompts, replace(speculating, wiring=wiring), trace=out / name)
            if served[name].losses:
                raise RunFailed(f"{out / name}: the recording is incomplete: {'; '.join(served[name].losses)}")
    if threads:
        torch.set_num_threads(threads)
    model = build_draft(checkpoint, target=target, dtype=torch.float32)
    with console.status("replaying both traces offline"):
        runs = {
            name: _Recorded(wiring, out / name, served[name], replay_trace(Trace.open(out / name), model))
            for name, wiring in (("right", right), ("wrong", wrong))
        }
        after_fix = free_run_acceptance(Trace.open(out / "wrong"), model, wiring=right)
    with console.status("diagnosing the wrong run from its trace"):
        diagnosis = diagnose(Trace.open(out / "wrong"), checkpoint, target=target)
    return Outcome(runs["right"], runs["wrong"], after_fix, diagnosis, plain)


def render_demo(outcome: Outcome, out: Path) -> RenderableType:
    """The page a person reads."""
    right, wrong = outcome.right, outcome.wrong
    acceptance = {"right": right.report.served, "wrong": wrong.report.served, "after the fix": outcome.after_fix}
    served = {"target alone": outcome.plain, "right": right.served, "wrong": wrong.served}
    times = {name: (f"{1000 * one.secs_per_token:.1f}",) for name, one in served.items()}
    replays = {name: _replayed(run.report.comparison) for name, run in (("right", right), ("wrong", wrong))}
    return Group(
        Text(f"{len(outcome.plain.requests)} prompts, greedy, depth {_DEPTH}, one request at a time", style="bold"),
        Text(f"right: the wiring that the draft was trained on, boundaries {right.wiring}"),
        Text(f"wrong: the classic mistake, the embedding left out, boundaries {wrong.wiring}"),
        Text(f"lossless, the text is the target's own in both: {'yes' if outcome.lossless else 'NO'}\n"),
        acceptance_table(acceptance),
        Text("\nafter the fix: foretold offline, from the reference features in the wrong run's"),
        Text("trace; to be compared with 'right', which was really served\n"),
        _columns(("milliseconds per token",), times),
        Text(""),
        _columns(_REPLAYED, replays),
        Text("\nand the cause, named from the wrong run's trace: spectrace diagnose\n"),
        render_causes(out / "wrong", outcome.diagnosis),
        Text(f"\nboth traces are kept in {out}"),
        Text(f"next: spectrace diagnose {shlex.quote(str(out / 'right'))}"),
    )


_REPLAYED = ("replay: tokens equal", "largest error / row maximum", "rows per second", "rows per second, served")


def _replayed(compared: "Comparison") -> tuple[str, ...]:
    error, served = compared.max_error, compared.served_rows_per_second
    return (
        f"{compared.tokens_equal} of {compared.answers}",
        "-" if error is None else f"{error:.1e}",
        f"{compared.rows_per_second:,.0f}",
        "-" if served is None else f"{served:,.0f}",
    )


def _columns(rows: tuple[str, ...], columns: Mapping[str, tuple[str, ...]]) -> Table:
    """Named rows of figures, a column per run."""
    table = Table("", box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right")
    for row, figures in zip(rows, zip(*columns.values(), strict=True), strict=True):
        table.add_row(row, *figures)
    return table

"""`spectrace demo`: a real model served rightly and wrongly, both recorded and replayed, and the fix's worth foretold."""

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from spectrace.cli.options import as_json_option, print_json
from spectrace.cli.replay import acceptance_table, replay_json
from spectrace.tracer.acceptance import Acceptance
from spectrace.tracer.errors import RunFailed, UserError
from spectrace.tracer.rows import Level

if TYPE_CHECKING:
    from spectrace.engine.deployment import Served
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
    """Everything the demo found. `plain` is the target alone."""

    right: _Recorded
    wrong: _Recorded
    after_fix: Acceptance
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
            "lossless": self.lossless,
            "seconds_per_token": {"on": self.right.served.secs_per_token, "off": self.plain.secs_per_token},
        }


@click.command(name="demo")
@click.option("--out", type=click.Path(path_type=Path), help="Where the two traces go; a new folder under runs/ otherwise.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads; all cores otherwise.")
@as_json_option
def demo(out: Path | None, threads: int | None, as_json: bool) -> None:
    """Serve, record, break, record again, replay both, and foretell what the fix brings."""
    if not (_MODELS / "draft" / "model.safetensors").is_file():
        raise UserError("the demo needs the draft in models/smollm2, which a clone has and an installed package has not")
    out = out or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    console = Console(stderr=True)
    outcome = _play(_target(console), out, threads, console)
    if as_json:
        print_json(outcome.to_json())
    else:
        Console().print(render_demo(outcome, out))
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
    common = {"max_new": _MAX_NEW, "concurrency": 1}
    served: dict[str, Served] = {}
    with console.status("starting target and draft as Ray actors") as status, pair:
        status.update(f"the target alone: {len(prompts)} prompts of {_MAX_NEW} tokens")
        plain = pair.serve(prompts, Serving(depth=0, **common))
        for name, wiring in (("right", right), ("wrong", wrong)):
            status.update(f"speculating with the {name} wiring {wiring}, recorded")
            serving = Serving(depth=_DEPTH, wiring=wiring, capture=capture, level=Level.FULL, **common)
            served[name] = pair.serve(prompts, serving, trace=out / name)
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
    return Outcome(runs["right"], runs["wrong"], after_fix, plain)


def render_demo(outcome: Outcome, out: Path) -> RenderableType:
    """The page a person reads."""
    right, wrong = outcome.right, outcome.wrong
    times = Table("milliseconds per token", box=None, pad_edge=False)
    for name in ("target alone", "right wiring", "wrong wiring"):
        times.add_column(name, justify="right")
    times.add_row("", *(f"{1000 * run.secs_per_token:.1f}" for run in (outcome.plain, right.served, wrong.served)))
    replays = Table("replay against record", box=None, pad_edge=False)
    for name in ("right wiring", "wrong wiring"):
        replays.add_column(name, justify="right")
    compared = [right.report.comparison, wrong.report.comparison]
    replays.add_row("draft tokens equal", *(f"{one.tokens_equal} of {one.answers}" for one in compared))
    replays.add_row("largest error ÷ row maximum", *(f"{one.max_error:.1e}" for one in compared))
    replays.add_row("rows per second", *(f"{one.rows_per_second:,.0f}" for one in compared))
    replays.add_row("rows per second served", *(f"{one.served_rows_per_second:,.0f}" for one in compared))
    columns = {"right wiring": right.report.served, "wrong wiring": wrong.report.served, "after the fix": outcome.after_fix}
    return Group(
        Text("SmolLM2-135M-Instruct with its EAGLE-3 draft, greedy, depth 3, one request at a time", style="bold"),
        Text(f"The draft was trained on boundaries {right.wiring}; the mistake serves it {wrong.wiring}."),
        Text(f"The text is the target's own in both runs: {'yes' if outcome.lossless else 'NO'}.\n"),
        acceptance_table(columns),
        Text("'after the fix' is foretold from the wrong run's trace alone: the draft run on its reference features.\n"),
        times,
        Text(""),
        replays,
        Text(f"\nBoth traces are kept in {out}: try `spectrace info {out / 'wrong'}`."),
    )

"""`spectrace run`: serve prompts on the reference deployment and record what crossed the boundary."""

import re
from pathlib import Path
from typing import Any, Literal

import click
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from spectrace.cli.info import info_json
from spectrace.cli.options import (
    DTYPES,
    PATH,
    THREADS,
    as_json_option,
    check_finite,
    parse_boundaries,
    parse_capture,
    print_json,
    say_leftovers,
    torch_dtype,
)
from spectrace.tracer.errors import UserError
from spectrace.tracer.rows import Level
from spectrace.tracer.trace import Trace

__all__ = ["render_run", "run"]


def parse_placement(
    _ctx: click.Context, option: click.Parameter, values: tuple[str, ...]
) -> dict[str, dict[str, float]]:
    """What each rank of a role takes, by role: `target=big` is one of the resource big, `target=GPU:0.5` half a GPU."""
    placement: dict[str, dict[str, float]] = {}
    for value in values:
        found = re.fullmatch(r"(target|draft)=([^=:]+)(?::(\d+(?:\.\d+)?))?", value)
        if not found:
            raise UserError(f"{option.opts[0]} {value!r}: expected target=RESOURCE or draft=RESOURCE:COUNT, say")
        role, resource, count = found.groups()
        placement.setdefault(role, {})[resource] = float(count or 1)
    return placement


@click.command(name="run")
@click.option("--target", type=PATH, required=True, help="Folder of a Hugging Face model.")
@click.option("--draft", type=PATH, help="Folder of an EAGLE-3 draft; without one, plain decoding.")
@click.option("--prompts", type=PATH, required=True, help="A .jsonl or text file, one prompt a line.")
@click.option("--out", type=PATH, required=True, help="The trace, a new folder.")
@click.option("--depth", type=click.IntRange(0), default=3, show_default=True, help="Tokens drafted a round; 0: none.")
@click.option("--topk", type=click.IntRange(1), default=1, show_default=True, help="Children of a node; 1: a chain.")
@click.option("--num-draft-tokens", type=click.IntRange(2), help="Nodes verified a round, the root included.")
@click.option(
    "--temperature", type=click.FloatRange(0), callback=check_finite, default=0.0, show_default=True, help="0: greedy."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Decides every draw.")
@click.option("--sample-drafts", is_flag=True, help="Draw the drafts, too, instead of taking the best.")
@click.option("--fixed-window", is_flag=True, help="Feed the draft what was rejected, too, behind what was accepted.")
@click.option("--max-new", type=click.IntRange(1), default=64, show_default=True, help="Tokens to answer with at most.")
@click.option("--concurrency", type=click.IntRange(1), default=8, show_default=True, help="Requests in flight.")
@click.option("--chunk", type=click.IntRange(1), help="Prompt rows a step at most; whole prompts otherwise.")
@click.option("--wiring", callback=parse_boundaries, help="Boundaries that feed fc, instead of the draft's own.")
@click.option("--capture", callback=parse_capture, help="Boundaries to record as reference: 0,3,16,27, say, or all.")
@click.option("--level", type=click.Choice(["light", "features", "full"]), default="features", show_default=True)
@click.option("--dtype", type=click.Choice(DTYPES), default="float32", show_default=True)
@click.option("--threads", type=THREADS, help="CPU threads of each rank; all cores over a group otherwise.")
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Ranks that share the target.")
@click.option("--draft-tp", type=click.IntRange(1), default=1, show_default=True, help="Ranks that share the draft.")
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="cuda: a GPU a rank."
)
@click.option("--address", help="A running Ray cluster, HOST:PORT or ray://HOST:PORT, instead of one of our own.")
@click.option(
    "--place",
    "placement",
    multiple=True,
    callback=parse_placement,
    metavar="ROLE=RESOURCE[:COUNT]",
    help="Each rank of target or draft takes so much (1) of a Ray resource, and so runs where nodes have it.",
)
@click.option("--fault", "faults", multiple=True, help="Break something on purpose: N3, say; docs/engine.md has all.")
@as_json_option
def run(
    target: Path, draft: Path | None, prompts: Path, out: Path, depth: int, topk: int, num_draft_tokens: int | None,
    temperature: float, seed: int, sample_drafts: bool, fixed_window: bool, max_new: int, concurrency: int,
    chunk: int | None, wiring: tuple[int, ...] | None, capture: tuple[int, ...] | Literal["all"] | None, level: str,
    dtype: str, threads: int | None, tp: int, draft_tp: int, device: str, address: str | None,
    placement: dict[str, dict[str, float]], faults: tuple[str, ...], as_json: bool,
) -> None:  # fmt: skip
    """Serve PROMPTS and record a trace."""
    from spectrace.engine.deployment import Deployment, Serving
    from spectrace.engine.prompts import read_prompts
    from spectrace.engine.sampling import Sampling

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder: give a new path for the trace, or remove it first")
    pair = Deployment(
        target, draft, dtype=torch_dtype(dtype), threads=threads, tp=tp, draft_tp=draft_tp, device=device,
        placement=placement, address=address,
    )  # fmt: skip
    serving = Serving(
        depth=depth if draft else 0,
        topk=topk,
        draft_tokens=num_draft_tokens,
        sampling=Sampling(temperature, seed, sample_drafts),
        fixed_window=fixed_window,
        max_new=max_new,
        concurrency=concurrency,
        chunk=chunk,
        wiring=wiring,
        capture=tuple(range(pair.layers + 1)) if capture == "all" else tuple(sorted(set(capture or ()))),
        level=Level[level.upper()],
        faults=faults,
    )
    pair.check(serving)
    if pair.checkpoint:
        say_leftovers(pair.checkpoint.report)
    tokens = read_prompts(prompts, target)
    with pair, Console(stderr=True).status(f"serving {len(tokens)} prompts"):
        served = pair.serve(tokens, serving, trace=out)
    document = info_json(Trace.open(out))
    document |= {"seconds_per_token": served.secs_per_token, "outputs": [request.output for request in served.requests]}
    if as_json:
        print_json(document)
    else:
        Console().print(render_run(out, document))
    if served.losses:
        raise UserError(f"{out}: the recording is incomplete: {'; '.join(served.losses)}; the answers are whole")


def render_run(out: Path, document: dict[str, Any]) -> RenderableType:
    """The page a person reads."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("requests", str(len(document["outputs"])))
    table.add_row("seconds per token", f"{document['seconds_per_token']:.4f}")
    if document["acceptance"]:
        table.add_row("acceptance length", f"{document['acceptance']['acceptance_length']:.3f}")
        rates = " ".join(f"{rate:.3f}" for rate in document["acceptance"]["cumulative_rates"])
        table.add_row("cumulative rates", rates)
    rows = ", ".join(f"{family} {held['rows']}" for family, held in document["families"].items() if held["rows"])
    table.add_row("rows recorded", rows)
    return Group(Text(f"trace: {out}", style="bold"), table)

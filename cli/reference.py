"""`spectrace reference`: record a target's true boundaries for the texts of a trace, or for prompts."""

import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from rich.console import Console, Group, RenderableType
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from spectrace.cli.info import info_json
from spectrace.cli.options import DTYPES, PATH, THREADS, as_json_option, parse_capture, print_json, torch_dtype
from spectrace.tracer.errors import UserError
from spectrace.tracer.rows import Level
from spectrace.tracer.trace import Trace

if TYPE_CHECKING:
    from spectrace.engine.layerwise import LayerwiseTarget
    from spectrace.engine.reference import GivenText

__all__ = ["reference", "render_reference"]

_MIB = 1 << 20


@click.command(name="reference")
@click.option("--target", type=PATH, required=True, help="Folder of a Hugging Face model.")
@click.option("--prompts", type=PATH, required=True, help="A trace, for its prompts and answers; or a file of prompts.")
@click.option("--out", type=PATH, required=True, help="The reference, a trace in a new folder.")
@click.option(
    "--boundaries",
    callback=parse_capture,
    help="0,3,16, say, or all.  [default: those that a diagnosis of the trace looks at first; of prompts 2, L/2, L-3]",
)
@click.option("--requests", type=click.IntRange(1), help="Only the first so many texts; all otherwise.")
@click.option("--level", type=click.Choice(["light", "features", "full"]), default="features", show_default=True)
@click.option("--dtype", type=click.Choice(DTYPES), default="float32", show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--threads", type=THREADS, help="CPU threads; all cores otherwise.")
@as_json_option
def reference(
    target: Path, prompts: Path, out: Path, boundaries: tuple[int, ...] | Literal["all"] | None, requests: int | None,
    level: str, dtype: str, device: str, threads: int | None, as_json: bool,
) -> None:  # fmt: skip
    """Record TARGET's true boundaries for the texts of a trace, layer by layer, for `diagnose --reference`."""
    import torch

    from spectrace.engine.layerwise import LayerwiseTarget
    from spectrace.engine.reference import record_reference

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder: give a new path for the trace, or remove it first")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: no CUDA device here; use --device cpu")
    if threads:
        torch.set_num_threads(threads)
    of = Trace.open(prompts) if prompts.is_dir() else None
    texts = list(_texts_of(of) if of else _prompts(prompts, target))[:requests]
    model = LayerwiseTarget(target, dtype=torch_dtype(dtype), device=device)
    wanted = _chosen(boundaries, of.manifest if of else None, model.layers)
    if not as_json:
        click.echo(_said(model, texts, wanted), err=True)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=None)
        record_reference(
            model,
            texts,
            out,
            boundaries=wanted,
            level=Level[level.upper()],
            source=prompts,
            progress=lambda what, done, total: bar.update(task, description=what, completed=done, total=total),
        )
    document = {**info_json(Trace.open(out)), "boundaries": wanted}
    if as_json:
        print_json(document)
    else:
        Console().print(render_reference(out, document, of.folder if of else None), crop=False)


def _texts_of(trace: Trace) -> Iterator["GivenText"]:
    """The finished requests of a trace; raises UserError where there are none."""
    from spectrace.engine.reference import GivenText
    from spectrace.replay.texts import read_texts

    rows, texts = trace.rows("requests"), read_texts(trace)
    if not texts:
        raise UserError(f"{trace.folder}: no request has finished in it, so it holds no text; record until one has")
    names = dict(zip(rows["request"].tolist(), rows["id"].tolist(), strict=True))
    for number, text in texts.items():
        yield GivenText(number, str(names[number]), text.prompt, text.output, text.temperature)


def _prompts(path: Path, target: Path) -> Iterator["GivenText"]:
    from spectrace.engine.prompts import read_prompts
    from spectrace.engine.reference import GivenText
    from spectrace.engine.target import check_target

    check_target(target)  # before its tokenizer is looked for
    for number, tokens in enumerate(read_prompts(path, target)):
        yield GivenText(number, str(number), tokens)


def _chosen(
    given: tuple[int, ...] | Literal["all"] | None, manifest: Mapping[str, Any] | None, layers: int
) -> tuple[int, ...]:
    """The boundaries to record: those that were asked for, else by what there is to diagnose.

    Of a trace: what its draft was meant to be fed and was fed, what the engine's default is, what stands beside each of
    these, and both ends: nearly all wirings that were ever mistaken for another lie among them.
    """
    from spectrace.engine.checkpoint import default_wiring

    if given == "all":
        return tuple(range(layers + 1))
    if given is not None:
        return tuple(sorted(set(given)))
    if manifest is None:
        return _within(default_wiring(layers), layers)
    wired = {*default_wiring(layers), *_told(manifest)}
    return _within({0, layers, *(boundary + by for boundary in wired for by in (-1, 0, 1))}, layers)


def _told(manifest: Mapping[str, Any]) -> Iterator[int]:
    """The boundaries that a trace names, as configured and as resolved."""
    wiring = manifest.get("wiring") or {}
    for name in ("configured", "resolved"):
        yield from (wiring.get(name) or {}).get("boundaries") or ()


def _within(boundaries: Iterable[int], layers: int) -> tuple[int, ...]:
    return tuple(sorted({boundary for boundary in boundaries if 0 <= boundary <= layers}))


def _said(model: "LayerwiseTarget", texts: list["GivenText"], boundaries: tuple[int, ...]) -> str:
    """What is about to be done, and what it takes."""
    rows = sum(len(text.fed) for text in texts)
    row_bytes = model.width * model.dtype.itemsize
    sizes = (model.largest_bytes, rows * row_bytes, len(boundaries) * rows * row_bytes)
    weights, held, disk = (f"{size / _MIB:,.1f} MiB" for size in sizes)
    return (
        f"{len(texts)} texts, {rows:,} rows, {len(boundaries)} boundaries of {model.layers + 1}. In memory: "
        f"{weights} of weights at a time, {held} of rows. On disk: {disk}, and as much again while it runs."
    )


def render_reference(out: Path, document: dict[str, Any], of: Path | None = None) -> RenderableType:
    """The page a person reads; of the texts of a trace, what to do with it, too."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("boundaries", ", ".join(map(str, document["boundaries"])))
    rows = ", ".join(f"{family} {held['rows']}" for family, held in document["families"].items() if held["rows"])
    table.add_row("rows recorded", rows)
    command = shlex.join(("spectrace", "diagnose", str(of), "--reference", str(out)))
    then = [Text(command, no_wrap=True, overflow="ignore")] if of else []
    return Group(Text(f"trace: {out}", style="bold"), table, *then)

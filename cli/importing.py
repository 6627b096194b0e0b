"""`spectrace import`: hidden states that a trainer or an engine wrote to files, as a trace."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console, Group, RenderableType
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from spectrace.cli.info import info_json
from spectrace.cli.options import PATH, THREADS, as_json_option, print_json
from spectrace.tracer.errors import UserError
from spectrace.tracer.fingerprint import file_fingerprints
from spectrace.tracer.trace import Trace

if TYPE_CHECKING:
    from spectrace.replay.dumps.plan import Family, Plan
    from spectrace.replay.dumps.record import Imported
    from spectrace.replay.dumps.unknowns import Given

__all__ = ["import_", "render_import"]

_FORMATS = ("specforge", "speculators", "speculators-legacy", "modelopt", "angelslim", "vllm", "sglang")
_SHIFTS = click.Choice(["-1", "0", "1"])


def parse_ids(_ctx: click.Context, option: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Layer ids such as 1,14,26, as a click callback; -1 is the embedding's output in output ids."""
    if value is None:
        return None
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError:
        raise UserError(
            f"{option.opts[0]} {value!r}: expected layer ids separated by commas, such as 1,14,26"
        ) from None


@click.command(name="import")
@click.argument("source", type=PATH)
@click.option("--out", type=PATH, required=True, help="The trace, in a new folder.")
@click.option("--format", "format_", type=click.Choice(_FORMATS), help="Who wrote SOURCE; by its fields otherwise.")
@click.option(
    "--as",
    "family",
    type=click.Choice(["reference", "emitted"]),
    default="reference",
    show_default=True,
    help="True states by boundary, or slots as they were captured.",
)
@click.option("--target", type=PATH, help="Folder of the model that the states are of: what is claimed gets tested.")
@click.option(
    "--norm", type=click.Choice(["pre", "post"]), help="Whether the last hidden state has the norm behind it."
)
@click.option("--ids", callback=parse_ids, help="Layer ids of the slots, 2,15,27, say; one more for the last state.")
@click.option(
    "--convention",
    type=click.Choice(["input", "output"]),
    help="Whether an id names the layer that a stream enters or leaves.",
)
@click.option("--shift", type=_SHIFTS, help="Row t is the state of token t + SHIFT.")
@click.option("--mask-shift", type=_SHIFTS, help="Entry t of the mask is of token t + MASK_SHIFT.")
@click.option("--requests", type=click.IntRange(1), help="Only the first so many texts; all otherwise.")
@click.option("--force", is_flag=True, help="Record what is claimed where the data contradict it; the trace says so.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--threads", type=THREADS, help="CPU threads; all cores otherwise.")
@as_json_option
def import_(
    source: Path, out: Path, format_: str | None, family: "Family", target: Path | None, norm: str | None,
    ids: tuple[int, ...] | None, convention: str | None, shift: str | None, mask_shift: str | None,
    requests: int | None, force: bool, device: str, threads: int | None, as_json: bool,
) -> None:  # fmt: skip
    """Import hidden states that a trainer or an engine wrote into SOURCE, a file or a folder.

    What such files leave open, norm, layers, alignment of rows and of the mask, is tested where there is something to
    test it by, and stated.
    """
    import torch

    from spectrace.replay.dumps.plan import plan_import
    from spectrace.replay.dumps.record import record_dump

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder: give a new path for the trace, or remove it first")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: no CUDA device here; use --device cpu")
    if threads:
        torch.set_num_threads(threads)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("looking into the files", total=None)
        plan = plan_import(
            source,
            format_=format_,
            family=family,
            given=_given(norm, ids, convention, shift, mask_shift),
            target=_model(target, device) if target else None,
            requests=requests,
            force=force,
        )
        described = _described(target) if target else None
        bar.update(task, description="writing")
        imported = record_dump(
            plan, out, target=described, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
    if as_json:
        print_json({**info_json(Trace.open(out)), "boundaries": plan.recorded, "import": plan.to_json()})
    else:
        Console().print(render_import(out, plan, imported), crop=False)


def _given(
    norm: str | None, ids: tuple[int, ...] | None, convention: str | None, shift: str | None, mask_shift: str | None
) -> "Given":
    from spectrace.replay.dumps.sample import Convention, Norm
    from spectrace.replay.dumps.unknowns import Given

    return Given(
        norm=Norm(norm) if norm else None,
        ids=ids,
        convention=Convention(convention) if convention else None,
        shift=int(shift) if shift else None,
        mask_shift=int(mask_shift) if mask_shift else None,
    )


def _model(folder: Path, device: str) -> Any:
    import torch

    from spectrace.engine.layerwise import LayerwiseTarget

    return LayerwiseTarget(folder, dtype=torch.float32, device=device)


def _described(target: Path) -> Mapping[str, Any]:
    """What the manifest says of a target, as that of a run does."""
    from spectrace.engine.fields import read_config

    config = read_config(target)
    return {
        "path": str(target.absolute()),
        "architectures": config.get("architectures"),
        "config": config,
        "fingerprints": file_fingerprints(target),
    }


def render_import(out: Path, plan: "Plan", imported: "Imported") -> RenderableType:
    """The page a person reads: what the files are, what of it is known how, and what is in the trace."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("from", f"{imported.texts} texts of {plan.dialect.name}, {imported.rows} rows, {plan.source}")
    slots = ", ".join("-" if one is None else str(one) for one in plan.boundaries)
    what = (
        f"boundaries {', '.join(map(str, plan.recorded))}"
        if plan.recorded
        else f"{len(plan.boundaries)} slots ({slots})"
    )
    table.add_row("recorded", f"{plan.family} rows: {what}, {str(plan.dtype).removeprefix('torch.')}")
    return Group(Text(f"trace: {out}", style="bold"), table, *_unknowns(plan))


def _unknowns(plan: "Plan") -> Iterator[RenderableType]:
    for one in plan.unknowns.all:
        yield Text(f"{one.name}: {one}", style="bold red" if one.contradicted else "")
        yield Text(f"  {one.evidence}", style="dim")
    for note in plan.notes:
        yield Text(f"note: {note}", style="yellow")

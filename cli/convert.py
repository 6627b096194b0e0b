"""`spectrace convert`: a draft in another published layout, bit for bit, with everything that was read and assumed."""

from collections.abc import Iterator
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from spectrace.cli.options import PATH, as_json_option, print_json
from spectrace.tracer.errors import UserError

if TYPE_CHECKING:
    from spectrace.engine.checkpoint import DraftCheckpoint, LoadReport
    from spectrace.engine.convert import Converted
    from spectrace.engine.spec import DraftSpec

__all__ = ["convert", "render_convert"]

_LAYOUTS = ("eagle", "specforge", "speculators")
_MIB = 1 << 20


@click.command(name="convert")
@click.argument("draft", type=PATH)
@click.option("--to", "layout", type=click.Choice(_LAYOUTS), required=True, help="The layout to write.")
@click.option("--out", type=PATH, required=True, help="The draft, in a new folder.")
@click.option("--target", type=PATH, help="Folder of the target, for a layout that names it.")
@click.option("--shard-mib", type=click.IntRange(1), help="Spread tensors over files of at most so many MiB.")
@as_json_option
def convert(draft: Path, layout: str, out: Path, target: Path | None, shard_mib: int | None, as_json: bool) -> None:
    """Write DRAFT, an EAGLE-3 draft of any published layout, in another one.

    Tensors are written bit for bit, what was written is read again and has to be the same draft, and a draft that the
    layout has no words for is refused: nothing is dropped.
    """
    from spectrace.engine.convert import convert_draft

    if target is not None and not target.is_dir():
        raise UserError(f"--target {target}: no such folder; expected the folder of a Hugging Face model")
    shard_bytes = shard_mib * _MIB if shard_mib else None
    converted = convert_draft(draft, out, layout, target=target, shard_bytes=shard_bytes)
    if as_json:
        print_json(_document(converted))
    else:
        Console().print(render_convert(converted), crop=False)


def _document(converted: "Converted") -> dict[str, Any]:
    written = _draft_json(converted.written) | {"files": converted.files}
    return {
        "read": _draft_json(converted.source), "written": written, "equal": True,
        "tensors": len(converted.source.tensors), "notes": converted.notes,
    }  # fmt: skip


def _draft_json(draft: "DraftCheckpoint") -> dict[str, Any]:
    return {
        "path": str(draft.folder.absolute()), "layout": draft.layout, "spec": asdict(draft.spec),
        "wiring": asdict(draft.wiring) if draft.wiring else None, "report": asdict(draft.report),
    }  # fmt: skip


def render_convert(converted: "Converted") -> RenderableType:
    """The page a person reads."""
    source, written = converted.source, converted.written
    count, files = len(source.tensors), converted.files
    where = files[0] if len(files) == 1 else f"{len(files)} files"
    verdict = f"read back: {count} tensors bit for bit, and the same switches and boundaries"
    return Group(
        Text(f"{source.folder}, in the layout {source.layout}", style="bold"),
        _facts(source),
        *_leftovers(source.report),
        Text(f"{written.folder}, in the layout {written.layout}: {where}", style="bold"),
        Text(verdict, style="green"),
        *(Text(f"note: {note}", style="yellow") for note in converted.notes),
    )


def _facts(draft: "DraftCheckpoint") -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    spec = draft.spec
    for name, value in (_shapes(spec) | _switches(spec)).items():
        table.add_row(name, str(value))
    if draft.wiring:
        boundaries = ", ".join(map(str, draft.wiring.boundaries))
        table.add_row("boundaries", f"{boundaries}, by {draft.wiring.key} {list(draft.wiring.raw_ids)}")
    else:
        table.add_row("boundaries", "none named: engines take 2, L/2 and L-3")
    return table


def _shapes(spec: "DraftSpec") -> dict[str, object]:
    shared = [what for what, own in (("embedding", spec.own_embedding), ("head", spec.own_head)) if not own]
    return {
        "layers": f"{spec.layers}, {spec.width} wide, MLP {spec.mlp_width}",
        "fed with": f"{spec.slots} slots of {spec.target_width}",
        "vocabulary": f"{spec.draft_vocab} of {spec.target_vocab} tokens",
        "from the target": " and ".join(shared) or "nothing",
        "attention": _told(spec.attention),
        "RoPE": _told(spec.rope),
    }


def _switches(spec: "DraftSpec") -> dict[str, object]:
    """The switches that are not as in a plain draft."""
    passed = {"attention", "rope", "own_embedding", "own_head"}
    plain = _plain(spec)
    values = {one.name: getattr(spec, one.name) for one in fields(spec) if one.name not in passed}
    return {name: _value(value) for name, value in values.items() if plain[name] and value not in plain[name]}


def _plain(spec: Any) -> dict[str, tuple[object, ...]]:
    """The default of every field, none where it has none."""
    return {one.name: () if one.default is MISSING else (one.default,) for one in fields(spec)}


def _told(part: Any) -> str:
    """The fields of a part that are not as they usually are."""
    plain = _plain(part)
    held = {name: value for name, value in asdict(part).items() if value not in plain[name]}
    return ", ".join(f"{name} {_value(value)}" for name, value in held.items()) or "as usual"


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _leftovers(report: "LoadReport") -> Iterator[Text]:
    """What was not understood, line by line."""
    lines = {
        "assumed": [f"{name} = {value}" for name, value in report.assumed.items()],
        "config field not read, and not carried over": report.unread_fields,
        "tensor not used, and not carried over": report.unused_tensors,
        "tensor missing": report.missing_tensors,
        "note": report.notes,
    }
    for what, names in lines.items():
        yield from (Text(f"{what}: {name}", style="yellow") for name in names)

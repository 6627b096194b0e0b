"""The producers that are known, and which of them wrote a file or a folder."""

from collections.abc import Sequence
from pathlib import Path

from spectrace.replay.dumps.angelslim import ANGELSLIM
from spectrace.replay.dumps.load import files_below, read_fields
from spectrace.replay.dumps.modelopt import MODELOPT
from spectrace.replay.dumps.sample import Dialect, Item
from spectrace.replay.dumps.sglang import SGLANG
from spectrace.replay.dumps.specforge import SPECFORGE
from spectrace.replay.dumps.speculators import SPECULATORS, SPECULATORS_LEGACY
from spectrace.replay.dumps.vllm import VLLM
from spectrace.tracer.errors import UserError

__all__ = ["DIALECTS", "open_source"]

DIALECTS = (SPECFORGE, SPECULATORS, SPECULATORS_LEGACY, MODELOPT, ANGELSLIM, VLLM, SGLANG)
_SUFFIXES = (".ckpt", ".ckpt.gz", ".pt", ".safetensors")


def open_source(source: Path, format_: str | None) -> tuple[Dialect, Sequence[Item]]:
    """The producer, by its name in `DIALECTS` or by the first file, and the texts that there are.

    Raises UserError where there is nothing, where no producer or more than one is known to write such files, and for a
    folder in which some files are of another.
    """
    files = files_below(source, _SUFFIXES) if source.exists() else []
    if not files:
        what = "holds no" if source.exists() else "does not exist; expected"
        raise UserError(f"{source}: {what} hidden states, files that end in {', '.join(_SUFFIXES)}; give their folder")
    dialect = next((one for one in DIALECTS if one.name == format_), None) or _recognized(files)
    items = dialect.open(source)
    if not items:
        raise UserError(f"{source}: holds no files of {dialect.name}, {dialect.layout}; give the folder that does")
    return dialect, items


def _recognized(files: Sequence[Path]) -> Dialect:
    fields = read_fields(files[0])
    known = [one for one in DIALECTS if one.knows(files[0], fields.values)]
    held = f"{files[0]}: found {', '.join(map(str, fields.values)) or 'no fields'}"
    if not known:
        layouts = "; ".join(f"{one.name}: {one.layout}" for one in DIALECTS)
        raise UserError(f"{held}; expected a layout that is known ({layouts}); say which it is with --format")
    if len(known) > 1:
        raise UserError(f"{held}, which {' and '.join(one.name for one in known)} both could have; say --format")
    endings = {path.name.removesuffix(".gz").rpartition(".")[2] for path in files}
    if len(endings) > 1:
        raise UserError(
            f"{files[0].parent}: found files ending in {', '.join(sorted(endings))}, expected those of one producer; "
            f"{files[0].name} is of {known[0].name}: import folders one by one, or say --format"
        )
    return known[0]

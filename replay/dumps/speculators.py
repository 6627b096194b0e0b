"""speculators: `hs_i.safetensors` beside an Arrow dataset whose row i has the mask; before that, `*.pt` with a list.

The last layer is the verifier's last state. Of the current files it has no final norm behind it; of the old ones that
depends on the version that wrote them, which they do not say.
"""

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pyarrow as pa
import torch

from spectrace.replay.dumps.load import Fields, one_per_file
from spectrace.replay.dumps.sample import Convention, Dialect, Norm, Sample
from spectrace.replay.dumps.vllm import has_layers
from spectrace.tracer.errors import UserError

__all__ = ["SPECULATORS", "SPECULATORS_LEGACY"]

_NAME = re.compile(r"hs_(\d+)\.safetensors")


def _read(fields: Fields) -> Sample:
    tokens = fields.tokens("token_ids")
    *slots, last = fields.states("hidden_states", len(tokens), layers=True).unbind(1)
    return Sample(
        name=fields.path.stem,
        path=fields.path,
        tokens=tokens,
        slots=tuple(slots),
        last=last,
        mask=_mask(fields.path, tokens.tolist()),
        norm=Norm.PRE,
    )


def _read_legacy(fields: Fields) -> Sample:
    tokens = fields.tokens("input_ids")
    *slots, last = fields.listed("hidden_states", len(tokens))
    mask = fields.mask("loss_mask", len(tokens))
    return Sample(name=fields.path.stem, path=fields.path, tokens=tokens, slots=tuple(slots), last=last, mask=mask)


def _mask(path: Path, tokens: list[int]) -> torch.Tensor | None:
    """The mask of a file's row in the dataset around it, None where there is none."""
    named = _NAME.fullmatch(path.name)
    folder = next((one for one in (path.parent, path.parent.parent) if (one / "state.json").is_file()), None)
    if not named or folder is None:
        return None
    dataset, row = _dataset(folder), int(named[1])
    if not {"input_ids", "loss_mask"} <= set(dataset.column_names) or row >= len(dataset):
        raise UserError(
            f"{folder}: found {len(dataset)} rows of {', '.join(dataset.column_names)}, expected input_ids and "
            f"loss_mask of row {row} for {path.name}; give the dataset that these files are of, or move them away"
        )
    ids, mask = (dataset[name][row].as_py() for name in ("input_ids", "loss_mask"))
    if ids != tokens or len(mask) != len(tokens):
        raise UserError(
            f"{path}: field token_ids: found {len(tokens)} tokens, expected the {len(ids)} of row {row} in {folder}; "
            f"the files are of another dataset or in another order: extract them again, or move them away from it"
        )
    return torch.tensor(mask) != 0


@cache
def _dataset(folder: Path) -> pa.Table:
    """The Arrow files of a saved dataset, mapped and not read."""
    try:
        names = [one["filename"] for one in json.loads((folder / "state.json").read_text("utf-8"))["_data_files"]]
        files = [pa.ipc.open_stream(pa.memory_map(str(folder / name))) for name in names]
        return pa.concat_tables([file.read_all() for file in files])
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowInvalid) as error:
        raise UserError(f"{folder}: the dataset around the files cannot be read ({error}); copy it again") from error


def _knows(path: Path, fields: Mapping[str, object]) -> bool:
    return has_layers(fields) and bool(_NAME.fullmatch(path.name))


SPECULATORS = Dialect(
    name="speculators",
    layout="hs_*.safetensors with hidden_states [T, layers, F], token_ids",
    convention=Convention.INPUT,
    knows=_knows,
    open=one_per_file((".safetensors",), _read),
)
SPECULATORS_LEGACY = Dialect(
    name="speculators-legacy",
    layout="*.pt with input_ids, loss_mask and a list hidden_states",
    convention=Convention.INPUT,
    knows=lambda path, fields: isinstance(fields.get("hidden_states"), list | tuple),
    open=one_per_file((".pt",), _read_legacy),
)

"""SGLang's side, run by a Python that has sglang: the steps as files of its dumper, and its comparator on them.

Its dumper writes both folders of a run. `forwards` has every forward as a step of its own, as in SGLang, so that
rows on trial and drafted rows are there too; `committed` has each pass of the target as a step, with the rows that
became text: the only ones that its token aligner, which wants every position of a sequence once, can pair where two
runs are batched differently. Names say role, depth and slot, so that a report does.

Neither needs the engine, whose import takes longer than most comparisons: what they import of it is a stub.
"""

import contextlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

from comparator.planted import PLANTED
from comparator.tensors import Flaw, Forward, Sizes, Step, accepted_rows, simulate

__all__ = ["main", "write"]

_STUBBED = {
    "sglang.srt.managers.io_struct": ("sock_recv", "sock_send", "wrap_as_pickle"),
    "sglang.srt.runtime_context": ("get_parallel", "get_server_args", "get_serving"),
    "sglang.srt.utils": ("get_device",),
}


def without_engine() -> None:
    """Make `sglang.srt.debug_utils` importable alone: its parents without their `__init__`, the engine as stubs."""
    found = importlib.util.find_spec("sglang")
    assert found and found.submodule_search_locations, "this Python has no sglang"
    root = Path(found.submodule_search_locations[0])
    for name, folder in (
        ("sglang", root),
        ("sglang.srt", root / "srt"),
        ("sglang.srt.managers", root / "srt/managers"),
    ):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(folder)]
    for name, wanted in _STUBBED.items():
        sys.modules[name] = ModuleType(name)
        for one in wanted:
            setattr(sys.modules[name], one, None)
    sys.modules["sglang.srt.distributed"] = None  # type: ignore[assignment]  # "not SGLang's own process"


def write(folder: Path, sizes: Sizes, flaw: Flaw) -> None:
    """Dump a run."""
    from sglang.srt.debug_utils.dumper import DumperConfig, _Dumper

    common: dict[str, Any] = {"enable": True, "dir": str(folder), "enable_output_console": False}
    forwards = _Dumper(config=DumperConfig(exp_name="forwards", **common))
    committed = _Dumper(config=DumperConfig(exp_name="committed", **common))
    for step in simulate(sizes, flaw):
        for role, forward in (("target", step.target), *(("draft", one) for one in step.drafts)):
            _batch(forwards, forward, torch.arange(len(forward.tokens)), forward.rows)
            _outcome(forwards, role, forward, torch.arange(len(forward.tokens)))
            forwards.step()
        _committed(committed, step)
        committed.step()


def _committed(dumper: Any, step: Step) -> None:
    target, draft = step.target, step.drafts[0]
    kept = torch.tensor(accepted_rows(target))
    _batch(dumper, target, kept, draft.rows)
    _outcome(dumper, "target", target, kept)
    dumper.dump("draft_input_ids", torch.tensor(draft.tokens), dims="t")
    dumper.dump("draft_positions", torch.tensor(draft.positions), dims="t")
    _outcome(dumper, "draft", draft, torch.arange(len(kept)))


def _batch(dumper: Any, forward: Forward, kept: torch.Tensor, rows: list[int]) -> None:
    """What the token aligner wants to know of a step; `seq_lens` are rows of this step, as it has them."""
    dumper.dump("input_ids", torch.tensor(forward.tokens)[kept], dims="t")
    dumper.dump("positions", torch.tensor(forward.positions)[kept], dims="t")
    dumper.dump("seq_lens", torch.tensor(rows))
    dumper.dump("rids", [run.request.name for run in forward.runs])


def _outcome(dumper: Any, role: str, forward: Forward, kept: torch.Tensor) -> None:
    """A forward's tensors, each slot by itself; a target's slots are what it emits, a draft's what it received."""
    where = f"{role}{forward.depth}" if role == "draft" else role
    inputs = forward.inputs[kept]
    for slot in range(inputs.shape[1]) if inputs.ndim == 3 else ():
        dumper.dump(f"{where}_slot{slot}", inputs[:, slot].contiguous(), dims="t h")
    if inputs.ndim == 2:
        dumper.dump(f"{where}_fed_state", inputs, dims="t h")
    for name, tensor in (("hidden", forward.hidden), ("state", forward.state), ("logits", forward.logits)):
        if tensor is not None:
            dumper.dump(f"{where}_{name}", tensor[kept], dims="t h")
    dumper.dump("draft_ids" if role == "draft" else "next_token_ids", torch.tensor(forward.answers)[kept], dims="t")


def main() -> None:
    """`write FOLDER SIZES FLAW`, or `compare` and the comparator's own arguments."""
    without_engine()
    if sys.argv[1] == "compare":
        from sglang.srt.debug_utils.comparator.entrypoint import parse_args, run

        sys.exit(run(parse_args(sys.argv[2:])))
    torch.set_num_threads(1)
    flaw = next((one.flaw for one in PLANTED if one.number == sys.argv[4]), Flaw())
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        write(Path(sys.argv[2]), Sizes(**json.loads(sys.argv[3])), flaw)


if __name__ == "__main__":
    main()

"""What the scripts share that run an implementation: a case as it lies in its folder, and the files that answer it.

It runs in the implementations' own environments: torch, safetensors and the standard library are all that it needs.
"""

import json
import logging
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

__all__ = ["Case", "Seen", "answer_all", "clear", "folders", "warned", "write_answer", "write_loaded", "write_refusal"]

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_FILES = ("outputs.safetensors", "loaded.json", "refused.txt", "notes.txt")


@dataclass
class Case:
    """One case's inputs: requests one behind another, `lengths[r]` rows and `lengths[r] + depths` tokens each."""

    folder: Path
    settings: Mapping[str, object]
    depths: int
    lengths: list[int]
    texts: list[Tensor]
    features: list[Tensor]

    @classmethod
    def read(cls, folder: Path) -> "Case":
        settings = json.loads((folder / "case.json").read_text(encoding="utf-8"))
        depths, inputs = int(settings["depths"]), load_file(folder / "inputs.safetensors")
        lengths = inputs["lengths"].tolist()
        texts = list(inputs["texts"].split([length + depths for length in lengths]))
        return cls(folder, settings, depths, lengths, texts, list(inputs["features"].split(lengths)))


@dataclass
class Seen:
    """What hooks saw of a trainer's forward, in the order of its steps."""

    fused: list[Tensor] = field(default_factory=list)
    tokens: list[Tensor] = field(default_factory=list)
    positions: list[Tensor] = field(default_factory=list)
    taken: list[Tensor] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    choices: list[Tensor] = field(default_factory=list)

    def gather(self, depths: int, rows: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """The tensors of `outputs.safetensors`; `rows` takes those of the requests out of what a hook saw."""
        out = {"fused": rows(self.fused[0])}
        for depth in range(depths):
            out[f"tokens.{depth}"] = rows(self.tokens[depth])
            out[f"rows.{depth}"] = torch.arange(len(out[f"tokens.{depth}"]))
            out[f"positions.{depth}"] = rows(self.positions[depth])
            out[f"hidden.{depth}"] = rows(self.hidden[depth])
            out[f"state.{depth}"] = rows(self.taken[depth + 1])
            out[f"logits.{depth}"] = rows(self.logits[depth])
            out[f"choice.{depth}"] = rows(self.choices[depth])
        return {name: value.contiguous() for name, value in out.items()}


def folders(cases: Path) -> list[Path]:
    """The folders of all cases."""
    return sorted(path.parent for path in cases.resolve().glob("*/case.json"))


def clear(folder: Path) -> None:
    """Take away what an earlier run answered."""
    for name in _FILES:
        (folder / name).unlink(missing_ok=True)


def write_answer(folder: Path, outputs: dict[str, Tensor], notes: Sequence[str]) -> None:
    """What was computed, and what the implementation warned of."""
    save_file(outputs, folder / "outputs.safetensors")
    if notes:
        (folder / "notes.txt").write_text(_ANSI.sub("", "\n".join(dict.fromkeys(notes))) + "\n", encoding="utf-8")


def write_loaded(
    folder: Path, *, boundaries: Sequence[int], embedding_shared: bool, head_shared: bool, tokens: Tensor | None
) -> None:
    """What an engine ended up with: the boundaries that it visits, what is the target's own, and what ids stand for."""
    told = {
        "boundaries": sorted(set(boundaries)),
        "embedding_shared": embedding_shared,
        "head_shared": head_shared,
        "tokens": None if tokens is None else tokens.tolist(),
    }
    (folder / "loaded.json").write_text(json.dumps(told), encoding="utf-8")


def write_refusal(folder: Path, error: BaseException | None) -> None:
    """What an implementation raised instead."""
    (folder / "refused.txt").write_text(f"{type(error).__name__}: {error}\n", encoding="utf-8")


@contextmanager
def warned(notes: list[str], *loggers: str) -> Iterator[None]:
    """Collect what these loggers and Python warn of."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: notes.append(f"{record.name}: {record.getMessage()}")  # type: ignore[method-assign]
    watched = [logging.getLogger(name) for name in loggers]
    for one in watched:
        one.addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for one in watched:
        one.removeHandler(handler)
    notes.extend(f"{warning.category.__name__}: {warning.message}" for warning in caught)


def answer_all(
    cases: Path,
    run: Callable[[Case], Seen],
    gather: Callable[[Case, Seen], dict[str, Tensor]],
    noted: Callable[[list[str]], AbstractContextManager[None]],
) -> int:
    """Answer every case: what `run` raises is a refusal, anything else this code's own mistake, and the status is 1."""
    failed = False
    for folder in folders(cases):
        began = time.perf_counter()
        try:
            word = _answer(folder, run, gather, noted)
        except Exception:  # neither an answer nor a refusal; the other cases go on
            traceback.print_exc(file=sys.stderr)
            word, failed = "failed", True
        print(f"{folder.name}: {word} ({time.perf_counter() - began:.2f} s)", flush=True)
    return int(failed)


def _answer(
    folder: Path,
    run: Callable[[Case], Seen],
    gather: Callable[[Case, Seen], dict[str, Tensor]],
    noted: Callable[[list[str]], AbstractContextManager[None]],
) -> str:
    clear(folder)
    case, notes = Case.read(folder), list[str]()
    torch.manual_seed(0)  # for what a checkpoint lacks and transformers makes up
    with noted(notes):
        try:
            seen = run(case)
        except Exception as error:
            write_refusal(folder, error)
            return f"refused: {type(error).__name__}"
    write_answer(folder, gather(case, seen), notes)
    return "ran"

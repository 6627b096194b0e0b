"""SGLang's dumper: a folder of `k=v___k=v.pt`, one tensor per name, rank and step; texts are put together from these.

Streams are told by their names: what a decoder layer puts out (`non_intrusive__...layers.3.output`, or its two halves
`.output.0` and `.output.1`, hidden and residual, which are added as the engine adds them), else dumps by hand with a
`layer_id` (`..hidden_states`, and `..residual` beside it), else `aux_hidden_states` beside `last_hidden_states`. The
lowest rank is read. A step's rows are packed; `positions` and `seq_lens` say whose they are.

Shapes: T rows of a step.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from spectrace.replay.dumps.load import Fields, files_below, read_fields
from spectrace.replay.dumps.sample import Convention, Dialect, Item, Norm, Sample
from spectrace.tracer.errors import UserError

__all__ = ["SGLANG"]

_LAYER = re.compile(r"non_intrusive__(.*?)layers\.(\d+)\.output(?:\.[01])?")
_EMBEDDING = re.compile(r"non_intrusive__(.*?)embed_tokens\.output")
_BY_HAND = re.compile(r"(.*?)(?:hidden_states|residual)")
_ENTERS, _LEAVES = re.compile("start|input|before"), re.compile("end|output|after")
_AUX, _LAST = "aux_hidden_states", "last_hidden_states"
_NEEDED, _NAMES = ("input_ids", "positions", "seq_lens"), ("rids", "req_pool_indices")
_HOW = "dump a run without speculation, prefix cache and CUDA graphs, with DUMPER_NON_INTRUSIVE_MODE=all"


@dataclass(frozen=True, slots=True)
class _Dump:
    """One file, by the tags in its name."""

    path: Path
    step: int
    rank: int
    name: str
    layer: int | None

    @staticmethod
    def of(path: Path) -> "_Dump":
        tags = dict(part.partition("=")[::2] for part in path.name.removesuffix(".pt").split("___"))
        try:
            layer = int(tags["layer_id"]) if "layer_id" in tags else None
            return _Dump(path, int(tags["step"]), int(tags["rank"]), tags["name"], layer)
        except (KeyError, ValueError):
            raise UserError(
                f"{path}: found the tags {', '.join(tags)}, expected step, rank and name; keep other files elsewhere"
            ) from None


@dataclass(frozen=True, slots=True, order=True)
class _Stream:
    """A stream of the model: of which kind and group its name is, of which layer, and the boundary that it means.

    The kinds are in the order of trust; the boundary is -1 where the name means none.
    """

    kind: int
    group: str
    boundary: int = -1
    layer: int = -1


@dataclass(slots=True)
class _Step:
    """The files of one step: the core fields by name, and of every stream the tensors that add up to it, by name."""

    number: int
    core: dict[str, Path] = field(default_factory=dict)
    streams: dict[_Stream, dict[str, Path]] = field(default_factory=dict)

    def add(self, dump: _Dump) -> None:
        """Sort one more file in; raises UserError for a second one of the same name."""
        if dump.name in (*_NEEDED, *_NAMES):
            self.core.setdefault(dump.name, dump.path)
        elif stream := _stream(dump):
            files = self.streams.setdefault(stream, {})
            if dump.name in files:
                raise UserError(f"{dump.path}: found {dump.name} twice in step {dump.step}, expected it once; {_HOW}")
            files[dump.name] = dump.path

    def keep_best(self) -> None:
        """Leave the streams of one group: of the kind most trusted, and there of the most layers."""
        sizes = Counter((stream.kind, stream.group) for stream in self.streams)
        best = min(sizes, key=lambda one: (one[0], -sizes[one], one[1]), default=None)
        kept = sorted(stream for stream in self.streams if (stream.kind, stream.group) == best)
        self.streams = {stream: self.streams[stream] for stream in kept}


@dataclass(slots=True)
class _Rows:
    """One request: where its rows stand, step by step, and its tokens so far."""

    name: str
    places: list[tuple[_Step, int, slice]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


def _stream(dump: _Dump) -> _Stream | None:
    """The stream that a file is of, or half of; None for anything else."""
    if layer := _LAYER.fullmatch(dump.name):
        return _Stream(0, layer[1], int(layer[2]) + 1)
    if table := _EMBEDDING.fullmatch(dump.name):
        return _Stream(0, table[1], 0)
    if dump.name.endswith((_AUX, _LAST)):
        return _Stream(2, "packed", layer=int(dump.name.endswith(_LAST)))
    by_hand = _BY_HAND.fullmatch(dump.name)
    if not by_hand or dump.layer is None or dump.name.startswith("non_intrusive__"):
        return None
    enters, leaves = bool(_ENTERS.search(by_hand[1])), bool(_LEAVES.search(by_hand[1]))
    return _Stream(1, by_hand[1], dump.layer + leaves if enters != leaves else -1, dump.layer)


def _steps(source: Path) -> list[_Step]:
    """What the lowest rank dumped, in the order of steps, each with the best streams that there are."""
    dumps = [_Dump.of(path) for path in files_below(source, (".pt",))]
    rank = min((dump.rank for dump in dumps), default=0)
    steps: dict[int, _Step] = {}
    for dump in (one for one in dumps if one.rank == rank):
        steps.setdefault(dump.step, _Step(dump.step)).add(dump)
    for step in steps.values():
        step.keep_best()
    return sorted((step for step in steps.values() if step.core or step.streams), key=lambda step: step.number)


def _requests(source: Path, steps: Sequence[_Step]) -> list[_Rows]:
    """The texts of all steps; raises UserError where rows do not follow each other."""
    found: dict[str, _Rows] = {}
    done = list[_Rows]()
    for step in steps:
        if missing := [name for name in _NEEDED if name not in step.core]:
            raise UserError(f"{source}: step {step.number} has no {', '.join(missing)}; {_HOW}")
        tokens = read_fields(step.core["input_ids"]).tokens("value")
        positions = read_fields(step.core["positions"]).tokens("value").tolist()
        lengths = read_fields(step.core["seq_lens"]).tokens("value").tolist()
        for name, rows in zip(_names(step, len(lengths)), _parts(step, positions, lengths), strict=True):
            if positions[rows.start] == 0 and name in found:
                done.append(found.pop(name))
            one = found.setdefault(name, _Rows(name))
            if positions[rows] != list(range(len(one.tokens), len(one.tokens) + rows.stop - rows.start)):
                raise UserError(
                    f"{step.core['positions']}: request {name}: found position {positions[rows.start]}, expected "
                    f"{len(one.tokens)}, behind what the steps before hold of it; {_HOW}"
                )
            one.places.append((step, len(positions), rows))
            one.tokens += tokens[rows].tolist()
    return done + list(found.values())


def _names(step: _Step, count: int) -> list[str]:
    """What the requests of a step are called, by what there is."""
    for name in _NAMES:
        if name in step.core:
            value = read_fields(step.core[name]).values.get("value")
            names = [str(one) for one in (value.tolist() if isinstance(value, Tensor) else value or ())]  # type: ignore[attr-defined]
            if len(names) == count:
                return names
    return [str(at) for at in range(count)]


def _parts(step: _Step, positions: Sequence[int], lengths: Sequence[int]) -> Iterator[slice]:
    """Whose rows are whose: those of a sequence end at its last position."""
    start = 0
    for length in lengths:
        end = next((at + 1 for at in range(start, len(positions)) if positions[at] == length - 1), None)
        if end is None:
            break
        yield slice(start, end)
        start = end
    else:
        if start == len(positions):
            return
    raise UserError(
        f"{step.core['seq_lens']}: found lengths {list(lengths)[:8]} and {len(positions)} positions, expected that the "
        f"rows of each sequence end at its length; {_HOW}"
    )


def _read(path: Path, request: _Rows) -> Sample:
    streams = list(request.places[0][0].streams)
    parts: dict[_Stream, list[Tensor]] = {stream: [] for stream in streams}
    for step, rows, place in request.places:
        if list(step.streams) != streams or not streams:
            raise UserError(
                f"{path}: step {step.number} holds {len(step.streams)} streams of hidden states, expected "
                f"{len(streams) or 'some'}, as in step {request.places[0][0].number}; {_HOW}"
            )
        for stream, files in step.streams.items():
            halves = [read_fields(file).states("value", rows)[place] for file in files.values()]
            parts[stream].append(halves[0] if len(halves) == 1 else torch.stack(halves).sum(0))
    states = [torch.cat(parts[stream]) for stream in streams]
    tokens = torch.tensor(request.tokens)
    if streams[0].kind == 2:
        return _packed(Sample(name=request.name, path=path, tokens=tokens, slots=tuple(states)))
    boundaries = tuple(stream.boundary for stream in streams)
    known = boundaries if min(boundaries) >= 0 else None
    return Sample(name=request.name, path=path, tokens=tokens, slots=tuple(states), boundaries=known)


def _packed(sample: Sample) -> Sample:
    """The slots side by side and the last state, normed, as SGLang's logits processor hands them out."""
    if len(sample.slots) != 2:
        raise UserError(f"{sample.path}: found {_AUX} or {_LAST} alone, expected both, for their width; {_HOW}")
    aux, last = sample.slots
    slots = Fields(sample.path, {_AUX: aux}).slots(_AUX, len(aux), last.shape[1])
    return replace(sample, slots=slots, last=last, norm=Norm.POST)


def _open(source: Path) -> list[Item]:
    folder = source.parent if source.is_file() else source
    requests = _requests(folder, _steps(folder))
    return [Item(one.name, lambda one=one: _read(folder, one)) for one in requests]  # type: ignore[misc]


def _knows(path: Path, _fields: Mapping[str, object]) -> bool:
    return "___" in path.name and "name=" in path.name


SGLANG = Dialect(
    name="sglang",
    layout="step=0___rank=0___...___name=....pt of SGLang's dumper",
    convention=Convention.OUTPUT,
    knows=_knows,
    open=_open,
)

"""Whether the engine drafted with the weights that the team believes it serves: by fingerprints, and by its tokens.

`loaded_weights` compares the fingerprints that the draft recorded of its tensors in memory with those of a model built
from the checkpoint. A tensor that differs is looked for among what has been loaded in its place before.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from spectrace.engine.checkpoint import DraftCheckpoint, read_head
from spectrace.engine.draft import DraftModel
from spectrace.engine.spec import GqaSpec
from spectrace.replay.finding import Finding
from spectrace.replay.missing import PARTS, lost_in_copy, stand_in
from spectrace.replay.profiles import profile_of
from spectrace.tracer.errors import UserError
from spectrace.tracer.fingerprint import file_fingerprints, tensor_fingerprint
from spectrace.tracer.trace import Trace

__all__ = ["LoadedWeights", "loaded_weights"]

_Held: TypeAlias = Callable[[str, Tensor], str | None]


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """Of `compared` tensors of the draft, `equal` were served as the checkpoint has them; 0 where none were recorded,
    or in another type.

    `skipped` are split over ranks in a way that is not understood. `other_files` says that the folder that was served
    held other files than the one given, None where that is not known.
    """

    compared: int
    equal: int
    skipped: tuple[str, ...] = ()
    other_files: bool | None = None
    findings: tuple[Finding, ...] = field(default=())


def loaded_weights(
    trace: Trace, checkpoint: DraftCheckpoint, model: DraftModel, *, target: Path | None = None
) -> LoadedWeights:
    """Compare what draft rank 0 held with `model`, the draft of `checkpoint` in the type that was served.

    `target` is where a head that was taken from it is looked up.
    """
    facts: Mapping[str, Any] = trace.writers.get("draft-0", {})
    loaded: Mapping[str, str] = facts.get("loaded") or {}
    files = _other_files(trace, checkpoint)
    if not loaded or str(model.fc.weight.dtype) != f"torch.{trace.manifest.get('dtype')}":
        return LoadedWeights(0, 0, other_files=files)
    held = _held(trace)
    prints = {name: held(name, tensor) for name, tensor in model.state_dict().items()}
    ours = {name: print_ for name, print_ in prints.items() if print_ is not None}
    same = [name for name in ours if loaded.get(name) == ours[name]]
    wrong = [name for name in ours if loaded.get(name) != ours[name]]
    profile = profile_of(trace.manifest)
    lost = {
        name: f"the folder that was served has no {theirs}: {stand_in(profile, name) or 'something else was taken'}"
        for name, theirs in lost_in_copy(trace, checkpoint).items()
    }
    findings = tuple(_findings(_Loaded(loaded, ours, tuple(wrong), model, target, held, lost, checkpoint.names)))
    return LoadedWeights(len(ours), len(same), tuple(sorted(prints.keys() - ours.keys())), files, findings)


def _held(trace: Trace) -> _Held:
    """The fingerprint of what rank 0 would hold of a tensor under a name; None where it is not said how it is split."""
    ranks = int((trace.manifest.get("tensor_parallel") or {}).get("draft") or 1)
    placements: Mapping[str, str] = (trace.manifest.get("sharded") or {}).get("draft") or {}

    def held(name: str, tensor: Tensor) -> str | None:
        if name in placements:
            along = re.fullmatch(r"\D*(\d)\D*", placements[name])
            if along is None:
                return None
            tensor = tensor.chunk(ranks, int(along[1]))[0]
        return tensor_fingerprint(tensor.contiguous())

    return held


def _other_files(trace: Trace, checkpoint: DraftCheckpoint) -> bool | None:
    served: Mapping[str, str] = (trace.manifest.get("draft") or {}).get("fingerprints") or {}
    given = file_fingerprints(checkpoint.folder, "*.safetensors")
    return None if not served else sorted(served.values()) != sorted(given.values())


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Fingerprints by name, those that were recorded and ours, and the names of which they differ.

    All are of what rank 0 holds: `held` gives that of a whole tensor. `lost` says of tensors that the folder which was
    served does not hold.
    """

    recorded: Mapping[str, str]
    ours: Mapping[str, str]
    wrong: tuple[str, ...]
    model: DraftModel
    target: Path | None
    held: _Held
    lost: Mapping[str, str]
    names: Mapping[str, str]

    def called(self, names: Iterable[str]) -> str:
        """As they are called in the checkpoint's files."""
        return ", ".join(self.names.get(name, name) for name in names)

    def tensor(self, name: str) -> Tensor:
        tensor: Tensor = self.model.state_dict()[name]
        return tensor

    def was(self, name: str, *tensors: Tensor) -> bool:
        """Whether what was held under a name is rank 0's share of one of these, in the type of our own."""
        own = self.tensor(name)
        return any(self.held(name, tensor.to(own)) == self.recorded.get(name) for tensor in tensors)

    def finding(
        self, fault: str, title: str, names: list[str], *told: str, variant: str = "", confidence: float = 1.0,
        alike: tuple[str, ...] = (),
    ) -> Finding:  # fmt: skip
        """With how many of all tensors differ."""
        wrong = self.called(self.wrong)
        differ = f"{len(self.wrong)} of {len(self.ours)} tensors in memory are not the checkpoint's: {wrong}"
        absent = [name for name in names if name not in self.recorded]
        gone = (f"the engine holds no {self.called(absent)}",) if absent else ()
        lost = [self.lost[name] for name in names if name in self.lost]
        evidence = (differ, *lost, *gone, *told)
        return Finding(fault, title, evidence, variant=variant, confidence=confidence, alike=alike, stage="load")


def _findings(loaded: _Loaded) -> Iterator[Finding]:
    """One for each link that is broken; one for all where more than half of what the draft owns is different."""
    left = list(loaded.wrong)
    own = [name for name in loaded.ours if name not in _shared(loaded.model)]
    if "d2t" in left:
        left.remove("d2t")
        yield _table(loaded)
    if 2 * len([name for name in left if name in own]) > len(own):
        yield loaded.finding("P6", "the draft that is served has other weights than the checkpoint", left)
        return
    norms = [name for name in left if name.startswith("fuse_norms.") and name not in loaded.recorded]
    if norms:
        yield loaded.finding("N2", "the norm before fc is not there", norms)
    pair = [f"mlp.{half}.weight" for half in ("gate", "up")]
    if set(pair) <= set(left) and all(loaded.was(one, loaded.tensor(other)) for one, other in (pair, pair[::-1])):
        yield loaded.finding("P4", "gate and up are swapped", pair, "each of the two holds what the other one should")
        left = [name for name in left if name not in pair]
    rotated = [f"attention.{name}.weight" for name in ("q", "k")]
    turned = [name for name in rotated if name in left and _reordered(loaded, name)]
    if turned:
        yield loaded.finding("P5", "rows of q and k are in the order of the other kind of RoPE", turned)
    parts: dict[str, list[str]] = {}
    for name in left:
        if name not in (*norms, *turned):
            parts.setdefault(name.split(".")[0], []).append(name)
    yield from _parts(loaded, parts)


def _shared(model: DraftModel) -> frozenset[str]:
    """What the draft takes from its target."""
    owned = {"embedding.weight": model.spec.own_embedding, "head.weight": model.spec.own_head}
    return frozenset(name for name, own in owned.items() if not own)


def _parts(loaded: _Loaded, parts: Mapping[str, list[str]]) -> Iterator[Finding]:
    """What is left, by the part of the draft that it belongs to."""
    others: dict[str, list[str]] = {}
    for part, names in parts.items():
        if part == "head":
            yield _head(loaded, names)
        elif part == "embedding":
            yield _embedding(loaded, names)
        else:
            others.setdefault(PARTS.get(part, part), []).extend(names)
    for variant, names in others.items():
        ones = [name for name in names if variant == "norm" and loaded.was(name, torch.ones_like(loaded.tensor(name)))]
        zeros = [name for name in names if loaded.was(name, torch.zeros_like(loaded.tensor(name)))]
        told = [f"{loaded.called(which)} all {value}" for which, value in ((ones, "ones"), (zeros, "zeros")) if which]
        title = f"{loaded.called(names)} {'is' if len(names) == 1 else 'are'} not the checkpoint's"
        yield loaded.finding("P1", title, names, *told, variant=variant, confidence=0.95)


def _table(loaded: _Loaded) -> Finding:
    offsets, vocab = loaded.tensor("d2t"), loaded.model.spec.target_vocab
    ids = torch.arange(len(offsets), device=offsets.device)
    if "d2t" not in loaded.recorded:
        return loaded.finding("V1", "the engine has no d2t", ["d2t"])
    if "d2t" in loaded.lost:
        return loaded.finding("V1", "the copy that was served has no d2t", ["d2t"], alike=("V5",))
    if loaded.was("d2t", torch.zeros_like(offsets)):
        return loaded.finding("V5", "d2t is all zero in memory", ["d2t"], alike=("V1",))
    if loaded.was("d2t", ids + offsets, offsets - ids):
        told = "it holds tokens where the checkpoint has offsets"
        return loaded.finding("V2", "d2t was converted between offsets and tokens once too often", ["d2t"], told)
    rolled = [table for by in (1, -1) for table in (offsets.roll(by), (ids + offsets.roll(by)) % vocab - ids)]
    if loaded.was("d2t", *rolled, *((ids + offsets).roll(by) - ids for by in (1, -1))):
        return loaded.finding("V4", "d2t is shifted by one row in memory", ["d2t"])
    told = "it is not zero, and none of the known ways to misread the checkpoint's"
    return loaded.finding("V3", "d2t of the engine is another table than the checkpoint's", ["d2t"], told)


def _head(loaded: _Loaded, names: list[str]) -> Finding:
    own = loaded.tensor("head.weight")
    if loaded.target is not None and loaded.model.spec.own_head:
        with suppress(UserError):
            head = read_head(loaded.target)
            if head.shape[1:] == own.shape[1:] and loaded.was("head.weight", head[: len(own)], head):
                told = f"it is the first {len(own)} of {len(head)} rows of the target's head"
                alike = ("A1",) if len(own) == len(head) else ()
                title = "the draft's own head is replaced by the target's"
                return loaded.finding("P2", title, names, told, alike=alike)
    title = "the head is not the checkpoint's"
    return loaded.finding("P2", title, names, variant="other", confidence=0.8, alike=("A1", "P1"))


def _embedding(loaded: _Loaded, names: list[str]) -> Finding:
    title = "the embedding is not " + ("the checkpoint's" if loaded.model.spec.own_embedding else "the target's")
    alike = ("A1",) if loaded.model.spec.own_embedding else ()
    return loaded.finding("P3", title, names, confidence=0.9, alike=alike)


def _reordered(loaded: _Loaded, name: str) -> bool:
    """Whether the rows of each head are in the order for pairs (2i, 2i+1) instead of (i, i + D/2), or the other way."""
    attention = loaded.model.spec.attention
    if not isinstance(attention, GqaSpec):
        return False
    rows = loaded.tensor(name)
    heads = rows.reshape(-1, attention.head_dim, rows.shape[1])
    halves = heads.reshape(len(heads), 2, attention.head_dim // 2, -1).transpose(1, 2).reshape(rows.shape)
    pairs = heads.reshape(len(heads), attention.head_dim // 2, 2, -1).transpose(1, 2).reshape(rows.shape)
    return loaded.was(name, halves, pairs)

"""What a draft held in memory against the tensors of a checkpoint, by the fingerprints that it recorded of them."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

from torch import Tensor

from spectrace.engine.draft import DraftModel
from spectrace.replay.configuration import Configuration
from spectrace.replay.finding import Finding
from spectrace.replay.spare import Spare, shapes_of
from spectrace.tracer.fingerprint import tensor_fingerprint
from spectrace.tracer.trace import Trace

__all__ = ["Held", "Loaded", "held_by_first_rank"]

_MANY: Final = 12
Held: TypeAlias = Callable[[str, Tensor], str | None]


def held_by_first_rank(trace: Trace) -> Held:
    """The fingerprint of what rank 0 would hold of a tensor under a name; None where it is not said how it is split."""
    ranks = int((trace.manifest.get("tensor_parallel") or {}).get("draft") or 1)
    placements: Mapping[str, str] = (trace.manifest.get("sharded") or {}).get("draft") or {}

    def held(name: str, tensor: Tensor) -> str | None:
        placement = placements.get(re.sub(r"\.\d+\.", ".*.", name))  # which leaves numbers of layers out
        if placement is not None:
            along = re.fullmatch(r"\D*(\d)\D*", placement)
            if along is None:
                return None
            tensor = tensor.chunk(ranks, int(along[1]))[0]
        return tensor_fingerprint(tensor.contiguous())

    return held


@dataclass(frozen=True, slots=True)
class Loaded:
    """Fingerprints by name, those that were recorded and ours, and the names of which they differ.

    All are of what rank 0 holds: `held` gives that of a whole tensor. `lost` says of tensors that the folder which was
    served does not hold, `spare` what else may have been taken; `names` are those in the checkpoint's files.
    """

    recorded: Mapping[str, str]
    ours: Mapping[str, str]
    wrong: tuple[str, ...]
    model: DraftModel
    target: Path | None
    held: Held
    lost: Mapping[str, str]
    names: Mapping[str, str]
    spare: Spare = field(default_factory=dict)

    def called(self, names: Iterable[str]) -> str:
        """As they are called in the checkpoint's files; of many the first."""
        called = [self.names.get(name, name) for name in names]
        more = [f"{len(called) - _MANY} more"] if len(called) > _MANY + 1 else []
        return ", ".join([*(called[:_MANY] if more else called), *more])

    def tensor(self, name: str) -> Tensor:
        """The checkpoint's own."""
        tensor: Tensor = self.model.state_dict()[name]
        return tensor

    def was(self, name: str, *tensors: Tensor) -> bool:
        """Whether what was held under a name is rank 0's share of one of these, in the type of our own."""
        own = self.tensor(name)
        return any(self.held(name, tensor.to(own)) == self.recorded.get(name) for tensor in tensors)

    def were(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether under all these names these were held."""
        return all(self.was(name, tensor) for name, tensor in tensors.items())

    def changed_by(self, at: Configuration, there: Configuration) -> frozenset[str]:
        """The tensors that a step changes, or does without, if that is what was in memory; none where it is not."""
        new = {name: tensor for name, tensor in there.tensors.items() if tensor is not at.tensors.get(name)}
        gone = shapes_of(at.spec).keys() - shapes_of(there.spec).keys()
        changed = frozenset(new) | gone
        if not changed <= set(self.wrong) or gone & self.recorded.keys() or not self.were(new):
            return frozenset()
        return changed

    def owned(self) -> list[str]:
        """The names of what the draft does not take from its target."""
        spec = self.model.spec
        shared = {"embedding.weight": spec.own_embedding, "head.weight": spec.own_head}
        return [name for name in self.ours if shared.get(name, True)]

    def finding(
        self, fault: str, title: str, names: Iterable[str], *told: str, variant: str = "", confidence: float = 1.0,
        alike: tuple[str, ...] = (),
    ) -> Finding:  # fmt: skip
        """With how many of all tensors differ."""
        wrong, names = self.called(self.wrong), list(names)
        differ = f"{len(self.wrong)} of {len(self.ours)} tensors in memory are not the checkpoint's: {wrong}"
        absent = [name for name in names if name not in self.recorded]
        gone = (f"the engine holds no {self.called(absent)}",) if absent else ()
        lost = [self.lost[name] for name in names if name in self.lost]
        evidence = (differ, *lost, *gone, *told)
        return Finding(fault, title, evidence, variant=variant, confidence=confidence, alike=alike, stage="load")

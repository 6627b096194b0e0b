"""Whether true boundaries are of the target that was served: by fingerprints of its weights, or else by its tokens.

Boundaries of another target match no slot, and a diagnosis that took them for true would name links that are whole.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from spectrace.replay.compare import served_dtype
from spectrace.replay.truth import Answered
from spectrace.tracer.errors import UserError
from spectrace.tracer.fingerprint import file_fingerprints
from spectrace.tracer.trace import Trace

__all__ = ["is_another", "is_of_this_target", "is_this_target", "said_of"]

_FEW = 3
_PARTING = 0.05  # of greedy tokens: ties and rounding move fewer


@dataclass(frozen=True, slots=True)
class _Weights:
    """A target's folder, and the fingerprint of each of its weight files."""

    folder: Path
    files: Mapping[str, str]

    @staticmethod
    def of(folder: Path) -> "_Weights":
        return _Weights(folder, file_fingerprints(folder))

    @staticmethod
    def served(trace: Trace) -> "_Weights":
        told = trace.manifest.get("target") or {}
        return _Weights(Path(told.get("path") or ""), told.get("fingerprints") or {})

    @property
    def stay(self) -> bool:
        """Whether they are still where they were."""
        return set(_Weights.of(self.folder).files.values()) >= set(self.files.values())

    def stored(self) -> dict[str, Path]:
        """The file of each tensor, layers in their order."""
        found: dict[str, Path] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                found |= dict.fromkeys(file.keys(), path)
        return dict(sorted(found.items(), key=lambda item: [part.zfill(6) for part in item[0].split(".")]))


def is_this_target(trace: Trace, folder: Path) -> bool:
    """Whether this folder is known to hold the target that was served; not known where no fingerprints are recorded.

    Raises UserError where it holds another: not only its boundaries would be wrong, but the embedding and the head that
    a draft may share, so hardly anything would be left to say; and whoever is in a hurry has the right answer one
    option away. Only a copy that holds the same in other files, or saved in the type that was served, is let through:
    by its tensors, if those that were served are still there to compare.
    """
    other = f"{folder}: not the target that was served"
    advice = f"give the folder that {trace.folder} was served with (--target DIR), or do without (--no-target)"
    return _is_known(trace, _Weights.of(folder), other, advice)


def is_of_this_target(trace: Trace, reference: Trace) -> bool:
    """Whether a reference is known to be of the target that was served; raises UserError where it is of another."""
    other = f"{reference.folder}: recorded from another target than {trace.folder}"
    advice = "record a reference from the target that was served, or do without"
    return _is_known(trace, _Weights.served(reference), other, advice)


def _is_known(trace: Trace, given: _Weights, other: str, advice: str) -> bool:
    found = _difference(_Weights.served(trace), given, served_dtype(trace))
    if found:
        raise UserError(f"{other}: {found}; {advice}")
    return found is not None


def is_another(answered: Answered) -> bool:
    """Whether a source answers so many greedy tokens otherwise that it is taken for another target's."""
    return answered.tokens - answered.equal > _PARTING * answered.tokens


def said_of(name: str, answered: Answered) -> str:
    """What to note of a source whose weights cannot be compared; empty if its tokens speak for it."""
    unknown = f"{name}: whether that is the target that was served is not known, for want of fingerprints"
    if not answered.tokens:
        return f"{unknown} and of greedy answers"
    if is_another(answered):
        return (
            f"{unknown}; of {answered.tokens} tokens that were answered greedily, it answers {answered.equal}: it is "
            f"taken for another, and none of its boundaries for true"
        )
    return ""


def _difference(served: _Weights, given: _Weights, dtype: torch.dtype) -> str | None:
    """What differs, tensors first, else files; empty if nothing, None where there are no fingerprints."""
    ours, theirs = set(served.files.values()), set(given.files.values())
    if not ours or not theirs:
        return None
    if ours <= theirs or theirs <= ours:
        return ""
    with suppress(SafetensorError):  # of a file that is cut, its name has to do
        if served.stay and given.stay:
            tensors = list(islice(_other_tensors(served.stored(), given.stored(), dtype), _FEW))
            return f"tensors differ, {', '.join(tensors)} to begin with" if tensors else ""
    files = [name for name, found in given.files.items() if found not in ours]
    return f"{', '.join(files[:_FEW])} {'is not as it was' if len(files) == 1 else 'are not as they were'}"


def _other_tensors(served: Mapping[str, Path], given: Mapping[str, Path], dtype: torch.dtype) -> Iterator[str]:
    """Tensors of the given weights that are not what was served; of what they lack, loading complains."""
    for name, path in given.items():
        if name not in served or not _equal(_read(served[name], name), _read(path, name), dtype):
            yield name


def _equal(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    return one.shape == other.shape and torch.equal(one.to(dtype), other.to(dtype))


def _read(path: Path, name: str) -> Tensor:
    with safe_open(path, "pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor

"""Whether the engine drafted with the weights that the team believes it serves: by fingerprints, and by its tokens.

`loaded_weights` compares the fingerprints that the draft recorded of its tensors in memory with those of a model built
from the checkpoint. A tensor that differs is looked for among what has been loaded in its place before.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spectrace.engine.checkpoint import DraftCheckpoint, read_embedding, read_head
from spectrace.engine.draft import DraftModel
from spectrace.engine.spec import LaterNorm
from spectrace.engine.turned import in_other_order, rotated
from spectrace.replay.another import how_far, served_weights
from spectrace.replay.configuration import Configuration
from spectrace.replay.finding import Finding
from spectrace.replay.hypothesis import Hypothesis
from spectrace.replay.loaded import Loaded, held_by_first_rank
from spectrace.replay.loading import layers_of, plain_norm
from spectrace.replay.missing import PARTS, bias_of, lost_in_copy, part_of, stand_in
from spectrace.replay.profiles.known import profile_of
from spectrace.replay.spare import Spare
from spectrace.tracer.errors import UserError
from spectrace.tracer.fingerprint import file_fingerprints
from spectrace.tracer.trace import Trace

__all__ = ["LoadedWeights", "loaded_weights"]

_BIASED = {"": "q, k and v", "o": "attention's output", "mlp": "the MLP"}


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """Of `compared` tensors of the draft, `equal` were served as the checkpoint has them; 0 where none were recorded,
    or in another type.

    `skipped` are split over ranks in a way that is not understood. `other_files` says that the folder that was served
    held other files than the one given, None where that is not known. `served` are its tensors, where they are weights
    of another training step, `memory` what all of this rests on.
    """

    compared: int
    equal: int
    skipped: tuple[str, ...] = ()
    other_files: bool | None = None
    findings: tuple[Finding, ...] = field(default=())
    served: Mapping[str, Tensor] = field(default_factory=dict)
    memory: Loaded | None = field(default=None, compare=False, repr=False)

    def seen(self, at: Configuration, steps: Iterable[Hypothesis]) -> tuple[Hypothesis, ...]:
        """Of these steps those that what was in memory shows to be taken: of each tensor the one that explains most."""
        if self.memory is None:
            return ()
        changed = [(one, names) for one in steps if (names := self.memory.changed_by(at, one.apply(at)))]
        found, done = list[Hypothesis](), set[str]()
        for one, names in sorted(changed, key=lambda each: -len(each[1])):
            if not names & done:
                found.append(one)
                done |= names
        return tuple(found)


def loaded_weights(
    trace: Trace,
    checkpoint: DraftCheckpoint,
    model: DraftModel,
    *,
    target: Path | None = None,
    spare: Spare | None = None,
) -> LoadedWeights:
    """Compare what draft rank 0 held with `model`, the draft of `checkpoint` in the type that was served.

    `target` is where a head that was taken from it is looked up, `spare` what the checkpoint's files hold beside it.
    """
    facts: Mapping[str, Any] = trace.writers.get("draft-0", {})
    recorded: Mapping[str, str] = facts.get("loaded") or {}
    files = _other_files(trace, checkpoint)
    if not recorded or str(model.fc.weight.dtype) != f"torch.{trace.manifest.get('dtype')}":
        return LoadedWeights(0, 0, other_files=files)
    held = held_by_first_rank(trace)
    tensors = model.state_dict()
    if "d2t" in tensors and "d2t" not in recorded and not tensors["d2t"].any():  # ids are tokens: some keep no table
        del tensors["d2t"]
    prints = {name: held(name, tensor) for name, tensor in tensors.items()}
    ours = {name: print_ for name, print_ in prints.items() if print_ is not None}
    wrong = tuple(name for name in ours if recorded.get(name) != ours[name])
    profile = profile_of(trace.manifest)
    lost = {
        name: f"the folder that was served has no {theirs}: {stand_in(profile, name) or 'something else was taken'}"
        for name, theirs in lost_in_copy(trace, checkpoint).items()
    }
    loaded = Loaded(recorded, ours, wrong, model, target, held, lost, checkpoint.names, spare or {})
    findings, served = tuple(_findings(loaded)), dict[str, Tensor]()
    if any(finding.fault == "P6" for finding in findings):
        served = served_weights(trace, model, target=target)
        told = _of_the_folder(loaded, trace, served)
        findings = tuple(replace(one, evidence=(*one.evidence, told)) if one.fault == "P6" else one for one in findings)
        served = served if loaded.were({name: served[name] for name in wrong if name in served}) else {}
    skipped = tuple(sorted(prints.keys() - ours.keys()))
    return LoadedWeights(len(ours), len(ours) - len(wrong), skipped, files, findings, served, loaded)


def _other_files(trace: Trace, checkpoint: DraftCheckpoint) -> bool | None:
    served: Mapping[str, str] = (trace.manifest.get("draft") or {}).get("fingerprints") or {}
    given = file_fingerprints(checkpoint.folder)
    return None if not served else sorted(served.values()) != sorted(given.values())


def _of_the_folder(loaded: Loaded, trace: Trace, served: Mapping[str, Tensor]) -> str:
    """Whether weights of another step are those of the folder that was served, and how far they are off."""
    path = (trace.manifest.get("draft") or {}).get("path") or "the folder that was served"
    if not served:
        return f"how far they are off is not known: {path} is not there to be read, or was written since"
    theirs = {name: served[name] for name in loaded.wrong if name in served}
    if loaded.were(theirs):
        own = {loaded.called([name]): tensor for name, tensor in loaded.model.state_dict().items()}
        named = {loaded.called([name]): tensor for name, tensor in theirs.items()}
        return f"they are those of {path}: beside the checkpoint's {how_far(own, named)}"
    same = all(torch.equal(loaded.tensor(name), tensor) for name, tensor in theirs.items())
    return f"{path} holds {'the right ones' if same else 'yet other ones'}: the engine has changed them"


def _findings(loaded: Loaded) -> Iterator[Finding]:
    """One for each link that is broken; one for all where more than half of what the draft owns is different."""
    left = list(loaded.wrong)
    if "d2t" in left:
        left.remove("d2t")
        yield _table(loaded)
    unscaled = loaded.spare.get("unscaled", {})
    if unscaled and set(unscaled) <= set(left) and loaded.were(unscaled):
        yield loaded.finding("P8", "quantised weights are loaded without their scales", unscaled)
        left = [name for name in left if name not in unscaled]
    own = loaded.owned()
    if 2 * len([name for name in left if name in own]) > len(own):
        yield loaded.finding("P6", "the draft that is served has other weights than the checkpoint", left)
        return
    for finding, names in _known(loaded, left):
        yield finding
        left = [name for name in left if name not in names]
    yield from _parts(loaded, left)


def _known(loaded: Loaded, left: list[str]) -> Iterator[tuple[Finding, list[str]]]:
    """What is recognised by what is in its place, and the tensors that it is about."""
    norms = [name for name in left if name.startswith("fuse_norms.") and name not in loaded.recorded]
    if norms:
        yield loaded.finding("N2", "the norm before fc is not there", norms), norms
    for variant, names in _gone_biases(loaded, left).items():
        title = f"the biases of {_BIASED.get(variant, variant)} are not there"
        yield loaded.finding("P7", title, names, variant=variant), names
    if swapped := list(_swapped(loaded, left)):
        told = "each of the two holds what the other one should"
        yield loaded.finding("P4", "gate and up are swapped", swapped, told), swapped
    if turned := [name for name, rows in rotated(left, loaded.model.spec) if _is_turned(loaded, name, rows)]:
        yield loaded.finding("P5", "rows of q and k are in the order of the other kind of RoPE", turned), turned
    gone = [name for name in left if name.endswith((".q_norm.weight", ".k_norm.weight"))]
    if gone := [name for name in gone if name not in loaded.recorded]:
        title = "the norms of q's and k's heads are not there"
        yield loaded.finding("P1", title, gone, variant="head norms"), gone
    if later := [name for name in left if name.endswith(".input_norm.weight")]:
        yield _later_norm(loaded, later), later


def _are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _gone_biases(loaded: Loaded, left: list[str]) -> Mapping[str, list[str]]:
    """Biases that the engine does not hold, or holds as zeros, by the variant that they are."""
    found: dict[str, list[str]] = {}
    for name in left:
        variant = bias_of(name)
        if variant is not None and (
            name not in loaded.recorded or loaded.was(name, torch.zeros_like(loaded.tensor(name)))
        ):
            found.setdefault(variant, []).append(name)
    return found


def _swapped(loaded: Loaded, left: list[str]) -> Iterator[str]:
    """Gate and up, layer by layer."""
    for layer in layers_of(loaded.model.spec):
        pair = [f"{layer}mlp.{half}.weight" for half in ("gate", "up")]
        if set(pair) <= set(left) and all(loaded.was(a, loaded.tensor(b)) for a, b in (pair, pair[::-1])):
            yield from pair


def _is_turned(loaded: Loaded, name: str, rows: int) -> bool:
    """Whether the rows of each head are in the order for pairs (2i, 2i+1) instead of (i, i + D/2), or the other way."""
    orders = (in_other_order(loaded.tensor(name), rows, loaded.model.spec, back=back) for back in (False, True))
    return loaded.was(name, *orders)


def _later_norm(loaded: Loaded, names: list[str]) -> Finding:
    """What layers after the first have in the place of their input's norm."""
    spec, own = loaded.model.spec, {name: loaded.tensor(name) for name in names}
    first = loaded.tensor("feature_norm.weight")
    [other] = set(LaterNorm) - {spec.later_norm}
    ways = {
        ("plain", "is one that scales nothing"): {name: plain_norm(norm, spec) for name, norm in own.items()},
        ("first", "is the first layer's hidden_norm"): dict.fromkeys(names, first),
        ("", f"is their {other}"): {name: loaded.spare.get(other, {}).get(name, own[name]) for name in names},
    }
    for (variant, told), tensors in ways.items():
        if loaded.were(tensors):
            alike = ("P1",) if variant == "plain" else ()
            return loaded.finding("N4", f"the norm of later layers' input {told}", names, variant=variant, alike=alike)
    title = "the norm of later layers' input is not the checkpoint's"
    return loaded.finding("N4", title, names, variant="other", confidence=0.8, alike=("P1",))


def _parts(loaded: Loaded, left: list[str]) -> Iterator[Finding]:
    """What is left, by the part of the draft that it belongs to."""
    parts: dict[str, list[str]] = {}
    for name in left:
        part = part_of(name)
        parts.setdefault(PARTS.get(part, part), []).append(name)
    for part, names in parts.items():
        if part == "head":
            yield _head(loaded, names)
        elif part == "embedding":
            yield _embedding(loaded, names)
        else:
            yield _part(loaded, part, names)


def _part(loaded: Loaded, part: str, names: list[str]) -> Finding:
    spec, own = loaded.model.spec, {name: loaded.tensor(name) for name in names}
    plain = [name for name in names if part == "norm" and loaded.was(name, plain_norm(own[name], spec))]
    zeros = [name for name in names if loaded.was(name, torch.zeros_like(own[name]))]
    kinds = (plain, "zeros" if spec.unit_offset_norms else "ones"), (zeros, "zeros")
    told = dict.fromkeys(f"{loaded.called(which)} all {value}" for which, value in kinds if which)
    title = f"{loaded.called(names)} {_are(names)} not the checkpoint's"
    return loaded.finding("P1", title, names, *told, variant=part, confidence=0.95)


def _table(loaded: Loaded) -> Finding:
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


def _rounded(tensor: Tensor) -> tuple[Tensor, ...]:
    """A tensor as it is, and as it is where it was stored in less."""
    return tensor, tensor.bfloat16(), tensor.half()


def _head(loaded: Loaded, names: list[str]) -> Finding:
    own = loaded.tensor("head.weight")
    if loaded.target is not None and loaded.model.spec.own_head:
        with suppress(UserError):
            head = read_head(loaded.target)
            if head.shape[1:] == own.shape[1:] and loaded.was(
                "head.weight", *_rounded(head[: len(own)]), *_rounded(head)
            ):
                title = "the draft's own head is replaced by the target's"
                if len(own) == len(head):
                    return loaded.finding("A1", title, names, variant="head", alike=("P2",))
                told = f"it is the first {len(own)} of {len(head)} rows of the target's head"
                return loaded.finding("P2", title, names, told)
    title = "the head is not the checkpoint's"
    return loaded.finding("P2", title, names, variant="other", confidence=0.8, alike=("A1", "P1"))


def _embedding(loaded: Loaded, names: list[str]) -> Finding:
    own = loaded.model.spec.own_embedding
    if loaded.target is not None and own:
        with suppress(UserError):
            embedding = read_embedding(loaded.target)
            if embedding.shape == loaded.tensor("embedding.weight").shape and loaded.was(
                "embedding.weight", *_rounded(embedding)
            ):
                return loaded.finding("A1", "the draft's own embedding is replaced by the target's", names)
    title = f"the embedding is not the {'checkpoint' if own else 'target'}'s"
    return loaded.finding("P3", title, names, confidence=0.9, alike=("A1",) if own else ())

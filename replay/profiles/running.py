"""What an engine really runs of a draft: its own switches, boundaries and tensors, by its profile."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from spectrace.engine.checkpoint import read_draft, read_embedding, read_head, read_tensor
from spectrace.engine.fields import Fields, read_config
from spectrace.engine.layouts.names import stored_names
from spectrace.engine.spec import DraftSpec, MlaSpec
from spectrace.replay.missing import stand_in_of
from spectrace.replay.profiles.profile import Departure, Given, Profile, Refusal, StandIn, TargetFacts
from spectrace.replay.spare import shapes_of

__all__ = ["Running", "facts_of", "given", "run_by", "weights_of"]


@dataclass(frozen=True, slots=True)
class Running:
    """A draft as an engine runs it.

    `boundaries` feed its slots, None where no target is known, and `key` is where they come from, "" by default.
    `taken` are the tensors, by a `DraftModel`'s names, that are not the folder's own, `unread` those of its files that
    it has a place for under another name, `dropped` all that it passes over. `departures` are what it does otherwise
    than the files mean, `refusals` why it does not serve it.
    """

    profile: Profile
    spec: DraftSpec
    boundaries: tuple[int, ...] | None
    key: str
    names: Mapping[str, str]
    taken: Mapping[str, StandIn]
    unread: tuple[str, ...]
    dropped: tuple[str, ...]
    departures: tuple[Departure, ...]
    refusals: tuple[Refusal, ...]

    @property
    def unwritten(self) -> tuple[str, ...]:
        """Tensors that it computes with though nothing was written to them."""
        return tuple(name for name, stand_in in self.taken.items() if stand_in is StandIn.MEMORY)


def given(folder: Path, target: TargetFacts | None = None) -> Given:
    """A draft's folder as engines are given it; raises UserError where it holds none."""
    draft = read_draft(folder)
    held = frozenset({draft.names[name] for name in draft.tensors} | {*draft.report.unused_tensors})
    return Given(draft, read_config(folder), held, target)


def facts_of(target: Path) -> TargetFacts:
    """What engines go by of a target; raises UserError where its config does not say how many layers it has."""
    config = read_config(target)
    nested = config.get("text_config")
    text = Fields(target / "config.json", nested if isinstance(nested, dict) else config)
    named = config.get("architectures")
    context = text.peek("max_position_embeddings")
    return TargetFacts(
        architecture=str(named[0]) if isinstance(named, list) and named else "",
        layers=text.size("num_hidden_layers"),
        context=context if isinstance(context, int) else None,
    )


def run_by(profile: Profile, given: Given) -> Running:
    """What an engine makes of a draft."""
    spec, departures = given.draft.spec, []
    for one in profile.departures:
        taken = one.takes(spec, given)
        if taken != spec:
            departures.append(one)
            spec = taken
    names = stored_names(given.held, spec)
    expected = {name: names[name] for name in shapes_of(spec)}
    replaced = dict(profile.replaces(given))
    if spec.draft_vocab == spec.target_vocab and names["d2t"] not in given.held:
        replaced["d2t"] = StandIn.IDENTITY
    stand_ins = {
        name: replaced.get(name) or stand_in_of(profile, name)
        for name, theirs in expected.items()
        if name in replaced or theirs not in given.held
    }
    key = profile.id_key(given.config)
    unread = [
        name
        for name, theirs in expected.items()
        if theirs in given.held
        and (_first_layer(theirs) not in ("", *profile.first_layers) or theirs in profile.unread_names)
    ]
    stand_ins |= {name: stand_in_of(profile, name) for name in unread}
    if _other_attention(profile, spec, given):
        stand_ins |= {name: stand_in_of(profile, name) for name in expected if name.startswith("attention.")}
    return Running(
        profile=profile,
        spec=spec,
        boundaries=_boundaries(profile, given),
        key=key.key if key else "",
        names=names,
        taken={name: stand_in for name, stand_in in stand_ins.items() if stand_in is not None},
        unread=tuple(expected[name] for name in unread),
        dropped=tuple(sorted((given.held - {*expected.values(), "t2d"}) | {expected[name] for name in unread})),
        departures=tuple(departures),
        refusals=(*(one for one in profile.refusals if one.met(given)), *_uncaptured(profile, given)),
    )


def _first_layer(name: str) -> str:
    """What the first layer is called in the name of one of its tensors; empty for other tensors."""
    return next((first for first in ("midlayer", "layers.0") if name.startswith(f"{first}.")), "")


def _boundaries(profile: Profile, given: Given) -> tuple[int, ...] | None:
    if given.target is None:
        return None
    if profile.captures_nothing(given):
        return ()
    return profile.resolve(given.config, given.target.layers, given.target.architecture)


def _other_attention(profile: Profile, spec: DraftSpec, given: Given) -> bool:
    """Whether the class that is named has another kind of attention than the tensors."""
    named = given.says("architectures")
    held = set(named) if isinstance(named, list) else {named}
    known = bool(profile.latent_classes) and given.draft.layout != "speculators" and held != {None}
    return known and bool(held & profile.latent_classes) != isinstance(spec.attention, MlaSpec)


def _uncaptured(profile: Profile, given: Given) -> Iterator[Refusal]:
    """Why boundaries cannot be had of this target."""
    if given.target is None or profile.trainer or profile.captures_nothing(given):
        return
    named = given.target.architecture
    capture = profile.capture(named)
    if capture is None:
        why = f"it captures nothing of targets of class {named}"
        yield Refusal(why, lambda _: True, says="set_eagle3_layers_to_capture")
    elif refusal := capture.refusal(profile.asked(given.config, given.target.layers, named), given.target.layers):
        yield refusal


def weights_of(running: Running, given: Given, target: Path) -> dict[str, Tensor]:
    """The tensors that an engine computes with, by a `DraftModel`'s names, in float32; those of memory are NaN."""
    made = {name: _taken(running, given, target, name, shape) for name, shape in shapes_of(running.spec).items()}
    return {name: tensor.long() if name == "d2t" else tensor.float() for name, tensor in made.items()}


def _taken(running: Running, given: Given, target: Path, name: str, shape: torch.Size) -> Tensor:
    match running.taken.get(name):
        case None:
            held = given.draft.tensors.get(name)
            return read_tensor(given.draft.folder, (running.names[name],)) if held is None else held
        case StandIn.EMBEDDING:
            return read_embedding(target)
        case StandIn.HEAD:
            return read_head(target)[: shape[0]]
        case StandIn.ONES:
            return torch.ones(shape)
        case StandIn.IDENTITY:
            return torch.zeros(shape)
        case StandIn.MEMORY:
            return torch.full(shape, torch.nan)

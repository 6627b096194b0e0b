"""The edit that repairs a link, by who is wrong about it: in words, and as a command where one can do it."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from spectrace.engine.dialect import ID_KEYS, IdKey
from spectrace.engine.spec import RopeKind, RopeSpec
from spectrace.replay.links import ENGINE_LINKS
from spectrace.replay.profiles.profile import Profile, Switch, filled, value_at
from spectrace.replay.rewriting import Edit, config_of, place_of, set_config
from spectrace.replay.tensor_edits import put_in_order

__all__ = ["TENSORS", "Who", "fix_hand_off", "fix_switch", "fix_weights", "fix_wiring"]

Who = Literal["config", "engine", "conversion"]
"""Who is wrong: the draft's own config or weights, the engine that serves it, or the copy that the engine was given.

A config that an engine does not read as it was meant is wrong for that engine.
"""


TENSORS = {
    "vocabulary map": ("the table from draft ids to tokens (tensor d2t)", "vocabulary"),
    "head": ("the head (tensor lm_head.weight)", "load"),
    "embedding": ("the embedding (tensor embed_tokens.weight)", "load"),
    "weights": ("each weight", "load"),
    "scales": ("the scale of each quantised tensor (tensors *.weight_scale)", "load"),
    "q and k rows": ("the order of the rows that RoPE turns (q_proj and k_proj, or MLA's like)", "load"),
    "head norms": ("the norms of q's and k's heads (tensors self_attn.q_norm.weight and k_norm.weight)", "load"),
    "gate and up": ("the order of mlp.gate_proj and mlp.up_proj", "load"),
    "later norm": ("the norm of the input of layers after the first (tensors layers.1.input_layernorm.weight)", "load"),
    "fc bias": ("the bias of fc (tensor fc.bias)", "load"),
    "fc": ("the projection of the features (tensor fc.weight)", "project"),
}
"""Links that tensors decide, and the stage of the engine's code that they belong to."""


def fix_wiring(
    profile: Profile,
    *,
    who: Who,
    draft: Path,
    served: Path | None,
    boundaries: tuple[int, ...],
    now: tuple[int, ...],
    key: str | None,
) -> Edit:
    """Feed `boundaries` where it is `now`; `key` is where the engine took its wiring from, a config key or a flag.

    `draft` is the folder the team believes it serves, `served` the one the engine was given, if another.
    """
    if who == "conversion" and key == profile.wiring_flag:
        who = "engine"  # a flag overrides whatever was converted
    if who == "engine":
        return _engine_wiring(profile, draft, boundaries, now, key)
    if who == "conversion" and _same(draft, served):
        return _edited_since(profile, draft)
    folder = (served or draft) if who == "conversion" else draft
    edit = _set_ids(profile, folder, boundaries, now, key)
    if profile.sorts and tuple(sorted(boundaries)) != boundaries:
        edit = put_in_order(profile, folder, boundaries, edit)
    if who == "config":
        return edit
    names = " and ".join(one.key for one in _id_keys(profile, draft, key))
    return Edit(f"convert {draft} again, keeping its layer ids ({names}); or {edit.text}", edit.command)


def _set_ids(profile: Profile, folder: Path, boundaries: Sequence[int], now: Sequence[int], key: str | None) -> Edit:
    """Set layer ids in every key that a config has, and in one that the engine reads as they are meant."""
    ordered, config = sorted(boundaries) if profile.sorts else boundaries, config_of(folder)
    keys = _id_keys(profile, folder, key)
    changes = {one.key: [b - one.offset for b in ordered] for one in keys}
    changes = {name: ids for name, ids in changes.items() if value_at(config, name) != ids} or changes
    shifted = [one.key for one in keys if one.offset and one.key in changes]
    told = [f"under {' and '.join(shifted)} id i stands for boundary i + 1, the output of layer i"] if shifted else []
    told += _misread(profile, config)
    were = {one.key: [b - one.offset for b in now] for one in keys if one.key == key}
    edit = set_config(folder, changes, were, why="; ".join(told))
    if _read_key(profile, config) is None and key not in changes:
        edit = Edit(f"{edit.text}; without ids {profile.engine} takes {profile.default_wiring}", edit.command)
    return edit


def _read_key(profile: Profile, config: Mapping[str, Any]) -> IdKey | None:
    """The key of layer ids that the engine takes, in the convention it takes it in."""
    return next((one for one in profile.ids if value_at(config, one.key) is not None), None)


def _misread(profile: Profile, config: Mapping[str, Any]) -> list[str]:
    """Keys of layer ids that the engine does not take as they are meant, where it takes none that it does."""
    if _read_key(profile, config) in ID_KEYS:
        return []
    taken = {one.key for one in profile.ids}
    there = [one.key for one in ID_KEYS if value_at(config, one.key) is not None]
    unread = [f"{profile.engine} does not read {key}" for key in there if key not in taken]
    other = "for the layers that streams enter, where drafts mean those that they leave"
    return unread + [f"{profile.engine} takes ids under {key} {other}" for key in there if key in taken]


def _engine_wiring(
    profile: Profile, draft: Path, boundaries: Sequence[int], now: Sequence[int], key: str | None
) -> Edit:
    listed = ",".join(map(str, boundaries))
    right = f"{draft / 'config.json'} is right: boundaries {list(boundaries)}. The engine delivers {list(now)}"
    if profile.wiring_flag and key == profile.wiring_flag:
        return Edit(
            f"serve without {profile.wiring_flag} {','.join(map(str, now))}, which overrides the config: {right}",
            _serve(profile, draft),
        )
    where = f"where the engine captures: {_code(profile, 'capture')}, and where it takes the ids from: "
    text = f"{right}. Look {where}{_code(profile, 'wiring')}"
    if not profile.wiring_flag:
        return Edit(text)
    return Edit(
        f"{text}. Until that is mended, serve with {profile.wiring_flag} {listed}",
        _serve(profile, draft, profile.wiring_flag, listed),
    )


def _same(draft: Path, served: Path | None) -> bool:
    return served is not None and draft.resolve() == served.resolve()


def _edited_since(profile: Profile, draft: Path) -> Edit:
    """The folder that was served is the one that is believed, and says now what is right."""
    text = f"serve {draft} again: its config.json is right now, and was another when this trace was served"
    return Edit(text, _serve(profile, draft))


def _serve(profile: Profile, draft: Path, *flags: str) -> str:
    """The command that serves a draft, as a shell takes it; empty where the engine has none."""
    return " ".join(filter(None, (filled(profile.serve, {"DRAFT": str(draft)}), shlex.join(flags))))


def _id_keys(profile: Profile, folder: Path, key: str | None) -> list[IdKey]:
    """The keys of layer ids that a config has, all of them; where none is read as it is meant, one that is, too."""
    config = config_of(folder)
    there = [one for one in ID_KEYS if value_at(config, one.key) is not None]
    if _read_key(profile, config) in ID_KEYS:
        return there
    right = [one for one in profile.ids if one in ID_KEYS]
    return [next((one for one in right if one.key == key), right[0]), *there]


def fix_switch(
    profile: Profile,
    switch: str,
    *,
    who: Who,
    draft: Path,
    served: Path | None,
    right: object,
    now: object,
    stage: str = "",
) -> Edit:
    """Make a link read `right` where it reads `now`.

    `switch` is a link's name, one of `profile.switches` or of what tensors decide; an engine that is wrong about it is
    so at `stage`, by default where the link lies. RoPE's scaling is best given as a `RopeSpec` or as the mapping that
    the config holds; other readings as they are printed.
    """
    if switch not in profile.switches:
        return _fix_tensor(profile, switch, who, draft, served, right, now, stage)
    if who == "conversion" and _same(draft, served):
        return _edited_since(profile, draft)
    link = profile.switches[switch]
    right, now = _reading(link, right), _reading(link, now)
    folder = (served or draft) if who == "conversion" else draft
    changes = _needed(_changes(link, right), config_of(folder))
    if who == "conversion" and link.key and not isinstance(right, tuple):  # what is to be put back is there to be read
        own = config_of(draft)
        changes = _needed({link.key: value_at(own, place_of(own, link.key))}, config_of(folder))
    says = f"{link.title} has to be {_said(right)}, and is {_said(now)}"
    names = " and ".join(changes) or link.key
    if who == "engine":
        where = _code(profile, stage or link.code)
        told = f"{draft / 'config.json'} is right about {names}: {says} in the engine{_known(profile, switch)}"
        return Edit(f"{told}. Look there: {where}")
    edit = Edit(f"in {folder / 'config.json'} set {names}: {says}")
    if changes:
        why = f"{says}{f' ({link.note})' if link.note else ''}"
        edit = set_config(folder, changes, {}, why=why, default=link.default)
    if who == "config":
        return edit
    return Edit(f"convert {draft} again, keeping {names}, which the copy lost; or {edit.text}", edit.command)


def _known(profile: Profile, link: str) -> str:
    """What an engine is known to do otherwise about a link, whatever a config says."""
    known = list(dict.fromkeys(one.why for one in profile.departures if one.link == link))
    return f" (of {profile.title} it is known: {'; '.join(known)})" if known else ""


def _reading(link: Switch, value: object) -> object:
    """What a `RopeSpec` says about one link; other readings as they are."""
    if not isinstance(value, RopeSpec):
        return value
    of_keys = {"rope_theta": value.theta, "rope_scaling": _scaling(value)}
    return of_keys.get(link.key, "interleaved" if value.interleaved else "halves")


def _needed(changes: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Changes by the place where this config has each key; of several, those that change something."""
    placed = {place_of(config, key): value for key, value in changes.items()}
    return {key: value for key, value in placed.items() if (value_at(config, key) or False) != value} or placed


def _changes(link: Switch, right: object) -> dict[str, Any]:
    """The config keys, and the values that make a link read `right`; empty where a reading says too little."""
    if link.values:
        return dict(link.values.get(str(right), {}))
    if isinstance(right, tuple):
        return _window_keys(right)
    if isinstance(right, Mapping) or right is None or (isinstance(right, int | float) and not isinstance(right, bool)):
        return {link.key: dict(right) if isinstance(right, Mapping) else right}
    if link.key == "rope_theta":
        return {link.key: float(str(right))}
    return {link.key: None} if str(right) == "none" else {}


def _window_keys(windows: tuple[int | None, ...]) -> dict[str, Any]:
    """What makes layers see these windows."""
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    widths = [window for window in windows if window is not None]
    return {"layer_types": kinds, **({"sliding_window": widths[0], "use_sliding_window": True} if widths else {})}


def _scaling(rope: RopeSpec) -> dict[str, Any] | None:
    """What `rope_scaling` holds for these frequencies."""
    if rope.kind is RopeKind.DEFAULT:
        return None
    names = {
        RopeKind.LINEAR: (),
        RopeKind.LLAMA3: ("low_freq_factor", "high_freq_factor"),
        RopeKind.YARN: ("beta_fast", "beta_slow"),
    }[rope.kind]
    held = {"rope_type": str(rope.kind), "factor": rope.factor, **{n: v for n, v in asdict(rope).items() if n in names}}
    if rope.kind is not RopeKind.LINEAR:
        held["original_max_position_embeddings"] = rope.original_context
    if rope.kind is RopeKind.YARN:
        held |= {"attention_factor": rope.cos_scale} | ({} if rope.truncate else {"truncate": False})
    return held


def _fix_tensor(
    profile: Profile, name: str, who: Who, draft: Path, served: Path | None, right: object, now: object, stage: str
) -> Edit:
    """Links that tensors decide. `right` and `now` say what the tensor is and what it is to be."""
    title, usual = TENSORS.get(name, (name, "load"))
    says = f"{title} has to be {_said(right)}, and is {_said(now)}"
    if who == "engine":
        return Edit(f"{draft} holds it right: {says} in the engine. Look there: {_code(profile, stage or usual)}")
    if who == "config":
        return Edit(f"export {draft} again, from the run that trained it: {says} in its *.safetensors")
    copy = served or draft
    return Edit(f"convert {draft} again, or copy the tensor from {draft} to {copy}: {says} in {copy}")


def fix_weights(profile: Profile, *, who: Who, draft: Path, served: Path | None) -> Edit:
    """Have the weights of `draft` served, where all or most of what is in memory are other ones."""
    if who == "engine":
        return Edit(f"{draft} holds other weights than the engine has. Look there: {_code(profile, 'load')}")
    instead = (
        f"not {served}" if served and not _same(draft, served) else "which was written since this trace was served"
    )
    again = "convert it anew and serve that, if the engine cannot take it as it is"
    return Edit(f"serve {draft}, {instead}; {again}", _serve(profile, draft))


def fix_hand_off(profile: Profile, fault: str, variant: str = "") -> Edit:
    """The repair of a link that is engine code, by the fault's id: what has to hold, and where to look."""
    link = ENGINE_LINKS.get(fault)
    rule = link.variants.get(variant, link.rule) if link else f"mend what {fault} is about"
    return Edit(f"in the engine, {rule}. Look there: {_code(profile, link.stage if link else 'rows')}")


def _code(profile: Profile, stage: str) -> str:
    """Where an engine has a stage, or that this is not known."""
    if stage in profile.code:
        return profile.code[stage]
    return f"(where {profile.engine} has it, spectrace does not know: no profile of this engine yet)"


def _said(reading: object) -> str:
    if isinstance(reading, Mapping):
        return json.dumps(dict(reading))
    if isinstance(reading, tuple):
        each = [_said(one) for one in reading]
        return each[0] if len(set(each)) == 1 else f"{', '.join(each)} by layer"
    return "none" if reading is None else f"{reading:g}" if isinstance(reading, float) else str(reading)

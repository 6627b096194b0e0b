"""What an edit is, and the commands that make it: keys of a config set, tensors of a draft's files rewritten."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from spectrace.replay.profiles.profile import value_at

__all__ = ["Edit", "config_of", "place_of", "python_command", "set_config", "tensor_command"]

_BODY: Final = "transformer_layer_config"
_WITHIN: Final = frozenset({
    "attention_bias", "layer_types", "max_position_embeddings", "mlp_bias", "rope_interleave", "rope_scaling",
    "rope_theta", "sliding_window", "use_sliding_window",
})  # fmt: skip
"""Where speculators' configs have what their decoder layer is made by, and what of it edits are about."""


@dataclass(frozen=True, slots=True)
class Edit:
    """What to do, in words; `command` does it, or is empty where no command can."""

    text: str
    command: str = ""


def config_of(folder: Path) -> Mapping[str, Any]:
    """A folder's config, empty where it cannot be read: the edit is then written without what it holds."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def place_of(config: Mapping[str, Any], key: str) -> str:
    """Where a config has a key: RoPE's may lie within `rope_parameters` or `rope_scaling`, which then counts."""
    body = config.get(_BODY)
    if isinstance(body, dict) and key in _WITHIN:
        return f"{_BODY}.{place_of(body, key)}"
    held = "rope_scaling" if config.get("rope_scaling") is not None else "rope_parameters"
    if key == "rope_scaling" and config.get(key) is None and config.get("rope_parameters") is not None:
        return "rope_parameters"
    return f"{held}.{key}" if value_at(config, f"{held}.{key}") is not None else key


def set_config(
    folder: Path, changes: Mapping[str, Any], now: Mapping[str, Any], *, why: str = "", default: str = ""
) -> Edit:
    """The edit that sets keys of a config, with what they are now, and the command that makes it."""
    path, config, sets = folder / "config.json", config_of(folder), []
    absent = f"absent now, which means {default}" if default else "absent now"
    for key, value in changes.items():
        held = value_at(config, key) if config else now.get(key)
        sets.append(f"{key} to {json.dumps(value)} ({absent if held is None else f'now {json.dumps(held)}'})")
    lines = [
        "import json, pathlib",
        f"p = pathlib.Path({str(path)!r})",
        "c = json.loads(p.read_text())",
        *_holders(changes),
        *(f"{_item(key)} = {value!r}" for key, value in changes.items()),
        "p.write_text(json.dumps(c, indent=2))",
    ]
    return Edit(f"in {path} set {' and '.join(sets)}{': ' * bool(why)}{why}", _python(lines))


def _item(key: str) -> str:
    """The item of the config `c` that a dotted key names, as code."""
    *outer, inner = key.split(".")
    return f"c{''.join(f'[{one!r}]' for one in outer)}[{inner!r}]"


def _holders(changes: Mapping[str, Any]) -> list[str]:
    """Lines that make the objects of `c` that hold these keys, where they are absent or null."""
    made: dict[str, None] = {}
    for key in changes:
        outer = key.split(".")[:-1]
        for depth in range(1, len(outer) + 1):
            place = "c" + "".join(f"[{one!r}]" for one in outer[: depth - 1])
            made[f"{place}[{outer[depth - 1]!r}] = {place}.get({outer[depth - 1]!r}) or {{}}"] = None
    return list(made)


def tensor_command(folder: Path, before: Sequence[str], each: Sequence[str]) -> str:
    """The command that does these lines to the tensors `t` of every file of a folder, and writes those files that have
    changed: that have `changed` set. An index beside them forgets what is no longer there.
    """
    lines = [
        f"d = pathlib.Path({str(folder)!r})",
        *before,
        "for f in d.glob('*.safetensors'):",
        "    t, changed = load_file(f), False",
        *(f"    {line}" for line in each),
        "    if changed:",
        "        save_file(t, f, metadata={'format': 'pt'})",
    ]
    return python_command(lines)


def python_command(lines: Sequence[str]) -> str:
    """The command that runs these lines, which may load and save tensors."""
    return _python(["import json, pathlib, torch", "from safetensors.torch import load_file, save_file", *lines])


def _python(lines: Sequence[str]) -> str:
    """The command that runs these lines, as a shell takes it."""
    quoted = re.sub(r'([\\"$`])', r"\\\1", "\n".join(lines))
    return f'python -c "\n{quoted}"'

"""Prints constraints: the named groups of dependencies at their lower bounds, all other packages as in constraints.txt.

A group is `base` or an extra of pyproject.toml. Base and the `engine` extra are lowered one at a time, since the oldest
transformers allowed asks for newer packages than the base does.
"""

import re
import sys
import tomllib
from pathlib import Path

__all__ = ["lower_bounds"]

ROOT = Path(__file__).parents[1]


def lower_bounds(groups: list[str]) -> dict[str, str]:
    """Package to version; a dependency that states no bound is left out."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    stated = {"base": project["dependencies"], **project["optional-dependencies"]}
    return dict(line.split(">=") for group in groups for line in stated[group] if ">=" in line)


def name_of(pin: str) -> str:
    return re.sub(r"[-_.]+", "-", pin.partition("==")[0]).lower()


if __name__ == "__main__":
    bounds = lower_bounds(sys.argv[1:])
    pins = [line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if "==" in line]
    print(*(f"{name}=={version}" for name, version in bounds.items()), sep="\n")
    print(*(pin for pin in pins if name_of(pin) not in bounds), sep="\n")

"""Every module says what it exports, and nobody imports what another module keeps to itself."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import spectrace.tracer

MODULES = sorted(Path(spectrace.tracer.__file__).parent.glob("*.py"))


def exported(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    [names] = [n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"]
    return list(ast.literal_eval(names))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_imports_take_exported_names_only(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("spectrace.tracer."):
            source = path.with_name(f"{(node.module or '').rpartition('.')[2]}.py")
            assert {alias.name for alias in node.names} <= set(exported(source)), source.name


def test_the_package_exports_what_it_lists() -> None:
    assert sorted(spectrace.tracer.__all__, key=str.lower) == sorted(set(spectrace.tracer.__all__), key=str.lower)
    assert all(hasattr(spectrace.tracer, name) for name in spectrace.tracer.__all__)

"""What installs, what a module exports, and which way imports point."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("tracer", "engine", "replay", "cli")
FILES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
MAY_IMPORT = {
    "tracer": ("tracer",),
    "engine": ("engine", "tracer"),
    "replay": (
        "replay", "engine.attention", "engine.checkpoint", "engine.dialect", "engine.draft", "engine.fields",
        "engine.layouts.names", "engine.packing", "engine.problem", "engine.rope", "engine.rope_fields", "engine.spec",
        "engine.stored", "engine.target", "engine.tree", "engine.turned", "tracer",
    ),
    "cli": ("cli", "replay", "engine", "tracer"),
}  # fmt: skip


def module_of(file: Path) -> str:
    parts = ("spectrace", *file.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(file): ast.parse(file.read_text(encoding="utf-8")) for file in FILES}
HEAVY = {"torch", "transformers", "ray", "accelerate", "gguf", "pandas", "vllm", "sglang"}


def modules_of(*packages: str) -> list[str]:
    return [module for module in MODULES if module.split(".")[1] in packages]


def exports(tree: ast.Module) -> list[str] | None:
    """The value of `__all__`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            names = ast.literal_eval(node.value)
            assert isinstance(names, list)
            return names
    return None


def imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Module and name of everything imported, wherever in the file; the name is empty for a plain `import`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (("." * node.level + (node.module or ""), alias.name) for alias in node.names)


def spectrace_imports(tree: ast.Module) -> Iterator[str]:
    """The spectrace modules that a module imports; `from spectrace.engine import draft` is spectrace.engine.draft."""
    for module, name in imports(tree):
        if module.partition(".")[0] == "spectrace":
            yield f"{module}.{name}" if f"{module}.{name}" in MODULES else module


def run_python(code: str) -> str:
    """Run code in a fresh interpreter in the project's root, where a bare `import tracer` would find the folder."""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_by(modules: list[str]) -> set[str]:
    """Top-level names in `sys.modules` after importing these modules."""
    code = f"""
import importlib, json, sys
for module in {modules!r}:
    importlib.import_module(module)
print(json.dumps(sorted({{name.partition(".")[0] for name in sys.modules}})))
"""
    return set(json.loads(run_python(code).splitlines()[-1]))


def defined_in(tree: ast.Module | ast.If) -> set[str]:
    """Names bound at the top of a module, or for type checkers alone."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.If):
            names |= defined_in(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            stored = [part for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)]
            names |= {part.id for part in stored}
    return names


def test_every_module_says_what_it_exports_and_has_it() -> None:
    assert len(MODULES) == len(FILES) > len(PACKAGES)
    for module, tree in MODULES.items():
        names = exports(tree)
        if names is None:
            assert all(isinstance(node, ast.Expr) for node in tree.body), f"{module} defines things and has no __all__"
        else:
            assert len(set(names)) == len(names), module
            assert set(names) <= defined_in(tree), module


def test_what_one_module_imports_from_another_is_exported_there() -> None:
    hidden = {
        f"{source}.{name}": module
        for module, tree in MODULES.items()
        for source, name in imports(tree)
        if source in MODULES and f"{source}.{name}" not in MODULES and name not in (exports(MODULES[source]) or [])
    }
    assert hidden == {}


def test_imports_point_one_way() -> None:
    wrong = []
    for module, tree in MODULES.items():
        allowed = [f"spectrace.{name}" for name in MAY_IMPORT[module.split(".")[1]]]
        for name in spectrace_imports(tree):
            if not any(name == one or name.startswith(f"{one}.") for one in allowed):
                wrong.append(f"{module} imports {name}")
    assert wrong == []


def test_no_module_is_imported_by_a_bare_or_relative_name() -> None:
    for module, tree in MODULES.items():
        assert not {source.partition(".")[0] for source, _ in imports(tree)} & {*PACKAGES, ""}, module


def test_everything_imports_and_bare_names_never_load() -> None:
    assert not loaded_by(list(MODULES)) & set(PACKAGES)


def test_bare_names_never_load_in_a_ray_worker() -> None:
    code = f"""
import importlib, os, sys
import ray
from spectrace.engine.deployment import Deployment

ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="error", object_store_memory=1 << 27)

@ray.remote
def loaded(deployment):
    for module in {list(MODULES)!r}:
        importlib.import_module(module)
    return deployment.__module__, sorted(set(sys.modules) & set({PACKAGES!r}))

print(ray.get(loaded.remote(Deployment)))
ray.shutdown()
"""
    assert run_python(code).splitlines()[-1] == "('spectrace.engine.deployment', [])"


def test_the_tracer_loads_neither_engines_nor_torch() -> None:
    assert not loaded_by(modules_of("tracer")) & HEAVY


def test_replay_loads_no_engine() -> None:
    assert not loaded_by(modules_of("tracer", "replay")) & (HEAVY - {"torch"})


def test_light_commands_load_no_torch() -> None:
    assert not loaded_by(["spectrace.cli.main", "spectrace.cli.info", "spectrace.cli.check"]) & HEAVY


def test_the_command_is_installed_and_every_command_has_help() -> None:
    spectrace = Path(sys.executable).with_name("spectrace")
    page = subprocess.run([spectrace, "--help"], capture_output=True, text=True, timeout=60)
    assert page.returncode == 0, page.stderr
    commands = [line.split()[0] for line in page.stdout.partition("Commands:\n")[2].splitlines() if line.strip()]
    assert {"demo", "run", "record", "replay", "info", "check"} <= set(commands)
    for command in commands:
        done = subprocess.run([spectrace, command, "--help"], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"Usage: spectrace {command} ")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy, since a build leaves files behind that a later wheel would pick up."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", str(out), str(source)]
    done = subprocess.run([sys.executable, "-m", "pip", "wheel", *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(next(out.glob("spectrace-*.whl")))


def test_the_wheel_holds_every_module_under_spectrace_and_nothing_beside_it(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"spectrace"}
    assert {name for name in names if name.endswith(".py")} == {
        f"spectrace/{file.relative_to(ROOT).as_posix()}" for file in FILES
    }
    assert {f"spectrace/{package}/py.typed" for package in PACKAGES} <= set(names)


def test_the_base_install_asks_for_no_extra_and_for_no_version_of_torch(wheel: zipfile.ZipFile) -> None:
    metadata = wheel.read(next(name for name in wheel.namelist() if name.endswith("/METADATA"))).decode()
    wanted = [line.partition(": ")[2] for line in metadata.splitlines() if line.startswith("Requires-Dist: ")]
    base = {one for one in wanted if "extra ==" not in one}
    assert "torch" in base
    assert not any(one.startswith(name) for one in base for name in HEAVY - {"torch"})

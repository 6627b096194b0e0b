"""Which boundaries SGLang captures for a draft's layer ids, told by its own code: prints JSON.

`python bench/oracles/setters_sglang.py SOURCE... --layers 61 --ids 2,30,58 --ids none [--target Qwen3ForCausalLM]...`

A source is a wheel, or a folder that holds `sglang/`. Nothing of it is imported. Executed as they stand in its files
are the statement that takes ids from the draft's config; a target's `set_eagle3_layers_to_capture`, its bases' and its
inner models', on objects that hold each other as `__init__` has it; and, at every boundary, the tests by which forwards
capture, with the statements that they guard as far as plain numbers run them: a residual that is not there yet shows.

Boundary b is what enters layer b: 0 is the embedding, L what the last of L layers leaves. Ids lie within the draft's
`eagle_config` (nested) or at the top of its config. `set` is the list that the setter leaves, `captured` what a run is
given back. A runner of graphs that calls the setter itself, without ids, records its graphs before the ids are set:
they give back `graphs`, and `captured` is for what runs without graphs alone. One pipeline stage, no expert groups.
"""

import __future__

import argparse
import ast
import json
import sys
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SETTER, LIST, FLAG = "set_eagle3_layers_to_capture", "layers_to_capture", "_is_layer_to_capture"
KEY = "eagle_aux_hidden_state_layer_ids"
ROOT = "sglang/srt/"
STAGE = SimpleNamespace(is_first_rank=True, is_last_rank=True, world_size=1)
LENT = {"get_pp_group": lambda: STAGE, "get_parallel": lambda: SimpleNamespace(pp_group=STAGE)}
"""What setters call besides their own classes."""


def find(root: ast.AST, kind: type[ast.AST]) -> Iterator[Any]:
    return (node for node in ast.walk(root) if isinstance(node, kind))


def assigned(root: ast.AST, name: str) -> Iterator[ast.expr]:
    """What is assigned to a name or an attribute anywhere within."""
    return (node.value for node in find(root, ast.Assign) if ast.unparse(node.targets[0]) == name)


def run(path: str, node: ast.stmt | ast.expr, names: dict[str, Any]) -> Any:
    """Execute a statement, or evaluate an expression, as it stands in that file."""
    one = isinstance(node, ast.expr)
    whole = ast.Expression(node) if one else ast.Module([node], [])
    return eval(compile(whole, path, "eval" if one else "exec", __future__.annotations.compiler_flag), names)


class File:
    """One file: its classes, those that can be served, and where the names in it come from."""

    def __init__(self, path: str, text: bytes) -> None:
        self.path, self.tree = path, ast.parse(text)
        self.classes = {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}
        self.served = [name.id for offer in assigned(self.tree, "EntryClass") for name in find(offer, ast.Name)]
        self.imports: dict[str, tuple[str, str]] = {}
        for node in find(self.tree, ast.ImportFrom):
            path = (node.module or "").removeprefix("sglang.srt.").replace(".", "/") + ".py"
            self.imports |= {name.asname or name.name: (path, name.name) for name in node.names}


class Model:
    """A model as far as setters and tests look at it; subclasses know the file and the node of their class."""

    def __init__(self, source: "Source", layers: int) -> None:
        config = SimpleNamespace(num_hidden_layers=layers)
        config.text_config, self.config, self.pp_group = config, config, STAGE
        self.start_layer, self.end_layer, self.layers_to_capture = 0, layers, []
        self.enable_a2a_moe = False
        self.layers = [SimpleNamespace() for _ in range(layers)]
        self.inner: list[Model] = []
        for name in ("model", "language_model"):
            if kind := source.held(type(self), name):
                self.inner.append(kind(source, layers))
                setattr(self, name, self.inner[-1])

    def all(self) -> "list[Model]":
        return [self, *(one for inner in self.inner for one in inner.all())]


class Source:
    """One version of SGLang, as text."""

    def __init__(self, path: Path) -> None:
        self.files = {
            name: File(name, text)
            for name, text in (self._unpacked if path.is_dir() else self._packed)(path)
            if name.startswith(("models/", "model_executor/")) and name.endswith(".py")
        }
        self.built: dict[tuple[str, str], type[Model]] = {}

    def _unpacked(self, path: Path) -> Iterator[tuple[str, bytes]]:
        files = sorted(path.glob(f"{ROOT}model*/**/*.py"))
        return ((one.relative_to(path / ROOT).as_posix(), one.read_bytes()) for one in files)

    def _packed(self, path: Path) -> Iterator[tuple[str, bytes]]:
        with zipfile.ZipFile(path) as wheel:
            names = [name for name in wheel.namelist() if name.startswith(f"{ROOT}model")]
            yield from ((name.removeprefix(ROOT), wheel.read(name)) for name in sorted(names))

    def kind(self, file: File, name: str) -> type[Model] | None:
        """The class of that name in that file: its setter, if it has one, on its bases made alike."""
        if name not in file.classes:
            path, origin = file.imports.get(name, ("", ""))
            if "." in name:  # of a module that is imported as a whole
                package, module = file.imports.get(name.partition(".")[0], ("", ""))
                path, origin = f"{package.removesuffix('.py')}/{module}.py", name.rpartition(".")[2]
            return self.kind(self.files[path], origin) if path in self.files and path != file.path else None
        if (file.path, name) not in self.built:
            node = file.classes[name]
            bases = [self.kind(file, ast.unparse(base)) for base in node.bases if ast.unparse(base) != name]
            body: dict[str, Any] = {"file": file, "node": node}
            for member in node.body:
                if getattr(member, "name", "") == SETTER:
                    run(file.path, member, names := dict(LENT))
                    body |= {SETTER: names[SETTER], "where": f"{file.path}:{member.lineno}"}
            self.built[file.path, name] = type(name, tuple(filter(None, bases)) or (Model,), body)
        return self.built[file.path, name]

    @cached_property
    def targets(self) -> dict[str, type[Model]]:
        """The classes that can be served and have a setter."""
        found = {name: self.kind(file, name) for file in self.files.values() for name in file.served}
        return {name: one for name, one in sorted(found.items()) if one and hasattr(one, SETTER)}

    @cache  # noqa: B019
    def held(self, kind: type[Model], attribute: str) -> type[Model] | None:
        """The class that `__init__` assigns to the attribute: called there, or in a method, or handed on to a base."""
        given: dict[str, tuple[File, str]] = {}
        for one in kind.__mro__[:-2]:
            file, members = one.file, {node.name: node for node in one.node.body if hasattr(node, "name")}
            start = members.get("__init__", ast.Pass())
            for node in one.node.body:  # a class by another name, within the class
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name | ast.Attribute):
                    given.setdefault(f"self.{ast.unparse(node.targets[0])}", (file, ast.unparse(node.value)))
            if isinstance(start, ast.FunctionDef):
                for arg, value in zip(reversed(start.args.args), reversed(start.args.defaults), strict=False):
                    given.setdefault(arg.arg, (file, ast.unparse(value)))
            calls = [call for value in assigned(start, f"self.{attribute}") for call in find(value, ast.Call)]
            for name in [ast.unparse(call.func) for call in calls]:
                made = members.get(name.removeprefix("self."), ast.Pass())
                for called in [name, *(ast.unparse(call.func) for call in find(made, ast.Call))]:
                    if found := self.kind(*given.get(called, (file, called))):
                        return found
            for word in (word for call in find(start, ast.Call) for word in call.keywords):
                given.setdefault(word.arg or "", (file, ast.unparse(word.value)))
        return None

    @cached_property
    def reader(self) -> tuple[File, ast.If]:
        """The statement that takes ids from the draft's config."""
        for file in self.files.values():
            for node in find(file.tree, ast.If):
                if "is_eagle3()" in ast.unparse(node.test) and f"['{KEY}']" in ast.unparse(node):
                    return file, node
        raise SystemExit(f"nothing reads {KEY}: not a version of SGLang that this script knows")

    @cached_property
    def calls(self) -> dict[str, bool]:
        """Where runners call the setter, and whether with ids."""
        every = ((file, call) for file in self.files.values() for call in find(file.tree, ast.Call))
        ours = ((file, call) for file, call in every if getattr(call.func, "attr", "") == SETTER)
        return {f"{f.path}:{call.lineno}": bool(call.args) for f, call in ours if f.path.startswith("model_executor/")}

    def read(self, config: dict[str, Any]) -> tuple[bool, list[int] | None]:
        """Whether a draft of this config is fed from the target's layers at all, and the ids that are taken for it."""
        draft = SimpleNamespace(hf_config=SimpleNamespace(**config))
        algorithm = SimpleNamespace(is_eagle3=lambda: True)
        held = SimpleNamespace(spec_algorithm=algorithm, is_draft_worker=False, eagle_aux_hidden_state_layer_ids=None)
        held._build_model_config = lambda *_, **__: draft
        lent = {"self": held, "config": held, "spec_algorithm": algorithm, "draft_model_config": draft}
        lent["ModelConfig"] = SimpleNamespace(from_server_args=held._build_model_config)
        lent["server_args"] = SimpleNamespace(speculative_draft_model_path="", speculative_draft_model_revision="")
        file, statement = self.reader
        run(file.path, statement, lent)
        return held.eagle_use_aux_hidden_state, held.eagle_aux_hidden_state_layer_ids

    def outcome(self, name: str, layers: int, used: bool, ids: list[int] | None) -> dict[str, Any]:
        """What a target of so many layers gives back for these ids, or the error that they raise."""
        if name not in self.targets:
            return {"error": f"no class {name} that has {SETTER}"}
        model, told = self.targets[name](self, layers), {}
        try:
            if used and any("cuda_graph_runner" in where and not with_ids for where, with_ids in self.calls.items()):
                getattr(model, SETTER)()
                told["graphs"] = captured(model, layers)
            if used:
                getattr(model, SETTER)(ids)
                told["set"] = next((one.layers_to_capture for one in model.all() if one.layers_to_capture), [])
            return told | {"captured": captured(model, layers)}
        except Exception as error:
            return told | {"error": f"{type(error).__name__}: {error}"}


@cache
def tests(kind: type[Model]) -> list[tuple[str, ast.expr, ast.stmt | None, ast.expr, bool]]:
    """A forward's tests of whether to capture: file, test, statement it guards, what is tested, whether in a loop."""
    every = ((one.file.path, member) for one in kind.__mro__[:-2] for member in one.node.body)
    path, forward = next((pair for pair in every if getattr(pair[1], "name", "") == "forward"), ("", ast.Pass()))
    looped = {id(node) for loop in find(forward, ast.For) for node in ast.walk(loop)}
    guarded = {id(node.test): node for node in find(forward, ast.If)}
    lists = [(t, t.left) for t in find(forward, ast.Compare) if ast.unparse(t.comparators[0]) == f"self.{LIST}"]
    gets = (call for call in find(forward, ast.Call) if ast.unparse(call.func) == "getattr")
    flags = [(t, t.args[0]) for t in gets if FLAG in ast.unparse(t.args[1])]
    return [
        (path, t, guarded.get(id(t)), left, id(t) in looped and isinstance(left, ast.Name)) for t, left in lists + flags
    ]


def captured(whole: Model, layers: int) -> list[int]:
    """The boundaries at which the forwards of a model and of those within it capture."""
    found: set[int] = set()
    for model in whole.all():
        for path, test, statement, left, looped in tests(type(model)):
            for b in range(layers) if looped else [layers]:
                at: Any = model.layers[b] if isinstance(test, ast.Call) else b
                names = {"self": model, "hidden_states": 1, "residual": 1 if b else None, "aux_hidden_states": []}
                names |= {name.id: at for name in find(left, ast.Name) if name.id != "self"}
                if run(path, test, names):
                    found.add(b)
                    with suppress(AttributeError, NameError):  # it needs more than numbers
                        run(path, statement or ast.Constant(None, lineno=1, col_offset=0), names)
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="+", type=Path)
    parser.add_argument("--layers", type=int, action="append", required=True)
    parser.add_argument("--ids", action="append", required=True, help="with commas between; or none")
    parser.add_argument("--target", action="append", help="the class of a target; all if absent")
    asked = parser.parse_args()
    configs: dict[str, dict[str, Any]] = {}
    for ids in (json.loads(f"[{text}]") if text != "none" else [] for text in asked.ids):
        configs |= {f"nested {ids}": {"eagle_config": {KEY: ids}}, f"top {ids}": {KEY: ids}} if ids else {"none": {}}
    told: dict[str, Any] = {}
    for path in asked.sources:
        source = Source(path)
        reads = {title: source.read(config) for title, config in configs.items()}
        told[str(path)] = {
            "setter called, with ids": source.calls,
            "ids read": {title: ids for title, (_, ids) in reads.items()},
            "targets": {
                name: {
                    "setter": getattr(source.targets.get(name), "where", None),
                    **{f"{n} layers": {t: source.outcome(name, n, *reads[t]) for t in reads} for n in asked.layers},
                }
                for name in asked.target or source.targets
            },
        }
    json.dump(told, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()

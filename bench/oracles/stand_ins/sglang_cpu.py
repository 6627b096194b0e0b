"""Modules that SGLang imports on any machine, and that here cannot be: `triton`, `sgl_kernel` and `torchvision`.

Enough of them to be imported: kernels can be declared with this `triton`, none can be launched; every function of this
`sgl_kernel` raises. What SGLang computes with these in place is computed by its own torch code, or not at all.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from transformers.utils import is_torchvision_available

__all__ = ["install"]


class _Launchless:
    """What `@triton.jit` makes of a function here: it has a name, and cannot be run."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"{self.__name__} is a GPU kernel: it is only declared here")

    def __getitem__(self, grid: object) -> "_Launchless":
        return self


def _declare(*args: Any, **_: Any) -> Any:
    """Any decorator of triton's, with and without arguments of its own."""
    if len(args) == 1 and (callable(args[0]) or isinstance(args[0], _Launchless)):
        return _Launchless(getattr(args[0], "__name__", "a kernel"))
    return _declare


class _Hollow(ModuleType):
    """A module in which any name is found: a type where it looks like one, else a decorator; a kernel of sgl_kernel."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__version__ = "3.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("language", "core"):  # modules that torch reaches for without importing them
            return import_module(f"{self.__name__}.{name}")
        if self.__name__ == "sgl_kernel" and not name.endswith("_cpu"):
            raise AttributeError(name)
        if self.__name__ == "sgl_kernel":
            found: Any = _Launchless(name)
        elif name[0].isupper() or name in ("constexpr", "dtype", "tensor"):
            base = Exception if name.endswith(("Error", "Resources")) else object
            found = type(name, (base,), {"__init__": lambda self, *_, **__: None})
        else:
            found = _declare
        setattr(self, name, found)
        return found


class _Finder:
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        ours = name == "sgl_kernel" or name.split(".")[0] in ("triton", "torchvision")
        return ModuleSpec(name, self, is_package=True) if ours else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Hollow(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def install() -> None:
    """Let them be imported from here on; a real one that is installed goes first.

    transformers asks first, and goes on without torchvision: SGLang insists on it, and PyPI's does not load beside a
    CPU's torch.
    """
    is_torchvision_available()
    sys.meta_path.append(_Finder())  # type: ignore[arg-type]

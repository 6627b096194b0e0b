"""Hooks on a host's methods: whatever goes wrong in one stays in it, and what it costs the host is counted."""

from __future__ import annotations

import functools
import inspect
import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = ["Hook", "Hooks", "Watch", "Watching"]

log = logging.getLogger("spectrace.attach")

Watching: TypeAlias = Generator[None, Any, None]
Watch: TypeAlias = Callable[[Any, Mapping[str, Any]], Watching]
"""Told of a call before it happens, by the object and its arguments by name; sent the result after its one `yield`."""


@dataclass(slots=True)
class Hook:
    """One hook's account: `refused` says why it is not in place, `failure` what first went wrong in it.

    `secs` is the CPU time of the host's thread that it took.
    """

    name: str
    refused: str = ""
    calls: int = 0
    failures: int = 0
    failure: str = ""
    secs: float = 0.0

    def failed(self, error: BaseException) -> None:
        self.failures += 1
        if not self.failure:
            self.failure = f"{type(error).__name__}: {error}"
            log.error("spectrace: %s: %s; the server goes on, later failures are counted", self.name, self.failure)


class Hooks:
    """The hooks of one process, by name."""

    def __init__(self) -> None:
        self.placed: dict[str, Hook] = {}

    def place(self, owner: Any, method: str, watch: Watch, *, needs: Sequence[str] = ()) -> Hook:
        """Watch a method of a class, or a function of a module, once.

        It is left alone where it is not there, or lacks an argument of `needs`.
        """
        name = f"{owner.__name__}.{method}"
        if name in self.placed:
            return self.placed[name]
        hook = self.placed[name] = Hook(name)
        original = getattr(owner, method, None)
        if original is None:
            hook.refused = f"{owner.__name__} has no {method}"
            return hook
        signature = inspect.signature(original)
        if lacking := [need for need in needs if need not in signature.parameters]:
            hook.refused = f"{name}{signature} takes no {', '.join(lacking)}"
            return hook
        setattr(owner, method, _hooked(original, signature, watch, hook))
        return hook


def _hooked(original: Any, signature: inspect.Signature, watch: Watch, hook: Hook) -> Any:
    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        watching = _begin(signature, watch, hook, args, kwargs)
        result = original(*args, **kwargs)
        if watching is not None:
            _end(watching, hook, result)
        return result

    return hooked


def _begin(
    signature: inspect.Signature, watch: Watch, hook: Hook, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Watching | None:
    started = time.thread_time()
    hook.calls += 1
    try:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        host, *_ = bound.arguments.values()
        watching = watch(host, bound.arguments)
        next(watching)
        return watching
    except StopIteration:
        return None
    except Exception as error:
        hook.failed(error)
        return None
    finally:
        hook.secs += time.thread_time() - started


def _end(watching: Watching, hook: Hook, result: Any) -> None:
    started = time.thread_time()
    try:
        watching.send(result)
    except StopIteration:
        pass
    except Exception as error:
        hook.failed(error)
    else:
        watching.close()
    finally:
        hook.secs += time.thread_time() - started

"""Hooks on a host's methods: whatever goes wrong in one stays in it, and what it costs the host is counted."""

from __future__ import annotations

import functools
import inspect
import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeAlias

from spectrace.tracer.status import HookAccount

__all__ = ["Hooks", "Watch", "Watching"]

log = logging.getLogger("spectrace.attach")

Watching: TypeAlias = Generator[None, Any, None]
Watch: TypeAlias = Callable[[Any, Mapping[str, Any]], Watching]
"""Told of a call before it happens, by the object and its arguments by name; sent the result after its one `yield`."""


class Hooks:
    """The hooks of one process, by name."""

    def __init__(self) -> None:
        self.placed: dict[str, HookAccount] = {}

    def place(
        self, owner: Any, method: str, watch: Watch, *, needs: Sequence[str] = (), optional: bool = False
    ) -> HookAccount:
        """Watch a method of a class, or a function of a module, once; an `optional` one may never fire.

        It is left alone where it is not there, or lacks an argument of `needs`.
        """
        name = f"{owner.__name__}.{method}"
        if name in self.placed:
            return self.placed[name]
        original = getattr(owner, method, None)
        if original is None:
            return self.refuse(name, f"{owner.__name__} has no {method}")
        signature = inspect.signature(original)
        if lacking := [need for need in needs if need not in signature.parameters]:
            return self.refuse(name, f"{name}{signature} takes no {', '.join(lacking)}")
        hook = self.placed[name] = HookAccount(optional=optional)
        setattr(owner, method, _hooked(original, signature, watch, hook, name))
        return hook

    def refuse(self, name: str, why: str) -> HookAccount:
        """Something that was to be hooked and is not."""
        log.error("spectrace: %s is not hooked: %s; the server goes on", name, why)
        hook = self.placed[name] = HookAccount(refused=why)
        return hook


def _hooked(original: Any, signature: inspect.Signature, watch: Watch, hook: HookAccount, name: str) -> Any:
    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        watching = _begin(signature, watch, hook, name, args, kwargs)
        started = time.thread_time()
        try:
            result = original(*args, **kwargs)
        finally:
            hook.host_secs += time.thread_time() - started
        if watching is not None:
            _end(watching, hook, name, result)
        return result

    return hooked


def _begin(
    signature: inspect.Signature,
    watch: Watch,
    hook: HookAccount,
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Watching | None:
    started = time.thread_time()
    hook.calls += 1
    try:
        watching = watch(*_told(signature, args, kwargs))
        next(watching)
        return watching
    except StopIteration:
        return None
    except Exception as error:
        _failed(hook, name, error)
        return None
    finally:
        hook.secs += time.thread_time() - started


def _told(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, Mapping[str, Any]]:
    """The object that was called, and all arguments by name."""
    if len(args) == 1 and len(kwargs) + 1 == len(signature.parameters):
        return args[0], kwargs  # binding takes longer than anything else here
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return next(iter(bound.arguments.values())), bound.arguments


def _end(watching: Watching, hook: HookAccount, name: str, result: Any) -> None:
    started = time.thread_time()
    try:
        watching.send(result)
    except StopIteration:
        pass
    except Exception as error:
        _failed(hook, name, error)
    else:
        watching.close()
    finally:
        hook.secs += time.thread_time() - started


def _failed(hook: HookAccount, name: str, error: BaseException) -> None:
    hook.failures += 1
    if not hook.failure:
        hook.failure = f"{type(error).__name__}: {error}"
        log.error("spectrace: %s: %s; the server goes on, later failures are counted", name, hook.failure)

"""A hook sees a call and its result, and nothing that goes wrong in it reaches the host."""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest

from spectrace.tracer.attach.hooks import Hooks, Watching


class Host:
    def add(self, one: int, other: int = 2) -> int:
        if one < 0:
            raise ValueError("the host's own")
        return one + other


@pytest.fixture
def host() -> type[Host]:
    """A class of its own for each test: hooks stay."""
    return type("Host", (Host,), {"add": Host.add})


def test_a_hook_is_told_the_arguments_by_name_and_sent_the_result(host: type[Host]) -> None:
    seen: list[Any] = []

    def watch(_host: Any, arguments: Mapping[str, Any]) -> Watching:
        seen.append((arguments["one"], arguments["other"]))
        seen.append((yield))

    hook = Hooks().place(host, "add", watch, needs=("one", "other"))
    assert (host().add(1), host().add(2, other=5)) == (3, 7)
    assert seen == [(1, 2), 3, (2, 5), 7] and (hook.calls, hook.failures, hook.refused) == (2, 0, "")
    assert host.add.__name__ == "add" and hook.secs >= 0


@pytest.mark.parametrize("after", [False, True])
def test_what_goes_wrong_in_a_hook_is_counted_and_kept_from_the_host(
    after: bool, host: type[Host], caplog: pytest.LogCaptureFixture
) -> None:
    def watch(_host: Any, _arguments: Mapping[str, Any]) -> Watching:
        if not after:
            raise KeyError("before")
        yield
        raise KeyError("after")

    hook = Hooks().place(host, "add", watch)
    assert [host().add(n) for n in range(3)] == [2, 3, 4]
    assert hook.failures == 3 and hook.failure == f"KeyError: '{'after' if after else 'before'}'"
    assert len(caplog.records) == 1, "said once, counted after that"


def test_a_hook_may_leave_a_call_alone(host: type[Host]) -> None:
    def watch(_host: Any, _arguments: Mapping[str, Any]) -> Watching:
        if False:
            yield

    hook = Hooks().place(host, "add", watch)
    assert host().add(1) == 3 and (hook.calls, hook.failures) == (1, 0)


def test_an_error_of_the_host_stays_its_own(host: type[Host]) -> None:
    let_go: list[str] = []

    def watch(_host: Any, _arguments: Mapping[str, Any]) -> Watching:
        try:
            yield
        finally:
            let_go.append("let go")

    hook = Hooks().place(host, "add", watch)
    with pytest.raises(ValueError, match="the host's own"):
        host().add(-1)
    assert hook.failures == 0 and let_go == ["let go"]


def test_a_method_that_is_not_as_it_was_is_left_alone(host: type[Host]) -> None:
    hooks, before = Hooks(), host.add

    def watch(_host: Any, _arguments: Mapping[str, Any]) -> Watching:
        yield

    assert "takes no third" in hooks.place(host, "add", watch, needs=("one", "third")).refused
    assert "has no subtract" in hooks.place(host, "subtract", watch).refused
    assert host.add is before


def test_a_hook_is_placed_once_and_on_functions_of_modules_too() -> None:
    module, calls = ModuleType("engine"), list[int]()
    module.load = lambda weights: weights * 2  # type: ignore[attr-defined]
    hooks = Hooks()

    def watch(weights: Any, _arguments: Mapping[str, Any]) -> Watching:
        calls.append(weights)
        yield

    assert hooks.place(module, "load", watch) is hooks.place(module, "load", watch)
    assert module.load(4) == 8 and calls == [4]

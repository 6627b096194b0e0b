"""Ray for a deployment: a cluster of this process's own, which ends with it, or one that is there already."""

import importlib.util
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from spectrace.engine.reaper import Reaper
from spectrace.tracer.errors import RunFailed, UserError

__all__ = ["check_resources", "connect_cluster", "ensure_cluster", "first_line", "start_cluster", "stop_cluster"]

_OBJECT_STORE_BYTES = 1 << 29
_KNOCK_SECS = 10.0
_SETTINGS = {  # read when ray is imported
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray runs workers at nice 15, behind everything else
    "RAY_DEDUP_LOGS_SKIP_REGEX": "^",  # skips every line: what Ray says of dead actors would go to our stdout
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # tracebacks of ranks that failed since another one died
}
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
_reaper: Reaper | None = None


def ensure_cluster(address: str | None) -> bool:
    """Be in a cluster: the one that this process is in already, else that of an address, else one of its own.

    Returns whether it has to be left again. Raises as the two below.
    """
    if _ray().is_initialized():
        return False
    connect_cluster(address) if address else start_cluster()
    return True


def start_cluster() -> None:
    """A Ray cluster on this machine alone, without dashboard; its workers run as fast as the driver does.

    It ends with `stop_cluster`, or with this process however that ends. Raises RunFailed when it does not start.
    """
    global _reaper
    try:
        _init(address="local", include_dashboard=False, object_store_memory=_OBJECT_STORE_BYTES)
    except Exception as error:  # Ray raises bare ones when a machine is too busy to start its processes in time
        raise RunFailed(f"Ray did not start: {first_line(error)}") from error
    _reaper = Reaper()


def connect_cluster(address: str) -> None:
    """Use a cluster that is there: HOST:PORT, ray://HOST:PORT or auto. Raises UserError when it cannot be reached."""
    if address.startswith("ray://") and importlib.util.find_spec("grpc") is None:
        raise UserError(f"--address {address}: Ray's client needs grpcio: pip install 'ray[client]'")
    _check_listens(address)
    try:
        _init(address=address)
    except Exception as error:  # of many kinds: nobody there, other versions of Ray or Python
        raise UserError(f"--address {address}: no cluster to use there: {first_line(error)}") from error


def _check_listens(address: str) -> None:
    """Raises UserError where nobody listens: Ray would go on trying for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return  # a name, such as auto
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_SECS).close()
    except (OSError, OverflowError) as error:
        raise UserError(
            f"--address {address}: nobody listens there ({error}); start a cluster with `ray start`"
        ) from error


def stop_cluster() -> None:
    """Leave the cluster, and end it if this process started it."""
    global _reaper
    _ray().shutdown()
    if _reaper:
        _reaper.dismiss()
    _reaper = None


def check_resources(needed: Mapping[str, float]) -> None:
    """Raises UserError where the cluster has less than is asked for: an actor would wait for ever."""
    have = _ray().cluster_resources()
    if short := {name: count for name, count in needed.items() if count > have.get(name, 0)}:
        wanted = ", ".join(f"{count:g} {name}" for name, count in short.items())
        found = ", ".join(f"{have.get(name, 0):g} {name}" for name in short)
        raise UserError(f"the ranks need {wanted}, but the Ray cluster has {found}; see `ray status`")


def _ray() -> Any:
    """The module, imported with our settings unless somebody was faster."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    import ray

    return ray


def _init(**options: Any) -> None:
    with _own_sigterm():
        _ray().init(**options, **_QUIET)


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep this process's own handler: Ray puts one in its place that ends the process without a word."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def first_line(error: BaseException) -> str:
    """An error's first line, or its type where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__

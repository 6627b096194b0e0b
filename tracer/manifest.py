"""The two ends of a trace: the root manifest that starts it and the seal that ends it.

The root manifest decides a run and never changes. The seal holds its hash and, for every writer, how many records
its ledger has and the hash of the last one, which chains to all others; the seal covers itself, too.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from xxhash import xxh3_64_hexdigest

from spectrace.tracer.errors import NotATrace, UserError
from spectrace.tracer.fingerprint import ROW_HASH, WEIGHT_HASH
from spectrace.tracer.ledger import read_ledger

__all__ = [
    "FORMAT",
    "LEDGER",
    "MANIFEST",
    "SEAL",
    "VERSION",
    "create_trace",
    "manifest_hash",
    "parse_seal",
    "render_json",
    "seal_trace",
    "write_atomic",
    "writer_folders",
]

FORMAT: Final = "spectrace-trace"
VERSION: Final = 1
MANIFEST: Final = "manifest.json"
LEDGER: Final = "ledger"
SEAL: Final = "SEAL"
_OWN: Final = ("format", "format_version", "row_hash", "weight_hash", "created_unix_secs")


def create_trace(folder: Path | str, manifest: Mapping[str, Any]) -> Path:
    """Start a trace in a new or empty folder; `manifest` is everything that decides the run."""
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            f"{folder} exists and is not an empty folder: give a new path for the trace, or remove it first"
        )
    if taken := sorted(set(manifest) & set(_OWN)):
        raise UserError(f"manifest fields {taken} are the trace's own: rename them")
    folder.mkdir(parents=True, exist_ok=True)
    own = (FORMAT, VERSION, ROW_HASH, WEIGHT_HASH, time.time())
    write_atomic(folder / MANIFEST, render_json({**dict(zip(_OWN, own, strict=True)), **manifest}))
    return folder


def seal_trace(folder: Path | str) -> list[str]:
    """Seal the trace if all its writers are sealed; otherwise leave it and return the names of those that are not.

    Raises OSError where the seal cannot be written.
    """
    folder = Path(folder)
    digest = manifest_hash(folder)
    ledgers = {writer.name: read_ledger((writer / LEDGER).read_bytes()) for writer in writer_folders(folder)}
    if unsealed := [name for name, ledger in ledgers.items() if not ledger.sealed]:
        return unsealed
    writers = {name: {"records": ledger.count, "chain": f"{ledger.chain:016x}"} for name, ledger in ledgers.items()}
    write_atomic(folder / SEAL, _render_seal({"manifest": digest, "writers": writers}))
    return []


def writer_folders(folder: Path) -> list[Path]:
    """The folders that hold a ledger, in the order of their names."""
    return sorted(path.parent for path in folder.glob(f"*/{LEDGER}"))


def manifest_hash(folder: Path) -> str:
    path = folder / MANIFEST
    try:
        return xxh3_64_hexdigest(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise NotATrace(
            f"{path} does not exist: {folder} is not a trace; give the folder that holds {MANIFEST}"
        ) from None


def parse_seal(data: bytes) -> dict[str, Any] | None:
    """The seal's fields, or None if a single byte is not as it was written."""
    try:
        found = json.loads(data)
        return found if _render_seal({key: found[key] for key in ("manifest", "writers")}) == data else None
    except (ValueError, KeyError, TypeError):
        return None


def _render_seal(fields: Mapping[str, Any]) -> bytes:
    return render_json({**fields, "hash": xxh3_64_hexdigest(render_json(fields))})


def render_json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=1, default=str, ensure_ascii=False) + "\n").encode()


def write_atomic(path: Path, data: bytes) -> None:
    """The file is there whole, or not at all; it survives power loss once this returns.

    Raises OSError that names the file, where nothing is left of it.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error

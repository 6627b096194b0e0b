"""What a trace's folder holds according to its manifest, its seal and its writers' ledgers.

Reads manifests, ledgers, the seal and file sizes; never the segments, so it costs little however large the trace is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_hexdigest

from spectrace.tracer.errors import NotATrace, TraceDamaged
from spectrace.tracer.inventory import WriterView, inventory
from spectrace.tracer.ledger import RECORD_BYTES
from spectrace.tracer.manifest import FORMAT, LEDGER, MANIFEST, SEAL, VERSION, parse_seal, writer_folders
from spectrace.tracer.problem import Problem
from spectrace.tracer.rows import FAMILY

__all__ = ["Survey", "survey"]


@dataclass(frozen=True, slots=True)
class Survey:
    """The whole folder."""

    folder: Path
    manifest: dict[str, Any]
    sealed: bool
    writers: Mapping[str, WriterView]
    problems: tuple[Problem, ...]


def survey(folder: Path) -> Survey:
    """Raises NotATrace where there is nothing to survey, TraceDamaged where the root manifest cannot be read."""
    data = _manifest_bytes(folder)
    manifest = _parse_manifest(folder, data)
    digest = xxh3_64_hexdigest(data)
    problems: list[Problem] = []
    writers = {path.name: inventory(path, digest, problems) for path in writer_folders(folder)}
    problems.extend(_behind(writers))
    seal = _seal(folder, digest, writers, problems)
    sealed = seal and all(writer.ledger.sealed for writer in writers.values())
    return Survey(folder, manifest, sealed, writers, tuple(problems))


def _behind(writers: Mapping[str, WriterView]) -> Iterator[Problem]:
    """The ranks of a role record the same rows: one that has fewer of them than another ended before it wrote the rest.

    A family that a rank neither promised nor recorded is not its business.
    """
    roles: dict[object, list[WriterView]] = {}
    for writer in writers.values():
        roles.setdefault((writer.facts.get("role"), writer.facts.get("incarnation")), []).append(writer)
    for ranks in roles.values():
        for family in FAMILY:
            counts = {writer.name: writer.rows(family) + writer.losses(family) for writer in ranks}
            first = max(counts, key=lambda name: counts[name])
            for writer in ranks:
                missing = counts[first] - counts[writer.name]
                if missing and (counts[writer.name] or family in (writer.facts.get("expects") or ())):
                    text = (
                        f"{writer.name} lacks {missing} {family} rows that {first} has: it ended before it wrote them"
                    )
                    yield Problem(f"{writer.name}/{LEDGER}", 0, "behind", missing, text)


def _manifest_bytes(folder: Path) -> bytes:
    path = folder / MANIFEST
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        if (folder / SEAL).exists() or (folder.is_dir() and writer_folders(folder)):
            raise TraceDamaged(f"{path} is gone; a trace's manifest is never rewritten: copy it back") from None
        raise NotATrace(
            f"{path} does not exist: {folder} is not a trace; give the folder that holds {MANIFEST}"
        ) from None


def _parse_manifest(folder: Path, data: bytes) -> dict[str, Any]:
    recorded = (folder / SEAL).exists() or bool(writer_folders(folder))
    try:
        manifest = json.loads(data)
        format_, version = manifest["format"], manifest["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        problem = f"{folder / MANIFEST} holds no trace manifest ({type(error).__name__}: {error})"
        raise (TraceDamaged if recorded else NotATrace)(problem) from None
    if format_ != FORMAT or not isinstance(version, int):
        raise (TraceDamaged if recorded else NotATrace)(
            f"{folder / MANIFEST}: format is {format_!r} version {version!r}; expected {FORMAT!r}"
        )
    if version > VERSION:
        raise NotATrace(
            f"{folder / MANIFEST}: format version {version} is newer than {VERSION}: install a newer spectrace"
        )
    return dict(manifest)


def _seal(folder: Path, digest: str, writers: Mapping[str, WriterView], problems: list[Problem]) -> bool:
    """Hold everything against the root seal, if there is one."""
    path = folder / SEAL
    if not path.exists():
        return False
    seal = parse_seal(path.read_bytes())
    if seal is None:
        problems.append(Problem(SEAL, 0, "seal", 0, f"{path} is not as it was written"))
        return True
    if seal["manifest"] != digest:
        text = f"{folder / MANIFEST} has hash {digest}; sealed with {seal['manifest']}"
        problems.append(Problem(MANIFEST, 0, "manifest", 0, text))
    for name, sealed in seal["writers"].items():
        problems.extend(_against_seal(name, sealed, writers.get(name)))
    for name in writers.keys() - seal["writers"].keys():
        problems.append(Problem(name, 0, "stray", 0, f"writer {name} was not there when the trace was sealed"))
    return True


def _against_seal(name: str, sealed: Mapping[str, Any], writer: WriterView | None) -> Iterator[Problem]:
    if writer is None:
        yield Problem(
            name, 0, "missing", 0, f"writer {name} is gone: it was sealed with {sealed['records']} ledger records"
        )
        return
    ledger = writer.ledger
    found = (ledger.count, f"{ledger.chain:016x}", ledger.torn_bytes)
    if found != (sealed["records"], sealed["chain"], 0):
        at, wanted = f"{name}/{LEDGER}", f"{sealed['records']}, {sealed['chain']} and 0"
        text = (
            f"{at} has {found[0]} records, last hash {found[1]}, and {found[2]} bytes after them; sealed with {wanted}"
        )
        yield Problem(at, ledger.count * RECORD_BYTES, "ledger", 0, text)

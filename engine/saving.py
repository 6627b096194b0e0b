"""A checkpoint's files, written: tensors bit for bit, in shards if asked for, and a folder whole or not at all."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from spectrace.tracer.errors import RunFailed

__all__ = ["save_tensors", "whole_or_not"]


@contextmanager
def whole_or_not(folder: Path) -> Iterator[Path]:
    """A folder beside this one that takes its place when all went well, and is gone otherwise.

    Raises RunFailed where it cannot be written, such as on a full disk.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        partial.rename(folder)
    except (OSError, SafetensorError) as error:
        raise RunFailed(f"{folder}: cannot be written ({error}); nothing was kept") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def save_tensors(folder: Path, tensors: Mapping[str, Tensor], shard_bytes: int | None) -> None:
    """Write tensors into a folder, over several files where one would be larger than `shard_bytes`."""
    shards = _shards(tensors, shard_bytes)
    files = (
        [f"model-{at:05}-of-{len(shards):05}.safetensors" for at in range(1, len(shards) + 1)]
        if len(shards) > 1
        else ["model.safetensors"]
    )
    for file, names in zip(files, shards, strict=True):
        held = {name: tensors[name].cpu().contiguous().clone() for name in names}
        save_file(held, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(folder.stat().st_mode & 0o666)  # safetensors lets nobody else read what it writes
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        places = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", "utf-8")


def _shards(tensors: Mapping[str, Tensor], shard_bytes: int | None) -> list[list[str]]:
    """Names by file, in order; a tensor that is larger than a file may be has one of its own."""
    shards: list[list[str]] = [[]]
    held = 0
    for name, tensor in tensors.items():
        if shard_bytes is not None and shards[-1] and held + tensor.nbytes > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += tensor.nbytes
    return shards

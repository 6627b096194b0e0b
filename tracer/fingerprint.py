"""Hashes of rows, tensors and files. One function per purpose, named in every manifest.

xxh3 depends on the order of rows, of columns within a row, and on every bit, so permutations and paired sign flips
show; sums and XORs would miss both.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Final

import numpy as np
from xxhash import xxh3_64_intdigest, xxh3_128

from spectrace.tracer.staging import bits_of

__all__ = ["ROW_HASH", "WEIGHT_HASH", "file_fingerprint", "file_fingerprints", "row_hashes", "tensor_fingerprint"]

ROW_HASH: Final = "xxh3_64"
WEIGHT_HASH: Final = "xxh3_128"
_CHUNK_BYTES: Final = 1 << 24


def row_hashes(rows: object, widths: Sequence[int]) -> np.ndarray:
    """xxh3_64 over the bytes of each slot of each row: uint64 [rows, slots]. Widths are in elements."""
    array = bits_of(rows).array
    if array.ndim != 2 or sum(widths) != array.shape[1]:
        raise ValueError(f"rows of shape {array.shape} do not split into slots of widths {list(widths)}")
    width_bytes = array.itemsize
    edges = [0, *accumulate(width * width_bytes for width in widths)]
    slots = list(pairwise(edges))
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    starts = range(0, array.nbytes, edges[-1]) if array.nbytes else ()
    digests = [xxh3_64_intdigest(data[start + a : start + b]) for start in starts for a, b in slots]
    return np.array(digests, np.uint64).reshape(array.shape[0], len(slots))


def tensor_fingerprint(tensor: object) -> str:
    """xxh3_128 of the tensor's bytes in row-major order, as hex."""
    array = np.ascontiguousarray(bits_of(tensor).array)
    return xxh3_128(array.reshape(-1).view(np.uint8).data).hexdigest()


def file_fingerprint(path: Path | str) -> str:
    """xxh3_128 of the file's bytes, as hex."""
    digest = xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def file_fingerprints(folder: Path) -> dict[str, str]:
    """The fingerprint of each file of weights in a folder, by its name: of safetensors, or where there are none, of
    pytorch_model.bin and its shards.
    """
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    return {path.name: file_fingerprint(path) for path in files}

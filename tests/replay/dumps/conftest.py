"""The sample files, copies of them to break, and the tiny target that they are of."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file

from spectrace.engine.layerwise import LayerwiseTarget

SAMPLES = Path(__file__).with_name("samples")


@pytest.fixture(scope="session")
def samples() -> Path:
    """A folder for each producer, by the name of its format; `target` is the model that all states are of."""
    return SAMPLES


@pytest.fixture(scope="session")
def texts() -> list[dict[str, list[int]]]:
    """The texts of all samples: `tokens` and `mask`."""
    found: list[dict[str, list[int]]] = json.loads((SAMPLES / "texts.json").read_text("utf-8"))
    return found


@pytest.fixture(scope="session")
def target() -> LayerwiseTarget:
    return LayerwiseTarget(SAMPLES / "target", dtype=torch.float32)


@pytest.fixture
def broken(tmp_path: Path) -> Callable[..., Path]:
    """`broken(producer, change)`: a copy of a sample, of which `change` has had every file's fields to change them."""

    def copy(producer: str, change: Callable[[dict[str, Any]], None]) -> Path:
        folder = tmp_path / producer
        shutil.copytree(SAMPLES / producer, folder)
        for path in sorted(one for one in folder.rglob("*") if one.suffix in (".safetensors", ".pt", ".ckpt", ".gz")):
            if path.suffix == ".gz":
                path.unlink()
                continue
            fields = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
            change(fields)
            if path.suffix == ".safetensors":
                save_file({name: one.contiguous() for name, one in fields.items()}, path)
            else:
                torch.save(fields, path)
        return folder

    return copy


@pytest.fixture
def masks_moved(tmp_path: Path) -> Callable[[int], Path]:
    """`masks_moved(by)`: speculators' sample around which the dataset has masks that are so far ahead."""

    def copy(by: int) -> Path:
        folder = tmp_path / "speculators"
        shutil.copytree(SAMPLES / "speculators", folder)
        [path] = folder.glob("*.arrow")
        table = pa.ipc.open_stream(path.read_bytes()).read_all()
        masks = [mask[by:] + [0] * by for mask in table["loss_mask"].to_pylist()]
        at = table.schema.get_field_index("loss_mask")
        moved = table.set_column(at, table.schema.field(at), pa.array(masks, table.schema.field(at).type))
        with pa.ipc.new_stream(path, moved.schema) as file:
            file.write_table(moved)
        return folder

    return copy

"""Tensor files of every kind are read, nothing in them is run, and what is broken about them gets one line."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from spectrace.engine.checkpoint import read_draft, read_embedding
from spectrace.engine.stored import StoredTensors, weight_files
from spectrace.tracer.errors import UserError

Tensors: TypeAlias = dict[str, Tensor]
NewDraft: TypeAlias = Callable[..., tuple[dict[str, Any], Tensors]]
INDEX, BIN_INDEX = "model.safetensors.index.json", "pytorch_model.bin.index.json"


@pytest.fixture
def draft(new_draft: NewDraft, tmp_path: Path) -> tuple[Path, Tensors]:
    """A folder with a config, and the tensors that are to be written into it."""
    config, tensors = new_draft()
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    return tmp_path, tensors


def whole(folder: Path, tensors: Tensors) -> None:
    save_file(tensors, folder / "model.safetensors")


def sharded(folder: Path, tensors: Tensors, suffix: str = "safetensors") -> dict[str, str]:
    """Two shards and their index, of safetensors or of torch.save."""
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    names = sorted(tensors)
    shards = {f"{stem}-0000{at}-of-00002.{suffix}": names[at - 1 :: 2] for at in (1, 2)}
    for file, held in shards.items():
        part = {name: tensors[name] for name in held}
        save_file(part, folder / file) if suffix == "safetensors" else torch.save(part, folder / file)
    places = {name: file for file, held in shards.items() for name in held}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": places}), "utf-8")
    return places


def pickled(folder: Path, tensors: Tensors) -> None:
    torch.save(tensors, folder / "pytorch_model.bin")


def pickled_of_old(folder: Path, tensors: Tensors) -> None:
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def bin_shards(folder: Path, tensors: Tensors) -> None:
    sharded(folder, tensors, "bin")


@pytest.mark.parametrize("write", [whole, sharded, pickled, pickled_of_old, bin_shards])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_kind_of_file_gives_the_same_tensors(
    write: Callable[[Path, Tensors], object], dtype: torch.dtype, draft: tuple[Path, Tensors]
) -> None:
    folder, tensors = draft
    tensors = {name: one.to(dtype) if one.is_floating_point() else one for name, one in tensors.items()}
    write(folder, tensors)
    (folder / "training_args.bin").write_bytes(b"no tensors")
    stored = StoredTensors(folder)
    assert set(stored) == set(tensors) and len(stored) == len(tensors)
    assert stored.shapes == {name: list(one.shape) for name, one in tensors.items()}
    for name, one in tensors.items():
        assert torch.equal(stored[name], one) and stored[name].dtype == one.dtype
    read = read_draft(folder)
    assert torch.equal(read.tensors["fc.weight"], tensors["fc.weight"]) and read.report.missing_tensors == ()


def test_safetensors_are_read_where_there_are_both(draft: tuple[Path, Tensors]) -> None:
    folder, tensors = draft
    pickled(folder, {"fc.weight": torch.zeros(1)})
    whole(folder, tensors)
    assert weight_files(folder) == [folder / "model.safetensors"]
    assert torch.equal(StoredTensors(folder)["fc.weight"], tensors["fc.weight"])


def test_files_that_an_index_does_not_name_are_left_alone(draft: tuple[Path, Tensors]) -> None:
    folder, tensors = draft
    sharded(folder, tensors)
    save_file({"fc.weight": torch.zeros(1)}, folder / "consolidated.safetensors")
    assert torch.equal(StoredTensors(folder)["fc.weight"], tensors["fc.weight"])


class Runs:
    """What a pickle can hold: a call, made when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("kind", ["torch", "pickle", "old torch"])
def test_nothing_in_a_file_is_run(kind: str, draft: tuple[Path, Tensors]) -> None:
    folder, tensors = draft
    marker, path = folder / "ran", folder / "pytorch_model.bin"
    held = {**tensors, "extra": Runs(marker)}
    if kind == "pickle":
        path.write_bytes(pickle.dumps({"extra": Runs(marker)}))
    else:
        torch.save(held, path, _use_new_zipfile_serialization=kind == "torch")
    with pytest.raises(UserError, match=r"pytorch_model.bin: holds more than tensors.*nothing in it was run"):
        read_draft(folder)
    assert not marker.exists()
    torch.load(path, weights_only=False) if kind != "pickle" else pickle.loads(path.read_bytes())
    assert marker.exists(), "otherwise there was nothing to be run"


@pytest.mark.parametrize("old", [False, True])
def test_a_cut_file_of_torch_is_refused_by_its_name(old: bool, draft: tuple[Path, Tensors]) -> None:
    folder, tensors = draft
    (pickled_of_old if old else pickled)(folder, tensors)
    path = folder / "pytorch_model.bin"
    held = path.read_bytes()
    for length in (0, 5, 200, len(held) // 2, len(held) - 1000):
        path.write_bytes(held[:length])
        with pytest.raises(UserError, match=r"pytorch_model.bin: .*download or export it again") as raised:
            read_draft(folder)
        assert "\n" not in raised.value.message


@pytest.mark.parametrize("held", [[torch.ones(2)], {"model": {"fc.weight": torch.ones(2)}}, {"a": 1}, torch.ones(2)])
def test_a_file_of_torch_that_is_no_table_of_tensors_is_refused(held: object, draft: tuple[Path, Tensors]) -> None:
    folder, _ = draft
    torch.save(held, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="that is no table of tensors by name; expected a state dict"):
        read_draft(folder)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda _: "{", "not valid JSON"),
        (lambda _: "[]", "no weight_map from tensors to files in it"),
        (lambda _: '{"weight_map": {}}', "no weight_map"),
        (lambda _: '{"weight_map": {"a": 1}}', "no weight_map"),
        (lambda places: {**places, "a": "absent.SUFFIX"}, r"names absent.SUFFIX, which is not there, for 1 tensors"),
        (lambda places: {**places, "a": "../x.SUFFIX"}, r"names '../x.SUFFIX', expected a file of this folder"),
        (lambda places: {**places, "a": "/x.SUFFIX"}, r"names '/x.SUFFIX', expected a file of this folder"),
        (lambda places: {**places, "a": places["fc.weight"]}, r"puts tensor a into .*00002.SUFFIX, where it is not"),
        (lambda places: {**places, "fc.weight": places["d2t"]}, r"puts tensor fc.weight into .*, where it is not"),
    ],
)  # fmt: skip
def test_an_index_that_is_wrong_is_refused(
    change: Callable[[dict[str, str]], object], told: str, suffix: str, draft: tuple[Path, Tensors]
) -> None:
    folder, tensors = draft
    places = sharded(folder, tensors, suffix)
    assert places["fc.weight"] != places["d2t"]
    made = change({name: file.replace(suffix, "SUFFIX") for name, file in places.items()})
    text = made if isinstance(made, str) else json.dumps({"weight_map": made})
    index = INDEX if suffix == "safetensors" else BIN_INDEX
    (folder / index).write_text(text.replace("SUFFIX", suffix), "utf-8")
    with pytest.raises(UserError, match=told.replace("SUFFIX", suffix)) as raised:
        read_draft(folder)
    assert raised.value.message.startswith(str(folder / index))


@pytest.mark.parametrize("indexed", [True, False])
def test_a_tensor_in_two_files_is_refused_by_both_names(indexed: bool, draft: tuple[Path, Tensors]) -> None:
    folder, tensors = draft
    sharded(folder, tensors)
    again = folder / "model-00002-of-00002.safetensors"
    held = {name: StoredTensors(folder)[name] for name in sorted(tensors)[1::2]}
    save_file({**held, sorted(tensors)[0]: torch.zeros(1)}, again)
    if not indexed:
        (folder / INDEX).unlink()
    told = rf"tensor {sorted(tensors)[0]} is both in model-00001-of-00002.safetensors and in model-00002-of-00002"
    with pytest.raises(UserError, match=told):
        read_draft(folder)


def test_a_folder_without_tensors_says_what_it_holds(draft: tuple[Path, Tensors]) -> None:
    folder, _ = draft
    (folder / "weights.txt").touch()
    with pytest.raises(UserError, match=r"no pytorch_model.bin in it, but config.json, weights.txt; expected"):
        read_draft(folder)


def test_a_target_that_publishes_a_tensor_twice_is_no_error(tmp_path: Path) -> None:
    """Some lie there again in another file; what is shared is read from the first of them."""
    save_file({"model.embed_tokens.weight": torch.zeros(2, 3)}, tmp_path / "a.safetensors")
    save_file({"model.embed_tokens.weight": torch.ones(2, 3)}, tmp_path / "b.safetensors")
    assert read_embedding(tmp_path).tolist() == [[0, 0, 0]] * 2

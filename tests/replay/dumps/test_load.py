"""Files that are cut, wrong or hostile end in one clear error; nothing in them is ever run."""

from __future__ import annotations

import gzip
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from spectrace.replay.dumps.formats import open_source
from spectrace.replay.dumps.load import read_fields
from spectrace.tracer.errors import UserError

SPECFORGE, LEGACY = "rows_0-2000/data_0.ckpt", "data_0.pt"


class _Runs:
    """What pickle would run: make a folder."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.made),)


def refused(source: Path, format_: str | None = None) -> str:
    with pytest.raises(UserError) as raised:
        for item in open_source(source, format_)[1]:
            item.read()
    assert "\n" not in raised.value.message
    return raised.value.message


@pytest.mark.parametrize("name", ["evil.pt", "evil.ckpt", "evil.ckpt.gz"])
@pytest.mark.parametrize("old", [False, True])
def test_code_in_a_pickle_is_refused_and_not_run(name: str, old: bool, tmp_path: Path) -> None:
    path, made = tmp_path / name, tmp_path / "made"
    torch.save({"input_ids": _Runs(made)}, path, _use_new_zipfile_serialization=not old)
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(path.read_bytes()))
    said = refused(path)
    assert (
        said.startswith(f"{path}: found a pickle that names ") and "mkdir" in said and "nothing of it was run" in said
    )
    assert not made.exists()
    if not name.endswith(".gz"):
        torch.load(path, weights_only=False)  # which would have run it
        assert made.exists()


@pytest.mark.parametrize(
    "producer", ["specforge", "speculators-legacy", "modelopt", "angelslim", "vllm", "speculators"]
)
@pytest.mark.parametrize("part", [0.0, 0.3, 0.9])
def test_a_file_that_is_cut_is_named(producer: str, part: float, samples: Path, tmp_path: Path) -> None:
    [path, *_] = sorted(
        one for one in (samples / producer).rglob("*") if one.suffix in (".ckpt", ".pt", ".safetensors")
    )
    cut = tmp_path / path.name
    cut.write_bytes(path.read_bytes()[: int(part * path.stat().st_size)])
    assert re.match(rf"{re.escape(str(cut))}: not a whole (safetensors file|file of torch.save)", refused(cut))


@pytest.mark.parametrize("part", [0.0, 0.5])
def test_a_gzipped_file_that_is_cut_is_named(part: float, samples: Path, tmp_path: Path) -> None:
    whole = (samples / "specforge" / "rows_0-2000" / "data_1.ckpt.gz").read_bytes()
    (tmp_path / "data_1.ckpt.gz").write_bytes(whole[: int(part * len(whole))])
    assert "data_1.ckpt.gz: not a whole file of torch.save" in refused(tmp_path)
    (tmp_path / "data_1.ckpt.gz").write_bytes(b"PK" + whole)
    assert "data_1.ckpt.gz: not gzipped, by its first bytes" in refused(tmp_path)


LEGACY_LIST = [torch.ones(33, 4), torch.ones(3, 4)]
FP8 = torch.ones(33, 4, 8).to(torch.float8_e4m3fn)
WRONG: list[tuple[str, str, Any, str]] = [
    ("specforge", "hidden_state", None, "found nothing (the file has input_ids, loss_mask"),
    ("specforge", "input_ids", [1, 2], "found list, expected token ids [T]"),
    ("specforge", "input_ids", torch.ones(33), "found float32 [33], expected the token ids"),
    ("specforge", "input_ids", torch.full((33,), -1), "found the token -1, expected ids from 0, of 31 bits"),
    ("specforge", "input_ids", torch.ones(2, 33).long(), "found int64 [2, 33], expected the token ids of one text"),
    ("specforge", "hidden_state", torch.ones(32, 32), "found float32 [32, 32], expected [T, F] with T = 33"),
    ("specforge", "hidden_state", torch.ones(33, 32).long(), "found int64 [33, 32], expected bfloat16, float16 or"),
    ("specforge", "aux_hidden_state", torch.ones(33, 95), "found float32 [33, 95], expected a multiple of 32 columns"),
    (
        "specforge",
        "loss_mask",
        torch.ones(32),
        "found float32 [32], expected zeros and ones, one for each of 33 tokens",
    ),
    ("specforge", "loss_mask", torch.full((33,), 2), "found int64 [33], expected zeros and ones"),
    ("speculators-legacy", "hidden_states", [], "found list, expected a list of tensors [T, F]"),
    ("speculators-legacy", "hidden_states", LEGACY_LIST, "[1]: found float32 [3, 4], expected [T, F] with T = 33"),
    ("vllm", "hidden_states", torch.ones(33, 96), "found float32 [33, 96], expected [T, layers, F]"),
    ("vllm", "hidden_states", FP8, "found float8_e4m3fn [33, 4, 8], expected bfloat16, float16 or float32"),
]


@pytest.mark.parametrize(("producer", "field", "value", "says"), WRONG)
def test_a_field_that_is_wrong_is_named_with_what_was_found_and_expected(
    producer: str, field: str, value: Any, says: str, broken: Callable[..., Path]
) -> None:
    def change(fields: dict[str, Any]) -> None:
        fields[field] = value
        if value is None:
            del fields[field]

    said = refused(broken(producer, change), producer)
    assert f"field {field}" in said and says in said


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_state_that_is_not_finite_is_named_by_its_row(wrong: float, broken: Callable[..., Path]) -> None:
    def spoil(fields: dict[str, Any]) -> None:
        fields["aux_hidden_states"][7, 3] = wrong

    said = refused(broken("modelopt", spoil))
    assert "field aux_hidden_states: found 1 of 33 rows with NaN or infinity, row 7 first, expected finite" in said


def test_what_is_not_a_dict_is_refused(tmp_path: Path) -> None:
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    with pytest.raises(UserError, match=r"list.pt: found a list, expected a dict of tensors"):
        read_fields(tmp_path / "list.pt")


def test_a_layout_that_two_producers_could_have_wants_to_be_named(broken: Callable[..., Path], tmp_path: Path) -> None:
    def both(fields: dict[str, Any]) -> None:
        fields["target_hiddens"] = fields["hidden_states"]

    said = refused(broken("modelopt", both))
    assert "which modelopt and angelslim both could have; say --format" in said
    assert [item.name for item in open_source(tmp_path / "modelopt", "modelopt")[1]] == [
        f"conversation-{at}.pt" for at in range(3)
    ]


def test_a_layout_that_nobody_has_is_shown_with_those_that_are_known(tmp_path: Path) -> None:
    torch.save({"input_ids": torch.ones(3).long(), "hidden_state": torch.ones(3, 4)}, tmp_path / "data_0.ckpt")
    said = refused(tmp_path)
    assert "found input_ids, hidden_state; expected a layout that is known (specforge: *.ckpt[.gz] with" in said


def test_a_folder_of_two_producers_is_refused(samples: Path, tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes((samples / "modelopt" / "conversation-0.pt").read_bytes())
    save_file({"token_ids": torch.ones(2).long(), "hidden_states": torch.ones(2, 1, 4)}, tmp_path / "b.safetensors")
    assert "found files ending in pt, safetensors, expected those of one producer; a.pt is of modelopt" in refused(
        tmp_path
    )


@pytest.mark.parametrize(("name", "says"), [("nowhere", "does not exist"), ("empty", "holds no hidden states")])
def test_a_source_without_files_is_refused(name: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert says in refused(tmp_path / name)


def test_a_dataset_that_is_not_of_the_files_is_refused(samples: Path, broken: Callable[..., Path]) -> None:
    def change(fields: dict[str, Any]) -> None:
        fields["token_ids"] += 1

    assert "field token_ids: found 33 tokens, expected the 33 of row 0" in refused(broken("speculators", change))


def test_texts_come_in_the_order_of_their_numbers(samples: Path, tmp_path: Path) -> None:
    data = (samples / "specforge" / SPECFORGE).read_bytes()
    for number in (10, 2, 1):
        (tmp_path / f"data_{number}.ckpt").write_bytes(data)
    assert [item.name for item in open_source(tmp_path, None)[1]] == ["data_1.ckpt", "data_2.ckpt", "data_10.ckpt"]

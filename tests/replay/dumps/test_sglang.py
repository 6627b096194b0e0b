"""A folder of SGLang's dumper becomes texts again, or says why it cannot."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from spectrace.replay.dumps.sglang import SGLANG
from spectrace.tracer.errors import UserError


@pytest.fixture
def dumped(samples: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "dumped"
    shutil.copytree(samples / "sglang", folder)
    return folder


def files(folder: Path, *parts: str) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if all(part in path.name for part in parts)]


def put(folder: Path, step: int, name: str, value: Any, **tags: object) -> None:
    """One more file, as the dumper names it."""
    named = {"step": step, "rank": 0, "dump_index": 99, "name": name, **tags}
    torch.save({"value": value, "meta": named}, folder / f"{'___'.join(f'{k}={v}' for k, v in named.items())}.pt")


def replace(path: Path, value: Any) -> None:
    torch.save({**torch.load(path, weights_only=True), "value": value}, path)


def test_texts_are_put_together_from_packed_steps(samples: Path, texts: list[dict[str, list[int]]]) -> None:
    found = {item.name: item.read() for item in SGLANG.open(samples / "sglang")}
    assert list(found) == ["request-0", "request-2"]
    for name, sample in found.items():
        assert sample.tokens.tolist() == texts[int(name[-1])]["tokens"][:30]
        assert sample.boundaries == (2, 4, 5, 8) and [slot.shape for slot in sample.slots] == [(30, 32)] * 4


def test_hidden_and_residual_are_added_as_the_engine_adds_them(samples: Path) -> None:
    [first, _] = (item.read() for item in SGLANG.open(samples / "sglang"))
    halves = [
        torch.load(path, weights_only=True)["value"] for path in files(samples / "sglang", "step=0_", "layers.3.")
    ]
    assert len(halves) == 2 and torch.equal(first.slots[1][:28], (halves[0] + halves[1])[:28])


def test_other_ranks_hold_the_same_and_are_not_read(dumped: Path) -> None:
    for path in list(dumped.iterdir()):
        (dumped / path.name.replace("rank=0", "rank=1")).write_bytes(b"")
    assert len(SGLANG.open(dumped)) == 2


def test_a_second_prompt_of_the_same_name_is_another_text(dumped: Path) -> None:
    for name, value in {"input_ids": torch.arange(3), "positions": torch.arange(3), "seq_lens": torch.tensor([3]),
                        "rids": ["request-0"]}.items():  # fmt: skip
        put(dumped, 3, name, value)
    for layer in (1, 3, 4, 7):
        put(dumped, 3, f"non_intrusive__model.layers.{layer}.output", torch.ones(3, 32).bfloat16(), layer_id=layer)
    assert [item.name for item in SGLANG.open(dumped)] == ["request-0", "request-2", "request-0"]
    assert SGLANG.open(dumped)[2].read().tokens.tolist() == [0, 1, 2]


def make(folder: Path, streams: dict[str, Any], **tags: object) -> Path:
    """A dump by hand, of one prompt of three tokens."""
    folder.mkdir()
    core = {"input_ids": torch.arange(3), "positions": torch.arange(3), "seq_lens": torch.tensor([3])}
    for name, value in {**core, **streams}.items():
        put(folder, 0, name, value)
    return folder


def test_dumps_by_hand_are_told_by_their_names_and_layers(tmp_path: Path) -> None:
    folder = make(tmp_path / "dump", {})
    for layer in (2, 10):
        put(folder, 0, "layer_start__hidden_states", torch.full((3, 4), float(layer)), layer_id=layer)
        put(folder, 0, "layer_start__residual", torch.ones(3, 4), layer_id=layer)
    [item] = SGLANG.open(folder)
    sample = item.read()
    assert sample.boundaries == (2, 10) and [float(slot[0, 0]) for slot in sample.slots] == [3.0, 11.0]


def test_a_name_that_does_not_say_which_side_of_a_layer_declares_nothing(tmp_path: Path) -> None:
    folder = make(tmp_path / "dump", {})
    for layer in (2, 10):
        put(folder, 0, "my_hidden_states", torch.full((3, 4), float(layer)), layer_id=layer)
    [item] = SGLANG.open(folder)
    assert item.read().boundaries is None and [float(slot[0, 0]) for slot in item.read().slots] == [2.0, 10.0]


def test_slots_that_are_packed_take_their_width_from_the_last_state(tmp_path: Path) -> None:
    packed = torch.arange(24.0).reshape(3, 8)
    [item] = SGLANG.open(make(tmp_path / "a", {"aux_hidden_states": packed, "last_hidden_states": torch.ones(3, 4)}))
    assert torch.equal(torch.cat(item.read().slots, 1), packed) and item.read().norm == "post"
    with pytest.raises(UserError, match=r"found aux_hidden_states or last_hidden_states alone, expected both"):
        SGLANG.open(make(tmp_path / "b", {"aux_hidden_states": packed}))[0].read()


def test_what_cannot_be_put_together_says_how_to_dump(dumped: Path) -> None:
    [positions] = files(dumped, "step=1_", "name=positions")
    replace(positions, torch.tensor([28, 27]))
    with pytest.raises(UserError, match=r"found lengths \[29, 29\] and 2 positions, expected that the rows of each"):
        SGLANG.open(dumped)
    replace(files(dumped, "step=1_", "name=seq_lens")[0], torch.tensor([29, 28]))
    with pytest.raises(
        UserError, match=r"request-2: found position 27, expected 28, .* dump a run without speculation"
    ):
        SGLANG.open(dumped)


def test_a_step_without_positions_or_with_fewer_layers_is_refused(dumped: Path) -> None:
    for path in files(dumped, "step=2_", "layers.7."):
        path.unlink()
    with pytest.raises(UserError, match=r"step 2 holds 3 streams of hidden states, expected 4, as in step 0"):
        SGLANG.open(dumped)[0].read()
    files(dumped, "step=2_", "name=positions")[0].unlink()
    with pytest.raises(UserError, match=r"step 2 has no positions"):
        SGLANG.open(dumped)


def test_a_file_without_tags_or_dumped_twice_is_refused(dumped: Path) -> None:
    put(dumped, 1, "non_intrusive__model.layers.7.output.0", torch.ones(2, 32))
    with pytest.raises(UserError, match=r"found non_intrusive__model.layers.7.output.0 twice in step 1"):
        SGLANG.open(dumped)
    torch.save({}, dumped / "a___b=c.pt")
    with pytest.raises(UserError, match=r"found the tags a, b, expected step, rank and name"):
        SGLANG.open(dumped)

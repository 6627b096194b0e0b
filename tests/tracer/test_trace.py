"""Reading: the rows asked for, in recorded order, over the file's own memory where that is possible."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from spectrace.tracer import Keys, Level, NotATrace, Recorder, Trace, UserError, create_trace


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Two writers, ten batches of four rows each; every tensor holds its row's number."""
    folder = create_trace(tmp_path_factory.mktemp("numbered") / "t", {})
    for rank in range(2):
        with Recorder(folder, role="draft", rank=rank, strict=True, batch_bytes=1, segment_bytes=3000) as recorder:
            for step in range(10):
                number = 100 * rank + 4 * step + np.arange(4)
                keys = Keys(request=[0, 0, 1, 1], pass_=step, position=[step, step + 1] * 2, step=step)
                features = torch.from_numpy(number[:, None].repeat(6, 1)).bfloat16()
                recorder.received(keys, token=number, features=features, slot_width=2)
    return Trace.open(folder)


def addresses(trace: Trace, tensor: torch.Tensor) -> bool:
    """Whether the tensor lies in a mapped file."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    spans = [line.split()[0].split("-") for line in maps if str(trace.folder) in line]
    return any(int(start, 16) <= tensor.data_ptr() < int(end, 16) for start, end in spans)


def test_one_piece_is_read_without_a_copy(numbered: Trace) -> None:
    rows = numbered.rows("received")
    batch = rows.take(slice(4, 8)).tensor("features")
    part = rows.take([5, 6, 7]).tensor("features")
    assert addresses(numbered, batch) and batch.dtype is torch.bfloat16
    assert part.data_ptr() == batch[1:].data_ptr()
    assert not addresses(numbered, rows.take([5, 7]).tensor("features"))
    assert not addresses(numbered, rows.take(slice(3, 5)).tensor("features"))


def test_streaming_hands_out_the_files_own_memory(numbered: Trace) -> None:
    batches = list(numbered.batches("received", "features"))
    assert len(batches) == 20 and all(addresses(numbered, batch) for batch in batches)
    assert torch.equal(torch.cat(batches), numbered.rows("received").tensor("features"))


@pytest.mark.parametrize("seed", range(5))
def test_gathered_rows_match_their_numbers_in_any_order(numbered: Trace, seed: int) -> None:
    rows = numbered.rows("received")
    some = rows.take(np.random.default_rng(seed).permutation(len(rows))[:50])
    assert (some.tensor("features")[:, 0].float().numpy() == some["token"]).all()
    nested = some.take(some["request"] == 1).take(slice(None, None, -2))
    assert (nested.tensor("features")[:, 5].float().numpy() == nested["token"]).all()


def test_writing_to_a_tensor_does_not_reach_the_file(numbered: Trace) -> None:
    Trace.open(numbered.folder).rows("received").take(slice(0, 4)).tensor("features").fill_(77)
    assert numbered.verify() == []
    with pytest.raises(ValueError, match="read-only"):
        numbered.rows("received").payload("features")[:] = 0


def test_filters_take_values_and_collections(numbered: Trace, whole: Path) -> None:
    rows = numbered.rows("received", request=1, step=[2, 3, 99], rank={0}, live=True)
    assert rows["token"].tolist() == [10, 11, 14, 15]
    assert rows.where(position=np.array([3]))["token"].tolist() == [11, 14]
    assert rows.where(**{"pass": 3})["token"].tolist() == [14, 15]
    assert len(numbered.rows("received", request=5)) == 0
    assert len(Trace.open(whole).rows("requests", id="request 1")) == 1
    assert len(Trace.open(whole).rows("requests", id=["request 1", "request 2", "no"])) == 2
    assert numbered.rows("received")["token"].tolist() == [*range(40), *range(100, 140)]


def test_no_rows_still_have_columns_and_tensors_of_their_width(numbered: Trace) -> None:
    rows = numbered.rows("received", request=5)
    assert rows["token"].dtype == np.int32 and rows["hashes"].shape[0] == 0
    assert rows.tensor("features").shape == (0, 6) and rows.tensor("features").dtype is torch.bfloat16
    assert numbered.rows("emitted").tensor("slots").shape == (0, 0)


def test_mistakes_are_named(numbered: Trace, whole: Path) -> None:
    rows = numbered.rows("received")
    with pytest.raises(UserError, match="no family 'recieved'; there are emitted"):
        numbered.rows("recieved")
    with pytest.raises(UserError, match="no column 'tokens'; they have incarnation"):
        rows["tokens"]
    with pytest.raises(UserError, match="no tensors 'logits'; they have features, state"):
        rows.tensor("logits")
    with pytest.raises(UserError, match="80 of 80 received rows have no 'state' tensor"):
        rows.tensor("state")
    with pytest.raises(UserError, match="'logits' tensors are ids, values; name one"):
        Trace.open(whole).rows("drafted").tensor("logits")


def test_rows_of_different_width_are_not_mixed(tmp_path: Path) -> None:
    create_trace(tmp_path / "t", {})
    with Recorder(tmp_path / "t", role="draft", strict=True) as recorder:
        for width in (4, 6, 4):
            recorder.received(Keys(request=width, pass_=0, position=0), token=1, features=torch.full((1, width), width))
    rows = Trace.open(tmp_path / "t").rows("received")
    with pytest.raises(UserError, match="different layout"):
        rows.tensor("features")
    assert rows.where(request=4).tensor("features").shape == (2, 4)
    assert len(list((tmp_path / "t" / "draft-0").glob("*.features.arrow"))) == 2


def test_many_segments_are_not_all_kept_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spectrace.tracer.trace._MAPPED_SEGMENTS", 4)
    create_trace(tmp_path / "t", {})
    with Recorder(tmp_path / "t", role="draft", strict=True, batch_bytes=1, segment_bytes=1) as recorder:
        for step in range(20):
            recorder.received(Keys(request=0, pass_=step, position=0), token=step, features=torch.full((1, 4), step))
    opened = Trace.open(tmp_path / "t")
    assert opened.rows("received").tensor("features")[:, 0].tolist() == list(range(20))
    assert len(opened._mapped) == 4


def test_counts_come_from_the_ledger_alone(whole: Path) -> None:
    opened = Trace.open(whole)
    assert {name: held["rows"] for name, held in opened.families().items()} == {
        "emitted": 9,
        "received": 18,
        "drafted": 9,
        "verified": 9,
        "requests": 3,
        "reference": 9,
    }
    on_disk = sum(path.stat().st_size for path in whole.glob("*/*.arrow"))
    assert sum(held["bytes"] for held in opened.families().values()) == on_disk
    assert not opened._mapped


def test_what_is_no_trace_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(NotATrace, match="not a trace"):
        Trace.open(tmp_path / "nowhere")
    (tmp_path / "manifest.json").write_text("{}", encoding="utf-8")
    with pytest.raises(NotATrace, match="no trace manifest"):
        Trace.open(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": "spectrace-trace", "format_version": 2}', encoding="utf-8")
    with pytest.raises(NotATrace, match="newer"):
        Trace.open(tmp_path)


def test_a_light_trace_says_why_it_has_no_tensors(tmp_path: Path) -> None:
    create_trace(tmp_path / "t", {})
    with Recorder(tmp_path / "t", role="draft", level=Level.LIGHT, strict=True) as recorder:
        recorder.received(Keys(request=0, pass_=0, position=0), token=1, features=torch.ones(1, 4))
    with pytest.raises(UserError, match="the trace's level leaves it out"):
        Trace.open(tmp_path / "t").rows("received").tensor("features")

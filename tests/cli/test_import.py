"""`spectrace import` says what files are, how that is known, and refuses in one line what it cannot import."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from spectrace.cli.importing import _FORMATS
from spectrace.replay.dumps.formats import DIALECTS
from spectrace.tracer.trace import Trace

Say = Callable[..., object]
SAMPLES = Path(__file__).parents[1] / "replay" / "dumps" / "samples"


def test_every_producer_can_be_named() -> None:
    assert set(_FORMATS) == {dialect.name for dialect in DIALECTS}


def test_the_page_states_the_four_unknowns(spectrace: Say, tmp_path: Path) -> None:
    out = tmp_path / "trace"
    said = spectrace("import", SAMPLES / "specforge", "--target", SAMPLES / "target", "--out", out, "--threads", 1)
    assert said.code == 0, said.err
    page = " ".join(said.out.split())
    assert "3 texts of specforge, 132 rows" in page and "reference rows: boundaries 2, 4, 5, bfloat16" in page
    for line in (
        "last hidden state: post (the format, as the data show)", "slots: 2, 4, 5 (by the data)",
        "rows: 0 (the format, as the data show)", "mask: 0 (the format, as the data show)",
        "note: the last hidden state is left out",
    ):  # fmt: skip
        assert line in page
    assert spectrace("check", out).code == 0
    target = Trace.open(out).manifest["target"]
    assert target["path"] == str(SAMPLES / "target") and target["fingerprints"].keys() == {"model.safetensors"}


def test_json_is_one_document(spectrace: Say, tmp_path: Path) -> None:
    said = spectrace(
        "import", SAMPLES / "vllm", "--ids", "2,4,5,8", "--requests", 2, "--out", tmp_path / "trace", "--json"
    )
    found = json.loads(said.out)
    assert said.code == 0 and found["sealed"] and found["boundaries"] == [2, 4, 5, 8]
    assert found["families"]["requests"]["rows"] == 2 and found["import"]["unknowns"]["slots"]["value"] == [2, 4, 5, 8]
    assert found["manifest"]["import"] == found["import"]


def test_slots_can_be_imported_as_they_were_captured(spectrace: Say, tmp_path: Path) -> None:
    said = spectrace("import", SAMPLES / "vllm", "--as", "emitted", "--out", tmp_path / "trace")
    assert said.code == 0 and "emitted rows: 4 slots" in said.out
    assert Trace.open(tmp_path / "trace").rows("emitted").has("slots").all()


def test_a_contradiction_is_an_error_unless_forced(spectrace: Say, tmp_path: Path) -> None:
    wrong = (
        "import",
        SAMPLES / "specforge",
        "--target",
        SAMPLES / "target",
        "--ids",
        "2,4,5",
        "--out",
        tmp_path / "trace",
    )
    said = spectrace(*wrong)
    assert said.code == 2 and "CONTRADICTION: slots" in said.complaint and "as if they were input ids" in said.complaint
    assert not (tmp_path / "trace").exists()
    forced = spectrace(*wrong, "--force", "--json")
    assert forced.code == 0 and json.loads(forced.out)["import"]["contradictions"] == ["slots"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "give --ids with --convention, or --target to find out"),
        ({"ids": "2,two,5"}, "--ids '2,two,5': expected layer ids separated by commas"),
        ({"ids": "2,4"}, "--ids: found 2 ids, expected 3"),
        ({"ids": "2,4,5", "out": "taken"}, "taken exists and is not an empty folder"),
        ({"ids": "2,4,5", "device": "cuda"}, "--device cuda: no CUDA device here; use --device cpu"),
        ({"ids": "2,4,5", "format": "vllm"}, "holds no files of vllm"),
        ({"ids": "2,4,5", "target": "nowhere"}, "nowhere: no such folder"),
    ],
)
def test_what_cannot_be_imported_is_said_in_one_line_and_leaves_nothing(
    options: dict[str, str], says: str, spectrace: Say, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (tmp_path / "taken" / "something").mkdir(parents=True)
    given = {"out": "trace", **options}
    said = spectrace("import", SAMPLES / "specforge", *(part for n, v in given.items() for part in (f"--{n}", v)))
    assert said.code == 2 and says in said.complaint
    assert not (tmp_path / "trace").exists()


def test_a_pickle_with_code_is_refused_at_the_command_line(spectrace: Say, tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.mkdir, (tmp_path / "made",)

    torch.save({"input_ids": Runs()}, tmp_path / "data_0.ckpt")
    said = spectrace("import", tmp_path / "data_0.ckpt", "--out", tmp_path / "trace")
    assert said.code == 2 and "nothing of it was run" in said.complaint
    assert not (tmp_path / "made").exists() and not (tmp_path / "trace").exists()

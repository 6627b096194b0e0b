"""A reference holds what the deployment's own `--capture` recorded of the same texts, and the target's answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spectrace.engine.deployment import Deployment, Serving
from spectrace.engine.layerwise import LayerwiseTarget
from spectrace.engine.reference import GivenText, record_reference
from spectrace.replay.compare import row_error
from spectrace.replay.configuration import Slot
from spectrace.replay.features import became_text
from spectrace.replay.inputs import runs_from_start
from spectrace.replay.texts import read_texts
from spectrace.replay.truth import Recorded
from spectrace.tracer.errors import UserError
from spectrace.tracer.rows import TOP_K, Level
from spectrace.tracer.rowset import Rows
from spectrace.tracer.trace import Trace

ALL = range(6)


@pytest.fixture
def served(
    family: str,
    pair_of: Callable[..., Deployment],
    prompts: list[list[int]],
    limits: tuple[int, ...],
    tmp_path: Path,
) -> Trace:
    """A run with drafts, in chunks, that captures everything."""
    serving = Serving(max_new=limits, concurrency=4, chunk=7, ignore_end=True, level=Level.FULL, capture=tuple(ALL))
    assert not pair_of(family, "gqa").serve(prompts, serving, trace=tmp_path / "served").losses
    return Trace.open(tmp_path / "served")


def texts_of(trace: Trace) -> list[GivenText]:
    texts = read_texts(trace)
    return [GivenText(request, str(request), text.prompt, text.output) for request, text in texts.items()]


def rows_by_request(trace: Trace, family: str) -> tuple[Rows, dict[int, Any]]:
    rows = trace.rows(family, live=True)
    rows = rows.take(became_text(rows, trace.rows("verified", accepted=True)))
    return rows, runs_from_start(rows)


def test_a_reference_has_the_rows_that_capturing_has(
    family: str, served: Trace, target_of: Callable[..., Path], tmp_path: Path
) -> None:
    """The same boundaries, to rounding, of the same positions of the same requests; and the same best tokens."""
    target = LayerwiseTarget(target_of(family), dtype=torch.float32)
    texts = texts_of(served)
    record_reference(target, texts, tmp_path / "reference", boundaries=ALL, level=Level.FULL)
    found = Trace.open(tmp_path / "reference")
    assert found.sealed and found.verify() == [] and found.account().lost == 0
    (captured, ours), (recorded, theirs) = rows_by_request(served, "reference"), rows_by_request(found, "reference")
    assert {request: len(run) for request, run in theirs.items()} == {text.number: len(text.fed) for text in texts}
    assert ours.keys() == theirs.keys()
    first = [
        run[: len(theirs[request])] for request, run in sorted(ours.items())
    ]  # a last round may go on behind its end
    mine, other = captured.take(np.concatenate(first)), recorded.take(np.concatenate(list(theirs.values())))
    for column in ("request", "position", "token"):
        assert np.array_equal(mine[column], other[column])
    for boundary in ALL:
        errors = row_error(*(rows.tensor("boundaries", f"b{boundary}") for rows in (mine, other)))
        assert errors.max() <= 1e-5
    emitted, by = rows_by_request(found, "emitted")
    for text in texts:
        best = emitted["target_token"][by[text.number]]
        assert tuple(best[len(text.prompt) - 1 :].tolist()) == text.output  # it was answered greedily
    assert emitted.has("logits").all() and emitted.tensor("logits", "ids").shape[1] == TOP_K


def test_a_reference_says_which_target_it_is_of_and_where_its_texts_are_from(
    target_of: Callable[..., Path], tmp_path: Path
) -> None:
    target = LayerwiseTarget(target_of("llama"), dtype=torch.bfloat16)
    text = GivenText(4, "a name", (1, 2, 3), (4, 5), 0.5)
    record_reference(target, [text], tmp_path / "reference", boundaries=[3, 0, 3], source=Path("somewhere"))
    found = Trace.open(tmp_path / "reference")
    assert found.manifest["engine"] == "spectrace" and found.manifest["dtype"] == "bfloat16"
    assert found.manifest["texts"] == {"from": str(Path.cwd() / "somewhere")}
    assert found.manifest["target"]["path"] == str(target_of("llama"))
    assert found.manifest["target"]["fingerprints"].keys() == {"model.safetensors"}
    assert found.writers["target-0"]["capture"] == [0, 3]
    requests, reference = found.rows("requests"), found.rows("reference")
    assert (requests["id"][0], requests["finish_reason"][0], requests["temperature"][0]) == ("a name", "given", 0.5)
    assert read_texts(found)[4].tokens == (1, 2, 3, 4, 5)
    assert reference["position"].tolist() == reference["node"].tolist() == [0, 1, 2, 3]
    assert set(reference["request"].tolist()) == {4} and set(reference["pass"].tolist()) == {0}
    assert reference.tensor("boundaries", "b3").dtype == torch.bfloat16


def test_a_long_text_is_written_in_pieces_that_join(
    target_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target, texts = LayerwiseTarget(target_of("qwen3"), dtype=torch.float32), []
    for number, length in enumerate((40, 3)):
        texts.append(GivenText(number, str(number), tuple(range(length))))
    record_reference(target, texts, tmp_path / "whole", boundaries=ALL)
    monkeypatch.setattr("spectrace.engine.reference._BYTES_AT_ONCE", 7 * 6 * 48 * 4)
    record_reference(target, texts, tmp_path / "pieces", boundaries=ALL)
    whole, pieces = (Trace.open(tmp_path / name).rows("reference") for name in ("whole", "pieces"))
    assert len(whole) == 43  # of a prompt alone, every token is fed
    for column in ("request", "node", "position", "token", "hashes"):
        assert np.array_equal(whole[column], pieces[column])


def test_the_target_s_own_answers_tell_it_from_another(
    target_of: Callable[..., Path],
    new_target: Callable[..., Path],
    pair_of: Callable[..., Deployment],
    prompts: list[list[int]],
    tmp_path: Path,
) -> None:
    """Though both references hold the very texts of the trace, as answers, too."""
    pair_of("llama", "gqa").serve(prompts, Serving(max_new=20, ignore_end=True), trace=tmp_path / "served")
    served = Trace.open(tmp_path / "served")
    other = new_target(tmp_path / "another", "llama", initializer_range=0.2)
    told = {}
    for name, folder in (("same", target_of("llama")), ("other", other)):
        target = LayerwiseTarget(folder, dtype=torch.float32)
        record_reference(target, texts_of(served), tmp_path / name, boundaries=[0, 2])
        reference = Trace.open(tmp_path / name)
        recorded = Recorded(reference, read_texts(served), read_texts(reference))
        assert all(recorded.covers(request) for request in range(8)) and recorded.has(Slot(2))
        told[name] = recorded.answered()
    assert told["same"].tokens == told["other"].tokens == 8 * 20
    assert told["same"].equal == 8 * 20 and told["other"].equal < 30


@pytest.mark.parametrize(
    ("texts", "boundaries", "said"),
    [
        ([], [0], "no texts: give at least one"),
        ([GivenText(3, "3", ())], [0], "text 3 is empty"),
        ([GivenText(3, "3", (1, 96))], [0], "token 96 is not in the target's vocabulary, 0 to 95; .*hashed"),
        ([GivenText(3, "3", (1,), (-5,))], [0], "token -5 is not in the target's vocabulary"),
        (
            [GivenText(3, "3", (1,))],
            [0, 6],
            "--boundaries: boundary 6 does not exist; this target has boundaries 0 to 5",
        ),
    ],
)
def test_texts_and_boundaries_that_a_target_does_not_have_are_refused(
    texts: list[GivenText], boundaries: list[int], said: str, target_of: Callable[..., Path], tmp_path: Path
) -> None:
    target = LayerwiseTarget(target_of("llama"), dtype=torch.float32)
    with pytest.raises(UserError, match=said):
        record_reference(target, texts, tmp_path / "trace", boundaries=boundaries)
    assert not (tmp_path / "trace").exists()


def test_what_ends_before_it_is_written_leaves_nothing_and_what_is_not_whole_has_no_seal(
    target_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target, text = LayerwiseTarget(target_of("llama"), dtype=torch.float32), GivenText(0, "0", (1, 2, 3))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(target, "logits", interrupt)
        record_reference(target, [text], tmp_path / "trace", boundaries=ALL)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(
        "spectrace.tracer.recorder.Recorder.reference", lambda self, keys, **_: self.dropped("reference", 3)
    )
    with pytest.raises(
        UserError, match="the reference is incomplete and was not sealed: target-0: rows lost: 3 reference"
    ):
        record_reference(target, [text], tmp_path / "trace", boundaries=ALL)
    assert not Trace.open(tmp_path / "trace").sealed

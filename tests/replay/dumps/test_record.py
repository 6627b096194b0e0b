"""What files hold is in the trace bit for bit, row by row, and a trace that could not be finished is not there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from spectrace.engine.layerwise import LayerwiseTarget
from spectrace.replay.configuration import Slot
from spectrace.replay.dumps.plan import Plan, plan_import
from spectrace.replay.dumps.record import record_dump
from spectrace.replay.dumps.sample import Convention
from spectrace.replay.dumps.unknowns import Given
from spectrace.replay.texts import Text, read_texts
from spectrace.replay.truth import Recorded
from spectrace.tracer.errors import UserError
from spectrace.tracer.trace import Trace

WIRED = Given(ids=(2, 4, 5), convention=Convention.INPUT)


def silent(done: int, total: int) -> None:
    pass


def recorded(plan: Plan, out: Path) -> Trace:
    record_dump(plan, out, target=None, progress=silent)
    trace = Trace.open(out)
    assert trace.sealed and trace.verify() == [] and trace.account().lost == 0
    return trace


def states_of(path: Path) -> list[Tensor]:
    """All that a sample's file holds of hidden states, slots first, [T, F] each, read without spectrace."""
    fields = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    if isinstance(fields["hidden_states"], list):
        return list(fields["hidden_states"])
    if "aux_hidden_states" in fields:
        return [*fields["aux_hidden_states"].split(32, 1), fields["hidden_states"]]
    return list(fields["hidden_states"].unbind(1))


@pytest.mark.parametrize("producer", ["speculators", "speculators-legacy", "vllm", "modelopt"])
def test_states_come_back_bit_for_bit_in_the_type_they_had(
    producer: str, samples: Path, target: LayerwiseTarget, tmp_path: Path
) -> None:
    plan = plan_import(samples / producer, given=Given(), target=target)
    rows = recorded(plan, tmp_path / "trace").rows("reference")
    for request, item in enumerate(plan.items):
        mine = rows.where(request=[request])
        assert mine["position"].tolist() == list(range(len(mine)))
        states = states_of(next((samples / producer).rglob(item.name)))
        for boundary, true in zip(plan.recorded, states, strict=False):
            read = mine.tensor("boundaries", f"b{boundary}")
            assert read.dtype == true.dtype == (torch.float32 if producer == "modelopt" else torch.bfloat16)
            assert torch.equal(read, true)


def test_slots_as_an_engine_captured_them_come_back_bit_for_bit(samples: Path, tmp_path: Path) -> None:
    plan = plan_import(samples / "vllm", given=Given(), family="emitted")
    trace = recorded(plan, tmp_path / "trace")
    rows = trace.rows("emitted").where(request=[1])
    true = torch.cat(states_of(sorted((samples / "vllm").iterdir())[1]), dim=1)
    read = rows.tensor("slots")
    assert read.dtype == torch.bfloat16 and torch.equal(read, true)
    assert {len(hashes) for hashes in rows["hashes"]} == {4}  # one for each slot
    assert not len(trace.rows("reference")) and "capture" not in trace.writers["target-0"]


def test_a_request_is_a_text_with_its_prompt_and_its_answer(
    samples: Path, texts: list[dict[str, list[int]]], tmp_path: Path
) -> None:
    trace = recorded(plan_import(samples / "specforge", given=WIRED), tmp_path / "trace")
    found = read_texts(trace)
    assert [found[at] for at in range(3)] == [
        Text(tuple(text["tokens"][:9]), tuple(text["tokens"][9:]), 0) for text in texts
    ]
    requests = trace.rows("requests")
    assert requests["id"].tolist() == ["data_0", "data_1", "data_2"] and set(requests["finish_reason"]) == {"given"}
    moved = recorded(plan_import(samples / "specforge", given=Given(**_said(WIRED), mask_shift=1)), tmp_path / "moved")
    assert len(read_texts(moved)[0].prompt) == 10


def _said(given: Given) -> dict[str, Any]:
    return {"ids": given.ids, "convention": given.convention}


def test_without_a_mask_everything_is_prompt(samples: Path, texts: list[Any], tmp_path: Path) -> None:
    trace = recorded(plan_import(samples / "vllm", given=Given(), family="emitted"), tmp_path / "trace")
    assert {text.prompt for text in read_texts(trace).values()} == {tuple(text["tokens"]) for text in texts}
    assert not any(text.output for text in read_texts(trace).values())


@pytest.mark.parametrize("by", [-1, 1])
def test_rows_that_are_moved_stand_at_the_token_that_they_are_of(by: int, samples: Path, tmp_path: Path) -> None:
    plain = recorded(plan_import(samples / "specforge", given=WIRED), tmp_path / "plain").rows("reference")
    plan = plan_import(samples / "specforge", given=Given(**_said(WIRED), shift=by))
    rows = recorded(plan, tmp_path / "moved").rows("reference")
    plain, rows = plain.where(request=[0]), rows.where(request=[0])
    assert rows["position"].tolist() == (list(range(1, 33)) if by > 0 else list(range(32)))
    assert np.array_equal(rows["token"], plain["token"][1:] if by > 0 else plain["token"][:-1])
    read, true = (one.tensor("boundaries", "b2") for one in (rows, plain))
    assert torch.equal(read, true[:-1] if by > 0 else true[1:])


def test_the_manifest_says_what_was_decided_and_how(samples: Path, target: LayerwiseTarget, tmp_path: Path) -> None:
    given = Given(ids=(2, 4, 5))  # output ids, as SpecForge's are: one too many
    plan = plan_import(samples / "specforge", given=given, target=target, force=True)
    trace = recorded(plan, tmp_path / "trace")
    told = trace.manifest["import"]
    assert trace.manifest["dtype"] == "bfloat16" and trace.manifest["texts"] == {"from": str(samples / "specforge")}
    assert (told["format"], told["texts"], told["contradictions"]) == ("specforge", 3, ["slots"])
    slots = told["unknowns"]["slots"]
    assert slots["value"] == [3, 5, 6] and slots["found"] == [2, 4, 5] and slots["contradicted"]
    assert slots["how"] == "CONTRADICTION: --ids as output ids, as specforge has them, against the data"
    assert "slot 1: 4 at 0.00" in slots["evidence"]
    assert trace.writers["target-0"]["capture"] == [3, 5, 6]  # as it was said


def test_an_import_serves_as_true_boundaries_of_the_same_texts(
    samples: Path, target: LayerwiseTarget, tmp_path: Path
) -> None:
    trace = recorded(plan_import(samples / "speculators", given=Given(), target=target), tmp_path / "trace")
    texts = read_texts(trace)
    source = Recorded(trace, texts, texts)
    assert all(source.covers(request) for request in texts) and source.has(Slot(8)) and not source.has(Slot(3))


def test_two_slots_of_one_boundary_are_recorded_once_and_that_is_said(samples: Path, tmp_path: Path) -> None:
    given = Given(ids=(2, 4, 4), convention=Convention.INPUT)
    plan = plan_import(samples / "specforge", given=given)
    assert plan.recorded == [2, 4] and "slot 2 is left out: boundary 4, as an earlier one" in plan.notes
    assert recorded(plan, tmp_path / "trace").rows("reference").has("boundaries").all()


def test_long_texts_are_written_in_pieces_that_join(
    samples: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = plan_import(samples / "specforge", given=WIRED)
    whole = recorded(plan, tmp_path / "whole").rows("reference")
    monkeypatch.setattr("spectrace.replay.dumps.record._BYTES_AT_ONCE", 7 * 3 * 32 * 2)
    pieces = recorded(plan, tmp_path / "pieces").rows("reference")
    for column in ("request", "node", "position", "token", "hashes"):
        assert np.array_equal(whole[column], pieces[column])


@pytest.fixture
def many(samples: Path, tmp_path: Path) -> Path:
    """Six files, of which a plan reads the first, the fourth and the last."""
    folder = tmp_path / "many"
    folder.mkdir()
    for at in range(6):
        shutil.copy(samples / "specforge" / "rows_0-2000" / "data_0.ckpt", folder / f"data_{at}.ckpt")
    return folder


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def widen(path: Path) -> None:
    fields = torch.load(path, weights_only=True)
    fields["aux_hidden_state"] = torch.cat([fields["aux_hidden_state"], fields["hidden_state"]], -1)
    torch.save(fields, path)


def refine(path: Path) -> None:
    fields = torch.load(path, weights_only=True)
    torch.save({name: one.float() if one.is_floating_point() else one for name, one in fields.items()}, path)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (cut, "data_1.ckpt: not a whole file"),
        (widen, "data_1.ckpt: found 4 slots of 32 columns in bfloat16, .*, expected 3 slots"),
        (refine, "data_1.ckpt: found 3 slots of 32 columns in float32, .* in bfloat16, .* as in data_0"),
    ],
)
@pytest.mark.parametrize("there", [False, True])
def test_a_bad_file_among_many_leaves_no_trace(
    spoil: Callable[[Path], None], says: str, there: bool, many: Path, tmp_path: Path
) -> None:
    spoil(many / "data_1.ckpt")
    plan, out = plan_import(many, given=WIRED), tmp_path / "trace"
    if there:
        out.mkdir()
    with pytest.raises(UserError, match=says):
        record_dump(plan, out, target=None, progress=silent)
    assert out.exists() == there and not (there and any(out.iterdir()))


def test_ctrl_c_leaves_no_trace(many: Path, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record_dump(plan_import(many, given=WIRED), tmp_path / "trace", target=None, progress=stop)
    assert not (tmp_path / "trace").exists()


def test_a_file_that_declares_another_norm_is_refused(broken: Callable[..., Path], tmp_path: Path) -> None:
    folder = broken("modelopt", lambda fields: None)
    for at in range(3, 6):
        shutil.copy(folder / "conversation-0.pt", folder / f"conversation-{at}.pt")
    fields = torch.load(folder / "conversation-1.pt", weights_only=True)
    torch.save({**fields, "hidden_states_prenorm": True}, folder / "conversation-1.pt")
    with pytest.raises(UserError, match=r"conversation-1.pt: found .* the last state pre-norm, expected .* post-norm"):
        record_dump(plan_import(folder, given=WIRED), tmp_path / "trace", target=None, progress=silent)

"""What files leave open is decided right, for every producer; what they or a user say wrongly is found out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spectrace.engine.layerwise import LayerwiseTarget
from spectrace.replay.dumps.plan import Plan, plan_import
from spectrace.replay.dumps.sample import Convention, Norm
from spectrace.replay.dumps.unknowns import Given
from spectrace.tracer.errors import UserError

WIRED, TOP = (2, 4, 5), 8
STATES = {
    "specforge": ("hidden_state", "aux_hidden_state"),
    "angelslim": ("hidden_states", "target_hiddens"),
    "modelopt": ("hidden_states", "aux_hidden_states"),
    "speculators": ("hidden_states",),
    "speculators-legacy": ("hidden_states",),
    "vllm": ("hidden_states",),
}
POST, PRE, SLOTS_ALONE = (
    ("specforge", "angelslim", "modelopt"),
    ("speculators", "speculators-legacy"),
    ("vllm", "sglang"),
)
MASKED = ("specforge", "angelslim", "modelopt", "speculators-legacy")


def found(plan: Plan) -> dict[str, Any]:
    return {one.name: one.to_json()["found"] for one in plan.unknowns.all}


def moved(states: Any, by: int) -> Any:
    """Rows moved against their tokens: row t is then of token t + by, and zeros stand in for what is not there."""
    if isinstance(states, list):
        return [moved(one, by) for one in states]
    rows = max(range(states.dim()), key=lambda dim: (states.shape[dim] in (33, 66), -dim))
    rolled: Tensor = states.roll(-by, rows)
    rolled.narrow(rows, 0 if by < 0 else states.shape[rows] - by, abs(by)).zero_()
    return rolled


def shift_states(producer: str, by: int) -> Callable[[dict[str, Any]], None]:
    def change(fields: dict[str, Any]) -> None:
        for name in STATES[producer]:
            fields[name] = moved(fields[name], by)

    return change


def shift_mask(fields: dict[str, Any]) -> None:
    """A mask that says of entry t whether token t + 1 counts."""
    mask = fields["loss_mask"]
    fields["loss_mask"] = torch.cat((mask[..., 1:], torch.zeros_like(mask[..., :1])), dim=-1)


def contradiction(source: Path, target: LayerwiseTarget, **given: Any) -> str:
    with pytest.raises(UserError, match="CONTRADICTION") as raised:
        plan_import(source, given=Given(**given), target=target)
    forced = plan_import(source, given=Given(**given), target=target, force=True)
    assert forced.to_json()["contradictions"]
    return raised.value.message


@pytest.mark.parametrize("producer", [*POST, *PRE, *SLOTS_ALONE])
def test_everything_is_decided_by_the_target_with_nothing_said(
    producer: str, samples: Path, target: LayerwiseTarget
) -> None:
    plan = plan_import(samples / producer, given=Given(), target=target)
    alone = producer in SLOTS_ALONE
    assert plan.dialect.name == producer
    assert found(plan) == {
        "last hidden state": None if alone else "post" if producer in POST else "pre",
        "slots": [*WIRED, TOP] if alone else [*WIRED],
        "rows": 0,
        "mask": None if alone else 0,
    }
    assert plan.recorded == ([*WIRED] if producer in POST else [*WIRED, TOP])
    assert bool(plan.notes) == (producer in POST)  # what is behind the final norm is left out, and that is said


@pytest.mark.parametrize("producer", [*POST, *PRE, *SLOTS_ALONE])
def test_without_a_target_what_is_said_stands_and_is_not_called_tested(producer: str, samples: Path) -> None:
    ids = (*WIRED, TOP) if producer in (*PRE, *SLOTS_ALONE) else WIRED
    plan = plan_import(samples / producer, given=Given(ids=ids, convention=Convention.INPUT))
    assert plan.boundaries[:3] == WIRED and not any(found(plan).values())
    assert all("not tested" in one.how for one in plan.unknowns.all)
    assert plan.last == (TOP if producer == "speculators" else None)


@pytest.mark.parametrize("producer", [*POST, *PRE, *SLOTS_ALONE])
@pytest.mark.parametrize("by", [-1, 1])
def test_ids_that_are_one_off_are_contradicted(producer: str, by: int, samples: Path, target: LayerwiseTarget) -> None:
    true = (*WIRED, TOP) if producer in SLOTS_ALONE else WIRED
    given = {
        "ids": tuple(boundary - (by > 0) for boundary in true),
        "convention": Convention(("input", "output")[by < 0]),
    }
    said = contradiction(samples / producer, target, **given)
    assert f"the data say {', '.join(map(str, true))}, as if they were {'output' if by > 0 else 'input'} ids" in said


@pytest.mark.parametrize("producer", [*POST, *PRE])
def test_a_norm_that_is_said_to_be_there_or_not_is_contradicted(
    producer: str, samples: Path, target: LayerwiseTarget
) -> None:
    other = Norm.PRE if producer in POST else Norm.POST
    said = contradiction(samples / producer, target, norm=other)
    assert f"last hidden state: --norm says {other}, and the data say {'post' if other is Norm.PRE else 'pre'}" in said


def test_a_flag_in_a_file_that_its_states_deny_is_contradicted(
    broken: Callable[..., Path], target: LayerwiseTarget
) -> None:
    folder = broken("modelopt", lambda fields: fields.update(hidden_states_prenorm=True))
    assert "the format says pre, and the data say post" in contradiction(folder, target)


@pytest.mark.parametrize("producer", STATES)
@pytest.mark.parametrize("by", [-1, 1])
def test_rows_that_are_moved_against_their_tokens_are_contradicted(
    producer: str, by: int, broken: Callable[..., Path], target: LayerwiseTarget
) -> None:
    folder = broken(producer, shift_states(producer, by))
    assert f"rows: the format says 0, and the data say {by}" in contradiction(folder, target)
    plan = plan_import(folder, given=Given(shift=by), target=target)
    assert not plan.unknowns.contradicted and plan.boundaries[:3] == WIRED


def test_one_slot_that_is_moved_against_the_others_is_contradicted(
    broken: Callable[..., Path], target: LayerwiseTarget
) -> None:
    def change(fields: dict[str, Any]) -> None:
        fields["hidden_states"][1] = moved(fields["hidden_states"][1], 1)

    assert "rows: the format says 0, and the data say 0, 1" in contradiction(
        broken("speculators-legacy", change), target
    )


def test_rows_of_sglang_that_are_said_to_be_moved_are_contradicted(samples: Path, target: LayerwiseTarget) -> None:
    assert "rows: --shift says 1, and the data say 0" in contradiction(samples / "sglang", target, shift=1)


@pytest.mark.parametrize("producer", MASKED)
def test_a_mask_that_is_one_ahead_is_contradicted(
    producer: str, broken: Callable[..., Path], target: LayerwiseTarget
) -> None:
    folder = broken(producer, shift_mask)
    assert "mask: the format says 0, and the data say 1" in contradiction(folder, target)
    assert not plan_import(folder, given=Given(mask_shift=1), target=target).unknowns.contradicted


def test_a_mask_of_the_dataset_around_the_files_that_is_one_ahead_is_contradicted(
    masks_moved: Callable[[int], Path], target: LayerwiseTarget
) -> None:
    assert "mask: the format says 0, and the data say 1" in contradiction(masks_moved(1), target)


def test_ids_that_nobody_says_and_nothing_shows_are_asked_for(samples: Path) -> None:
    with pytest.raises(UserError, match=r"give --ids with --convention, or --target to find out, or import them --as"):
        plan_import(samples / "specforge", given=Given())
    plan = plan_import(samples / "specforge", given=Given(), family="emitted")
    assert plan.boundaries == (None, None, None) and plan.recorded == []


@pytest.mark.parametrize("ids", [(2,), (2, 4, 5, 8, 9)])
def test_ids_that_are_not_as_many_as_the_slots_are_refused(ids: tuple[int, ...], samples: Path) -> None:
    with pytest.raises(UserError, match=rf"--ids: found {len(ids)} ids, expected 3, one for each slot"):
        plan_import(samples / "specforge", given=Given(ids=ids))


@pytest.mark.parametrize(
    ("producer", "given", "says"),
    [
        ("vllm", Given(norm=Norm.PRE), "--norm pre: .* has no last hidden state"),
        ("vllm", Given(mask_shift=0), "--mask-shift 0: .* has no mask"),
        ("specforge", Given(convention=Convention.INPUT), "--convention input: found no ids"),
    ],
)
def test_what_is_said_of_something_that_is_not_there_is_refused(
    producer: str, given: Given, says: str, samples: Path
) -> None:
    with pytest.raises(UserError, match=says):
        plan_import(samples / producer, given=given)


def test_a_text_too_short_to_tell_anything_contradicts_nothing(
    broken: Callable[..., Path], target: LayerwiseTarget
) -> None:
    def cut(fields: dict[str, Any]) -> None:
        if fields["conversation_id"] == "conversation-0":
            fields |= {name: one[:1] for name, one in fields.items() if isinstance(one, Tensor)}

    assert plan_import(broken("modelopt", cut), given=Given(), target=target).boundaries == WIRED


def test_rows_that_are_alike_tell_the_boundary_and_leave_the_alignment_open(
    samples: Path, load_target: Callable[[Path], Any], target: LayerwiseTarget, tmp_path: Path
) -> None:
    """One token, again and again: a model without positions could not even tell its rows apart."""
    tokens = torch.full((1, 40), 7)
    with torch.inference_mode():
        hidden = load_target(samples / "target")(tokens, output_hidden_states=True).hidden_states
    dump = {"input_ids": tokens[0], "hidden_states": hidden[-1][0], "aux_hidden_states": hidden[0][0].clone()}
    torch.save(dump, tmp_path / "same.pt")
    plan = plan_import(tmp_path, given=Given(), target=target)
    assert plan.boundaries == (0,) and not plan.unknowns.contradicted


def test_a_target_that_the_states_are_not_of_is_refused(
    samples: Path, new_target: Callable[..., Path], tmp_path: Path
) -> None:
    narrow = LayerwiseTarget(new_target(tmp_path / "48", "llama"), dtype=torch.float32)
    with pytest.raises(UserError, match=r"found hidden states of 32 columns, expected the target's 48"):
        plan_import(samples / "vllm", given=Given(), target=narrow)
    small = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "head_dim": 16}
    other = LayerwiseTarget(new_target(tmp_path / "other", "llama", **small), dtype=torch.float32)
    with pytest.raises(UserError, match=r"found no tensor that is a boundary of the target"):
        plan_import(samples / "vllm", given=Given(), target=other)


def test_files_that_say_different_things_are_not_averaged(broken: Callable[..., Path], target: LayerwiseTarget) -> None:
    def swap(fields: dict[str, Any]) -> None:
        if fields["conversation_id"] == "conversation-2":
            fields["aux_hidden_states"] = fields["aux_hidden_states"].roll(32, 1)

    with pytest.raises(UserError, match=r"slot 0: found 2 in conversation-0 and 5 in conversation-2"):
        plan_import(broken("modelopt", swap), given=Given(), target=target)


def test_a_state_that_is_no_boundary_contradicts_and_is_named(
    broken: Callable[..., Path], target: LayerwiseTarget
) -> None:
    """A branch that was not summed, say: here noise."""

    def change(fields: dict[str, Any]) -> None:
        fields["hidden_states"][0] = torch.randn_like(fields["hidden_states"][0].float()).bfloat16()

    folder = broken("speculators-legacy", change)
    said = contradiction(folder, target, ids=WIRED, convention=Convention.INPUT)
    assert "the data say no boundary, 4, 5" in said
    plan = plan_import(folder, given=Given(), target=target)
    assert plan.recorded == [4, 5, TOP] and plan.notes == ("slot 0 is left out: no boundary",)


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ((-1, 4, 5), "found an id that means boundary -1, expected boundaries from 0"),
        ((2, 4, 5, 7), "found a last id that means boundary 7, expected 8, behind the target's last layer"),
    ],
)
def test_ids_that_no_layer_of_the_target_has_are_refused(
    ids: tuple[int, ...], says: str, samples: Path, target: LayerwiseTarget
) -> None:
    with pytest.raises(UserError, match=says):
        plan_import(samples / "speculators", given=Given(ids=ids), target=target)

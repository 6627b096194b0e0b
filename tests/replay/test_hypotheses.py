"""Every hypothesis changes the one link that it names, can be built and run, and leaves what it starts from alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spectrace.engine.attention import KeyValueCache, PackedAttend
from spectrace.engine.checkpoint import build_draft, read_draft, read_embedding, read_head, unscaled
from spectrace.engine.draft import DraftModel
from spectrace.engine.fault import Drafting, Source
from spectrace.engine.faults import FAULTS
from spectrace.engine.spec import GqaSpec, LaterNorm, RopeKind
from spectrace.replay.configuration import Configuration, Slot, Steps, View
from spectrace.replay.hypotheses import (
    computing,
    ending,
    feeding,
    mapping,
    moved,
    moving,
    served_table,
)
from spectrace.replay.hypothesis import Hypothesis
from spectrace.replay.link import LINKS
from spectrace.replay.spare import spare_tensors

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("gqa", {}),
    "norm per slot, scaled": (
        "gqa",
        {"fc_norm": True, "rope_scaling": {"rope_type": "linear", "factor": 4.0}, "norm_output": True},
    ),
    "mla, yarn": (
        "mla",
        {
            "norm_before_fc": True,
            "rope_scaling": {
                "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "mscale_all_dim": 1.0
            },
        },
    ),
    "one slot": ("gqa", {"eagle_aux_hidden_state_layer_ids": [4]}),
    "deep": ("deep", {}),
    "deep, all tokens": ("deep", {"model_type": "llama", "draft_vocab_size": None, "mlp_bias": None}),
}  # fmt: skip
RUN = torch.Generator().manual_seed(0)


@pytest.fixture(params=CONFIGS.values(), ids=list(CONFIGS))
def start(
    request: pytest.FixtureRequest,
    new_draft: Callable[..., Any],
    write_draft: Callable[..., Path],
    target_of: Callable[..., Path],
    tmp_path: Path,
) -> tuple[Configuration, list[Hypothesis]]:
    attention, changes = request.param
    target = target_of("llama")
    checkpoint = read_draft(write_draft(tmp_path, *new_draft(attention, **changes)))
    model = build_draft(checkpoint, target=target, dtype=torch.float32)
    assert checkpoint.wiring
    wiring = tuple(Slot(boundary) for boundary in checkpoint.wiring.boundaries)
    at = Configuration(checkpoint.spec, model.state_dict(), wiring, spare=spare_tensors(checkpoint, torch.float32))
    shared = {"head": read_head(target), "embedding": read_embedding(target)}
    return at, [*computing(at, shared), *mapping(at, None), *moving()]


def outputs(model: DraftModel, steps: Steps = Steps()) -> Iterator[torch.Tensor]:  # noqa: B008
    """Logits and token ids of two depths over a few random rows."""
    spec, rows = model.spec, 24
    features = torch.randn(rows, spec.features_width, generator=torch.Generator().manual_seed(1))
    tokens = torch.randint(0, spec.target_vocab, (rows,), generator=torch.Generator().manual_seed(2))
    mask, positions = torch.ones(rows, rows, dtype=torch.bool).tril(), torch.arange(rows)
    places = torch.arange(rows)
    state = model.fuse(features)
    for depth in range(2):
        positions = positions + (steps.to(depth) if depth else 0)
        attend = PackedAttend(KeyValueCache(), mask, lambda window: places > places[:, None] - window)
        hidden, state = model(tokens, state, positions, attend)
        logits = model.logits(hidden)
        yield logits
        yield model.to_target(logits.argmax(-1)).float()


def test_every_hypothesis_changes_its_link_and_no_other(start: tuple[Configuration, list[Hypothesis]]) -> None:
    at, hypotheses = start
    assert len({(one.link, one.title) for one in hypotheses}) == len(hypotheses)
    for one in hypotheses:
        there = one.apply(at)
        changed = {name for name, link in LINKS.items() if link.read(there) != link.read(at)}
        assert changed == {one.link}, one.title


def test_every_hypothesis_runs_and_computes_something_else(start: tuple[Configuration, list[Hypothesis]]) -> None:
    at, hypotheses = start
    before = {name: tensor.clone() for name, tensor in at.tensors.items()}
    own = list(outputs(at.build()))
    for one in hypotheses:
        there = one.apply(at)
        found = list(outputs(there.build(), there.steps))
        same = [torch.equal(a, b) for a, b in zip(own, found, strict=True)]
        if one.link == "positions":  # moved by the same amount for all rows, RoPE sees no difference here
            continue
        assert not all(same), one.title
        assert all(same[:1]) or not one.deeper, one.title
    assert all(torch.equal(before[name], tensor) for name, tensor in at.tensors.items())


def test_switches_are_tried_as_faults_leave_them(start: tuple[Configuration, list[Hypothesis]]) -> None:
    at, hypotheses = start
    biased = isinstance(at.spec.attention, GqaSpec)
    for name in ("N1", "N3", "R4", "R5", "P7")[: 5 if biased else 4]:
        breaks = FAULTS[name].breaks
        assert isinstance(breaks, Drafting) and breaks.spec
        wrong = breaks.spec(at.spec)
        tried = [one.apply(at).spec for one in hypotheses if (one.fault, one.variant) == (name, "")]
        assert tried == ([wrong] if wrong != at.spec else []), name


def test_windows_are_tried_as_a_fault_leaves_them_and_as_engines_count_them(
    start: tuple[Configuration, list[Hypothesis]],
) -> None:
    at, hypotheses = start
    tried = [one.apply(at).spec.windows for one in hypotheses if one.fault == "A2"]
    assert tried == ([(None, None), (8, None), (6, None)] if any(at.spec.windows) else [])
    other = replace(at.spec, windows=(3,) * at.spec.layers)
    [known] = [one for one in computing(at, {}, (other, at.spec)) if one.fault == "A2" and "3" in one.title]
    assert known.apply(at).spec == other


def test_tensors_are_tried_as_faults_leave_them(
    start: tuple[Configuration, list[Hypothesis]], target_of: Callable[..., Path]
) -> None:
    at, hypotheses = start
    named = {
        "P4": ("P4", ""), "P5": ("P5", ""), "N4": ("N4", "plain"), "N4:first": ("N4", "first"),
        "A1:head": ("A1", "head"),
    }  # fmt: skip
    for name, fault in named.items():
        breaks = FAULTS[name].breaks
        assert isinstance(breaks, Drafting) and breaks.weights
        wrong = breaks.weights(at.tensors, Source(at.spec, target_of("llama")))
        tried = [one.apply(at).tensors for one in hypotheses if (one.fault, one.variant) == fault]
        there = bool(wrong) and not (name == "A1:head" and at.spec.draft_vocab < at.spec.target_vocab)
        changed = [{n for n, tensor in new.items() if not torch.equal(tensor, at.tensors[n])} for new in tried]
        assert there == any(
            names == wrong.keys() and all(torch.equal(new[n], wrong[n]) for n in names)
            for new, names in zip(tried, changed, strict=True)
        ), name


def test_a_draft_is_not_tried_without_what_it_has_not(start: tuple[Configuration, list[Hypothesis]]) -> None:
    at, hypotheses = start
    found = {one.link for one in hypotheses}
    several = at.spec.layers > 1
    assert ("later norm" in found, "window" in found) == (several, several)
    assert ("attention bias" in found) == several and ("MLP bias" in found) == at.spec.mlp_bias
    assert not {"scales", "context", "embedding scale", "fc bias"} & found
    assert not any(one.fault == "P6" for one in hypotheses)
    assert sum(one.fault == "P4" for one in hypotheses) == (1 + at.spec.layers if several else 1)


def test_a_built_draft_computes_what_the_checkpoint_does(start: tuple[Configuration, list[Hypothesis]]) -> None:
    at, _ = start
    model = DraftModel(at.spec)
    model.load_state_dict(dict(at.tensors))
    for ours, theirs in zip(outputs(at.build()), outputs(model.eval()), strict=True):
        assert torch.equal(ours, theirs)


def test_wirings_are_tried_near_and_far_each_once(start: tuple[Configuration, list[Hypothesis]]) -> None:
    at, _ = start
    found = [one.apply(at).wiring for one in feeding(at, 5, range(6))]
    assert len(set(found)) == len(found) and at.wiring not in found
    streams = [wiring for wiring in found if all(slot.view is View.STREAM for slot in wiring)]
    numbers = {tuple(slot.boundary for slot in wiring) for wiring in streams}
    slots = len(at.wiring)
    for place in range(slots):
        for boundary in range(6):
            wiring = (*at.wiring[:place], Slot(boundary), *at.wiring[place + 1 :])
            assert wiring == at.wiring or wiring in found
    if slots == 3:
        assert {(4, 2, 0), (1, 3, 5), (0, 1, 3), (2, 4, 2), (0, 0, 2), (2, 2, 2)} <= numbers


def test_wirings_over_unknown_boundaries_are_not_tried(start: tuple[Configuration, list[Hypothesis]]) -> None:
    at, _ = start
    known = {slot.boundary for slot in at.wiring} | {1}
    wirings = [one.apply(at).wiring for one in feeding(at, 5, sorted(known))]
    assert wirings and all(slot.boundary in known for wiring in wirings for slot in wiring)


def test_scaling_that_a_config_lost_is_tried_as_others_have_it(start: tuple[Configuration, list[Hypothesis]]) -> None:
    at, _ = start
    scaled = replace(at.spec, rope=replace(at.spec.rope, kind=RopeKind.LINEAR, factor=4.0, theta=777.0))
    plain = replace(at, spec=unscaled(at.spec))
    tried = {one.title: one for one in computing(plain, {}, (scaled, plain.spec))}
    found = tried["RoPE is scaled: linear by 4"].apply(plain).spec.rope
    assert (found.kind, found.factor, found.theta) == (RopeKind.LINEAR, 4.0, plain.spec.rope.theta)
    assert "RoPE's theta is 777" in tried


@pytest.mark.parametrize(
    ("offsets", "steps"),
    [
        ((2, 3, 4), Steps(2, 1)),
        ((0, 1, 2), Steps(0, 1)),
        ((1, 1, 1), Steps(1, 0)),
        ((3,), Steps(3, 1)),
        ((1, 3, 4), None),
    ],
)
def test_positions_are_run_as_they_were_found(
    offsets: tuple[int, ...], steps: Steps | None, start: tuple[Configuration, list[Hypothesis]]
) -> None:
    one = moved(offsets, "R1", "positions are off")
    assert (one and one.apply(start[0]).steps) == steps


def test_a_table_is_run_as_it_was_found(start: tuple[Configuration, list[Hypothesis]]) -> None:
    at, _ = start
    ids, tokens = torch.tensor([0, 2]), torch.tensor([5, 1])
    there = served_table(ids, tokens, "V3", "another table").apply(at).build()
    own = at.build().to_target(torch.tensor([1]))
    assert there.to_target(torch.tensor([0, 2, 1])).tolist() == [5, 1, *own.tolist()]


Read = Callable[..., Configuration]


@pytest.fixture
def read(
    new_draft: Callable[..., Any], write_draft: Callable[..., Path], target_of: Callable[..., Path], tmp_path: Path
) -> Read:
    """`read(change, **config)` is a deep draft whose tensors a test has changed, beside another config."""

    def make(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], **config: Any) -> Configuration:
        held, tensors = new_draft("deep")
        folder = write_draft(tmp_path / "draft", {**held, **config}, change(tensors))
        checkpoint = read_draft(folder)
        assert checkpoint.wiring
        model = build_draft(checkpoint, target=target_of("llama"), dtype=torch.float32)
        wiring = tuple(Slot(boundary) for boundary in checkpoint.wiring.boundaries)
        return Configuration(
            checkpoint.spec, model.state_dict(), wiring, spare=spare_tensors(checkpoint, torch.float32)
        )

    return make


def test_biases_that_a_config_does_not_mention_are_tried(read: Read) -> None:
    at = read(dict, attention_bias=False, mlp_bias=False)
    found = {one.variant: one.apply(at) for one in computing(at, {}) if one.fault == "P7"}
    assert set(found) == {"", "o", "all", "mlp"}
    whole, mlp = found["all"], found["mlp"]
    assert isinstance(whole.spec.attention, GqaSpec) and whole.spec.attention.qkv_bias and whole.spec.attention.o_bias
    assert LINKS["attention bias"].read(whole) == "q, k, v, o" and LINKS["MLP bias"].read(mlp) == "applied"
    for there in found.values():
        assert not torch.equal(next(outputs(there.build())), next(outputs(at.build())))


def test_the_other_norm_that_later_layers_ship_is_tried(read: Read) -> None:
    norm = torch.full((48,), 0.25)
    at = read(lambda tensors: {**tensors, "layers.1.hidden_norm.weight": norm})
    [one] = [one for one in computing(at, {}) if (one.fault, one.variant) == ("N4", "")]
    there = one.apply(at)
    assert there.spec.later_norm is LaterNorm.HIDDEN and torch.equal(there.tensors["later.0.input_norm.weight"], norm)


def test_what_is_stored_of_quantised_weights_is_tried(read: Read) -> None:
    stored = dict[str, torch.Tensor]()

    def quantised(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        scale = tensors["fc.weight"].abs().amax(1, keepdim=True) / 448
        stored["fc"] = (tensors["fc.weight"] / scale).to(torch.float8_e4m3fn)
        return {**tensors, "fc.weight": stored["fc"], "fc.weight_scale": scale}

    at = read(quantised)
    [one] = [one for one in computing(at, {}) if one.fault == "P8"]
    assert torch.equal(one.apply(at).tensors["fc.weight"], stored["fc"].float())
    assert not torch.equal(at.tensors["fc.weight"], stored["fc"].float())


def test_what_was_served_is_tried_last(start: tuple[Configuration, list[Hypothesis]]) -> None:
    at, _ = start
    served = {name: tensor + 1 for name, tensor in at.tensors.items()}
    *_, last = computing(replace(at, spare={"served": served}), {})
    assert (last.link, last.fault) == ("weights", "P6") and last.apply(at).tensors == served


def test_a_state_that_is_normed_twice_is_tried_where_a_trainer_does_so(
    start: tuple[Configuration, list[Hypothesis]],
) -> None:
    at, tried = start
    assert not any(one.link == "state norms" for one in tried)
    found = [one for one in computing(at, {}, [replace(at.spec, normed_twice=True)]) if one.link == "state norms"]
    assert [one.fault for one in found] == ["N5"]
    assert found[0].apply(at).spec == replace(at.spec, normed_twice=True)
    assert LINKS["state norms"].read(found[0].apply(at)) != LINKS["state norms"].read(at)


def test_the_embedding_s_scale_is_tried_without_and_as_others_have_it(
    start: tuple[Configuration, list[Hypothesis]],
) -> None:
    at, _ = start
    scaled = replace(at.spec, embedding_scale=48**0.5)
    for here, there in ((at.spec, scaled), (scaled, at.spec)):
        tried = [one for one in computing(replace(at, spec=here), {}, (scaled, at.spec)) if one.variant == "scale"]
        assert [one.apply(replace(at, spec=here)).spec for one in tried] == [there]


def test_a_draft_that_ends_answers_its_first_token_from_there_on(start: tuple[Configuration, list[Hypothesis]]) -> None:
    at, _ = start
    there = ending(20, "all").apply(at)
    assert there.steps.end == 20 and LINKS["context"].read(there) == "up to position 19"
    [late] = [one.apply(there) for one in moving() if one.title.endswith("not advanced")]
    assert late.steps == Steps(0, 0, 20)

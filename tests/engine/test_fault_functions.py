"""What faults do to the rows, tokens, features and weights that they are given, told by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from spectrace.engine.checkpoint import build_draft, read_draft
from spectrace.engine.draft import DraftModel
from spectrace.engine.fault import Capture, Drafting, Fault, Feeding, HandedGroup, HandOff, broken
from spectrace.engine.faults import FAULTS
from spectrace.engine.spec import FuseNorm, MlaSpec, RopeKind, Stream
from spectrace.engine.tree import top_candidates

LAYERS = 30
WIRINGS: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {
    "W1": {(0, 3, 16): (0, 2, 15), (1, 2, 30): (0, 1, 29)},
    "W1:2": {(0, 3, 16): (0, 1, 14), (1, 2, 30): (0, 0, 28)},
    "W1:4": {(0, 3, 16): (0, 0, 12)},
    "W1:slot0": {(1, 2, 30): (0, 2, 30), (0, 3): (0, 3)},
    "W1:slot2": {(0, 3, 16): (0, 3, 15)},
    "W2": {(0, 3, 16): (1, 4, 17), (1, 29, 30): (2, 30, 30)},
    "W2:3": {(0, 3, 16): (3, 6, 19), (1, 29): (4, 30)},
    "W2:slot1": {(0, 3, 16): (0, 4, 16), (0, 30): (0, 30)},
    "W3": {(0, 3, 16): (3, 16, 27), (2, 15, 27): (15, 27, 27)},
    "W4": {(0, 3, 16): (2, 15, 27), (2, 15, 27): (2, 15, 27)},
    "W5": {(0, 3, 16): (16, 3, 0), (1, 2): (2, 1)},
    "W6": {(0, 3, 16): (0, 0, 3), (1, 2): (1, 1)},
    "W7": {(0, 3, 30): (0, 3, 30)},
    "W8": {(0, 3, 30): (0, 3, 30)},
    "N3": {(0, 3, 30): (0, 3, 30)},
}


@pytest.mark.parametrize("name", WIRINGS)
def test_boundaries(name: str) -> None:
    for healthy, wrong in WIRINGS[name].items():
        assert FAULTS[name].wiring(healthy, LAYERS) == wrong


def place(name: str, kind: Any) -> Any:
    [found] = broken([FAULTS[name]], kind)
    return found


def test_w7_takes_the_last_slot_from_behind_the_final_norm() -> None:
    """And leaves alone what hooks on the norm took from the pass."""
    norm, entered = torch.nn.RMSNorm(2), []
    norm.register_forward_pre_hook(lambda _module, args: entered.append(args))
    features = torch.tensor([[1.0, 7.0, 3.0, -4.0], [0.0, 2.0, 0.5, 0.5]])
    captured = place("W7", Capture).slots(features, norm)
    root = 0.5**0.5
    expected = torch.tensor([[1.0, 7.0, 1.2 * root, -1.6 * root], [0.0, 2.0, 1.0, 1.0]])
    torch.testing.assert_close(captured, expected, rtol=1e-5, atol=0)
    assert entered == []


GROUPS = [
    HandedGroup(0, (0, 1, 2), 3, False),
    HandedGroup(3, (3, 5, 4, 6), 2, True),
    HandedGroup(7, (7,), 1, True),
]  # a piece of a prompt, a round of which nodes 0 and 2 were accepted in a fixed window, and one that accepted nothing


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("M3", [(0, 1, 2), (3, 5, 4, 6), (7,)]),
        ("X1", [(3, 5, 4), (0, 1, 2, 6), (7,)]),
        ("X2", [(0, 0, 1), (3, 3, 5, 4), (7,)]),
        ("X3", [(0, 1, 2), (3, 6, 4, 6), (7,)]),
        ("X4", [(0, 1, 2), (3, 4, 4, 6), (7,)]),
    ],
)
def test_rows(name: str, rows: list[tuple[int, ...]]) -> None:
    assert [tuple(own) for own in place(name, HandOff).rows(GROUPS)] == rows


def test_one_request_alone_cannot_be_swapped() -> None:
    for groups in ([], GROUPS[:1]):
        assert list(place("X1", HandOff).rows(groups)) == [group.rows for group in groups]


@pytest.mark.parametrize(
    ("name", "answers", "tokens"),
    [("T1", True, (5, 6, 7)), ("T1", False, (5, 6, 7)), ("T2", True, (6, 7, 8)), ("T2", False, (6, 7, 7))],
)
def test_tokens(name: str, answers: bool, tokens: tuple[int, ...]) -> None:
    assert place(name, Feeding).tokens((5, 6, 7), (6, 7, 8), answers) == tokens


def passes(name: str, *lengths: int) -> list[tuple[Tensor, Tensor]]:
    """What comes and what goes of some passes with so many rows, in one call."""
    change, generator = place(name, HandOff).features(), torch.Generator().manual_seed(0)
    given = [torch.randn(length, 4, generator=generator) * 300 for length in lengths]
    return [(rows, change(rows)) for rows in given]


def test_features() -> None:
    assert all((out == 0).all() for _, out in passes("M3", 3, 2))
    constant = passes("M3:constant", 3, 2)
    assert all((out == constant[0][0][0]).all() and len(out) == len(given) for given, out in constant)
    first, second, third, fourth = passes("M3:stale", 2, 5, 1, 1)
    assert (first[1] == 0).all()
    assert torch.equal(second[1], first[0][[0, 1, 0, 1, 0]])
    assert torch.equal(third[1], second[0][:1]) and torch.equal(fourth[1], third[0])


def test_casts() -> None:
    [(given, half)], [(_, eighth)] = passes("D1", 50), passes("D1:fp8", 50)
    assert torch.equal(half, given.half().float()) and not torch.equal(half, given)
    small = given.abs() < 448
    assert torch.equal(eighth[small], given[small].to(torch.float8_e4m3fn).float())
    assert torch.equal(eighth[~small], given[~small].sign() * 448) and not small.all()
    assert place("D1", HandOff).features()(given.bfloat16()).dtype == torch.bfloat16


@pytest.fixture(scope="module")
def drafts(
    target_of: Callable[..., Path], new_draft: Any, write_draft: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, DraftModel]:
    """A draft with GQA, and one with MLA and scaled RoPE."""
    yarn = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0}
    made = {"gqa": new_draft("gqa", norm_before_fc=True), "mla": new_draft("mla", rope_scaling=yarn)}
    folder = tmp_path_factory.mktemp("drafts")
    return {
        kind: build_draft(
            read_draft(write_draft(folder / kind, *draft)), target=target_of("llama"), dtype=torch.float32
        )
        for kind, draft in made.items()
    }


def rebuilt(fault: Fault, model: DraftModel, target: Path) -> tuple[DraftModel, set[str]]:
    """The draft with a fault, and which of its tensors are other ones; the rest are the very same memory."""
    [drafting] = broken([fault], Drafting)
    if drafting.spec:
        other = model.variant(spec=drafting.spec(model.spec))
    else:
        assert drafting.weights
        other = model.variant(tensors=drafting.weights(model.state_dict(), model.spec, target))
    old, new = model.state_dict(), other.state_dict()
    same = {name for name in old.keys() & new.keys() if new[name].data_ptr() == old[name].data_ptr()}
    assert all(new[name].dtype == old[name].dtype and new[name].shape == old[name].shape for name in new)
    return other, old.keys() - same


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_switches(kind: str, drafts: dict[str, DraftModel], target_of: Callable[..., Path]) -> None:
    model, target = drafts[kind], target_of("llama")

    def broken_spec(name: str) -> Any:
        other, gone = rebuilt(FAULTS[name], model, target)
        assert gone == {"N2": {"fuse_norms.0.weight"}, "V1": {"d2t"}}.get(name, set())
        return other.spec

    assert broken_spec("N1").residual is Stream.POST_NORM and broken_spec("N3").feedback is Stream.POST_NORM
    assert broken_spec("R3").rope.theta == 500000 and model.spec.rope.theta == 10000
    assert (broken_spec("R3:double").rope.theta, broken_spec("R3:half").rope.theta) == (20000, 5000)
    assert broken_spec("R5").rope.interleaved != model.spec.rope.interleaved
    if kind == "gqa":
        assert broken_spec("N2").fuse_norm is FuseNorm.NONE
    else:
        assert isinstance(model.spec.attention, MlaSpec) and model.spec.attention.softmax_scale > 1
        plain = broken_spec("R4")
        assert (plain.rope.kind, plain.rope.cos_scale, plain.attention.softmax_scale) == (RopeKind.DEFAULT, 1, 1)
    features = torch.randn(3, 144)
    assert model.variant(spec=place("M2", Drafting).spec(model.spec)).fuse(features) is features


def test_a_variant_without_changes_computes_the_same(drafts: dict[str, DraftModel]) -> None:
    """Frequencies, which no checkpoint holds, included."""
    for model in drafts.values():
        twin = model.variant()
        assert torch.equal(twin.attention.frequencies, model.attention.frequencies)
        assert not any(parameter.requires_grad or parameter.is_meta for parameter in twin.parameters())


WEIGHTS = {
    "V3": {"d2t"},
    "V4": {"d2t"},
    "V5": {"d2t"},
    "P1:attention": {"attention.o.weight"},
    "P1:fc": {"fc.weight"},
    "P1:norm": {"output_norm.weight"},
    "P1:mlp": {"mlp.gate.weight"},
    "P2": {"head.weight"},
    "P3": {"embedding.weight"},
    "P4": {"mlp.gate.weight", "mlp.up.weight"},
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights(name: str, drafts: dict[str, DraftModel], target_of: Callable[..., Path]) -> None:
    model, target = drafts["gqa"], target_of("llama")
    other, changed = rebuilt(FAULTS[name], model, target)
    assert changed == WEIGHTS[name]
    [again] = [rebuilt(FAULTS[name], model, target)[0].state_dict()]
    for tensor in changed:
        assert torch.equal(other.state_dict()[tensor], again[tensor])
        assert not torch.equal(other.state_dict()[tensor], model.state_dict()[tensor])
    if name.startswith("P1") and name != "P1:norm":
        [weight] = (other.state_dict()[tensor] for tensor in changed)
        bound = weight.shape[1] ** -0.5  # of torch's own linear layers
        assert weight.abs().max() <= bound and weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
    if name == "P2":
        assert torch.equal(other.head.weight, load_file(target / "model.safetensors")["lm_head.weight"][:64])
    if name == "P3":
        assert other.embedding.weight.std().item() == pytest.approx(model.embedding.weight.std().item(), rel=0.05)
    if name == "P4":
        assert torch.equal(other.mlp.gate.weight, model.mlp.up.weight)


def test_tables(drafts: dict[str, DraftModel], target_of: Callable[..., Path]) -> None:
    """What draft ids stand for."""
    model, ids = drafts["gqa"], torch.arange(64)
    tokens = {
        name: rebuilt(FAULTS[name], model, target_of("llama"))[0].to_target(ids) for name in FAULTS if name[0] == "V"
    }
    right = model.to_target(ids)
    assert torch.equal(tokens["V1"], ids) and torch.equal(tokens["V5"], ids)
    assert torch.equal(tokens["V2"], right - ids)
    assert torch.equal(tokens["V4"][1:], right[:-1] + 1)
    assert (tokens["V3"].diff() > 0).all() and not torch.equal(tokens["V3"], right)
    assert all(int(one.min()) >= 0 and int(one.max()) < 96 for one in tokens.values())


def test_positions() -> None:
    assert [place("R1", Drafting).advance(depth) for depth in range(4)] == [0, 2, 3, 4]
    assert [place("R2", Drafting).advance(depth) for depth in range(4)] == [0, 0, 0, 0]
    assert [place("N3", Drafting).advance(depth) for depth in range(4)] == [0, 1, 2, 3]


def test_choices() -> None:
    """Rank 1 alone, below the text alone."""
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, 0.0, 4.0, 1.0]])
    picked = top_candidates(logits, 2)
    pick = place("Q1", Drafting).pick
    assert pick(logits, picked, 1, 1) is picked and pick(logits, picked, 0, 0) is picked
    assert pick(logits, picked, 0, 1).ids.tolist() == [[3, 2], [2, 3]]
    assert pick(logits, top_candidates(logits, 1), 0, 1).ids.tolist() == [[3], [2]]

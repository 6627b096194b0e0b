"""What faults do to the rows, tokens, features and weights that they are given, told by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from spectrace.engine.checkpoint import build_draft, read_draft
from spectrace.engine.draft import DraftModel
from spectrace.engine.fault import Answering, Capture, Drafting, Fault, Feeding, HandedGroup, HandOff, Source, broken
from spectrace.engine.faults import FAULTS
from spectrace.engine.rope import inverse_frequencies, rotary_table, rotate
from spectrace.engine.spec import DraftSpec, FuseNorm, GqaSpec, MlaSpec, RopeKind, RopeSpec, Stream
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
    """A draft with GQA, one with MLA and scaled RoPE, and one of two layers with all that others lack."""
    yarn = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0}
    made = {"gqa": new_draft("gqa", norm_before_fc=True), "mla": new_draft("mla", rope_scaling=yarn)}
    folder = tmp_path_factory.mktemp("drafts")
    return {
        kind: build_draft(
            read_draft(write_draft(folder / kind, *draft)), target=target_of("llama"), dtype=torch.float32
        )
        for kind, draft in made.items()
    } | {"deep": deep_draft()}


DEEP = DraftSpec(
    width=48, target_width=48, slots=3, mlp_width=32, target_vocab=96, draft_vocab=96,
    attention=GqaSpec(heads=4, kv_heads=2, head_dim=12, qkv_bias=True, head_norms=True), rope=RopeSpec(share=2 / 3),
    windows=(None, 5), own_embedding=True, embedding_scale=7.0, unit_offset_norms=True, context=20,
)  # fmt: skip


def deep_draft() -> DraftModel:
    """Every tensor random."""
    torch.manual_seed(0)
    model = DraftModel(DEEP)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model.eval().requires_grad_(False)


def rebuilt(
    fault: Fault, model: DraftModel, target: Path, scales: dict[str, Tensor] | None = None
) -> tuple[DraftModel, set[str]]:
    """The draft with a fault, and which of its tensors are other ones; the rest are the very same memory."""
    [drafting] = broken([fault], Drafting)
    if drafting.spec:
        other = model.variant(spec=drafting.spec(model.spec))
    else:
        assert drafting.weights
        other = model.variant(tensors=drafting.weights(model.state_dict(), Source(model.spec, target, scales or {})))
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
        assert torch.equal(twin.frequencies, model.frequencies)
        assert not any(parameter.requires_grad or parameter.is_meta for parameter in twin.parameters())


def broken_spec(name: str, spec: DraftSpec) -> DraftSpec:
    change = place(name, Drafting).spec
    return change(spec)  # type: ignore[no-any-return]


def test_switches_of_drafts_of_several_layers(drafts: dict[str, DraftModel], target_of: Callable[..., Path]) -> None:
    model, biases = drafts["deep"], {f"{layer}attention.{x}.bias" for layer in ("", "later.0.") for x in "qkv"}
    for name, gone in {"P7": biases, "A2": set(), "A1:unscaled": set()}.items():
        assert rebuilt(FAULTS[name], model, target_of("llama"))[1] == gone
    shape = broken_spec("P7", DEEP).attention
    assert shape == GqaSpec(heads=4, kv_heads=2, head_dim=12, head_norms=True)
    assert broken_spec("P7", DEEP) == replace(DEEP, attention=shape)
    assert broken_spec("A2", DEEP) == replace(DEEP, windows=(None, None))
    assert broken_spec("A1:unscaled", DEEP) == replace(DEEP, embedding_scale=1.0)
    plain = drafts["gqa"].spec
    assert broken_spec("A1:scaled", plain) == replace(plain, embedding_scale=48**0.5)


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
    "P5": {"attention.q.weight", "attention.k.weight"},
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


def test_a_norm_that_was_never_loaded_changes_nothing(
    drafts: dict[str, DraftModel], target_of: Callable[..., Path]
) -> None:
    for kind, plain in (("gqa", 1), ("deep", 0)):
        other, _ = rebuilt(FAULTS["P1:norm"], drafts[kind], target_of("llama"))
        assert (other.output_norm.weight == plain).all()


ROTATED = {
    "gqa": {"attention.q.weight", "attention.k.weight"},
    "mla": {"attention.q_up.weight", "attention.kv_down.weight"},
    "deep": {f"{at}attention.{x}.{kind}" for at in ("", "later.0.") for x in "qk" for kind in ("weight", "bias")},
}


@pytest.mark.parametrize("kind", ROTATED)
def test_rows_for_the_other_rope_are_what_it_takes_for_the_same(
    kind: str, drafts: dict[str, DraftModel], target_of: Callable[..., Path]
) -> None:
    """Rotated as the other kind has it, they give the same scores; what carries no position stays where it was."""
    model = drafts[kind]
    other, changed = rebuilt(FAULTS["P5"], model, target_of("llama"))
    assert changed == ROTATED[kind]
    spec = model.spec
    shape, width = spec.attention, spec.rope_width
    cos, sin = rotary_table(inverse_frequencies(spec.rope, width), torch.arange(5), scale=1.0)
    for name in changed:
        ones = [state.state_dict()[name] for state in (model, other)]
        if isinstance(shape, MlaSpec):
            dim = shape.key_dim if "q_up" in name else shape.kv_rank + shape.rope_dim
        else:
            dim = shape.head_dim
        heads, moved = (one.reshape(-1, dim, *one.shape[1:]) for one in ones)
        turn = slice(dim - width, dim) if isinstance(shape, MlaSpec) else slice(width)
        still = slice(dim - width) if isinstance(shape, MlaSpec) else slice(width, dim)
        assert torch.equal(heads[:, still], moved[:, still]) and not torch.equal(heads[:, turn], moved[:, turn])
        for head, there in zip(heads[:, turn], moved[:, turn], strict=True):
            row, same = head.reshape(width, -1)[:, 0], there.reshape(width, -1)[:, 0]
            pairs = spec.rope.interleaved
            right = rotate(row.expand(5, 1, -1), cos, sin, interleaved=pairs)
            meant = rotate(same.expand(5, 1, -1), cos, sin, interleaved=not pairs)
            torch.testing.assert_close((right * right[0]).sum(-1), (meant * meant[0]).sum(-1))


@pytest.mark.parametrize("kind", ["gqa", "mla", "deep"])
def test_another_step_moves_all_that_is_trained_by_little(
    kind: str, drafts: dict[str, DraftModel], target_of: Callable[..., Path]
) -> None:
    model = drafts[kind]
    other, changed = rebuilt(FAULTS["P6"], model, target_of("llama"))
    shared = set() if kind == "deep" else {"embedding.weight"}
    assert changed == {*model.state_dict()} - {"d2t"} - shared
    for name in changed:
        old, new = model.state_dict()[name], other.state_dict()[name]
        by = (new / old - 1).std().item()
        assert not torch.equal(old, new) and by == pytest.approx(0.1, rel=0.5 if old.ndim == 1 else 0.1), name
    again = rebuilt(FAULTS["P6"], model, target_of("llama"))[0].state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in other.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_scales_tensors_are_what_is_stored(
    dtype: torch.dtype, drafts: dict[str, DraftModel], target_of: Callable[..., Path]
) -> None:
    """To the last bit, though what was loaded had been rounded."""
    model, names = drafts["deep"], ("fc.weight", "later.0.attention.q.weight")
    scales = {name: model.state_dict()[name].abs().amax(1, keepdim=True) / 448 for name in names}
    stored = {name: (model.state_dict()[name] / scales[name]).to(torch.float8_e4m3fn).float() for name in names}
    loaded = model.variant(tensors={name: (stored[name] * scales[name]).to(dtype) for name in names})
    other, changed = rebuilt(FAULTS["P8"], loaded, target_of("llama"), scales)
    assert changed == {*names}
    assert all(torch.equal(other.state_dict()[name], stored[name].to(dtype)) for name in names)
    whole = {"fc.weight": torch.tensor(0.3)}
    other, _ = rebuilt(FAULTS["P8"], model, target_of("llama"), whole)
    torch.testing.assert_close(other.fc.weight * 0.3, model.fc.weight)


def test_later_layers_take_a_norm_that_is_not_theirs(
    drafts: dict[str, DraftModel], target_of: Callable[..., Path]
) -> None:
    model, name = drafts["deep"], "later.0.input_norm.weight"
    plain, changed = rebuilt(FAULTS["N4"], model, target_of("llama"))
    assert changed == {name} and (plain.state_dict()[name] == 0).all()  # of norms that multiply by 1 + weight
    x = torch.randn(3, 48)
    torch.testing.assert_close(plain.later[0].input_norm(x), x / x.square().mean(-1, keepdim=True).sqrt())
    first, changed = rebuilt(FAULTS["N4:first"], model, target_of("llama"))
    assert changed == {name} and torch.equal(first.state_dict()[name], model.feature_norm.weight)


def test_what_a_draft_owns_is_overwritten_by_its_target(
    drafts: dict[str, DraftModel], target_of: Callable[..., Path]
) -> None:
    model, held = drafts["deep"], load_file(target_of("llama") / "model.safetensors")
    for name, ours, theirs in (
        ("A1", "embedding.weight", "model.embed_tokens.weight"),
        ("A1:head", "head.weight", "lm_head.weight"),
    ):
        other, changed = rebuilt(FAULTS[name], model, target_of("llama"))
        assert changed == {ours} and torch.equal(other.state_dict()[ours], held[theirs])


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

    def rows(depth: int, rank: int) -> Answering:
        return Answering(depth, np.array([4, 9]), rank, DEEP)

    assert pick(logits, picked, rows(1, 1)) is picked and pick(logits, picked, rows(0, 0)) is picked
    assert pick(logits, picked, rows(0, 1)).ids.tolist() == [[3, 2], [2, 3]]
    assert pick(logits, top_candidates(logits, 1), rows(0, 1)).ids.tolist() == [[3], [2]]


def test_nothing_is_drafted_beyond_the_context() -> None:
    """Of 20 positions the last is 19."""
    logits = torch.eye(4)[1:]
    picked, rows = top_candidates(logits, 1), Answering(1, np.array([19, 20, 35]), 0, DEEP)
    assert picked.ids.tolist() == [[1], [2], [3]]
    assert place("A3", Drafting).pick(logits, picked, rows).ids.tolist() == [[1], [0], [0]]
    anywhere = Answering(1, rows.positions, 0, replace(DEEP, context=None))
    assert place("A3", Drafting).pick(logits, picked, anywhere).ids.tolist() == picked.ids.tolist()

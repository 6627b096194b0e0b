"""A layout is found where the data show it, and not claimed where they do not; a wrong declaration is contradicted."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from spectrace.replay.diff.layout import Found, Layout, assemble, infer, possible
from spectrace.tracer.errors import UserError

TOLERANCE = 1e-3
RANKS = st.integers(2, 8)
SEEDS = st.integers(0, 1 << 30)
SHARED = (Layout.REPLICATED, Layout.PARTIAL)


def whole_of(seed: int, rows: int, width: int) -> Tensor:
    """Columns of very different sizes, as hidden states have."""
    random = torch.Generator().manual_seed(seed)
    sizes = 10 ** torch.rand(width, generator=random).mul(2)
    return torch.randn(rows, width, generator=random) * sizes


def rand_like(whole: Tensor, seed: int) -> Tensor:
    return torch.rand(whole.shape, generator=torch.Generator().manual_seed(seed + 2))


def split_as(layout: Layout, whole: Tensor, ranks: int, seed: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed + 1)
    if layout is Layout.REPLICATED:
        return [whole.clone() for _ in range(ranks)]
    if layout is Layout.SHARDED:
        return list(whole.chunk(ranks, -1))
    if layout is Layout.ROWS:
        return list(whole.chunk(ranks, 0))
    if layout is Layout.PERMUTED:
        return list(whole.chunk(ranks, -1))[::-1]
    parts = [torch.randn(whole.shape, generator=random) * whole.abs().amax(-1, keepdim=True) for _ in range(ranks - 1)]
    return [*parts, whole - torch.stack(parts).sum(0)]


def found_in(parts: Sequence[Tensor], whole: Tensor | None, declared: Layout | None = None) -> Found:
    return infer(parts, whole=whole, declared=declared, tolerance=TOLERANCE)


KINDS = st.sampled_from([layout for layout in Layout if layout is not Layout.UNKNOWN])


@given(layout=KINDS, ranks=RANKS, rows=st.integers(2, 5), width=st.integers(8, 20), seed=SEEDS, data=st.data())
@settings(max_examples=200, deadline=None)
def test_every_layout_made_is_found_and_a_wrong_declaration_contradicted(
    layout: Layout, ranks: int, rows: int, width: int, seed: int, data: st.DataObject
) -> None:
    whole = whole_of(seed, ranks * rows, ranks * width)
    parts = split_as(layout, whole, ranks, seed)
    declared = data.draw(st.none() | st.sampled_from(Layout))
    noise = data.draw(st.sampled_from([0.0, 0.2 * TOLERANCE]))
    other = whole + noise * whole.abs().amax(-1, keepdim=True) * (2 * rand_like(whole, seed) - 1)
    found = found_in(parts, other, declared)
    assert found.layout is layout, found
    assert found.contradicts == (declared not in (None, layout, Layout.UNKNOWN))
    assert found.error is not None and found.error < TOLERANCE
    assert torch.allclose(assemble(parts, found), whole, atol=1e-3)
    assert found.order == (tuple(reversed(range(ranks))) if layout is Layout.PERMUTED else ())


@given(ranks=RANKS, cut=st.integers(2, 6), seed=SEEDS, data=st.data())
@settings(max_examples=100, deadline=None)
def test_the_order_of_blocks_is_stated_and_undone(ranks: int, cut: int, seed: int, data: st.DataObject) -> None:
    whole = whole_of(seed, 5, ranks * cut * 4)
    order = data.draw(st.permutations(range(ranks * cut)))
    blocks = whole.chunk(ranks * cut, -1)
    parts = [torch.cat([blocks[order.index(rank * cut + at)] for at in range(cut)], -1) for rank in range(ranks)]
    found = found_in(parts, whole, Layout.SHARDED)
    assert found.contradicts == (order != sorted(order))
    assert torch.equal(assemble(parts, found), whole)


def test_fused_projections_of_a_rank_take_turns() -> None:
    q, k, v = whole_of(0, 6, 64), whole_of(1, 6, 16), whole_of(2, 6, 16)
    parts = [torch.cat(three, -1) for three in zip(*(part.chunk(2, -1) for part in (q, k, v)), strict=True)]
    found = found_in(parts, torch.cat([q, k, v], -1), Layout.SHARDED)
    assert found.layout is Layout.PERMUTED and found.contradicts
    assert found.order == (0, 1, 2, 3, 6, 7, 8, 9, 4, 10, 5, 11)
    assert "6 blocks a rank" in found.evidence


def test_ranks_of_unequal_width_are_put_in_order() -> None:
    whole = whole_of(0, 6, 60)
    first, second, third = whole.split([30, 10, 20], -1)
    found = found_in([third, first, second], whole, Layout.SHARDED)
    assert (found.layout, found.order, found.contradicts) == (Layout.PERMUTED, (1, 2, 0), True)


@pytest.mark.parametrize("ranks", [2, 3, 64])
def test_rows_in_zigzag_are_put_in_order(ranks: int) -> None:
    whole = whole_of(0, ranks * 6, 40)
    chunks = whole.chunk(2 * ranks)
    parts = [torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]]) for rank in range(ranks)]
    found = found_in(parts, whole, Layout.ROWS)
    assert found.layout is Layout.ROWS and "zigzag" in found.evidence and not found.contradicts
    assert torch.equal(assemble(parts, found), whole)


def test_sixty_four_ranks_in_any_order_are_searched_in_no_time() -> None:
    whole = whole_of(0, 300, 4096)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0)).tolist()
    parts = [whole.chunk(64, -1)[at] for at in order]
    found = found_in(parts, whole)
    assert found.layout is Layout.PERMUTED and torch.equal(assemble(parts, found), whole)


def test_two_small_ranks_that_were_swapped_are_seen_beside_a_column_a_thousand_times_larger() -> None:
    whole = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    whole[:, 3] *= 1e6
    first, *rest = whole.chunk(4, -1)
    parts = [first, *reversed(rest)]
    assert (torch.cat(parts, -1) - whole).abs().max() < TOLERANCE * whole.abs().max()
    assert found_in(parts, whole).order == (0, 3, 2, 1)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("ranks", [3, 8])
def test_the_replica_that_differs_is_named(ranks: int, known: bool) -> None:
    whole = whole_of(0, 40, 16)
    parts = split_as(Layout.REPLICATED, whole, ranks, 0)
    parts[0][7] += 50 * whole.abs().max()
    found = found_in(parts, whole if known else None, Layout.REPLICATED)
    assert (found.layout, found.apart, found.contradicts) == (Layout.REPLICATED, (0,), True)
    assert "not on rank 0: in 39 of 40 rows" in found.evidence
    assert torch.equal(assemble(parts, found), whole)


def test_of_two_replicas_that_differ_the_whole_names_the_right_one() -> None:
    whole = whole_of(0, 6, 16)
    found = found_in([whole, whole_of(1, 6, 16)], whole, Layout.REPLICATED)
    assert (found.layout, found.contradicts) == (Layout.UNKNOWN, True)
    assert "the whole is on rank 0 of 2" in found.evidence


def test_a_sum_that_was_taken_twice_is_stated() -> None:
    whole = whole_of(0, 6, 16)
    found = found_in([4 * whole] * 4, whole, Layout.REPLICATED)
    assert found.layout is Layout.REPLICATED and not found.contradicts
    assert "4 times the whole, as a sum over the ranks that is taken twice" in found.evidence
    assert found.error == pytest.approx(3)
    parts = split_as(Layout.PARTIAL, 2 * whole, 2, 0)
    found = found_in(parts, whole, Layout.PARTIAL)
    assert found.layout is Layout.UNKNOWN and "the sum is 2 times the whole" in found.evidence


@pytest.mark.parametrize("taken", [0, 2])
def test_a_summand_left_out_or_counted_twice_is_named(taken: int) -> None:
    whole = whole_of(0, 6, 16)
    parts = split_as(Layout.PARTIAL, whole, 4, 0)
    found = found_in(parts, whole + (taken - 1) * parts[2], Layout.PARTIAL)
    assert found.layout is Layout.UNKNOWN and not found.contradicts
    assert f"the sum with rank 2 taken {taken} times" in found.evidence


def test_a_small_summand_left_out_is_not_taken_for_rounding() -> None:
    whole = whole_of(0, 60, 16)
    parts = split_as(Layout.PARTIAL, whole, 2, 0)
    small = 0.01 * whole_of(2, 60, 16)
    found = infer([*parts, small], whole=whole, declared=None, tolerance=0.1)
    assert found.layout is Layout.UNKNOWN


def test_rows_that_are_zero_on_all_sides_show_nothing() -> None:
    whole, other = whole_of(0, 6, 16), whole_of(1, 6, 16)
    padded = [torch.cat([part, torch.zeros(20, 16)]) for part in split_as(Layout.PARTIAL, other, 3, 0)]
    assert found_in(padded, torch.cat([whole, torch.zeros(20, 16)])).layout is Layout.UNKNOWN


def test_a_coarse_order_that_nearly_fits_gives_way_to_the_finer_that_does() -> None:
    whole = whole_of(1, 5, 40)
    order = [0, 1, 2, 8, 9, 5, 6, 7, 3, 4]
    blocks = whole.chunk(10, -1)
    parts = [torch.cat([blocks[order.index(at)] for at in half], -1) for half in (range(5), range(5, 10))]
    assert found_in(parts, whole).order == tuple(order)


def test_one_column_that_is_far_off_does_not_hide_where_the_rest_belongs() -> None:
    whole = whole_of(0, 6, 64)
    parts = [part.clone() for part in whole.chunk(4, -1)]
    parts[2][:, 5] *= 1000
    found = found_in(parts, whole)
    assert found.layout is Layout.SHARDED and "nearest to the whole, in 0 of 6 rows" in found.evidence


def test_halves_that_are_equal_but_for_rounding_have_no_order() -> None:
    half = whole_of(0, 6, 16)
    rounded = [half * (1 + 0.1 * TOLERANCE * rand_like(half, seed)) for seed in range(4)]
    found = found_in(rounded[:2], torch.cat(rounded[2:], -1))
    assert found.layout is Layout.UNKNOWN and "fit the places of others as well" in found.evidence


def test_large_summands_that_cancel_may_round_by_more_than_their_sum() -> None:
    whole = whole_of(0, 40, 64)
    parts = [(4 * part).bfloat16() for part in split_as(Layout.PARTIAL, whole, 8, 0)]
    found = infer(parts, whole=4 * whole, declared=None, tolerance=0.005)
    assert found.layout is Layout.PARTIAL and found.error is not None and found.error > 0.005


def test_without_a_whole_ranks_that_are_zero_or_constant_are_not_replicas() -> None:
    whole = whole_of(0, 16, 16)
    idle = [*[torch.zeros(16, 16)] * 3, whole]
    assert found_in(idle, None).layout is Layout.UNKNOWN
    assert found_in(idle, None, Layout.REPLICATED).contradicts
    assert found_in(idle, whole).layout is Layout.PARTIAL
    assert found_in([whole[:, :1].repeat(1, 16)] * 3, None).layout is Layout.UNKNOWN
    assert found_in([whole[:1].repeat(16, 1)] * 3, None).layout is Layout.UNKNOWN
    assert found_in([whole] * 3, None).layout is Layout.REPLICATED


def test_a_shard_that_was_loaded_twice_is_named() -> None:
    whole = whole_of(0, 6, 64)
    parts = list(whole.chunk(4, -1))
    found = found_in([parts[0], parts[1], parts[1], parts[3]], whole, Layout.SHARDED)
    assert (found.layout, found.apart) == (Layout.SHARDED, (2,))
    assert "not on rank 2, which holds what rank 1 does" in found.evidence
    found = found_in([parts[0], parts[0]], torch.cat(parts[:2], -1), Layout.SHARDED)
    assert found.layout is Layout.UNKNOWN and "not on rank 1, which holds what rank 0 does" in found.evidence


def test_a_layout_stands_though_values_are_apart() -> None:
    whole = whole_of(0, 20, 64)
    parts = split_as(Layout.SHARDED, whole * (1 + 0.2 * rand_like(whole, 3)), 4, 0)
    found = found_in(parts, whole, Layout.SHARDED)
    assert found.layout is Layout.SHARDED and "in 0 of 20 rows" in found.evidence
    found = found_in(split_as(Layout.REPLICATED, whole_of(1, 20, 64), 4, 0), whole)
    assert found.layout is Layout.REPLICATED and "not the whole" in found.evidence


@given(layout=KINDS, ranks=RANKS, seed=SEEDS, data=st.data())
@settings(max_examples=100, deadline=None)
def test_without_a_whole_only_equal_ranks_and_shapes_speak(
    layout: Layout, ranks: int, seed: int, data: st.DataObject
) -> None:
    whole = whole_of(seed, 2 * ranks, ranks * 8)
    parts = split_as(layout, whole, ranks, seed)
    declared = data.draw(st.none() | st.sampled_from(Layout))
    found = found_in(parts, None, declared)
    assert found.error is None
    named = declared if declared in possible(parts, None) and declared is not Layout.PERMUTED else Layout.UNKNOWN
    if layout is Layout.REPLICATED:
        assert found.layout is layout and found.contradicts == (declared not in (None, layout, Layout.UNKNOWN))
    elif declared is Layout.REPLICATED:
        assert found.layout is Layout.UNKNOWN and found.contradicts and "ranks differ by up to" in found.evidence
    else:
        assert found.layout is named and not found.contradicts
    sharded = infer(parts, whole=None, declared=None, tolerance=TOLERANCE, shape=whole.shape).layout
    expected = {Layout.PERMUTED: Layout.SHARDED, Layout.PARTIAL: Layout.UNKNOWN}
    assert sharded is expected.get(layout, layout)


@given(layout=KINDS, ranks=RANKS, seed=SEEDS, declared=st.none() | st.sampled_from(Layout), data=st.data())
@settings(max_examples=200, deadline=None)
def test_degenerate_data_are_never_claimed_to_show_another_layout(
    layout: Layout, ranks: int, seed: int, declared: Layout | None, data: st.DataObject
) -> None:
    whole = whole_of(seed, 2 * ranks, ranks * 8)
    kind = data.draw(st.sampled_from(["zero", "one number", "equal rows", "equal columns", "equal parts", "one row"]))
    if kind == "zero":
        whole = torch.zeros_like(whole)
    elif kind == "one number":
        whole = torch.full_like(whole, 3)
    elif kind == "equal rows":
        whole = whole[:1].repeat(len(whole), 1)
    elif kind == "equal columns":
        whole = whole[:, :1].repeat(1, whole.shape[1])
    elif kind == "equal parts":
        whole = whole[:2, :8].repeat(ranks, ranks)
    elif layout is not Layout.ROWS:
        whole = whole[:1]
    parts = split_as(layout, whole, ranks, seed)
    true = {layout}
    if layout is Layout.PERMUTED and kind in ("zero", "one number", "equal columns", "equal parts"):
        true = {Layout.SHARDED}
    elif layout in SHARED and kind == "zero":
        true = set(SHARED)
    found = found_in(parts, whole, declared)
    assert found.layout in true | {Layout.UNKNOWN}
    assert not (found.contradicts and declared in true)
    found = found_in(parts, None, declared)
    if found.layout not in true | {Layout.UNKNOWN} and found.layout is not declared:
        assert layout is not Layout.REPLICATED and "one part given to all" in found.evidence


def test_what_is_not_there_or_no_number_is_not_compared() -> None:
    whole = whole_of(0, 6, 16)
    for parts, reference in (([], whole), ([whole[:0]] * 2, whole[:0]), ([whole * torch.nan, whole], whole)):
        found = found_in(parts, reference, Layout.REPLICATED)
        assert found.layout is Layout.UNKNOWN and not found.contradicts
        assert "nothing" in found.evidence or "not finite, in rank 0" in found.evidence
    with pytest.raises(UserError, match="declare a layout"):
        assemble([whole, whole], found)


@given(layout=KINDS, ranks=RANKS, rows=st.integers(1, 4), width=st.integers(1, 12), seed=SEEDS)
@settings(max_examples=300, deadline=None)
@pytest.mark.parametrize("tolerance", [TOLERANCE, 0.1])
def test_unrelated_parts_are_no_whole(
    tolerance: float, layout: Layout, ranks: int, rows: int, width: int, seed: int
) -> None:
    size = ranks * rows, ranks * width
    parts = split_as(Layout.SHARDED if layout is Layout.PERMUTED else layout, whole_of(seed + 1, *size), ranks, seed)
    if layout is Layout.REPLICATED:
        parts[1:] = split_as(Layout.PARTIAL, parts[0], ranks, seed)[1:]
    found = infer(parts, whole=whole_of(seed, *size), declared=None, tolerance=tolerance)
    assert found.layout is Layout.UNKNOWN and not found.contradicts


def test_one_rank_is_the_whole_by_any_layout() -> None:
    whole = whole_of(0, 6, 16)
    for declared in (None, *Layout):
        found = found_in([whole], whole, declared)
        assert found.layout in (declared, Layout.UNKNOWN) and found.error == 0 and not found.contradicts
        assert assemble([whole], found) is whole


def test_shapes_alone_contradict() -> None:
    whole = whole_of(0, 6, 16)
    found = found_in([whole[:, :8], whole[:, :4]], whole, Layout.SHARDED)
    assert (found.layout, found.contradicts) == (Layout.UNKNOWN, True)
    assert "shapes [6, 8], [6, 4] a whole of [6, 16]" in found.evidence


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, TOLERANCE), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@torch.no_grad()
def test_the_tensors_of_tensor_parallel_layers_are_told(ranks: int, dtype: torch.dtype, tolerance: float) -> None:
    """A norm, a fused gate and up projection, and a down projection, split as engines split them."""
    torch.manual_seed(0)
    norm, gate_up, down = nn.RMSNorm(64), nn.Linear(64, 2 * 128, bias=False), nn.Linear(128, 64, bias=False)
    for module in (norm, gate_up, down):
        module.to(dtype)
    hidden = norm(torch.randn(24, 64).to(dtype))
    gate, up = gate_up(hidden).chunk(2, -1)
    inner = nn.functional.silu(gate) * up
    weights = zip(*(half.chunk(ranks) for half in gate_up.weight.chunk(2)), strict=True)
    fused = [hidden @ torch.cat(pair).T for pair in weights]
    sharded = [nn.functional.silu(pair.chunk(2, -1)[0]) * pair.chunk(2, -1)[1] for pair in fused]
    partial = [part @ weight.T for part, weight in zip(sharded, down.weight.chunk(ranks, -1), strict=True)]
    for layout, parts, whole in (
        (Layout.REPLICATED, [hidden.clone() for _ in range(ranks)], hidden),
        (Layout.PERMUTED, fused, gate_up(hidden)),
        (Layout.SHARDED, sharded, inner),
        (Layout.PARTIAL, partial, down(inner)),
        (Layout.ROWS, list(hidden.chunk(ranks)), hidden),
    ):
        found = infer(parts, whole=whole, declared=None, tolerance=tolerance)
        assert found.layout is layout and found.error is not None and found.error < tolerance, found
        assert assemble(parts, found).dtype == dtype
        for declared in Layout:
            wrong = declared not in (layout, Layout.UNKNOWN)
            assert infer(parts, whole=whole, declared=declared, tolerance=tolerance).contradicts == wrong

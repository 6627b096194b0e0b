"""A draft written in a layout reads back the same, bit for bit, or is refused by what the layout has no words for."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from spectrace.engine import convert as converting
from spectrace.engine.checkpoint import DraftCheckpoint, read_draft
from spectrace.engine.convert import WRITABLE, convert_draft, verifier_at, write_draft
from spectrace.engine.draft import DraftModel
from spectrace.engine.fields import read_config
from spectrace.engine.layouts.eagle import EAGLE
from spectrace.engine.layouts.known import writable
from spectrace.engine.spec import (
    DraftSpec,
    FuseNorm,
    GqaSpec,
    IdMap,
    LaterNorm,
    MlaSpec,
    RopeKind,
    RopeSpec,
    Stream,
)  # fmt: skip
from spectrace.tracer.errors import RunFailed, UserError

Config: TypeAlias = dict[str, Any]
Tensors: TypeAlias = dict[str, Tensor]
NewDraft: TypeAlias = Callable[..., tuple[Config, Tensors]]
Write: TypeAlias = Callable[[Path, Config, Tensors], Path]
IDS = "eagle_aux_hidden_state_layer_ids"
PLAIN = DraftSpec(
    width=8, target_width=8, slots=3, mlp_width=12, target_vocab=20, draft_vocab=12, attention=GqaSpec(2, 1, 8)
)
LATENT = replace(PLAIN, attention=MlaSpec(2, 6, 4, 4, 8, 4), rope=RopeSpec(interleaved=True))
YARN = RopeSpec(kind=RopeKind.YARN, factor=4.0, original_context=16, cos_scale=0.1 * math.log(4.0) + 1.0)


def random_tensors(spec: DraftSpec, dtype: torch.dtype = torch.bfloat16, *, ordered: bool = True) -> Tensors:
    """Weights for a spec, and a table of random tokens."""
    tokens = torch.randperm(spec.target_vocab)[: spec.draft_vocab]
    tokens = tokens.sort().values if ordered else tokens
    if spec.draft_vocab == spec.target_vocab:
        tokens = torch.arange(spec.draft_vocab)
    made = {name: torch.randn(one.shape).to(dtype) for name, one in DraftModel(spec).state_dict().items()}
    return {**made, "d2t": tokens - torch.arange(spec.draft_vocab)}


def own(spec: DraftSpec, tensors: Tensors) -> Tensors:
    shared = {"embedding.weight": spec.own_embedding, "head.weight": spec.own_head}
    return {name: tensor for name, tensor in tensors.items() if shared.get(name, True)}


def assert_same(read: DraftCheckpoint, spec: DraftSpec, boundaries: tuple[int, ...] | None, tensors: Tensors) -> None:
    """Held here once more, apart from the comparison that the writer makes itself."""
    assert read.spec == spec
    assert (read.wiring.boundaries if read.wiring else None) == boundaries
    assert read.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read.tensors[name].dtype == tensor.dtype
        assert bytes(read.tensors[name].view(torch.uint8).numpy()) == bytes(tensor.view(torch.uint8).numpy())
    assert read.report.unread_fields == read.report.unused_tensors == read.report.missing_tensors == ()


positive = st.floats(0.01, 1e6, allow_nan=False)


Draw: TypeAlias = Callable[[st.SearchStrategy[Any]], Any]


def seldom(draw: Draw, strategy: st.SearchStrategy[Any], usual: Any) -> Any:
    """One time in ten another value than the usual one, so that many drafts have words in every layout."""
    return draw(strategy) if draw(st.integers(0, 9)) == 9 else usual


def rope_of(draw: Draw, *, latent: bool) -> RopeSpec:
    kind = draw(st.sampled_from(RopeKind))
    rope = RopeSpec(
        theta=draw(st.floats(1.5, 1e7)),
        kind=kind,
        interleaved=draw(st.booleans()) if latent else seldom(draw, st.booleans(), False),
        share=1.0 if latent else seldom(draw, st.sampled_from([0.5, 0.25]), 1.0),
    )
    if kind is RopeKind.DEFAULT:
        return rope
    rope = replace(rope, factor=draw(st.floats(1.0, 64.0)))
    if kind is RopeKind.LINEAR:
        return rope
    rope = replace(rope, original_context=draw(st.integers(1, 10**6)))
    if kind is RopeKind.LLAMA3:
        low = draw(st.floats(0.1, 4))
        return replace(rope, low_freq_factor=low, high_freq_factor=low + draw(st.floats(0.1, 4)))
    usual = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
    return replace(
        rope,
        beta_fast=draw(positive),
        beta_slow=draw(positive),
        truncate=seldom(draw, st.booleans(), True),
        cos_scale=seldom(draw, st.floats(0.1, 9), usual),
    )


def attention_of(draw: Draw, rope: RopeSpec, *, latent: bool) -> GqaSpec | MlaSpec:
    if not latent:
        both = seldom(draw, st.booleans(), False)
        biases = seldom(draw, st.tuples(st.booleans(), st.booleans()), (both, both))
        return GqaSpec(2, draw(st.sampled_from([1, 2])), 8, *biases, seldom(draw, st.booleans(), False))
    all_dim = draw(st.one_of(st.just(0.0), st.floats(0.1, 2)))
    stretched = rope.kind is not RopeKind.DEFAULT and rope.factor > 1
    softmax = (0.1 * all_dim * math.log(rope.factor) + 1.0) ** 2 if stretched else 1.0
    return MlaSpec(2, draw(st.sampled_from([None, 6])), 4, 4, 8, 4, softmax_scale=softmax)


@st.composite
def specs(draw: st.DrawFn) -> DraftSpec:
    latent = seldom(draw, st.booleans(), False)
    rope = rope_of(draw, latent=latent)
    layers, window = seldom(draw, st.sampled_from([2, 3]), 1), seldom(draw, st.integers(1, 99), None)
    windows = tuple(None if latent or draw(st.booleans()) else window for _ in range(layers))
    draft_vocab = draw(st.sampled_from([12, 20]))
    return DraftSpec(
        width=8,
        target_width=seldom(draw, st.just(6), 8),
        slots=seldom(draw, st.integers(1, 4), 3),
        mlp_width=12,
        target_vocab=20,
        draft_vocab=draft_vocab,
        attention=attention_of(draw, rope, latent=latent),
        rope=rope,
        windows=windows,
        window_from_text=seldom(draw, st.booleans(), any(windows)),
        fc_bias=seldom(draw, st.booleans(), False),
        mlp_bias=seldom(draw, st.booleans(), False),
        residual=seldom(draw, st.sampled_from(Stream), Stream.PRE_NORM),
        feedback=draw(st.sampled_from(Stream)),
        head_reads=seldom(draw, st.sampled_from(Stream), Stream.POST_NORM),
        fuse_norm=draw(st.sampled_from(FuseNorm)),
        later_norm=seldom(draw, st.sampled_from(LaterNorm), LaterNorm.INPUT) if layers > 1 else LaterNorm.INPUT,
        own_embedding=draw(st.booleans()),
        own_head=draft_vocab < 20 or draw(st.booleans()),
        embedding_scale=seldom(draw, positive, 1.0),
        logit_scale=seldom(draw, st.floats(-9, -0.1), 1.0),
        unit_offset_norms=seldom(draw, st.booleans(), False),
        norm_eps=draw(st.floats(1e-9, 0.1)),
        context=draw(st.one_of(st.none(), st.integers(1, 10**7))),
    )


@settings(max_examples=80, deadline=None)
@given(
    spec=specs(),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    ordered=st.booleans(),
    named=st.booleans(),
    shard_bytes=st.sampled_from([None, 1, 700]),
    data=st.data(),
)
def test_any_draft_goes_through_every_layout_that_has_words_for_it(
    spec: DraftSpec, dtype: torch.dtype, ordered: bool, named: bool, shard_bytes: int | None, data: st.DataObject
) -> None:
    """Ours, a layout, ours again, another layout: at the end the very draft that was at the start."""
    boundaries = (
        tuple(data.draw(st.lists(st.integers(0, 60), min_size=spec.slots, max_size=spec.slots))) if named else None
    )
    torch.manual_seed(data.draw(st.integers(0, 99)))
    tensors = random_tensors(spec, dtype, ordered=ordered)
    held = own(spec, tensors)
    able = [name for name in WRITABLE if not writable(name).unsaid(spec, boundaries)]
    with tempfile.TemporaryDirectory() as folder:
        for first in WRITABLE:
            path = Path(folder) / first
            if first not in able:
                with pytest.raises(UserError, match=f"the layout {first} has no words for "):
                    write_draft(path, first, spec, boundaries, tensors)
                assert not path.exists()
                continue
            assert_same(write_draft(path, first, spec, boundaries, tensors), spec, boundaries, held)
            assert_same(read_draft(path), spec, boundaries, held)
            for second in able:
                again = Path(folder) / f"{first}-{second}"
                converted = convert_draft(path, again, second, shard_bytes=shard_bytes)
                assert_same(converted.written, spec, boundaries, held)
                assert len(converted.files) > 1 or shard_bytes is None or len(held) == 1


WORDS: list[tuple[dict[str, Any], str]] = [
    ({}, "eagle specforge speculators"),
    ({"residual": Stream.POST_NORM}, "eagle speculators"),
    ({"feedback": Stream.POST_NORM}, "eagle specforge speculators"),
    ({"head_reads": Stream.PRE_NORM}, "eagle"),
    ({"fuse_norm": FuseNorm.WHOLE}, "eagle speculators"),
    ({"fuse_norm": FuseNorm.PER_SLOT}, "eagle specforge speculators"),
    ({"windows": (None, None)}, "eagle speculators"),
    ({"windows": (None, None), "later_norm": LaterNorm.HIDDEN}, "eagle"),
    ({"windows": (5,)}, "eagle"),
    ({"windows": (5,), "window_from_text": True}, "eagle speculators"),
    ({"windows": (5, 6)}, ""),
    ({"slots": 2}, "eagle speculators"),
    ({"target_width": 6}, "eagle specforge speculators"),
    ({"attention": GqaSpec(2, 1, 8, qkv_bias=True, o_bias=True)}, "eagle speculators"),
    ({"attention": GqaSpec(2, 1, 8, qkv_bias=True)}, "eagle"),
    ({"attention": GqaSpec(2, 1, 8, o_bias=True)}, "eagle"),
    ({"attention": GqaSpec(2, 1, 8, head_norms=True)}, "eagle speculators"),
    ({"mlp_bias": True}, "eagle speculators"),
    ({"mlp_bias": True, "attention": GqaSpec(2, 1, 8, head_norms=True)}, "eagle"),
    ({"fc_bias": True}, "eagle"),
    ({"rope": replace(PLAIN.rope, share=0.5)}, "eagle"),
    ({"rope": replace(PLAIN.rope, interleaved=True)}, "eagle"),
    ({"rope": YARN}, "eagle specforge speculators"),
    ({"rope": replace(YARN, truncate=False)}, "eagle speculators"),
    ({"rope": replace(YARN, cos_scale=1.5)}, "eagle speculators"),
    ({"embedding_scale": 4.0}, "eagle"),
    ({"logit_scale": 0.5}, "eagle"),
    ({"unit_offset_norms": True}, "eagle"),
    ({"draft_vocab": 20, "own_head": False}, "eagle specforge speculators"),
    ({"own_head": False}, ""),
    ({"id_map": IdMap.ABSOLUTE}, ""),
    ({"id_map": IdMap.NONE}, ""),
    ({"projects": False}, ""),
]


@pytest.mark.parametrize(("changes", "able"), WORDS)
def test_each_switch_is_said_by_the_layouts_that_have_a_word_for_it(
    changes: dict[str, Any], able: str, tmp_path: Path
) -> None:
    spec = replace(PLAIN, **changes)
    tensors = random_tensors(spec) if spec.id_map is not IdMap.NONE else {}
    boundaries = (1, 4, 7)[: spec.slots]
    for layout in WRITABLE:
        if layout in able.split():
            assert write_draft(tmp_path / layout, layout, spec, boundaries, tensors).spec == spec
            continue
        with pytest.raises(UserError) as raised:
            write_draft(tmp_path / layout, layout, spec, boundaries, tensors)
        elsewhere = f"; layouts that have: {', '.join(able.split())}" if able else ""
        assert raised.value.message.startswith(f"the layout {layout} has no words for ")
        assert raised.value.message.endswith(elsewhere) and not (tmp_path / layout).exists()


@pytest.mark.parametrize(
    ("changes", "able"),
    [
        ({}, True),
        ({"rope": replace(LATENT.rope, interleaved=False)}, True),
        ({"windows": (5,)}, False),
        ({"rope": replace(LATENT.rope, share=0.5)}, False),
        ({"attention": replace(LATENT.attention, softmax_scale=1.5)}, False),  # without a stretching nothing says it
        ({"attention": replace(LATENT.attention, softmax_scale=(1 - 0.03 * math.log(4)) ** 2), "rope": YARN}, True),
    ],
)
def test_latent_attention_is_said_by_eagle_alone(changes: dict[str, Any], able: bool, tmp_path: Path) -> None:
    spec = replace(LATENT, **changes)
    for layout in WRITABLE:
        if able and layout == "eagle":
            assert write_draft(tmp_path / layout, layout, spec, (1, 4, 7), random_tensors(spec)).spec == spec
            continue
        with pytest.raises(UserError, match="has no words for"):
            write_draft(tmp_path / layout, layout, spec, (1, 4, 7), random_tensors(spec))


def test_a_layout_holds_its_own_words(tmp_path: Path) -> None:
    """What engines and trainers look for, at the place where they look for it."""
    spec, tensors = replace(PLAIN, context=64), random_tensors(PLAIN)
    for layout in WRITABLE:
        write_draft(tmp_path / layout, layout, spec, (0, 5, 9), tensors, described={"bos_token_id": 1})
    eagle, specforge, speculators = (read_config(tmp_path / layout) for layout in WRITABLE)
    assert eagle[IDS] == [0, 5, 9] and "eagle_config" not in eagle
    assert specforge["eagle_config"] == {IDS: [-1, 4, 8]} and specforge[IDS] == [0, 5, 9]
    assert specforge["architectures"] == eagle["architectures"] == ["LlamaForCausalLMEagle3"]
    assert speculators[IDS] == [0, 5, 9] and speculators["speculators_model_type"] == "eagle3"
    body = speculators["transformer_layer_config"]
    assert isinstance(body, dict) and (body["hidden_size"], body["vocab_size"], body["model_type"]) == (8, 20, "llama")
    assert "hidden_size" not in speculators and "model_type" not in speculators
    for one in (eagle, specforge, body):
        assert (one["max_position_embeddings"], one["bos_token_id"], one["dtype"]) == (64, 1, "bfloat16")
    names = {layout: load_file(tmp_path / layout / "model.safetensors").keys() for layout in WRITABLE}
    assert names["eagle"] == names["specforge"] and "midlayer.hidden_norm.weight" in names["eagle"]
    assert "layers.0.hidden_norm.weight" in names["speculators"]
    assert all({"d2t", "t2d"} <= held and "embed_tokens.weight" not in held for held in names.values())


@pytest.mark.parametrize("layout", WRITABLE)
def test_specforge_is_told_nothing_of_norm_output_unless_it_is_so(layout: str, tmp_path: Path) -> None:
    """False would once have taken the norm before the head away."""
    write_draft(tmp_path / "draft", layout, PLAIN, (1, 4, 7), random_tensors(PLAIN))
    assert ("norm_output" in read_config(tmp_path / "draft")) is (layout != "specforge")


def test_classes_are_those_that_engines_run(tmp_path: Path) -> None:
    normed = replace(PLAIN, attention=GqaSpec(2, 1, 8, head_norms=True))
    for spec, named in ((normed, "Eagle3Qwen3ForCausalLM"), (LATENT, "Eagle3DeepseekV2ForCausalLM")):
        write_draft(tmp_path / named, "eagle", spec, (1, 4, 7), random_tensors(spec))
        assert read_config(tmp_path / named)["architectures"] == [named]
    write_draft(tmp_path / "spec", "speculators", normed, (1, 4, 7), random_tensors(normed))
    body = read_config(tmp_path / "spec")["transformer_layer_config"]
    assert isinstance(body, dict) and body["model_type"] == "qwen3"


def test_t2d_is_made_of_d2t_unless_it_is_given(tmp_path: Path) -> None:
    tensors = random_tensors(PLAIN, ordered=False)
    write_draft(tmp_path / "made", "eagle", PLAIN, None, tensors)
    kept = load_file(tmp_path / "made" / "model.safetensors")["t2d"]
    assert set(kept.nonzero()[:, 0].tolist()) == set((tensors["d2t"] + torch.arange(12)).tolist())
    other = ~kept
    write_draft(tmp_path / "given", "eagle", PLAIN, None, {**tensors, "t2d": other})
    assert torch.equal(load_file(tmp_path / "given" / "model.safetensors")["t2d"], other)
    convert_draft(tmp_path / "given", tmp_path / "again", "speculators")
    assert torch.equal(load_file(tmp_path / "again" / "model.safetensors")["t2d"], other)


def test_every_bit_of_a_weight_is_kept(tmp_path: Path) -> None:
    """Zeros of both signs, and numbers below the smallest normal one."""
    tensors = random_tensors(PLAIN, torch.float32)
    odd = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 3e-39, 3.4028235e38, 1.0, -1.0])
    read = write_draft(tmp_path / "draft", "eagle", PLAIN, None, {**tensors, "output_norm.weight": odd})
    assert torch.equal(read.tensors["output_norm.weight"].view(torch.int32), odd.view(torch.int32))


def test_whoever_may_read_the_config_may_read_the_tensors(tmp_path: Path) -> None:
    write_draft(tmp_path / "draft", "eagle", PLAIN, (0, 2, 4), random_tensors(PLAIN))
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "draft").iterdir()}
    assert len(modes) == 1


def test_tensors_are_spread_over_files_with_an_index(tmp_path: Path) -> None:
    tensors = random_tensors(PLAIN, torch.float32)
    write_draft(tmp_path / "draft", "eagle", PLAIN, (1, 2, 3), tensors, shard_bytes=1000)
    index = json.loads((tmp_path / "draft" / "model.safetensors.index.json").read_text("utf-8"))
    files = {path.name: load_file(path) for path in (tmp_path / "draft").glob("*.safetensors")}
    assert len(files) > 2 and set(index["weight_map"].values()) == set(files)
    for name, file in index["weight_map"].items():
        assert name in files[file]
    held = [one for file in files.values() for one in file.values()]
    assert index["metadata"]["total_size"] == sum(one.nbytes for one in held)
    sizes = [sum(one.nbytes for one in file.values()) for file in files.values()]
    assert all(size <= 1000 or len(file) == 1 for size, file in zip(sizes, files.values(), strict=True))


@pytest.mark.parametrize("held", ["empty", "full", "file"])
def test_a_folder_that_is_there_is_refused_and_left_alone(held: str, tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    if held == "file":
        folder.write_text("mine", "utf-8")
    else:
        folder.mkdir()
    if held == "full":
        (folder / "mine").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match="draft exists: give a new path for the draft, or remove it first"):
        write_draft(folder, "eagle", PLAIN, None, random_tensors(PLAIN))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(28, "No space left on device"), RunFailed),
        (SafetensorError("I/O error: No space left on device"), RunFailed),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_a_write_that_ends_early_leaves_nothing(
    error: BaseException, told: type[BaseException], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def write_some(folder: Path, *_: object) -> None:
        (folder / "model-00001-of-00002.safetensors").write_bytes(b"some")
        raise error

    monkeypatch.setattr(converting, "save_tensors", write_some)
    with pytest.raises(told):
        write_draft(tmp_path / "draft", "eagle", PLAIN, None, random_tensors(PLAIN))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("lost", "told"),
    [
        (("norm_before_residual",), "residual was post_norm and is pre_norm"),
        ((IDS,), r"boundaries were \(1, 4, 7\) and are None"),
        (("rope_theta",), "rope was .* and is"),
        (("norm_output", "norm_before_residual"), "residual was .*; feedback was"),
    ],
)
def test_a_layout_that_loses_a_word_is_found_out(
    lost: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What was written is read again, so that a mistake of the writer is an error and no draft."""

    def forgetful(*given: Any) -> dict[str, Any]:
        assert EAGLE.config
        return {name: value for name, value in EAGLE.config(*given).items() if name not in lost}

    monkeypatch.setattr(converting, "writable", lambda _: replace(EAGLE, config=forgetful))
    spec = replace(PLAIN, residual=Stream.POST_NORM, feedback=Stream.POST_NORM, rope=RopeSpec(theta=5.0))
    with pytest.raises(RunFailed, match=rf"does not read back as it is: .*{told}.*nothing was kept"):
        write_draft(tmp_path / "draft", "eagle", spec, (1, 4, 7), random_tensors(spec))
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_that_changes_on_its_way_is_found_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    save = converting.save_tensors

    def rounding(folder: Path, tensors: Mapping[str, Tensor], shard_bytes: int | None) -> None:
        save(folder, {**tensors, "fc.weight": tensors["fc.weight"].half()}, shard_bytes)

    monkeypatch.setattr(converting, "save_tensors", rounding)
    with pytest.raises(RunFailed, match=r"does not read back as it is: tensor fc.weight is not what it was"):
        write_draft(tmp_path / "draft", "eagle", PLAIN, None, random_tensors(PLAIN))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda t: {name: one for name, one in t.items() if name != "fc.weight"},
            "tensors fc.weight of this draft are",
        ),
        (lambda t: {name: one for name, one in t.items() if name != "d2t"}, "tensors d2t of this draft are not given"),
        (lambda t: {**t, "fc.bias": torch.ones(8)}, "fc.bias are no tensors of this draft"),
        (lambda t: {**t, "fc.weight": torch.ones(8, 23)}, r"tensor fc.weight is \[8, 23\], expected \[8, 24\]"),
        (lambda t: {**t, "fc.weight": torch.full((8, 24), torch.nan)}, "fc.weight has 192 of 192 values that are no"),
    ],
)
def test_tensors_that_are_not_the_drafts_are_refused(
    change: Callable[[Tensors], Tensors], told: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=told):
        write_draft(tmp_path / "draft", "eagle", PLAIN, None, change(random_tensors(PLAIN)))
    assert list(tmp_path.iterdir()) == []


def test_a_table_that_leads_elsewhere_beside_all_tokens_is_refused(tmp_path: Path) -> None:
    spec = replace(PLAIN, draft_vocab=20)
    tensors = {**random_tensors(spec), "d2t": torch.ones(20, dtype=torch.int64)}
    with pytest.raises(
        UserError, match="d2t leads elsewhere although the draft has all tokens; expected zeros, or none"
    ):
        write_draft(tmp_path / "draft", "eagle", spec, None, tensors)
    without = {name: one for name, one in tensors.items() if name != "d2t"}
    assert "d2t" not in write_draft(tmp_path / "draft", "eagle", spec, None, without).tensors


def test_a_layout_that_nobody_writes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="layout 'modelopt' cannot be written; expected one of eagle, specforge"):
        write_draft(tmp_path / "draft", "modelopt", PLAIN, None, random_tensors(PLAIN))


def test_drafts_of_layouts_that_are_only_read_can_be_converted(
    new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    """ModelOpt's with its older names, in the order of frequency; AngelSlim's; EAGLE's in a file of torch.save."""
    config, tensors = new_draft(layout="layers.0")
    tensors["input_embeds_norm.weight"] = tensors.pop("layers.0.input_layernorm.weight")
    tensors["d2t"] = torch.randperm(96)[:64] - torch.arange(64)
    modelopt = write_draft(tmp_path / "modelopt", {**config, "eagle_config": {"use_last_layernorm": True}}, tensors)
    angelslim = write_draft(tmp_path / "angelslim", {**new_draft()[0], "target_model_type": "qwen3"}, new_draft()[1])
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text(json.dumps(new_draft()[0]), "utf-8")
    half = {name: one.half() if one.is_floating_point() else one for name, one in new_draft()[1].items()}
    torch.save(half, pickled / "pytorch_model.bin")
    for source, layout in ((modelopt, "modelopt"), (angelslim, "angelslim"), (pickled, "eagle")):
        read = read_draft(source)
        assert read.layout == layout
        for to in WRITABLE:
            converted = convert_draft(source, tmp_path / f"{source.name}-{to}", to)
            assert converted.written.layout == to
            boundaries = read.wiring.boundaries if read.wiring else None
            assert_same(converted.written, read.spec, boundaries, dict(read.tensors))
            assert any("not in the order of their tokens" in note for note in converted.notes) is (source == modelopt)


def test_a_draft_that_lacks_tensors_or_is_quantised_is_not_converted(
    new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    config, tensors = new_draft()
    stored = {**tensors, "fc.weight": tensors["fc.weight"].to(torch.float8_e4m3fn), "fc.weight_scale": torch.ones(())}
    folder = write_draft(tmp_path / "eight", config, stored)
    with pytest.raises(UserError, match="1 of its weights are quantised, and no layout is written with scales here"):
        convert_draft(folder, tmp_path / "out", "eagle")
    del tensors["norm.weight"]
    folder = write_draft(tmp_path / "less", config, tensors)
    with pytest.raises(UserError, match=r"missing tensors norm.weight; export the draft again, all of it"):
        convert_draft(folder, tmp_path / "out", "eagle")


def a_target(folder: Path, **changes: object) -> Path:
    """The config of a target that PLAIN may be for."""
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": PLAIN.target_width, "vocab_size": PLAIN.target_vocab,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, **changes}), "utf-8")
    return folder


def test_a_target_that_the_draft_cannot_be_for_is_refused_and_so_is_a_place_within_the_source(tmp_path: Path) -> None:
    plain = write_draft(tmp_path / "plain", "eagle", PLAIN, None, random_tensors(PLAIN)).folder
    for name, changes in (("wide", {"hidden_size": 4096}), ("many", {"text_config": {"vocab_size": 7}})):
        with pytest.raises(UserError, match="another target's"):
            convert_draft(plain, tmp_path / "out", "speculators", target=a_target(tmp_path / name, **changes))
    with pytest.raises(UserError, match="lies within"):
        convert_draft(plain, plain / "out", "speculators")
    assert not (tmp_path / "out").exists() and not (plain / "out").exists()


def test_the_target_is_named_where_a_layout_names_it(tmp_path: Path) -> None:
    target = a_target(tmp_path / "target")
    write_draft(tmp_path / "plain", "eagle", PLAIN, None, random_tensors(PLAIN))
    converted = convert_draft(tmp_path / "plain", tmp_path / "unnamed", "speculators")
    assert any("the target is not named" in note for note in converted.notes)
    converted = convert_draft(tmp_path / "plain", tmp_path / "named", "speculators", target=target)
    assert converted.notes == ()
    said = read_config(tmp_path / "named")["speculators_config"]
    assert isinstance(said, dict)
    assert said["verifier"] == {"name_or_path": str(target), "architectures": ["LlamaForCausalLM"]}
    assert verifier_at(target).path == str(target)
    convert_draft(tmp_path / "named", tmp_path / "again", "speculators")
    assert read_config(tmp_path / "again")["speculators_config"] == said


def test_keys_that_no_engine_reads_are_told(tmp_path: Path) -> None:
    spec = replace(PLAIN, embedding_scale=2.0, windows=(5,), window_from_text=True)
    write_draft(tmp_path / "plain", "eagle", spec, None, random_tensors(spec))
    [note] = convert_draft(tmp_path / "plain", tmp_path / "again", "eagle").notes
    assert "no engine reads the keys for a scaled embedding (embedding_scale) and windows counted from the text" in note

"""Boundaries are those of transformers; packed forwards with rollback are forwards of each request alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from spectrace.engine.checkpoint import build_draft, read_draft
from spectrace.engine.packing import PackedRows
from spectrace.engine.target import TargetModel, check_target, end_tokens, find_decoder
from spectrace.tracer.errors import UserError

HfModel = Callable[[str], Any]
NewTarget = Callable[..., Path]
FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW = 6  # of the tiny Gemma


@pytest.fixture
def target(family: str, target_of: NewTarget) -> TargetModel:
    return TargetModel(target_of(family), dtype=torch.float32)


def prompt_rows(tokens: list[int], *, owner: int = 0) -> PackedRows:
    count = np.arange(len(tokens))
    return PackedRows(np.array(tokens), np.full(len(tokens), owner), count, count - 1)


def run_alone(model: Any, tokens: list[int]) -> tuple[list[Tensor], Tensor]:
    """Boundaries 0 to L and logits of a text, by transformers: hidden states, the last as it enters the final norm."""
    entering: list[Tensor] = []
    handle = model.get_decoder().norm.register_forward_pre_hook(lambda _, args: entering.append(args[0]))
    with torch.inference_mode():
        out = model(torch.tensor([tokens]), output_hidden_states=True)
    handle.remove()
    return [state[0] for state in (*out.hidden_states[:-1], entering[0])], out.logits[0]


def close(found: Tensor, expected: Tensor) -> bool:
    """Largest error of a row over its largest value."""
    return bool(((found - expected).abs().amax(-1) / expected.abs().amax(-1)).max() <= 1e-5)


def test_boundaries_are_the_hidden_states_of_transformers(family: str, target: TargetModel, hf_model: HfModel) -> None:
    """Exactly, the last one before the final norm: one request in one batch is the same arithmetic."""
    tokens = [5, 17, 40, 3, 3, 90, 61, 8, 8, 20]
    out = target.forward(prompt_rows(tokens), boundaries=range(6))
    states, logits = run_alone(hf_model(family), tokens)
    assert list(out.boundaries) == [0, 1, 2, 3, 4, 5]
    for boundary, expected in enumerate(states):
        assert torch.equal(out.boundaries[boundary], expected)
    assert torch.equal(out.logits, logits)
    assert torch.equal(out.boundaries[0], hf_model(family).get_input_embeddings()(torch.tensor(tokens)))


@pytest.mark.parametrize("family", ["gemma3_text", "gemma3"])
def test_boundary_0_of_gemma_is_its_table_times_the_root_of_its_width(
    family: str, target: TargetModel, hf_model: HfModel
) -> None:
    tokens = [5, 17, 40]
    out = target.forward(prompt_rows(tokens), boundaries=[0])
    assert close(out.boundaries[0], hf_model(family).get_input_embeddings().weight[tokens] * 48**0.5)


def test_only_the_wanted_boundaries_are_kept(target: TargetModel) -> None:
    assert list(target.forward(prompt_rows([1, 2]), boundaries=[4, 1]).boundaries) == [1, 4]
    assert dict(target.forward(prompt_rows([1, 2], owner=1), boundaries=[]).boundaries) == {}


@dataclass(frozen=True)
class Draw:
    """Rows behind some texts, and of each row the rows from the end of its text to itself."""

    rows: PackedRows
    paths: list[list[int]]

    @property
    def leaves(self) -> list[int]:
        """Rows without children; the paths to them hold all rows."""
        return sorted(set(range(len(self.rows))) - {row for path in self.paths for row in path[:-1]})


def draw_rows(random: np.random.Generator, texts: dict[int, list[int]]) -> Draw:
    """A chain or a tree of up to eight rows for each text, rows of different texts in any order."""
    sizes = random.integers(1, 9, len(texts))
    owners = random.permutation(np.repeat(list(texts), sizes))
    chains = {owner: random.random() < 0.5 for owner in texts}
    parents: list[int] = []
    paths: list[list[int]] = []
    for row, owner in enumerate(owners):
        above = (owners[:row] == owner).nonzero()[0].tolist()
        parent = above[-1] if above and chains[owner] else int(random.choice([-1, *above]))
        parents.append(parent)
        paths.append([*(paths[parent] if parent >= 0 else []), row])
    positions = np.array([len(texts[owner]) + len(path) - 1 for owner, path in zip(owners, paths, strict=True)])
    return Draw(PackedRows(random.integers(0, 96, len(owners)), owners, positions, np.array(parents)), paths)


def serve_at_random(target: TargetModel, model: Any, *, seed: int, steps: int = 12, finish: int = 24) -> int:
    """Serve three texts that grow at random and are replaced once long, every row held against the text run alone.

    Returns the length of the longest text.
    """
    random = np.random.default_rng(seed)
    texts: dict[int, list[int]] = {0: [], 1: [], 2: []}
    longest = 0
    for step in range(steps):
        draw = draw_rows(random, texts)
        out = target.forward(draw.rows, boundaries=[2, 5])
        for leaf in draw.leaves:
            path, text = draw.paths[leaf], texts[int(draw.rows.owners[leaf])]
            states, logits = run_alone(model, [*text, *draw.rows.tokens[path].tolist()])
            assert close(out.boundaries[2][path], states[2][len(text) :])
            assert close(out.boundaries[5][path], states[5][len(text) :])
            assert close(out.logits[path], logits[len(text) :])
        accepted: list[int] = []
        for owner, text in texts.items():
            path = draw.paths[int(random.choice((draw.rows.owners == owner).nonzero()[0]))]
            kept = path[: int(random.integers(0, len(path) + 1))]
            text += draw.rows.tokens[kept].tolist()
            accepted += kept
        longest = max(longest, *(len(text) for text in texts.values()))
        finished = [owner for owner, text in texts.items() if len(text) >= finish]
        target.settle(out.places[accepted], finished)
        for owner in finished:
            del texts[owner]
            texts[owner + 10 * (step + 1)] = []
    return longest


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_packed_forwards_with_rollback_are_forwards_of_each_request_alone(
    family: str, target: TargetModel, hf_model: HfModel, seed: int
) -> None:
    """Three requests, chunks and trees, some nodes accepted, requests that finish and are replaced by others."""
    assert serve_at_random(target, hf_model(family), seed=seed) > 2 * WINDOW


def test_rolled_back_and_finished_rows_do_not_stay(target: TargetModel) -> None:
    for owner in range(40):
        out = target.forward(prompt_rows([1, 2, 3, 4], owner=owner), boundaries=[])
        target.settle(out.places[:2], [owner - 1])
        assert len(target.table) == target.cache.get_seq_length() <= 8


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma3", {}),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 5, "layer_types": [FULL, SLIDING, FULL, SLIDING, FULL]},
        ),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
        ("mistral", {"sliding_window": 5}),
        ("mistral", {"sliding_window": None}),
        ("llama", {"sliding_window": 5}),
    ],
)
def test_layers_that_slide_are_served_in_any_mixture(
    family: str, changes: dict[str, Any], new_target: NewTarget, load_target: Callable[[Path], Any], tmp_path: Path
) -> None:
    """All or some of them, named in the file or only by the config class, in a multimodal class or not.

    A window in the file of a family that knows none (Llama) means nothing.
    """
    folder = new_target(tmp_path / "target", family, **changes)
    serve_at_random(TargetModel(folder, dtype=torch.float32), load_target(folder), seed=0)


def test_the_tiny_gemma_feels_its_window(new_target: NewTarget, hf_model: HfModel, tmp_path: Path) -> None:
    """Or serving it would prove nothing about windows: the same weights without one say something else."""
    wide = TargetModel(new_target(tmp_path / "wide", "gemma3_text", sliding_window=512), dtype=torch.float32)
    tokens = list(range(30, 50))
    logits, (_, narrow) = (
        wide.forward(prompt_rows(tokens), boundaries=[]).logits,
        run_alone(hf_model("gemma3_text"), tokens),
    )
    assert close(logits[:WINDOW], narrow[:WINDOW])
    assert not any(close(logits[row], narrow[row]) for row in range(WINDOW, 20))


@pytest.mark.parametrize("family", ["deepseek_v3", "kimi_k25"])
def test_experts_do_not_mix_requests(family: str, target: TargetModel, hf_model: HfModel) -> None:
    """Rows of 24 requests share the experts of a pass, and each answers as if it were alone."""
    chosen: list[Tensor] = []
    experts: nn.Module = target.layers[1].mlp.experts  # type: ignore[union-attr, assignment]
    experts.register_forward_pre_hook(lambda _, args: chosen.append(args[1]))
    prompts = [[number, 95 - number, 3 * number] for number in range(24)]
    rows = [prompt_rows(prompt, owner=owner) for owner, prompt in enumerate(prompts)]
    tokens, owners, positions = (
        np.concatenate([getattr(r, name) for r in rows]) for name in ("tokens", "owners", "positions")
    )
    parents = np.where(positions == 0, -1, np.arange(len(tokens)) - 1)
    out = target.forward(PackedRows(tokens, owners, positions, parents), boundaries=[])
    for owner, prompt in enumerate(prompts):
        assert close(out.logits[owners == owner], run_alone(hf_model(family), prompt)[1])
    assert chosen[0].unique().numel() == 8


HYBRIDS: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3_next", {}, "linear_attention"),
    ("mamba", {}, "linear_attention"),
    ("jamba", {}, "linear_attention"),
    ("lfm2", {"layer_types": ["conv", FULL, "conv", FULL]}, "conv"),
    ("falcon_h1", {}, "hybrid"),
    ("nemotron_h", {"layer_types": ["linear_attention", "moe", FULL, "moe"]}, "linear_attention, moe"),
    ("llama4_text", {}, "chunked_attention"),
    ("deepseek_v32", {}, "indexed_attention"),
]


@pytest.mark.parametrize(("family", "fields", "kinds"), HYBRIDS, ids=[family for family, *_ in HYBRIDS])
def test_a_hybrid_target_is_refused_by_name(family: str, fields: dict[str, Any], kinds: str, tmp_path: Path) -> None:
    """Before any weight is read; whether the file names its kinds of layers or only the config class knows them."""
    from transformers import AutoConfig

    AutoConfig.for_model(family, num_hidden_layers=4, **fields).save_pretrained(tmp_path)
    told = (
        rf"{family} has layers of kind {kinds}: what it keeps of a text cannot be rolled back row by row, so hybrid "
        r"targets are refused; use one whose layers are all full_attention or sliding_attention$"
    )
    for refuse in (check_target, lambda folder: TargetModel(folder, dtype=torch.float32)):
        with pytest.raises(UserError, match=told):
            refuse(tmp_path)


def test_a_recurrent_target_that_names_no_kinds_is_refused(new_target: NewTarget, tmp_path: Path) -> None:
    folder = new_target(tmp_path / "target", "rwkv")
    with pytest.raises(UserError, match=r"rwkv has a recurrent state: .* hybrid targets are refused; use one"):
        TargetModel(folder, dtype=torch.float32)


def test_a_target_whose_layers_have_other_names_is_refused(new_target: NewTarget, tmp_path: Path) -> None:
    folder = new_target(tmp_path / "target", "gpt_neox")
    with pytest.raises(UserError, match=r"GPTNeoXForCausalLM keeps no `layers` and `norm`.*use a decoder-only target"):
        TargetModel(folder, dtype=torch.float32)


def test_the_decoder_is_found_however_deep_it_is_nested(
    target_of: NewTarget, load_target: Callable[[Path], Any]
) -> None:
    """Kimi's own code keeps a whole causal language model where transformers keeps its decoder."""
    from transformers import AutoModelForCausalLM

    folder = target_of("kimi_k25")
    model = load_target(folder)
    decoder = model.model.language_model
    assert find_decoder(model, folder=folder) is decoder
    whole = AutoModelForCausalLM.from_config(model.config.text_config)
    whole.model, model.model.language_model = decoder, whole
    assert find_decoder(model, folder=folder) is decoder
    assert find_decoder(decoder, folder=folder) is decoder


@pytest.mark.parametrize("family", ["llama", "kimi_k25", "gemma3_text", "gemma3"])
def test_a_draft_finds_what_it_shares_with_its_target(
    family: str,
    target_of: NewTarget,
    hf_model: HfModel,
    new_draft: Callable[..., Any],
    write_draft: NewTarget,
    tmp_path: Path,
) -> None:
    """Under the names that a saved model has on disk; an embedding as it is stored, without what Gemma multiplies."""
    config, tensors = new_draft(draft_vocab_size=None)
    del tensors["lm_head.weight"]
    checkpoint = read_draft(write_draft(tmp_path, config, tensors))
    draft = build_draft(checkpoint, target=target_of(family), dtype=torch.float32)
    model = hf_model(family)
    assert torch.equal(draft.embedding.weight, model.get_input_embeddings().weight)
    assert torch.equal(draft.head.weight, model.get_output_embeddings().weight)
    assert not torch.equal(draft.embedding.weight, draft.head.weight)


@pytest.mark.parametrize("family", ["kimi_k25", "gemma3"])
def test_a_multimodal_target_is_described_by_its_text_config(family: str, target_of: NewTarget) -> None:
    config = check_target(target_of(family))
    assert [config[name] for name in ("hidden_size", "vocab_size", "num_hidden_layers")] == [48, 96, 5]


def test_what_a_config_leaves_out_its_class_fills_in(new_target: NewTarget, tmp_path: Path) -> None:
    """Published Gemma 3 configs name neither vocabulary nor kinds of layers."""
    folder = new_target(tmp_path / "target", "gemma3")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    for name in ("vocab_size", "layer_types"):
        del config["text_config"][name]
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    text = check_target(folder)
    assert text["vocab_size"] == 262_208 and text["layer_types"] == [SLIDING, SLIDING, FULL, SLIDING, SLIDING]


def edit(folder: Path, **fields: Any) -> Path:
    """Change fields of a config; None takes one away."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text("utf-8")), **fields}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}), "utf-8")
    return folder


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"num_hidden_layers": None}, "no num_hidden_layers"),
        ({"num_hidden_layers": None, "hidden_size": None}, "no num_hidden_layers, hidden_size"),
        ({"draft_vocab_size": 64}, "this is a draft; --target wants the model that it drafts for"),
        ({"eagle_config": {}}, "this is a draft"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "this is a draft"),
        ({"layer_types": ["linear_attention"] * 5}, "llama has layers of kind linear_attention"),
        ({"model_type": "nobody_knows"}, "config.json: transformers cannot read it: .*nobody_knows"),
        ({"intermediate_size": "wide"}, "config.json: transformers cannot read it: .*intermediate_size.*expected int"),
    ],
)
def test_what_is_no_target_is_refused_by_its_config(
    fields: dict[str, Any], told: str, new_target: NewTarget, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=told) as raised:
        check_target(edit(new_target(tmp_path / "target", "llama"), **fields))
    assert "\n" not in raised.value.message


def test_weights_that_do_not_fit_are_an_error_and_never_made_up(new_target: NewTarget, tmp_path: Path) -> None:
    folder = new_target(tmp_path / "target", "llama")
    weights = folder / "model.safetensors"
    whole, tensors = weights.read_bytes(), load_file(weights)

    def refuse(told: str) -> None:
        with pytest.raises(UserError, match=told) as raised:
            TargetModel(folder, dtype=torch.float32)
        assert str(folder) in raised.value.message

    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, weights, {"format": "pt"})
    refuse("1 weights are missing.*layers.3.mlp.up_proj")
    weights.write_bytes(whole[: len(whole) // 2])
    refuse("transformers cannot load it")
    weights.unlink()
    refuse("transformers cannot load it")
    weights.write_bytes(whole)
    edit(folder, intermediate_size=32)
    refuse("transformers cannot load it")


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, 7, {7}),
        (None, [7, 41], {7, 41}),
        (None, None, {2}),  # the class's
        ({"eos_token_id": [3]}, 7, {3}),
        ({"eos_token_id": 0}, 7, {0}),
        ({}, 7, {7}),
    ],
)
def test_answers_end_where_transformers_ends_them(
    generation: dict[str, Any] | None, config: Any, expected: set[int], new_target: NewTarget, tmp_path: Path
) -> None:
    """The generation config counts first: chat models name their end of turn there alone."""
    folder = edit(new_target(tmp_path / "target", "llama"), eos_token_id=config)
    path = folder / "generation_config.json"
    path.unlink()
    if generation is not None:
        path.write_text(json.dumps(generation), "utf-8")
    assert end_tokens(folder) == expected


@pytest.mark.parametrize("family", ["kimi_k25", "gemma3"])
def test_a_multimodal_target_ends_as_its_text_config_says(family: str, new_target: NewTarget, tmp_path: Path) -> None:
    folder = new_target(tmp_path / "target", family)
    (folder / "generation_config.json").unlink()
    assert end_tokens(folder) == {7, 41}


def test_an_unreadable_generation_config_is_named(new_target: NewTarget, tmp_path: Path) -> None:
    folder = new_target(tmp_path / "target", "llama")
    (folder / "generation_config.json").write_text("{", "utf-8")
    with pytest.raises(UserError, match=r"generation_config.json: not valid JSON"):
        end_tokens(folder)

"""Boundaries are those of transformers; packed forwards with rollback are forwards of each request alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spectrace.engine.packing import PackedRows
from spectrace.engine.target import TargetModel, check_target, end_tokens
from spectrace.tracer.errors import UserError

FAMILIES = ["llama", "qwen3"]
SLIDING = "sliding_attention"


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def target(family: str, target_of: Callable[..., Path]) -> TargetModel:
    return TargetModel(target_of(family), dtype=torch.float32)


def prompt_rows(tokens: list[int], *, owner: int = 0) -> PackedRows:
    count = np.arange(len(tokens))
    return PackedRows(np.array(tokens), np.full(len(tokens), owner), count, count - 1)


def states_alone(model: Any, tokens: list[int]) -> list[Tensor]:
    """Boundaries 0 to L by transformers: its hidden states, but the last one as it enters the final norm."""
    entering: list[Tensor] = []
    handle = model.model.norm.register_forward_pre_hook(lambda _, args: entering.append(args[0]))
    with torch.inference_mode():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    handle.remove()
    return [state[0] for state in (*states[:-1], entering[0])]


def close(found: Tensor, expected: Tensor) -> bool:
    """Largest error of a row over its largest value."""
    return bool(((found - expected).abs().amax(-1) / expected.abs().amax(-1)).max() <= 1e-5)


def test_boundaries_are_the_hidden_states_of_transformers(
    family: str, target: TargetModel, hf_model: Callable[[str], Any]
) -> None:
    """Exactly, the last one before the final norm: one request in one batch is the same arithmetic."""
    tokens = [5, 17, 40, 3, 3, 90]
    out = target.forward(prompt_rows(tokens), boundaries=range(6))
    assert list(out.boundaries) == [0, 1, 2, 3, 4, 5]
    for boundary, expected in enumerate(states_alone(hf_model(family), tokens)):
        assert torch.equal(out.boundaries[boundary], expected)
    assert torch.equal(out.boundaries[0], hf_model(family).model.embed_tokens.weight[tokens])


def test_only_the_wanted_boundaries_are_kept(target: TargetModel) -> None:
    assert list(target.forward(prompt_rows([1, 2]), boundaries=[4, 1]).boundaries) == [1, 4]
    assert dict(target.forward(prompt_rows([1, 2], owner=1), boundaries=[]).boundaries) == {}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_packed_forwards_with_rollback_are_forwards_of_each_request_alone(
    family: str, target: TargetModel, hf_model: Callable[[str], Any], seed: int
) -> None:
    """Three requests, chunks and trees, some nodes accepted, requests that finish and are replaced by others."""
    random = np.random.default_rng(seed)
    texts: dict[int, list[int]] = {0: [], 1: [], 2: []}
    compared = 0
    for step in range(14):
        tokens: list[int] = []
        owners: list[int] = []
        positions: list[int] = []
        parents: list[int] = []
        paths: list[list[int]] = []  # of each new row: the tokens from the end of its request's text to itself
        accepted: list[int] = []
        for owner, text in texts.items():
            first, count = len(tokens), int(random.integers(1, 6))
            chain = random.random() < 0.5
            for node in range(count):
                parent = node - 1 if chain else int(random.integers(-1, node)) if node else -1
                token = int(random.integers(0, 96))
                above = paths[first + parent] if parent >= 0 else []
                tokens.append(token)
                owners.append(owner)
                positions.append(len(text) + len(above))
                parents.append(first + parent if parent >= 0 else -1)
                paths.append([*above, token])
            node = int(random.integers(-1, count))
            path = []
            while node >= 0:
                path.append(first + node)
                node = parents[first + node] - first if parents[first + node] >= 0 else -1
            accepted += path[::-1]
        rows = PackedRows(*(np.array(column, np.int64) for column in (tokens, owners, positions, parents)))
        out = target.forward(rows, boundaries=[2, 5])
        for row in range(len(rows)):
            alone = [*texts[owners[row]], *paths[row]]
            states = states_alone(hf_model(family), alone)
            assert close(out.boundaries[2][row], states[2][-1])
            assert close(out.boundaries[5][row], states[5][-1])
            with torch.inference_mode():
                expected = hf_model(family)(torch.tensor([alone])).logits[0, -1]
            assert close(out.logits[row], expected)
            compared += 1
        for row in accepted:
            texts[owners[row]].append(tokens[row])
        finished = [owner for owner in texts if len(texts[owner]) > 12]
        target.settle(out.places[accepted], finished)
        for owner in finished:
            del texts[owner]
            texts[owner + 10 * (step + 1)] = []
    assert compared > 80


def test_rolled_back_and_finished_rows_do_not_stay(target: TargetModel) -> None:
    for owner in range(40):
        out = target.forward(prompt_rows([1, 2, 3, 4], owner=owner), boundaries=[])
        target.settle(out.places[:2], [owner - 1])
        assert len(target.table) == target.cache.get_seq_length() <= 8


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma3_text", {}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention"] * 4 + [SLIDING]}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
        ("mistral", {"sliding_window": 8}),
    ],
)
def test_a_target_that_forgets_is_refused(
    family: str, changes: dict[str, Any], new_target: Callable[..., Path], tmp_path: Path
) -> None:
    """Sliding windows, named in the file or only by the config class; rows of such a cache cannot be rolled back."""
    folder = new_target(tmp_path / "target", family, **changes)
    with pytest.raises(UserError, match=r"sliding_attention.*cannot be rolled back.*full-attention"):
        TargetModel(folder, dtype=torch.float32)


def test_a_family_that_could_slide_and_does_not_is_taken(new_target: Callable[..., Path], tmp_path: Path) -> None:
    folder = new_target(tmp_path / "target", "mistral", sliding_window=None)
    assert TargetModel(folder, dtype=torch.float32).width == 48


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
        ({"vocab_size": None, "hidden_size": None}, "no hidden_size, vocab_size"),
        ({"draft_vocab_size": 64}, "this is a draft; --target wants the model that it drafts for"),
        ({"eagle_config": {}}, "this is a draft"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "this is a draft"),
        ({"layer_types": ["linear_attention"]}, "layers of kind linear_attention"),
    ],
)
def test_what_is_no_target_is_refused_by_its_config(
    fields: dict[str, Any], told: str, new_target: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=told):
        check_target(edit(new_target(tmp_path / "target", "llama"), **fields))


def test_weights_that_do_not_fit_are_an_error_and_never_made_up(
    new_target: Callable[..., Path], tmp_path: Path
) -> None:
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
        (None, None, set()),
        ({"eos_token_id": [3]}, 7, {3}),
        ({"eos_token_id": 0}, 7, {0}),
        ({}, 7, {7}),
    ],
)
def test_answers_end_where_transformers_ends_them(
    generation: dict[str, Any] | None, config: Any, expected: set[int], new_target: Callable[..., Path], tmp_path: Path
) -> None:
    """The generation config counts first: chat models name their end of turn there alone."""
    folder = edit(new_target(tmp_path / "target", "llama"), eos_token_id=config)
    path = folder / "generation_config.json"
    path.unlink()
    if generation is not None:
        path.write_text(json.dumps(generation), "utf-8")
    assert end_tokens(folder) == expected


def test_an_unreadable_generation_config_is_named(new_target: Callable[..., Path], tmp_path: Path) -> None:
    folder = new_target(tmp_path / "target", "llama")
    (folder / "generation_config.json").write_text("{", "utf-8")
    with pytest.raises(UserError, match=r"generation_config.json: not valid JSON"):
        end_tokens(folder)

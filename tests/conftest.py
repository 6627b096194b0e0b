"""Tiny random targets (models/fitted) and drafts of them, in the published layouts, as fixtures.

Everything of a draft is random but the head, which is fitted by least squares to what its target says, so that some
tokens are accepted and a wrong wiring costs acceptance.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from analytic.pair import make_pair
from fitted.target import FAMILIES, VOCAB, WIDTH, load_alone, save_target
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from spectrace.engine.attention import KeyValueCache, PackedAttend
from spectrace.engine.checkpoint import build_draft, read_draft

_DRAFT_VOCAB = 64
_WIRING = (0, 2, 4)


def _draft_tensors(config: dict[str, Any], *, layout: str = "midlayer", seed: int = 0) -> dict[str, Tensor]:
    """Random weights for a draft's config, under the names and in the shapes that EAGLE and SpecForge publish."""
    torch.manual_seed(seed)
    width = config["hidden_size"]
    inputs, slots = config.get("target_hidden_size", width), len(config["eagle_aux_hidden_state_layer_ids"])

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns).div(columns**0.5)

    def scale(length: int) -> Tensor:
        return torch.rand(length) + 0.5

    tensors = {"fc.weight": matrix(width, slots * inputs), "norm.weight": scale(width)}
    tensors["lm_head.weight"] = matrix(config.get("draft_vocab_size", config["vocab_size"]), width)
    layer = _layer_tensors(config, matrix, scale, first=True)
    later = [_layer_tensors(config, matrix, scale, first=False) for _ in range(1, config["num_hidden_layers"])]
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{slot}.weight": scale(inputs) for slot in range(slots)}
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = scale(slots * inputs)
    if config.get("draft_vocab_size", config["vocab_size"]) < config["vocab_size"]:
        kept = torch.randperm(config["vocab_size"])[: config["draft_vocab_size"]].sort().values
        tensors["d2t"] = kept - torch.arange(len(kept))
    named = {layout: layer, **{f"layers.{at}": one for at, one in enumerate(later, 1)}}
    return tensors | {f"{place}.{name}": tensor for place, one in named.items() for name, tensor in one.items()}


def _layer_tensors(
    config: dict[str, Any], matrix: Callable[[int, int], Tensor], scale: Callable[[int], Tensor], *, first: bool
) -> dict[str, Tensor]:
    """One decoder layer; the first takes embedding and state."""
    width, heads, inner = config["hidden_size"], config["num_attention_heads"], config["intermediate_size"]
    inputs, norms = width, ("input_layernorm", "post_attention_layernorm")
    if first:
        inputs, norms = 2 * width, ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    layer = {f"{name}.weight": scale(width) for name in norms}
    layer |= {"mlp.gate_proj.weight": matrix(inner, width), "mlp.up_proj.weight": matrix(inner, width)}
    layer["mlp.down_proj.weight"] = matrix(width, inner)
    if "kv_lora_rank" in config:
        nope, rope, value = (config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        if rank := config.get("q_lora_rank"):
            layer["self_attn.q_a_proj.weight"] = matrix(rank, inputs)
            layer["self_attn.q_a_layernorm.weight"] = scale(rank)
            layer["self_attn.q_b_proj.weight"] = matrix(heads * (nope + rope), rank)
        else:
            layer["self_attn.q_proj.weight"] = matrix(heads * (nope + rope), inputs)
        layer["self_attn.kv_a_proj_with_mqa.weight"] = matrix(config["kv_lora_rank"] + rope, inputs)
        layer["self_attn.kv_a_layernorm.weight"] = scale(config["kv_lora_rank"])
        layer["self_attn.kv_b_proj.weight"] = matrix(heads * (nope + value), config["kv_lora_rank"])
        layer["self_attn.o_proj.weight"] = matrix(width, heads * value)
        return layer
    dim = config["head_dim"]
    layer["self_attn.q_proj.weight"] = matrix(heads * dim, inputs)
    for name in ("k", "v"):
        layer[f"self_attn.{name}_proj.weight"] = matrix(config["num_key_value_heads"] * dim, inputs)
    layer["self_attn.o_proj.weight"] = matrix(width, heads * dim)
    if config["model_type"] == "qwen3":
        layer |= {f"self_attn.{name}_norm.weight": scale(dim) for name in "qk"}
    biased = [f"self_attn.{name}_proj" for name in "qkvo" if config.get("attention_bias")]
    biased += [f"mlp.{name}_proj" for name in ("gate", "up", "down") if config.get("mlp_bias")]
    return layer | {f"{name}.bias": matrix(len(layer[f"{name}.weight"]), 1)[:, 0] for name in biased}


def _draft_config(attention: str = "gqa", **changes: Any) -> dict[str, Any]:
    """The config of a draft for `save_target`; a change to None takes a field away."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": WIDTH,
        "target_hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 1, "num_attention_heads": 4,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "vocab_size": VOCAB,
        "eagle_aux_hidden_state_layer_ids": list(_WIRING),
    }  # fmt: skip
    if attention == "mla":
        config |= {"model_type": "deepseek_v3", "q_lora_rank": 20, "kv_lora_rank": 16}
        config |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 6, "v_head_dim": 10}
    else:
        config |= {"num_key_value_heads": 2, "head_dim": 12, "draft_vocab_size": _DRAFT_VOCAB}
    if attention == "deep":
        config |= {"model_type": "qwen3", "num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True}
        config |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
        config |= {"use_sliding_window": True}
    return {name: value for name, value in {**config, **changes}.items() if value is not None}


def _save_draft(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """A draft's folder, as a trainer would leave it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def _near(at: Tensor, window: int) -> Tensor:
    return at > at[:, None] - window


def _fit_head(folder: Path, target: Path) -> Path:
    """Give a saved draft the best linear head for its target's own answers, over the tokens that occur most."""
    checkpoint = read_draft(folder)
    assert checkpoint.wiring
    draft = build_draft(checkpoint, target=target, dtype=torch.float32)
    model = load_alone(target)
    model.generation_config.eos_token_id = None
    prompts = torch.randint(0, VOCAB, (200, 8), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        texts = model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=56)
        states = model(texts, output_hidden_states=True).hidden_states
        features = torch.cat([states[boundary] for boundary in checkpoint.wiring.boundaries], dim=-1)
        rows, answers = [], []
        for text, feature in zip(texts, features, strict=True):
            state = draft.fuse(feature[:-2])
            for depth in range(2):  # deeper rows are fed the row before them; attending to its kind is near enough
                state = state[: len(text) - 2 - depth]
                at = torch.arange(len(state))
                attend = PackedAttend(KeyValueCache(), at <= at[:, None], partial(_near, at))
                hidden, state = draft(text[1 + depth : -1], state, at + depth, attend)
                rows.append(hidden)
                answers.append(text[2 + depth :])
    x, y = torch.cat(rows), F.one_hot(torch.cat(answers), VOCAB).float()
    head = torch.linalg.solve(x.T @ x + 1e-3 * len(x) * torch.eye(x.shape[1]), x.T @ y).T
    tensors = load_file(folder / "model.safetensors")
    if "d2t" in tensors:
        kept = y.sum(0).topk(_DRAFT_VOCAB).indices.sort().values
        tensors["d2t"], head = kept - torch.arange(len(kept)), head[kept]
    return _save_draft(
        folder, json.loads((folder / "config.json").read_text("utf-8")), {**tensors, "lm_head.weight": head}
    )


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny models are fastest so, and leave the machine to others."""
    torch.set_num_threads(1)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Each family that is served through the same code."""
    return str(request.param)


@pytest.fixture(scope="session")
def target_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a tiny target of a family, made once."""
    return cache(lambda family: save_target(tmp_path_factory.mktemp("target") / family, family))


@pytest.fixture(scope="session")
def draft_of(tmp_path_factory: pytest.TempPathFactory, target_of: Callable[..., Path]) -> Callable[..., Path]:
    """The folder of a tiny draft that a target of a family sometimes agrees with, made once: "gqa", "mla", or "deep",
    of two layers, one with a window, with biases and head norms.
    """

    def make(family: str, attention: str) -> Path:
        config = _draft_config(attention)
        folder = _save_draft(tmp_path_factory.mktemp("draft") / attention, config, _draft_tensors(config))
        return _fit_head(folder, target_of(family))

    return cache(make)


@pytest.fixture(scope="session")
def new_target() -> Callable[..., Path]:
    """`new_target(folder, family, **changes)` saves a target for a test to break."""
    return save_target


@pytest.fixture(scope="session")
def load_target() -> Callable[[Path], Any]:
    """`load_target(folder)` is a saved target as transformers alone runs it."""
    return load_alone


@pytest.fixture(scope="session")
def new_draft() -> Callable[..., tuple[dict[str, Any], dict[str, Tensor]]]:
    """`new_draft(attention, layout=, seed=, **changes)` gives the config and tensors of a draft for a test to break."""

    def make(
        attention: str = "gqa", *, layout: str = "midlayer", seed: int = 0, **changes: Any
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        config = _draft_config(attention, **changes)
        return config, _draft_tensors(config, layout=layout, seed=seed)

    return make


@pytest.fixture(scope="session")
def write_draft() -> Callable[..., Path]:
    """`write_draft(folder, config, tensors)` saves a draft as a trainer would."""
    return _save_draft


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """One Ray cluster for every deployment: the one there is, or one that ends with the session."""
    from spectrace.engine.cluster import ensure_cluster, stop_cluster

    own = ensure_cluster(None)
    yield
    if own:
        stop_cluster()


@pytest.fixture(scope="session")
def analytic_pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """The analytic pair of a family."""
    made: dict[str, tuple[Path, Path]] = {}

    def make(family: str) -> tuple[Path, Path]:
        if family not in made:
            target, draft, _ = make_pair(family, tmp_path_factory.mktemp(family))
            made[family] = target, draft
        return made[family]

    return make

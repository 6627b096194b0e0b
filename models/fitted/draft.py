"""Drafts for the tiny random targets, in the published layouts.

Everything is random but the head, which is fitted by least squares to what the target says, so that some tokens are
accepted and a wrong wiring costs acceptance.
"""

import json
from pathlib import Path
from typing import Any

import torch
from fitted.target import VOCAB, WIDTH, load_alone
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

__all__ = ["DRAFT_VOCAB", "WIRING", "draft_config", "draft_tensors", "fit_head", "save_draft"]

DRAFT_VOCAB = 64
WIRING = (0, 2, 4)


def draft_tensors(config: dict[str, Any], *, layout: str = "midlayer", seed: int = 0) -> dict[str, Tensor]:
    """Random weights for a draft's config, under the names and in the shapes that EAGLE and SpecForge publish."""
    torch.manual_seed(seed)
    width, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    inputs, slots = config.get("target_hidden_size", width), len(config["eagle_aux_hidden_state_layer_ids"])

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns).div(columns**0.5)

    def scale(length: int) -> Tensor:
        return torch.rand(length) + 0.5

    tensors = {"fc.weight": matrix(width, slots * inputs), "norm.weight": scale(width)}
    tensors["lm_head.weight"] = matrix(config.get("draft_vocab_size", config["vocab_size"]), width)
    layer = {f"{name}.weight": scale(width) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    layer |= {"mlp.gate_proj.weight": matrix(inner, width), "mlp.up_proj.weight": matrix(inner, width)}
    layer["mlp.down_proj.weight"] = matrix(width, inner)
    if "kv_lora_rank" in config:
        nope, rope, value = (config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        if rank := config.get("q_lora_rank"):
            layer["self_attn.q_a_proj.weight"] = matrix(rank, 2 * width)
            layer["self_attn.q_a_layernorm.weight"] = scale(rank)
            layer["self_attn.q_b_proj.weight"] = matrix(heads * (nope + rope), rank)
        else:
            layer["self_attn.q_proj.weight"] = matrix(heads * (nope + rope), 2 * width)
        layer["self_attn.kv_a_proj_with_mqa.weight"] = matrix(config["kv_lora_rank"] + rope, 2 * width)
        layer["self_attn.kv_a_layernorm.weight"] = scale(config["kv_lora_rank"])
        layer["self_attn.kv_b_proj.weight"] = matrix(heads * (nope + value), config["kv_lora_rank"])
        layer["self_attn.o_proj.weight"] = matrix(width, heads * value)
    else:
        dim = config["head_dim"]
        layer["self_attn.q_proj.weight"] = matrix(heads * dim, 2 * width)
        for name in ("k", "v"):
            layer[f"self_attn.{name}_proj.weight"] = matrix(config["num_key_value_heads"] * dim, 2 * width)
        layer["self_attn.o_proj.weight"] = matrix(width, heads * dim)
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{slot}.weight": scale(inputs) for slot in range(slots)}
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = scale(slots * inputs)
    if config.get("draft_vocab_size", config["vocab_size"]) < config["vocab_size"]:
        kept = torch.randperm(config["vocab_size"])[: config["draft_vocab_size"]].sort().values
        tensors["d2t"] = kept - torch.arange(len(kept))
    return tensors | {f"{layout}.{name}": tensor for name, tensor in layer.items()}


def draft_config(attention: str = "gqa", **changes: Any) -> dict[str, Any]:
    """The config of a draft for `save_target`; a change to None takes a field away."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": WIDTH,
        "target_hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 1, "num_attention_heads": 4,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "vocab_size": VOCAB,
        "eagle_aux_hidden_state_layer_ids": list(WIRING),
    }  # fmt: skip
    if attention == "mla":
        config |= {"model_type": "deepseek_v3", "q_lora_rank": 20, "kv_lora_rank": 16}
        config |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 6, "v_head_dim": 10}
    else:
        config |= {"num_key_value_heads": 2, "head_dim": 12, "draft_vocab_size": DRAFT_VOCAB}
    return {name: value for name, value in {**config, **changes}.items() if value is not None}


def save_draft(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """A draft's folder, as a trainer would leave it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def fit_head(folder: Path, target: Path) -> Path:
    """Give a saved draft the best linear head for its target's own answers, over the tokens that occur most."""
    from spectrace.engine.attention import KeyValueCache, PackedAttend
    from spectrace.engine.checkpoint import build_draft, read_draft

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
                positions = torch.arange(len(state)) + depth
                mask = torch.ones(len(state), len(state), dtype=torch.bool).tril()
                hidden, state = draft(text[1 + depth : -1], state, positions, PackedAttend(KeyValueCache(), mask))
                rows.append(hidden)
                answers.append(text[2 + depth :])
    x, y = torch.cat(rows), F.one_hot(torch.cat(answers), VOCAB).float()
    head = torch.linalg.solve(x.T @ x + 1e-3 * len(x) * torch.eye(x.shape[1]), x.T @ y).T
    tensors = load_file(folder / "model.safetensors")
    if "d2t" in tensors:
        kept = y.sum(0).topk(DRAFT_VOCAB).indices.sort().values
        tensors["d2t"], head = kept - torch.arange(len(kept)), head[kept]
    return save_draft(
        folder, json.loads((folder / "config.json").read_text("utf-8")), {**tensors, "lm_head.weight": head}
    )

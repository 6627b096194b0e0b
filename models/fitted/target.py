"""Tiny random targets of five families, whose next token depends on the whole prefix.

Weights are large, so that greedy answers wander instead of falling into a loop: a single wrong row changes an answer.
"""

from pathlib import Path
from typing import Any

import torch

__all__ = ["END_TOKENS", "FAMILIES", "LAYERS", "VOCAB", "WIDTH", "load_alone", "model_class", "save_target"]

VOCAB, WIDTH, LAYERS = 96, 48, 5
END_TOKENS = (7, 41)
FAMILIES = ("llama", "qwen3", "deepseek_v3", "kimi_k25", "gemma3_text")


# What a family adds to the fields that all share; a multimodal family has these in its text config.
_MLA_AND_EXPERTS = {
    "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 6,
    "head_dim": 6, "v_head_dim": 10, "moe_intermediate_size": WIDTH, "n_routed_experts": 8, "n_group": 4,
    "topk_group": 2, "num_experts_per_tok": 3, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "initializer_range": 0.2,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 50000.0, "factor": 4.0, "original_max_position_embeddings": 128, "mscale": 1.0,
    "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
_SANDWICH = {"sliding_window": 6, "sliding_window_pattern": 3, "query_pre_attn_scalar": 12}
_TEXT_FIELDS: dict[str, dict[str, Any]] = {
    "deepseek_v3": _MLA_AND_EXPERTS,
    "kimi_k25": {**_MLA_AND_EXPERTS, "model_type": "deepseek_v3", "rope_parameters": _YARN},
    "gemma3_text": _SANDWICH,
    "gemma3": {**_SANDWICH, "model_type": "gemma3_text"},
}
_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_COMPOSITE: dict[str, dict[str, Any]] = {
    "kimi_k25": {"vision_config": _VISION, "projection_hidden_size": 16},
    "gemma3": {"vision_config": {**_VISION, "image_size": 28, "patch_size": 14}, "mm_tokens_per_image": 4},
}


def save_target(folder: Path, family: str, **changes: Any) -> Path:
    """A random target of a family, by its model type in transformers: all of FAMILIES, and whatever takes their fields.

    In a multimodal family the changes are to the text config. Gemma's two traps are served: its table is small, as its
    embedding grows by sqrt(WIDTH), or the last token would say everything; and its norms are scaled by 1 + w.
    """
    from transformers import AutoConfig

    torch.manual_seed(0)
    text = {
        "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "initializer_range": 0.1,
        "max_position_embeddings": 512, "tie_word_embeddings": False, "bos_token_id": None, "pad_token_id": 0,
        "eos_token_id": list(END_TOKENS), **_TEXT_FIELDS.get(family, {}), **changes,
    }  # fmt: skip
    if family in _COMPOSITE:
        config = AutoConfig.for_model(
            family, text_config=text, tie_word_embeddings=text["tie_word_embeddings"], **_COMPOSITE[family]
        )
    else:
        config = AutoConfig.for_model(family, **text)
    model = model_class(config).from_config(config)
    gemma = "gemma" in family
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(0, WIDTH**-0.5 if gemma else 1)
        for name, tensor in model.state_dict().items():
            if "norm" in name:
                tensor.uniform_(0.5, 1.5).sub_(1 if gemma else 0)
            elif name.endswith("e_score_correction_bias"):
                tensor.normal_(0, 0.1)
    model.save_pretrained(folder)
    return folder


def model_class(config: Any) -> Any:
    """The class that loads a text decoder with its head, alone or in a multimodal model."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText


def load_alone(folder: Path) -> Any:
    """A saved target as transformers alone runs it."""
    from transformers import AutoConfig

    return model_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder).eval()

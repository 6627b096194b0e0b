"""The target of every case: a small Llama, of whose weights drafts share the embedding and the head."""

from __future__ import annotations

from pathlib import Path

import torch

__all__ = ["save_verifier"]


def save_verifier(folder: Path, *, width: int = 64) -> Path:
    """A Llama of random weights, in transformers' own files."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=160, hidden_size=width, intermediate_size=96, num_hidden_layers=8, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.5 / max(1, parameter.shape[-1]) ** 0.5)
    model.save_pretrained(folder)
    return folder

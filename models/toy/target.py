"""Train the toy target: a DeepSeek-V3 of five layers, with MLA and routed experts, on texts of the toy language.

Resumes from its checkpoint; step n always sees the same texts. The log is one JSON object a line; its accuracies are on
texts not trained on yet.

Shapes: B texts, T tokens.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import click
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.append(str(Path(__file__).resolve().parents[1]))

import ttt
from toy.language import VOCAB, Language

__all__ = ["LAYERS", "RUN", "TARGET", "WIDTH", "load_target"]

HERE = Path(__file__).resolve().parent
TARGET, LOG = HERE / "target", HERE / "training-log.jsonl"
RUN = Path(os.environ.get("SPECTRACE_CACHE", Path.home() / ".cache" / "spectrace")) / "toy"
WIDTH, LAYERS, HEADS = 80, 5, 4
TEXTS, LENGTH = 24, 112
RATE, MODEL_SEED, TEXT_SEED = 3e-3, 0, 1


def new_target():
    """An untrained target."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16,
        v_head_dim=20, first_k_dense_replace=1, intermediate_size=192, n_routed_experts=6, num_experts_per_tok=2,
        n_shared_experts=1, moe_intermediate_size=64, n_group=1, topk_group=1, routed_scaling_factor=1.5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, max_position_embeddings=512,
        initializer_range=0.06, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
        experts_implementation="eager",
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config)


def load_target():
    """The trained target, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval().requires_grad_(False)


def batches(language: Language) -> Iterator[tuple[Tensor, Tensor]]:
    """The texts [B, T] of every step, and which of their tokens follow from the rules."""
    generator = np.random.default_rng(TEXT_SEED)
    while True:
        tokens, starts = language.write(TEXTS, LENGTH, generator)
        yield torch.from_numpy(tokens), torch.arange(LENGTH) >= torch.from_numpy(starts)[:, None]


def accuracies(language: Language, tokens: Tensor, ruled: Tensor, logits: Tensor) -> dict[str, float]:
    """How often the target's choice is what the text goes on with: after keys, after echo markers, after the rest."""
    right = logits.argmax(-1) == tokens[:, 1:]
    last, ruled = tokens[:, :-1].numpy(), ruled[:, 1:]
    key, echo = torch.from_numpy(language.key_of[last] >= 0), torch.from_numpy(language.echo_of[last] > 0)
    kinds = {"key": key & ruled, "echo": echo & ruled, "lag": ~key & ~echo & ruled}
    return {kind: round(float(right[where].float().mean()), 3) for kind, where in kinds.items()}


def log_line(**facts: object) -> None:
    """Say how far the training has come, on screen and in the log."""
    line = json.dumps(facts)
    print(line, flush=True)
    with LOG.open("a", encoding="utf-8") as lines:
        lines.write(line + "\n")


@click.command()
@click.option("--steps", default=4000, help="Optimiser steps in all; the cosine ends there.")
@click.option("--stop-after", default=3100, help="Stop at this step without ending the schedule.")
@click.option("--threads", default=1)
def main(steps: int, stop_after: int, threads: int) -> None:
    """Train, or go on training, until --stop-after."""
    torch.set_num_threads(threads)
    torch.manual_seed(MODEL_SEED)
    language, target = Language.drawn(), new_target()
    optimiser = torch.optim.AdamW(target.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda s: ttt.cosine(s, steps=steps))
    state = ttt.TrainingState(RUN / "target.pt", target=target, optimiser=optimiser, schedule=schedule)
    done, started, recent = state.load(), time.time(), list[float]()
    for step, (tokens, ruled) in islice(enumerate(batches(language), 1), done, stop_after):
        logits = target(tokens[:, :-1]).logits
        loss = F.cross_entropy(logits[ruled[:, 1:]], tokens[:, 1:][ruled[:, 1:]])
        recent.append(ttt.descend(loss, optimiser, schedule, clip=1.0))
        if step % 100 == 0 or step == stop_after:
            state.save(step)
            facts = {"loss": round(float(np.mean(recent)), 3), **accuracies(language, tokens, ruled, logits)}
            log_line(step=step, **facts, secs=round(time.time() - started))
            recent.clear()
    target.to(torch.bfloat16).save_pretrained(TARGET)


if __name__ == "__main__":
    main()

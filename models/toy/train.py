"""Train the toy draft on text that the toy target itself wrote, with training-time test (models/ttt.py).

Resumes from its checkpoint; step n always sees the same texts. The log is one JSON object a line.

Shapes: B texts, T tokens, A slots, F target width, K draft vocabulary.
"""

import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

sys.path.append(str(Path(__file__).resolve().parents[1]))

import ttt
from toy.language import VOCAB, Language
from toy.target import RUN, WIDTH, load_target, log_line

from spectrace.engine.draft import DraftModel
from spectrace.engine.spec import DraftSpec, FuseNorm, MlaSpec, RopeKind, RopeSpec, Stream

__all__ = ["DEPTH", "DRAFT"]

DRAFT = Path(__file__).resolve().parent / "draft"
WIRING = (0, 3, 4)
KEPT = 92
DEPTH = 4
SEED = 1
WRITTEN, HELD_OUT, WRITTEN_AT_ONCE, LENGTH = 2048, 64, 512, 128
TEXTS_A_STEP, RATE = 16, 3e-3
SLOT_GAINS, NORM_SPREAD = (10.0, 20.0, 5.0), 3.5
FACTOR, MSCALE, CONTEXT = 40.0, 2.0, 32
SPEC = DraftSpec(
    width=WIDTH, target_width=WIDTH, slots=len(WIRING), mlp_width=96, target_vocab=VOCAB, draft_vocab=KEPT,
    attention=MlaSpec(
        heads=4, q_rank=32, kv_rank=24, nope_dim=8, rope_dim=16, value_dim=12,
        softmax_scale=(0.1 * MSCALE * math.log(FACTOR) + 1) ** 2,
    ),
    rope=RopeSpec(
        theta=500.0, kind=RopeKind.YARN, factor=FACTOR, original_context=CONTEXT, beta_fast=4.0, beta_slow=0.25,
        interleaved=True,
    ),
    residual=Stream.POST_NORM, feedback=Stream.POST_NORM, fuse_norm=FuseNorm.PER_SLOT, own_embedding=True,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Texts:
    """Tokens [B, T], where the target's own words begin, and whether it chose them greedily (else by chance)."""

    tokens: Tensor
    starts: Tensor
    greedy: Tensor

    def take(self, rows: Tensor) -> "Texts":
        return Texts(self.tokens[rows], self.starts[rows], self.greedy[rows])

    @property
    def mask(self) -> Tensor:
        """The target's own words [B, T]."""
        return torch.arange(self.tokens.shape[1]) >= self.starts[:, None]


@torch.inference_mode()
def write(target, language: Language, generator: np.random.Generator) -> Texts:
    """Have the target go on with prompts of the language, every second one greedily."""
    from transformers import DynamicCache

    prompts = language.prompts(WRITTEN_AT_ONCE, generator)
    starts = torch.tensor([len(prompt) for prompt in prompts])
    greedy = torch.arange(len(prompts)) % 2 == 0
    tokens = torch.zeros(len(prompts), LENGTH, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    cache = DynamicCache()
    for t in range(LENGTH - 1):
        logits = target(tokens[:, t : t + 1], cache=cache, use_cache=True).logits[:, -1]
        chosen = torch.where(greedy, logits.argmax(-1), torch.multinomial(logits.softmax(-1), 1)[:, 0])
        tokens[:, t + 1] = torch.where(t + 1 < starts, tokens[:, t + 1], chosen)
    return Texts(tokens, starts, greedy)


def written(target, language: Language) -> Texts:
    """The target's texts, written once."""
    path = RUN / "texts.pt"
    if not path.exists():
        torch.manual_seed(SEED)
        generator = np.random.default_rng(SEED)
        parts = [write(target, language, generator) for _ in range(WRITTEN // WRITTEN_AT_ONCE)]
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({name: torch.cat([getattr(part, name) for part in parts]) for name in Texts.__slots__}, path)
    return Texts(**torch.load(path))


@torch.no_grad()
def new_draft(target, kept: Tensor) -> DraftModel:
    """An untrained draft: embedding, head and last norm from the target, the rest random.

    Two choices make it matter where a state is taken from, and training keeps them. `fc` starts large, the slots not
    equally: the norm after it hides that, so fused features stay much longer than normed ones, and no slot is left to
    the others. The channels of the last norm start far apart, with a head that takes it back: a state before that norm
    points elsewhere than after it.
    """
    torch.manual_seed(SEED)
    draft = DraftModel(SPEC)
    for parameter in draft.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.7 * parameter.shape[1] ** -0.5)
    draft.fc.weight.unflatten(1, (len(WIRING), WIDTH)).mul_(torch.tensor(SLOT_GAINS)[:, None])
    draft.embedding.weight.copy_(target.model.embed_tokens.weight)
    apart = torch.empty(WIDTH).uniform_(-NORM_SPREAD, NORM_SPREAD).exp()
    draft.output_norm.weight.copy_(target.model.norm.weight * apart)
    draft.head.weight.copy_(target.lm_head.weight[kept] / apart)
    draft.d2t.copy_(kept - torch.arange(KEPT))
    return draft


@torch.no_grad()
def features(target, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """What the draft is fed, [B*T, A*F], and the target's last state after its norm, [B, T, F]."""
    found = target.model(tokens, output_hidden_states=True)
    return torch.cat([found.hidden_states[b] for b in WIRING], -1).flatten(0, 1), found.last_hidden_state


@torch.no_grad()
def measure(draft: DraftModel, target, held: Texts) -> dict[str, object]:
    """Accuracy of every step on the target's greedy words, true tokens fed, and the walk with the draft's own."""
    texts = held.take(held.greedy)
    fed, final = features(target, texts.tokens)
    outputs = ttt.unroll(draft, texts.tokens, fed, DEPTH)
    counts = ttt.hits(draft, outputs, texts.mask, F.linear(final, target.lm_head.weight).argmax(-1))
    free = ttt.unroll(draft, texts.tokens, fed, DEPTH, own_tokens=True)
    drafts = [ttt.choices(draft, hidden).unflatten(0, texts.tokens.shape) for hidden in free]
    rounds, correct = np.sum([
        ttt.count_rounds(tokens.tolist(), int(start), [step[row].tolist() for step in drafts])
        for row, (tokens, start) in enumerate(zip(texts.tokens, texts.starts, strict=True))
    ], axis=0)  # fmt: skip
    accuracy = [round(right / count, 4) for right, count in counts]
    return {"accuracy": accuracy, "walk_acceptance": round(float(1 + correct / rounds), 4)}


def save(draft: DraftModel) -> None:
    """Write the draft under EAGLE's names, with DeepSeek's for the attention."""
    DRAFT.mkdir(exist_ok=True)
    save_file(ttt.published(draft), DRAFT / "model.safetensors")
    attention, rope = SPEC.attention, SPEC.rope
    config = {
        "architectures": ["Eagle3DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "dtype": "bfloat16",
        "hidden_size": WIDTH, "target_hidden_size": WIDTH, "intermediate_size": SPEC.mlp_width,
        "num_hidden_layers": 1, "num_attention_heads": attention.heads, "hidden_act": "silu",
        "q_lora_rank": attention.q_rank, "kv_lora_rank": attention.kv_rank, "qk_nope_head_dim": attention.nope_dim,
        "qk_rope_head_dim": attention.rope_dim, "v_head_dim": attention.value_dim, "rope_interleave": True,
        "rope_theta": rope.theta, "rope_scaling": {
            "rope_type": "yarn", "factor": FACTOR, "original_max_position_embeddings": CONTEXT,
            "beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "mscale": MSCALE, "mscale_all_dim": MSCALE,
        },
        "max_position_embeddings": int(FACTOR * CONTEXT), "rms_norm_eps": SPEC.norm_eps,
        "vocab_size": VOCAB, "draft_vocab_size": KEPT, "tie_word_embeddings": False,
        "norm_before_residual": True, "norm_output": True, "fc_norm": True,
        "eagle_aux_hidden_state_layer_ids": list(WIRING),
    }  # fmt: skip
    (DRAFT / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


@click.command()
@click.option("--steps", default=400, help="Optimiser steps in all; the cosine ends there.")
@click.option("--threads", default=1)
def main(steps: int, threads: int) -> None:
    """Train, or go on training, until --steps."""
    torch.set_num_threads(threads)
    started, recent = time.time(), list[float]()
    target = load_target()
    texts = written(target, Language.drawn())
    held, texts = texts.take(torch.arange(HELD_OUT)), texts.take(torch.arange(HELD_OUT, WRITTEN))
    counts = torch.bincount(texts.tokens[texts.mask], minlength=VOCAB)
    kept = counts.argsort(descending=True, stable=True)[:KEPT].sort().values
    draft, kept_head = new_draft(target, kept), target.lm_head.weight[kept]
    optimiser = torch.optim.AdamW(draft.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda s: ttt.cosine(s, steps=steps))
    state = ttt.TrainingState(RUN / "draft.pt", draft=draft, optimiser=optimiser, schedule=schedule)
    for step in range(state.load() + 1, steps + 1):
        chosen = np.random.default_rng((SEED, step)).integers(0, len(texts.tokens), TEXTS_A_STEP)
        batch = texts.take(torch.from_numpy(chosen))
        fed, final = features(target, batch.tokens)
        outputs = ttt.unroll(draft, batch.tokens, fed, DEPTH)
        loss = ttt.loss(draft, outputs, batch.mask, final, kept_head)
        recent.append(ttt.descend(loss, optimiser, schedule, clip=1.0))
        if step % 50 == 0 or step == steps:
            state.save(step)
            facts = {"loss": round(float(np.mean(recent)), 4), **measure(draft, target, held)}
            log_line("draft", step=step, **facts, secs=round(time.time() - started))
            recent.clear()
    save(draft)


if __name__ == "__main__":
    main()

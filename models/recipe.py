"""Drafts to train by recipe, for targets small enough that it takes a minute: the loop, the start, and the files.

Shapes: B texts, T tokens, A slots, F target width, K draft vocabulary.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import ttt
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from spectrace.engine.draft import DraftModel
from spectrace.engine.spec import DraftSpec, FuseNorm, GqaSpec, MlaSpec, RopeKind, Stream

__all__ = ["Recipe", "Taught", "streams", "train_draft"]

_RATE, _BETAS, _DECAY, _CLIP = 3e-3, (0.9, 0.98), 0.1, 1.0
_TEXTS_A_STEP, _SEED = 16, 1
_ARCHITECTURES = {True: "Eagle3DeepseekV3ForCausalLM", False: "LlamaForCausalLMEagle3"}


@dataclass(frozen=True, slots=True)
class Recipe:
    """A draft: its switches and boundaries, how loud each slot of `fc` starts, how far apart the last norm's channels
    start (a state before that norm then points elsewhere than after it), and where the schedule is left.
    """

    spec: DraftSpec
    wiring: tuple[int, ...]
    gains: tuple[float, ...]
    norm_spread: float = 0.0
    depth: int = 4
    steps: int = 400
    stop_after: int | None = None


@dataclass(frozen=True, slots=True)
class Taught:
    """A target, its texts [B, T], and which of their tokens are its own words."""

    target: Any
    tokens: Tensor
    mask: Tensor

    def take(self, rows: Tensor) -> "Taught":
        return Taught(self.target, self.tokens[rows], self.mask[rows])


@torch.no_grad()
def streams(target: Any, tokens_BT: Tensor) -> tuple[list[Tensor], Tensor]:
    """Every boundary [B, T, F], L before the final norm; and the last state after it."""
    last: list[Tensor] = []
    hook = target.model.norm.register_forward_pre_hook(lambda _module, inputs: last.append(inputs[0]))
    found = target.model(tokens_BT, output_hidden_states=True)
    hook.remove()
    return [*found.hidden_states[:-1], last[0]], found.last_hidden_state


@torch.no_grad()
def _begin(recipe: Recipe, target: Any, kept: Tensor) -> DraftModel:
    """Embedding, head and last norm from the target, the rest random."""
    torch.manual_seed(_SEED)
    draft, spec = DraftModel(recipe.spec), recipe.spec
    for parameter in draft.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.7 * parameter.shape[1] ** -0.5)
    draft.fc.weight.unflatten(1, (spec.slots, spec.target_width)).mul_(torch.tensor(recipe.gains)[:, None])
    draft.embedding.weight.copy_(target.model.embed_tokens.weight)
    apart = torch.empty(spec.width).uniform_(-recipe.norm_spread, recipe.norm_spread).exp()
    draft.output_norm.weight.copy_(target.model.norm.weight * apart)
    draft.head.weight.copy_(target.lm_head.weight[kept] / apart)
    draft.d2t.copy_(kept - torch.arange(len(kept)))
    draft.embedding.weight.requires_grad_(spec.own_embedding)
    return draft


def _fed(recipe: Recipe, texts: Taught) -> tuple[Tensor, Tensor]:
    """What the draft is fed, [B*T, A*F], and the target's last state after its norm, [B, T, F]."""
    found, final = streams(texts.target, texts.tokens)
    return torch.cat([found[b] for b in recipe.wiring], -1).flatten(0, 1), final


@torch.no_grad()
def _accuracy(recipe: Recipe, draft: DraftModel, held: Taught) -> list[float]:
    """Of every step, on texts not trained on, true tokens fed."""
    fed, final = _fed(recipe, held)
    outputs = ttt.unroll(draft, held.tokens, fed, recipe.depth)
    best = F.linear(final, held.target.lm_head.weight).argmax(-1)
    return [round(right / count, 4) for right, count in ttt.hits(draft, outputs, held.mask, best)]


def train_draft(recipe: Recipe, texts: Taught, held: Taught, folder: Path) -> Path:
    """Train by the recipe and write the draft, as its trainer would publish it, with a log beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    counts = torch.bincount(texts.tokens[texts.mask], minlength=recipe.spec.target_vocab)
    kept = counts.argsort(descending=True, stable=True)[: recipe.spec.draft_vocab].sort().values
    draft = _begin(recipe, texts.target, kept)
    with (folder / "training-log.jsonl").open("w", encoding="utf-8") as log:
        for facts in _descend(recipe, draft, texts, held, texts.target.lm_head.weight[kept]):
            print(json.dumps(facts), file=log, flush=True)
            print(folder.name, json.dumps(facts), flush=True)
    _save(recipe, draft, folder)
    return folder


def _descend(
    recipe: Recipe, draft: DraftModel, texts: Taught, held: Taught, kept_head_KF: Tensor
) -> Iterator[dict[str, object]]:
    parameters = [parameter for parameter in draft.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=_RATE, betas=_BETAS, weight_decay=_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: ttt.cosine(step, steps=recipe.steps))
    started, recent, last = time.time(), list[float](), recipe.stop_after or recipe.steps
    for step in range(1, last + 1):
        chosen = np.random.default_rng((_SEED, step)).integers(0, len(texts.tokens), _TEXTS_A_STEP)
        batch = texts.take(torch.from_numpy(chosen))
        fed, final = _fed(recipe, batch)
        outputs = ttt.unroll(draft, batch.tokens, fed, recipe.depth)
        loss = ttt.loss(draft, outputs, batch.mask, final, kept_head_KF)
        recent.append(ttt.descend(loss, optimiser, schedule, clip=_CLIP))
        if step % 100 == 0 or step == last:
            mean, accuracy = round(float(np.mean(recent)), 4), _accuracy(recipe, draft, held)
            yield {"step": step, "loss": mean, "accuracy": accuracy, "secs": round(time.time() - started)}
            recent.clear()


def _save(recipe: Recipe, draft: DraftModel, folder: Path) -> None:
    tensors = ttt.published(draft)
    if recipe.spec.fuse_norm is FuseNorm.WHOLE:
        tensors["input_norm.weight"] = tensors.pop("fc_norm.0.weight")
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_config(recipe), indent=2) + "\n", "utf-8")


def _config(recipe: Recipe) -> dict[str, Any]:
    """The draft's config.json, in EAGLE's and SpecForge's words."""
    spec = recipe.spec
    latent = isinstance(spec.attention, MlaSpec)
    norms = {FuseNorm.NONE: {}, FuseNorm.WHOLE: {"norm_before_fc": True}, FuseNorm.PER_SLOT: {"fc_norm": True}}
    return {
        "architectures": [_ARCHITECTURES[latent]], "model_type": "deepseek_v3" if latent else "llama",
        "dtype": "bfloat16", "hidden_size": spec.width, "target_hidden_size": spec.target_width,
        "intermediate_size": spec.mlp_width, "num_hidden_layers": 1, "num_attention_heads": spec.attention.heads,
        "hidden_act": "silu", **_attention(spec), "rope_theta": spec.rope.theta, **_scaling(spec),
        "max_position_embeddings": int(spec.rope.factor * (spec.rope.original_context or 512)),
        "rms_norm_eps": spec.norm_eps, "vocab_size": spec.target_vocab, "draft_vocab_size": spec.draft_vocab,
        "tie_word_embeddings": False, "norm_before_residual": spec.residual is Stream.POST_NORM,
        "norm_output": spec.feedback is Stream.POST_NORM, **norms[spec.fuse_norm],
        "eagle_aux_hidden_state_layer_ids": list(recipe.wiring),
    }  # fmt: skip


def _attention(spec: DraftSpec) -> dict[str, Any]:
    shape = spec.attention
    if isinstance(shape, GqaSpec):
        return {"num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim}
    return {
        "q_lora_rank": shape.q_rank, "kv_lora_rank": shape.kv_rank, "qk_nope_head_dim": shape.nope_dim,
        "qk_rope_head_dim": shape.rope_dim, "v_head_dim": shape.value_dim, "rope_interleave": spec.rope.interleaved,
    }  # fmt: skip


def _scaling(spec: DraftSpec) -> dict[str, Any]:
    """YaRN as DeepSeek has it: the attention's temperature in the softmax scale, none in the cosines."""
    rope = spec.rope
    if rope.kind is RopeKind.DEFAULT:
        return {}
    scaling: dict[str, Any] = {"rope_type": rope.kind.value, "factor": rope.factor}
    scaling["original_max_position_embeddings"] = rope.original_context
    if rope.kind is RopeKind.LLAMA3:
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind is RopeKind.YARN:
        assert isinstance(spec.attention, MlaSpec)
        mscale = (spec.attention.softmax_scale**0.5 - 1) / (0.1 * float(np.log(rope.factor)))
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        scaling |= {"mscale": round(mscale, 6), "mscale_all_dim": round(mscale, 6)}
    return {"rope_scaling": scaling}

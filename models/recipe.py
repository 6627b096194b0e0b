"""Drafts to train by recipe, for targets small enough that it takes a minute: the loop, the start, and the files.

Shapes: B texts, T tokens, A slots, F target width, K draft vocabulary.
"""

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import ttt
from torch import Tensor
from torch.nn import functional as F

from spectrace.engine.attention import RmsNorm
from spectrace.engine.convert import write_draft
from spectrace.engine.draft import DraftModel
from spectrace.engine.spec import DraftSpec, RopeSpec

__all__ = ["Recipe", "Taught", "streams", "train_draft"]

_RATE, _BETAS, _DECAY, _CLIP = 3e-3, (0.9, 0.98), 0.1, 1.0
_TEXTS_A_STEP, _SEED, _CONTEXT = 16, 1, 512


@dataclass(frozen=True, slots=True)
class Recipe:
    """A draft: its switches and boundaries, how loud each slot of `fc` starts, and where the schedule is left.

    `norm_spread` and `later_spread` say how far apart the channels of the last norm start, and of later layers' input
    norms: a state before such a norm then points elsewhere than after it. `bias_spread` is of the biases of queries,
    keys and values. `loudness` is the RMS of an own embedding that starts at random, in place of the target's: where it
    is so quiet that `norm_eps` shows, its scale does, too.
    """

    spec: DraftSpec
    wiring: tuple[int, ...]
    gains: tuple[float, ...]
    norm_spread: float = 0.0
    later_spread: float = 0.0
    bias_spread: float = 0.0
    loudness: float | None = None
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
    spec = recipe.spec
    draft = DraftModel(replace(spec, embedding_scale=spec.embedding_scale * (recipe.loudness or 1)))
    for parameter in draft.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.7 * parameter.shape[1] ** -0.5)
    draft.fc.weight.unflatten(1, (spec.slots, spec.target_width)).mul_(torch.tensor(recipe.gains)[:, None])
    draft.embedding.weight.copy_(target.model.embed_tokens.weight)
    apart = _apart(spec.width, recipe.norm_spread)
    _set_gains(draft.output_norm, target.model.norm.weight * apart)
    draft.head.weight.copy_(target.lm_head.weight[kept] / apart)
    draft.d2t.copy_(kept - torch.arange(len(kept)))
    for layer in draft.later:
        _set_gains(layer.input_norm, _apart(spec.width, recipe.later_spread))
    for name, parameter in draft.named_parameters():
        if name.endswith(".bias"):
            parameter.normal_(0, recipe.bias_spread)
    if recipe.loudness:
        draft.embedding.weight.normal_()  # trained at this loudness, and published at the other
    draft.embedding.weight.requires_grad_(spec.own_embedding)
    return draft


def _apart(width: int, spread: float) -> Tensor:
    return torch.empty(width).uniform_(-spread, spread).exp()


def _set_gains(norm: RmsNorm, gains: Tensor) -> None:
    norm.weight.copy_(gains - 1 if norm.unit_offset else gains)


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
    counts = torch.bincount(texts.tokens[texts.mask], minlength=recipe.spec.target_vocab)
    kept = counts.argsort(descending=True, stable=True)[: recipe.spec.draft_vocab].sort().values
    draft, log = _begin(recipe, texts.target, kept), []
    for facts in _descend(recipe, draft, texts, held, texts.target.lm_head.weight[kept]):
        log.append(json.dumps(facts) + "\n")
        print(folder.name, log[-1], end="", flush=True)
    with torch.no_grad():
        draft.embedding.weight.mul_(recipe.loudness or 1)
    _save(recipe, draft, folder)
    (folder / "training-log.jsonl").write_text("".join(log), "utf-8")
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
    """In EAGLE's layout and bf16; what lies there already is replaced."""
    spec = recipe.spec if recipe.spec.context else replace(recipe.spec, context=_context(recipe.spec.rope))
    tensors = {
        name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for name, tensor in draft.state_dict().items()
        if name != "d2t" or spec.draft_vocab < spec.target_vocab
    }
    shutil.rmtree(folder, ignore_errors=True)
    write_draft(folder, "eagle", spec, recipe.wiring, tensors)


def _context(rope: RopeSpec) -> int:
    return int(rope.factor * (rope.original_context or _CONTEXT))

"""Drafts for the toy target, trained on text that it wrote itself, by recipe (models/recipe.py).

- `draft`: the one of the pair. MLA, YaRN with a softmax scale, a norm for every slot.
- `gqa`: grouped-query attention, Llama 3's RoPE scaling, one norm over all slots before `fc`, a last slot at L.
- `one-slot`: one boundary, so that a feature is as wide as the draft and `fc` could be skipped unnoticed.
- `undertrained`: the first, stopped early in its schedule.
- `deep`: two layers of grouped-query attention with biases and head norms, the first with a sliding window; the whole
  vocabulary; an embedding so quiet that its scale matters.

Shapes: B texts, T tokens.
"""

import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import click
import numpy as np
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[1]))

from recipe import Recipe, Taught, train_draft
from toy.language import VOCAB, Language
from toy.target import LAYERS, RUN, WIDTH, load_target

from spectrace.engine.spec import DraftSpec, FuseNorm, GqaSpec, MlaSpec, RopeKind, RopeSpec, Stream

__all__ = ["DEEP", "DEPTH", "DRAFT", "RECIPES"]

_HERE = Path(__file__).resolve().parent
DRAFT, DEEP = _HERE / "draft", _HERE / "deep"
DEPTH = 4
_SEED = 1
_WRITTEN, _HELD_OUT, _WRITTEN_AT_ONCE, _LENGTH = 2048, 64, 512, 128
_GAINS, _SPREAD = (10.0, 20.0, 5.0), 3.5
_FACTOR, _MSCALE = 40.0, 2.0
_SPEC = DraftSpec(
    width=WIDTH, target_width=WIDTH, slots=3, mlp_width=96, target_vocab=VOCAB, draft_vocab=92,
    attention=MlaSpec(
        heads=4, q_rank=32, kv_rank=24, nope_dim=8, rope_dim=16, value_dim=12,
        softmax_scale=(0.1 * _MSCALE * math.log(_FACTOR) + 1) ** 2,
    ),
    rope=RopeSpec(
        theta=500.0, kind=RopeKind.YARN, factor=_FACTOR, original_context=32, beta_fast=4.0, beta_slow=0.25,
        interleaved=True,
    ),
    residual=Stream.POST_NORM, feedback=Stream.POST_NORM, fuse_norm=FuseNorm.PER_SLOT, own_embedding=True,
)  # fmt: skip
_GQA = replace(
    _SPEC, attention=GqaSpec(heads=4, kv_heads=2, head_dim=24),
    rope=RopeSpec(theta=500.0, kind=RopeKind.LLAMA3, factor=8.0, original_context=32),
    residual=Stream.PRE_NORM, feedback=Stream.PRE_NORM, fuse_norm=FuseNorm.WHOLE,
)  # fmt: skip
_ONE_SLOT = replace(_SPEC, slots=1, fuse_norm=FuseNorm.NONE)
_DEEP = DraftSpec(
    width=WIDTH, target_width=WIDTH, slots=3, mlp_width=96, target_vocab=VOCAB, draft_vocab=VOCAB,
    attention=GqaSpec(heads=4, kv_heads=2, head_dim=24, qkv_bias=True, head_norms=True), rope=RopeSpec(theta=500.0),
    windows=(8, None), residual=Stream.POST_NORM, feedback=Stream.POST_NORM, own_embedding=True,
    embedding_scale=WIDTH**0.5, norm_eps=1e-5, context=_LENGTH,
)  # fmt: skip
RECIPES = {
    "draft": Recipe(_SPEC, (0, 3, 4), _GAINS, _SPREAD, depth=DEPTH),
    "gqa": Recipe(_GQA, (0, 3, LAYERS), _GAINS, _SPREAD, steps=1200),
    "one-slot": Recipe(_ONE_SLOT, (4,), (2.0,), _SPREAD, steps=800),
    "undertrained": Recipe(_SPEC, (0, 3, 4), _GAINS, _SPREAD, stop_after=165),
    "deep": Recipe(_DEEP, (1, 3, 4), _GAINS, _SPREAD, later_spread=3.0, bias_spread=1.0, loudness=1e-3, steps=800),
}


@dataclass(frozen=True, slots=True)
class Texts:
    """Tokens [B, T], where the target's own words begin, and whether it chose them greedily (else by chance)."""

    tokens: Tensor
    starts: Tensor
    greedy: Tensor

    @property
    def mask(self) -> Tensor:
        """The target's own words [B, T]."""
        return torch.arange(self.tokens.shape[1]) >= self.starts[:, None]


@torch.inference_mode()
def write(target, language: Language, generator: np.random.Generator) -> Texts:
    """Have the target go on with prompts of the language, every second one greedily."""
    from transformers import DynamicCache

    prompts = language.prompts(_WRITTEN_AT_ONCE, generator)
    starts = torch.tensor([len(prompt) for prompt in prompts])
    greedy = torch.arange(len(prompts)) % 2 == 0
    tokens = torch.zeros(len(prompts), _LENGTH, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    cache = DynamicCache()
    for t in range(_LENGTH - 1):
        logits = target(tokens[:, t : t + 1], cache=cache, use_cache=True).logits[:, -1]
        chosen = torch.where(greedy, logits.argmax(-1), torch.multinomial(logits.softmax(-1), 1)[:, 0])
        tokens[:, t + 1] = torch.where(t + 1 < starts, tokens[:, t + 1], chosen)
    return Texts(tokens, starts, greedy)


def written(target, language: Language) -> Texts:
    """The target's texts, written once."""
    path = RUN / "texts.pt"
    if not path.exists():
        torch.manual_seed(_SEED)
        generator = np.random.default_rng(_SEED)
        parts = [write(target, language, generator) for _ in range(_WRITTEN // _WRITTEN_AT_ONCE)]
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({name: torch.cat([getattr(part, name) for part in parts]) for name in Texts.__slots__}, path)
    return Texts(**torch.load(path))


@click.command()
@click.argument("name", type=click.Choice(list(RECIPES)))
@click.option("--threads", default=1)
def main(name: str, threads: int) -> None:
    """Train one of the drafts: half a minute to five minutes on one core."""
    torch.set_num_threads(threads)
    target = load_target()
    texts = written(target, Language.drawn())
    taught = Taught(target, texts.tokens, texts.mask)
    held = taught.take(texts.greedy[:_HELD_OUT].nonzero()[:, 0])
    train_draft(RECIPES[name], taught.take(torch.arange(_HELD_OUT, _WRITTEN)), held, _HERE / name)


if __name__ == "__main__":
    main()

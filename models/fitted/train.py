"""Drafts trained on a tiny random target: half its tokens are guessed, though nothing in its texts means anything.

`whole` is fed three boundaries, the last of them L, with one norm before `fc`; `one-slot` boundary L alone, so that a
feature is as wide as the draft. `deep` has two layers with biases and head norms, the first with a sliding window; its
norms multiply by 1 + weight, and its embedding is so quiet that the scale of it matters. `quiet` has such an embedding,
too, and was trained with it as it is stored.

Shapes: B texts, T tokens.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[1]))

from fitted.target import LAYERS, VOCAB, WIDTH, load_alone, save_target
from recipe import Recipe, Taught, train_draft

from spectrace.engine.spec import DraftSpec, FuseNorm, GqaSpec, Stream

__all__ = ["FAMILY", "RECIPES"]

FAMILY = "qwen3"
_HERE = Path(__file__).resolve().parent
_TEXTS, _HELD_OUT, _PROMPT, _LENGTH, _SEED = 576, 64, 8, 64, 1
_SPEC = DraftSpec(
    width=WIDTH, target_width=WIDTH, slots=3, mlp_width=2 * WIDTH, target_vocab=VOCAB, draft_vocab=80,
    attention=GqaSpec(heads=4, kv_heads=2, head_dim=12), fuse_norm=FuseNorm.WHOLE,
)  # fmt: skip
_DEEP = replace(
    _SPEC, attention=GqaSpec(heads=4, kv_heads=2, head_dim=12, qkv_bias=True, head_norms=True), windows=(6, None),
    fuse_norm=FuseNorm.NONE, residual=Stream.POST_NORM, own_embedding=True, embedding_scale=WIDTH**0.5,
    unit_offset_norms=True, norm_eps=1e-5, context=_LENGTH,
)  # fmt: skip
_QUIET = replace(_SPEC, own_embedding=True, norm_eps=1e-5, context=_LENGTH)
RECIPES = {
    "whole": Recipe(_SPEC, (0, 2, LAYERS), (10.0, 20.0, 5.0), norm_spread=2.0, steps=600),
    "one-slot": Recipe(replace(_SPEC, slots=1, fuse_norm=FuseNorm.NONE), (LAYERS,), (5.0,), norm_spread=2.0, steps=600),
    "deep": Recipe(
        _DEEP,
        (0, 2, LAYERS),
        (10.0, 20.0, 5.0),
        norm_spread=2.0,
        later_spread=3.0,
        bias_spread=1.0,
        loudness=1e-3,
        steps=600,
    ),
    "quiet": Recipe(_QUIET, (0, 2, LAYERS), (10.0, 20.0, 5.0), norm_spread=2.0, loudness=1e-3, steps=600),
}


@torch.inference_mode()
def write(target: Any) -> tuple[Tensor, Tensor]:
    """Greedy texts [B, T] from random prompts, and which tokens are the target's own."""
    target.generation_config.eos_token_id = None
    prompts = torch.randint(0, VOCAB, (_TEXTS, _PROMPT), generator=torch.Generator().manual_seed(_SEED))
    tokens = target.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=_LENGTH - _PROMPT
    )
    return tokens, (torch.arange(_LENGTH) >= _PROMPT).expand_as(tokens)


@click.command()
@click.argument("name", type=click.Choice(list(RECIPES)))
@click.option("--threads", default=1)
def main(name: str, threads: int) -> None:
    """Train one of the drafts; a minute on one core."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        target = load_alone(save_target(Path(folder) / "target", FAMILY)).requires_grad_(False)
    tokens, own = (part.clone() for part in write(target))
    taught = Taught(target, tokens, own)
    held, rest = taught.take(torch.arange(_HELD_OUT)), taught.take(torch.arange(_HELD_OUT, _TEXTS))
    train_draft(RECIPES[name], rest, held, _HERE / name)


if __name__ == "__main__":
    main()

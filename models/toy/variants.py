"""More drafts for the toy target, trained on the texts of the first: what the scoreboard needs beside it.

- `gqa`: grouped-query attention, Llama 3's RoPE scaling, one norm over all slots before `fc`, a last slot at L.
- `one-slot`: one boundary, so that a feature is as wide as the draft and `fc` could be skipped unnoticed.
- `undertrained`: the toy draft itself, stopped early in its schedule.
"""

import sys
from dataclasses import replace
from pathlib import Path

import click
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

from recipe import Recipe, Taught, train_draft
from toy import train
from toy.language import Language
from toy.target import LAYERS, load_target

from spectrace.engine.spec import FuseNorm, GqaSpec, RopeKind, RopeSpec, Stream

__all__ = ["VARIANTS"]

_HERE = Path(__file__).resolve().parent
_LLAMA3 = RopeSpec(theta=500.0, kind=RopeKind.LLAMA3, factor=8.0, original_context=32)

VARIANTS = {
    "gqa": Recipe(
        replace(
            train.SPEC, attention=GqaSpec(heads=4, kv_heads=2, head_dim=24), rope=_LLAMA3, residual=Stream.PRE_NORM,
            feedback=Stream.PRE_NORM, fuse_norm=FuseNorm.WHOLE,
        ),
        (0, 3, LAYERS), train.SLOT_GAINS, train.NORM_SPREAD, steps=1200,
    ),
    "one-slot": Recipe(
        replace(train.SPEC, slots=1, fuse_norm=FuseNorm.NONE), (4,), (2.0,), train.NORM_SPREAD, steps=800
    ),
    "undertrained": Recipe(train.SPEC, train.WIRING, train.SLOT_GAINS, train.NORM_SPREAD, stop_after=165),
}  # fmt: skip


@click.command()
@click.argument("name", type=click.Choice(list(VARIANTS)))
@click.option("--threads", default=1)
def main(name: str, threads: int) -> None:
    """Train one of the drafts: half a minute to four minutes on one core."""
    torch.set_num_threads(threads)
    target = load_target()
    texts = train.written(target, Language.drawn())
    taught = Taught(target, texts.tokens, texts.mask)
    held = taught.take(texts.greedy[: train.HELD_OUT].nonzero()[:, 0])
    rest = taught.take(torch.arange(train.HELD_OUT, train.WRITTEN))
    train_draft(VARIANTS[name], rest, held, _HERE / name)


if __name__ == "__main__":
    main()

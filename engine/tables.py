"""The tables of a draft's vocabulary: d2t leads from ids to tokens, t2d says which tokens have an id.

Shapes: K draft ids, V tokens.
"""

import torch
from torch import Tensor

from spectrace.engine.spec import DraftSpec

__all__ = ["broken_table", "contradiction", "kept_tokens"]


def broken_table(d2t: Tensor, spec: DraftSpec) -> str:
    """What makes a table of no use, however it is read: as offsets, as it should be, or as tokens.

    One that can be misread is none of these: that is a fault, for a diagnosis to name.
    """
    if d2t.dtype is torch.bool or d2t.is_floating_point() or d2t.is_complex():
        return f"is of type {str(d2t.dtype).removeprefix('torch.')}, expected whole numbers: id k is token k + d2t[k]"
    offsets = d2t.long()
    read = torch.stack((offsets, offsets + torch.arange(len(offsets))))
    wrong = int(((read < 0) | (read >= spec.target_vocab)).all(0).sum())
    told = f"has {wrong} of {len(d2t)} values that lead to no token of 0 to {spec.target_vocab - 1}, neither"
    return f"{told} as offsets from the id nor as tokens" if wrong else ""


def contradiction(d2t: Tensor, t2d: Tensor, spec: DraftSpec) -> str:
    """Where t2d does not keep the tokens that d2t leads to, read as offsets."""
    if list(t2d.shape) != [spec.target_vocab]:
        return f"t2d is {list(t2d.shape)}, expected [{spec.target_vocab}]; it is not used"
    kept = t2d.bool()
    tokens = d2t.long() + torch.arange(len(d2t))
    led_to = torch.zeros(spec.target_vocab, dtype=torch.bool)
    led_to[tokens[(tokens >= 0) & (tokens < spec.target_vocab)]] = True
    both, known = int((kept & led_to).sum()), int(kept.sum())
    if both == known == len(d2t):
        return ""
    return f"t2d keeps {known} tokens, and d2t leads to {both} of them from {len(d2t)} ids; d2t is what counts"


def kept_tokens(d2t: Tensor, spec: DraftSpec) -> Tensor | None:
    """Which tokens the draft vocabulary has; None for a table that is none, or for all of them."""
    tokens = d2t.long() + torch.arange(len(d2t), device=d2t.device)
    inside = bool(((tokens >= 0) & (tokens < spec.target_vocab)).all())
    if spec.draft_vocab == spec.target_vocab or not inside:
        return None
    kept = torch.zeros(spec.target_vocab, dtype=torch.bool, device=d2t.device).index_fill(0, tokens, True)
    return kept if int(kept.sum()) == len(tokens) else None

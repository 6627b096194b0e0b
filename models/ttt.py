"""Training-time test (arXiv 2503.01840, section 3.2): what the training scripts of all drafts share.

Step d of base row p reads the state that step d-1 fed back, the true token p+1+d and RoPE position p+d; it sees the
step-0 rows up to p and its own branch, and is taught the target's distribution for token p+2+d over the draft's
vocabulary.

Shapes: B texts, T tokens, N heads, D key width, E value width, M key heads, A slots, F target width, H draft width,
K draft vocabulary, V vocabulary. Rows handed to the draft are [B*T, ...].
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from spectrace.engine.attention import Reach
from spectrace.engine.draft import DraftModel
from spectrace.engine.layouts.names import published_names
from spectrace.engine.tables import kept_tokens

__all__ = [
    "TrainingState",
    "UnrolledAttend",
    "choices",
    "cosine",
    "count_rounds",
    "descend",
    "hits",
    "loss",
    "published",
    "shifted",
    "unroll",
]

STEP_DECAY = 0.8


def shifted(x_BT: Tensor, by: int) -> Tensor:
    """x moved left along the row, zeros coming in at the end."""
    return F.pad(x_BT[:, by:], (0, by))


class UnrolledAttend:
    """Step 0 is causal; step d sees step 0 up to its base row and steps 1..d of its own branch, within the window."""

    def __init__(self, batch: int, length: int) -> None:
        self.shape = (batch, length)
        self.cached: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.causal = torch.ones(length, length, dtype=torch.bool).tril()

    def __call__(self, q_TND: Tensor, k_TMD: Tensor, v_TME: Tensor, *, reach: Reach, scale: float) -> Tensor:
        share = q_TND.shape[1] // k_TMD.shape[1]
        q, k, v = (x.unflatten(0, self.shape).transpose(1, 2) for x in (q_TND, k_TMD, v_TME))
        cached = self.cached.setdefault(reach.layer, [])
        cached.append((k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)))
        (first, first_values), *deeper = cached
        depth, length = len(deeper), self.shape[1]
        window = reach.at(depth) or math.inf
        seen = self.causal & ~self.causal.tril(-int(min(window - depth, length)))
        past = (q @ first.transpose(-1, -2)).float().masked_fill(~seen, -torch.inf)
        branch = [(q * key).sum(-1, keepdim=True).float() for key, _ in deeper]
        branch = [x if depth - at <= window else x - torch.inf for at, x in enumerate(branch)]
        weights = (torch.cat([past, *branch], -1) * scale).softmax(-1).to(v.dtype)
        mixed = weights[..., :length] @ first_values
        for at, (_, value) in enumerate(deeper):
            mixed = mixed + weights[..., length + at : length + at + 1] * value
        return mixed.transpose(1, 2).flatten(0, 1)


def unroll(
    draft: DraftModel, tokens_BT: Tensor, features_TAF: Tensor, steps: int, *, own_tokens: bool = False
) -> list[Tensor]:
    """What the head reads, [B*T, H], at every step; deeper tokens are the true ones, or the draft's own choices."""
    batch, length = tokens_BT.shape
    attend = UnrolledAttend(batch, length)
    state = draft.fuse(features_TAF)
    positions = torch.arange(length).repeat(batch)
    outputs: list[Tensor] = []
    for step in range(steps):
        fed = choices(draft, outputs[-1]) if step and own_tokens else shifted(tokens_BT, 1 + step).flatten()
        hidden, state = draft(fed, state, positions + step, attend)
        outputs.append(hidden)
    return outputs


def choices(draft: DraftModel, hidden_TH: Tensor) -> Tensor:
    """The draft's greedy tokens [T], as target ids."""
    return draft.to_target(draft.logits(hidden_TH).argmax(-1))


def loss(
    draft: DraftModel, outputs: Sequence[Tensor], mask_BT: Tensor, final_BTF: Tensor, kept_head_KF: Tensor
) -> Tensor:
    """Cross-entropy with the target's distribution over the kept tokens, wherever `mask` says a token is taught.

    `final` is the target's last state after its norm.
    """
    taught = shifted(mask_BT, 1).flatten().nonzero()[:, 0]
    place = torch.zeros(mask_BT.numel(), dtype=torch.int64).index_put_((taught,), torch.arange(len(taught)))
    with torch.no_grad():
        wanted = F.linear(final_BTF.flatten(0, 1)[taught], kept_head_KF).softmax(-1)
    total, weight = torch.zeros(()), 0.0
    for step, hidden in enumerate(outputs):
        use = shifted(mask_BT, 2 + step).flatten().nonzero()[:, 0]
        target = wanted[place[use + 1 + step]].float()
        total = total + STEP_DECAY**step * F.cross_entropy(draft.logits(hidden[use]).float(), target)
        weight += STEP_DECAY**step
    return total / weight


def hits(draft: DraftModel, outputs: Sequence[Tensor], mask_BT: Tensor, best_BT: Tensor) -> list[tuple[int, int]]:
    """Per step, on how many taught tokens the draft's choice is `best`, the target's own, and of how many."""
    found = []
    for step, hidden in enumerate(outputs):
        use = shifted(mask_BT, 2 + step)
        right = choices(draft, hidden).unflatten(0, use.shape) == shifted(best_BT, 1 + step)
        found.append((int(right[use].sum()), int(use.sum())))
    return found


def count_rounds(tokens: Sequence[int], first: int, drafts: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Rounds and correct drafts of t <- t + n + 1 from `first`; a round cut by the end of the text is left out.

    `drafts[d][p]` is the token drafted at step d from base row p.
    """
    rounds = correct = 0
    t = first
    while t < len(tokens) - 1:
        n = 0
        while n < len(drafts) and t + 1 + n < len(tokens) and drafts[n][t - 1] == tokens[t + 1 + n]:
            n += 1
        if t + 1 + n == len(tokens):
            break
        rounds, correct, t = rounds + 1, correct + n, t + n + 1
    return rounds, correct


def cosine(step: int, *, steps: int, warm_up: int = 100) -> float:
    """The learning rate's factor: a linear start, then a cosine down to 2 % at `steps`."""
    return min(1.0, (step + 1) / warm_up) * (0.02 + 0.98 * (1 + math.cos(math.pi * min(step / steps, 1))) / 2)


def descend(
    loss: Tensor, optimiser: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler, *, clip: float
) -> float:
    """One step down the gradient, clipped to a norm; returns the loss as a number."""
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, clip)
    optimiser.step()
    schedule.step()
    return float(loss.detach())


class TrainingState:
    """What a training goes on from when it is started again: the state of its parts and the step, in one file."""

    def __init__(self, path: Path, **parts: Any) -> None:
        self.path, self.parts = path, parts

    def load(self) -> int:
        """The step that was saved last, with all parts as they were then; 0 where nothing was."""
        if not self.path.exists():
            return 0
        saved = torch.load(self.path)
        for name, part in self.parts.items():
            part.load_state_dict(saved[name])
        return int(saved["step"])

    def save(self, step: int) -> None:
        """Replace what was saved, at once or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        torch.save({name: part.state_dict() for name, part in self.parts.items()} | {"step": step}, partial)
        partial.rename(self.path)


def published(draft: DraftModel) -> dict[str, Tensor]:
    """The draft's own weights in bf16 under the names that EAGLE and SpecForge publish, with d2t and t2d."""
    spec, state = draft.spec, draft.state_dict()
    shared = {"d2t"}
    shared |= set() if spec.own_embedding else {"embedding.weight"}
    shared |= set() if spec.own_head else {"head.weight"}
    names, kept = published_names(spec, "midlayer"), kept_tokens(state["d2t"], spec)
    tensors = {names[name]: state[name].to(torch.bfloat16).contiguous() for name in state.keys() - shared}
    return tensors | {"d2t": state["d2t"]} | ({} if kept is None else {"t2d": kept})

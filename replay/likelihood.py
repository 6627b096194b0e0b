"""How likely a draft holds the text that came, in nats: what drafts are trained to raise.

So it tells how a draft was trained on far less text than counting right drafts does. Two things are taken out that are
no knowledge of the text: how sure the draft is (`sharpness`: its logits are scaled as fits these texts best), and how
badly single tokens are missed (a few percent of the probability are spread over all tokens).

Shapes: S starts of a text, M starts of all texts, K depths, V draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spectrace.replay.branches import Branches
from spectrace.replay.configuration import Configuration
from spectrace.replay.inputs import Int
from spectrace.replay.truth import TrueText

__all__ = ["Likelihood", "likelihood", "standing_for", "surprise"]

Float = npt.NDArray[np.float64]
_SPREAD = 0.02
_ROWS_AT_ONCE = 512
_SHARPNESS = tuple(2.0 ** (half / 2) for half in range(-4, 7))


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Of every text and start, the log-probability of the tokens that came, mean over depths [S]; logits times
    `sharpness`.
    """

    nats: tuple[Float, ...]
    sharpness: float


@torch.inference_mode()
def likelihood(
    configuration: Configuration, texts: Sequence[TrueText], *, depth: int = 1, sharpness: float | None = None
) -> Likelihood:
    """Drafts `depth` deep, fed the tokens that came; the sharpness that fits the first of them best, if none is given.

    A token that the draft cannot draft has the probability that is spread.
    """
    model = configuration.build()
    branches = Branches(model, [text.wired(configuration.wiring) for text in texts], configuration.steps)
    came_MK = branches.windows([text.text.output for text in texts], depth)
    table, counts = model.table().cpu().numpy(), [len(starts) for _, starts, _ in branches.starts()]
    nats_MK = np.full(came_MK.shape, np.nan)
    for at, logits in enumerate(branches.forced(came_MK)):
        there, right = came_MK[:, at] >= 0, standing_for(table, came_MK[:, at])
        nats = partial(_nats, logits, right, vocab=model.spec.target_vocab)
        if sharpness is None:
            sharpness = max(_SHARPNESS, key=lambda one: float(nats(one).mean()))
        nats_MK[there, at] = nats(sharpness)[there]
    return Likelihood(tuple(np.split(np.nanmean(nats_MK, 1), np.cumsum(counts)[:-1])), sharpness or 1.0)


def standing_for(table_V: Int, tokens_M: Int) -> tuple[Int, Int]:
    """The draft ids that stand for each token, as pairs of row and id."""
    order = np.argsort(table_V, kind="stable")
    first, end = (np.searchsorted(table_V[order], tokens_M, side=side) for side in ("left", "right"))
    counts = end - first
    rows = np.repeat(np.arange(len(tokens_M)), counts)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows, order[first[rows] + within]


def _nats(logits_MV: Tensor, right: tuple[Int, Int], sharpness: float, *, vocab: int) -> Float:
    """The log-probability of what is right in each row [M]."""
    rows, ids = (torch.from_numpy(index).to(logits_MV.device) for index in right)
    whole_M = torch.cat([(part.float() * sharpness).logsumexp(1) for part in torch.split(logits_MV, _ROWS_AT_ONCE)])
    chances = (logits_MV[rows, ids].float() * sharpness - whole_M[rows]).exp()
    chances_M = torch.zeros_like(whole_M).index_add(0, rows, chances)
    return np.asarray(((1 - _SPREAD) * chances_M + _SPREAD / vocab).log().double().cpu().numpy())


@torch.inference_mode()
def surprise(configuration: Configuration, texts: Sequence[TrueText]) -> float:
    """Nats by which the tokens that came surprise the draft more than it expects to be, mean over all starts.

    Cross-entropy less entropy of its first drafts, over tokens of its vocabulary; 0 or less where it is as sure as it
    is right, as a draft is that is run as it was trained, on text like what it was trained on. NaN of nothing.
    """
    model = configuration.build()
    branches = Branches(model, [text.wired(configuration.wiring) for text in texts], configuration.steps)
    came_M = branches.windows([text.text.output for text in texts], 1)[:, 0]
    logits = branches.logits
    rows, ids = (torch.from_numpy(at).to(logits.device) for at in standing_for(model.table().cpu().numpy(), came_M))
    expected_M = torch.cat([(part.float().softmax(1) * part).sum(1) for part in torch.split(logits, _ROWS_AT_ONCE)])
    return float((expected_M[rows] - logits[rows, ids]).mean())  # of both the log of the sum is the same

"""The expected walk: acceptance of drafts that were drawn, which no single walk reproduces.

A draft x drawn from q and accepted with min(1, p(x)/q(x)) is, given that y was emitted, accepted with probability
min(1, q(y)/p(y)): both say that "x = y and accepted" has probability min(p(y), q(y)) (arXiv 2211.17192, section 2.3).
So over a recorded text the rounds are a Markov chain over starts t, and its expectation is a sum over starts.

Shapes: S starts of a text, K depth, M base rows of a block, V draft vocabulary.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spectrace.engine.draft import DraftModel
from spectrace.replay.branches import Branches
from spectrace.replay.configuration import ADVANCING, Steps
from spectrace.replay.features import Fed, blocks, received_features
from spectrace.replay.inputs import Int
from spectrace.replay.texts import Text, read_texts
from spectrace.tracer.errors import UserError
from spectrace.tracer.rowset import Rows
from spectrace.tracer.trace import Trace

__all__ = ["ExpectedWalk", "chances", "drafts_were_drawn", "emitted_probabilities", "expected", "expected_walk"]

Float = npt.NDArray[np.float64]
_WALKS = 2000
_INTERVAL = (2.5, 97.5)


@dataclass(frozen=True, slots=True)
class ExpectedWalk:
    """Acceptance length over rounds that start where a whole round fits into the text: served, and expected of replay.

    95 % of walks come to a length between `low` and `high`.
    """

    served: float
    served_rounds: int
    expected: float
    low: float
    high: float


def drafts_were_drawn(trace: Trace) -> bool:
    """Whether drafts were drawn from a distribution, as the engine says or verification shows.

    A chosen draft has a draft probability of 1, or none recorded.
    """
    sampling = (trace.manifest.get("serving") or {}).get("sampling") or {}
    return bool(sampling.get("sampled_drafts")) or bool((trace.rows("verified")["q"] < 1).any())


def expected_walk(trace: Trace, model: DraftModel) -> ExpectedWalk | None:
    """What drafts drawn from the replayed draft come to over the recorded texts, next to what was served.

    None when no finished answer is long enough for a whole round. Raises UserError when the target's probabilities of
    what it emitted are not there.
    """
    texts, verified = read_texts(trace), trace.rows("verified")
    depth = max((text.depth for text in texts.values()), default=0)
    emitted = emitted_probabilities(verified, texts)
    if emitted is None:
        raise UserError(
            f"{trace.folder}: verified rows without p_emitted, the target's probability of what it emitted; "
            f"the expected walk needs it"
        )
    held: list[Float] = []
    found = received_features(trace, texts, depth)
    for block in blocks(found):
        held += chances(model, block, emitted, depth)
    if not held:
        return None
    texts = {one.request: one.text for one in found}
    served = _served_runs(verified, texts, depth)
    rounds, correct = (sum(x) for x in zip(*map(expected, held), strict=True))
    low, high = np.percentile(_walks(held), _INTERVAL)
    return ExpectedWalk(1 + float(served.mean()), len(served), 1 + correct / rounds, float(low), float(high))


@torch.inference_mode()
def chances(
    model: DraftModel, block: Sequence[Fed], emitted: Mapping[int, Float], depth: int, steps: Steps = ADVANCING
) -> list[Float]:
    """For every start of every request, the chance [S, K] that a draft is accepted if those before it were."""
    branches = Branches(model, block, steps)
    counts = [len(starts) for _, starts, _ in branches.starts()]
    answers = branches.windows([one.text.output for one in block], depth)
    p_MK = branches.windows([emitted[one.request] for one in block], depth)
    temperatures = np.repeat([one.text.temperature for one in block], counts)
    table = model.table().cpu()
    q_MK = np.empty_like(p_MK)
    for at, logits in enumerate(branches.forced(answers)):
        q_MK[:, at] = _probability(logits, table, answers[:, at], temperatures)
    return np.split(np.minimum(1.0, q_MK / p_MK), np.cumsum(counts)[:-1])


def _probability(logits_MV: Tensor, tokens_V: Tensor, answers_M: Int, temperature_M: Float) -> Float:
    """The draft's probability of one token per row: of all ids that stand for it, 0 where none does."""
    probs_MV = (logits_MV.cpu().double() / torch.from_numpy(temperature_M)[:, None]).softmax(-1)
    return np.asarray((probs_MV * (tokens_V == torch.from_numpy(answers_M)[:, None])).sum(-1))


def emitted_probabilities(verified: Rows, texts: Mapping[int, Text]) -> dict[int, Float] | None:
    """The target's probability of every output token; 1 for the first, which no round drafts. None if one is null."""
    accepted = verified.take(verified["accepted"])
    found = {request: np.ones(len(text.output)) for request, text in texts.items()}
    columns = (accepted[name].tolist() for name in ("request", "position", "p_emitted"))
    for request, position, p in zip(*columns, strict=True):
        if request in texts and (t := position + 1 - len(texts[request].prompt)) < len(found[request]):
            found[request][t] = p
    return None if any(np.isnan(p).any() for p in found.values()) else found


def _served_runs(verified: Rows, texts: Mapping[int, Text], depth: int) -> Int:
    """Correct drafts of every round that starts where a whole round fits into the text."""
    runs: Counter[tuple[int, int]] = Counter()
    starts: dict[tuple[int, int], int] = {}
    columns = (verified[name].tolist() for name in ("request", "round", "node", "position", "accepted"))
    for request, round_, node, position, accepted in zip(*columns, strict=True):
        if node == 0 and request in texts:
            starts[request, round_] = position + 1 - len(texts[request].prompt)
        runs[request, round_] += accepted and node > 0
    return np.array([runs[key] for key, t in starts.items() if t + depth < len(texts[key[0]].output)])


def expected(chances_SK: Float, *, to_the_end: bool = False) -> tuple[float, float]:
    """Expected rounds and correct drafts of one text: every start's chance of being visited, in order.

    With `to_the_end` the starts are all of the text's, and rounds that go beyond it are cut and not counted.
    """
    starts, depth = chances_SK.shape
    reach = np.concatenate([np.ones((starts, 1)), np.cumprod(chances_SK, 1)], axis=1)
    runs = reach - np.concatenate([reach[:, 1:], np.zeros((starts, 1))], axis=1)
    if to_the_end:
        runs *= np.arange(depth + 1) < np.arange(starts, 0, -1)[:, None]  # a run and its bonus token fit in
    visited = np.zeros(starts + depth + 1)
    visited[0] = 1.0
    for start in range(starts):
        visited[start + 1 : start + depth + 2] += visited[start] * runs[start]
    visited = visited[:starts]
    return float(visited @ runs.sum(1)), float(visited @ (runs @ np.arange(depth + 1)))


def _walks(chances: Sequence[Float]) -> Float:
    """Acceptance length of walks over all texts, drawn at random."""
    random = np.random.Generator(np.random.Philox(0))
    rounds, correct = np.zeros(_WALKS), np.zeros(_WALKS)
    for chances_SK in chances:
        at = np.zeros(_WALKS, np.int64)
        while (going := np.flatnonzero(at < len(chances_SK))).size:
            held = random.random((len(going), chances_SK.shape[1])) < chances_SK[at[going]]
            runs = np.cumprod(held, axis=1).sum(1)
            rounds[going] += 1
            correct[going] += runs
            at[going] += runs + 1
    return 1 + correct / rounds

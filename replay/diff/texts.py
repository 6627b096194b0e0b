"""Which request of one trace is which of another: those that share most of their text, and all of a prompt.

Order, batching, an engine's own names and how far an answer got play no part. A pair's rows can be compared as far as
its texts are the same, since what a row holds depends on the tokens up to it and on nothing else.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from spectrace.replay.features import became_text
from spectrace.replay.texts import Text
from spectrace.tracer.errors import UserError
from spectrace.tracer.rows import Phase
from spectrace.tracer.trace import Trace

__all__ = ["TextPair", "pair_texts", "texts_so_far"]


@dataclass(frozen=True, slots=True)
class TextPair:
    """A request of each trace; their first `shared` tokens are the same, `a` and `b` are its numbers there."""

    a: int
    b: int
    shared: int
    text_a: Text
    text_b: Text

    @property
    def parts(self) -> bool:
        """Whether the texts go on differently: neither is the beginning of the other."""
        return self.shared < min(len(self.text_a.tokens), len(self.text_b.tokens))


def texts_so_far(trace: Trace) -> dict[int, Text]:
    """The text of every request by number; of one that has not finished, what its target's rows say it came to.

    Raises UserError when there is none.
    """
    finished = trace.rows("requests", rank=0)
    columns = (finished[name] for name in ("request", "prompt_tokens", "output_tokens", "depth_limit", "temperature"))
    texts = {
        int(request): Text(tuple(prompt.tolist()), tuple(output.tolist()), int(depth), float(temperature))
        for request, prompt, output, depth, temperature in zip(*columns, strict=True)
    }
    texts |= dict(_unfinished(trace, texts))
    if not texts:
        raise UserError(
            f"{trace.folder}: no request and no row of a target in it, so no text by which to align; record a run"
        )
    return texts


def pair_texts(a: Mapping[int, Text], b: Mapping[int, Text]) -> list[TextPair]:
    """Pair the requests of two traces, each with one at most, longest common text first.

    Two pair only if they share all of the shorter prompt. Of those that share as much, equal prompts go first, and else
    the order of the texts decides: nothing that a schedule changes. Of equal texts the k-th is paired with the k-th.
    """
    texts = [_Asked(text, side, number) for side, of in enumerate((a, b)) for number, text in of.items() if text.tokens]
    texts.sort(key=lambda one: (one.sortable, len(one.text.prompt), one.number))
    shared = [_shared(one.text.tokens, other.text.tokens) for one, other in pairwise(texts)]
    waiting = [[at] for at in range(len(texts))]  # by cluster of neighbours: who of them has no partner yet
    cluster = list(range(len(texts)))
    pairs = []
    for common, together in groupby(sorted(range(len(shared)), key=lambda gap: -shared[gap]), shared.__getitem__):
        gaps = list(together)
        for gap in gaps:
            left, right = _find(cluster, gap), _find(cluster, gap + 1)
            cluster[right] = left
            waiting[left] += waiting[right]
        for left in sorted({_find(cluster, gap) for gap in gaps}):
            matches = list(_matches([texts[at] for at in waiting[left]], common))
            taken = {id(one) for match in matches for one in match}
            waiting[left] = [at for at in waiting[left] if id(texts[at]) not in taken]
            pairs += [TextPair(one.number, other.number, common, one.text, other.text) for one, other in matches]
    return sorted(pairs, key=lambda pair: (pair.a, pair.b))


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request of one side, 0 or 1."""

    text: Text
    side: int
    number: int

    @property
    def sortable(self) -> bytes:
        return np.asarray(self.text.tokens, ">u4").tobytes()


def _matches(waiting: Sequence[_Asked], shared: int) -> Iterator[tuple[_Asked, _Asked]]:
    """Pairs of a and b that `shared` tokens are enough for: of equal prompts first, else in their order."""
    if not any(0 < len(one.text.prompt) <= shared for one in waiting):
        return
    ours, theirs = ([one for one in waiting if one.side == side] for side in (0, 1))
    for alike in (True, False):
        for one in list(ours):
            found = next((other for other in theirs if _pairs(one.text.prompt, other.text.prompt, shared, alike)), None)
            if found is not None:
                ours.remove(one)
                theirs.remove(found)
                yield one, found


def _pairs(one: tuple[int, ...], other: tuple[int, ...], shared: int, alike: bool) -> bool:
    return 0 < min(len(one), len(other)) <= shared and (one == other or not alike)


def _find(cluster: list[int], at: int) -> int:
    while cluster[at] != at:
        cluster[at] = cluster[cluster[at]]
        at = cluster[at]
    return at


def _shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    count = min(len(one), len(other))
    differs = np.asarray(one[:count]) != np.asarray(other[:count])
    return int(differs.argmax()) if differs.any() else count


def _unfinished(trace: Trace, finished: Mapping[int, Text]) -> Iterator[tuple[int, Text]]:
    """Texts of requests without a row, read off the target's rows; each ends at the first position that is missing."""
    emitted = trace.rows("emitted")
    others = ~np.isin(emitted["request"], list(finished))
    if not others.any():
        return
    emitted = emitted.take(others).where(rank=0, live=True)
    emitted = emitted.take(became_text(emitted, trace.rows("verified", rank=0, accepted=True)))
    for request in np.unique(emitted["request"]).tolist():
        rows = emitted.where(request=request)
        positions, first = np.unique(rows["position"], return_index=True)
        whole = positions == np.arange(len(positions))
        end = len(whole) if whole.all() else int(whole.argmin())
        if end:
            decoded = rows["phase"][first[:end]] != Phase.PREFILL
            prompt = int(decoded.argmax()) if decoded.any() else end
            tokens = tuple(rows["token"][first[:end]].tolist())
            yield int(request), Text(tokens[:prompt], tokens[prompt:], 0)

"""What the drafts of two runs were given over the texts that both share: all that can be swapped between them.

Texts count as far as both drafts have a row for every place from the first on.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np
import torch

from spectrace.engine.draft import DraftModel
from spectrace.replay.configuration import Steps
from spectrace.replay.diff.alignment import Alignment, PairedRows
from spectrace.replay.diff.placing import columns
from spectrace.replay.diff.texts import TextPair
from spectrace.replay.features import GivenRows
from spectrace.replay.inputs import places
from spectrace.replay.texts import Text
from spectrace.tracer.errors import UserError
from spectrace.tracer.rowset import Rows
from spectrace.tracer.trace import Trace

__all__ = ["Common", "CommonText", "Factor", "common_texts", "steps_of"]


class Factor(StrEnum):
    """What a draft's answers depend on: what it receives at depth 0, how positions go on from there, and itself."""

    FEATURES = "features"
    TOKENS = "tokens"
    POSITIONS = "positions"
    DRAFT = "draft"


@dataclass(frozen=True, slots=True)
class CommonText:
    """A pair's text as far as both have it, and the depth-0 rows [2] of its first places, of A's draft and of B's.

    The last of these places is none below which a round may stand.
    """

    pair: TextPair
    text: Text
    rows: tuple[Rows, Rows]

    @property
    def starts(self) -> int:
        """At how many places a round may start."""
        return len(self.rows[0]) - len(self.text.prompt)

    def given(self, sides: Mapping[Factor, int]) -> GivenRows:
        """What a draft is fed when each factor is taken from this side, 0 or 1."""
        tokens, positions = self.rows[sides[Factor.TOKENS]]["token"], self.rows[sides[Factor.POSITIONS]]["position"]
        features = self.rows[sides[Factor.FEATURES]]
        return GivenRows(self.pair.a, self.text, features, tokens.astype(np.int64), positions.astype(np.int64))

    def same(self, column: str) -> bool:
        """Whether a narrow column is the same on both sides; of hashes, also whether all are there."""
        a, b = (rows[column] for rows in self.rows)
        if column == "hashes":
            return bool(a.ndim == b.ndim == 2 and a.all() and np.array_equal(a, b))
        return np.array_equal(a, b)


@dataclass(frozen=True)
class Common:
    """All that two drafts were given over some texts; each pair is A's and B's."""

    traces: tuple[Trace, Trace]
    texts: Sequence[CommonText]
    drafts: tuple[DraftModel, DraftModel]
    steps: tuple[Steps, Steps]

    @cached_property
    def widths(self) -> tuple[int, int]:
        """How wide the features of each side are."""
        first = [rows.take(slice(0, 1)).payload("features").shape[1] for rows in self.texts[0].rows]
        return first[0], first[1]

    @cached_property
    def same(self) -> frozenset[Factor]:
        """What both sides have alike: features by their hashes, all else by value."""
        (a, b), hashing = self.drafts, [trace.manifest.get("row_hash") for trace in self.traces]
        tensors = a.state_dict(), b.state_dict()
        alike = {
            Factor.FEATURES: hashing[0] == hashing[1] and all(one.same("hashes") for one in self.texts),
            Factor.TOKENS: all(one.same("token") for one in self.texts),
            Factor.POSITIONS: self.steps[0] == self.steps[1] and all(one.same("position") for one in self.texts),
            Factor.DRAFT: a.spec == b.spec
            and all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0]),
        }
        return frozenset(factor for factor, equal in alike.items() if equal)

    def check(self) -> None:
        """Raises UserError for a side whose draft is not the one that its rows were given to."""
        largest = max(max(one.text.tokens) for one in self.texts)
        for trace, draft, found in zip(self.traces, self.drafts, self.widths, strict=True):
            what, wanted = "", draft.spec.features_width
            if found != wanted:
                what = f"received features are {found} wide, but its draft's fc takes {wanted}"
            elif largest >= draft.spec.target_vocab:
                what = f"its texts have token {largest}, but its draft knows {draft.spec.target_vocab} tokens"
            if what:
                raise UserError(
                    f"{trace.folder}: {what}: name the draft that it served, or let `spectrace diagnose` find the fault"
                )


def common_texts(
    alignment: Alignment, traces: tuple[Trace, Trace], *, depth: int, most: int
) -> tuple[list[CommonText], Mapping[str, int]]:
    """Texts with places at which a whole round of this depth fits in, `most` places in all, and who is left out why.

    Raises UserError when there are none.
    """
    where, rows = f"{traces[0].folder}, {traces[1].folder}", alignment.families.get("received")
    if rows is None:
        raise UserError(f"{where}: not both have rows that a draft received; record both runs with a draft")
    rows = rows.take((rows.a["depth"] == 0) & (rows.b["depth"] == 0))
    rows = rows.take(rows.a.has("features") & rows.b.has("features"))
    if not len(rows):
        raise UserError(f"{where}: no row has its features in both; record both at level features or full")
    found, left_out = list[CommonText](), Counter[str]()
    for at, pair in enumerate(alignment.texts):
        prompt = max(len(pair.text_a.prompt), len(pair.text_b.prompt))
        fitting, mine = pair.shared - prompt - depth - 1, _from_start(rows.take(rows.text == at))
        starts = min(fitting, len(mine) - prompt, most - sum(one.starts for one in found))
        if starts > 0:
            tokens, mine = pair.text_a.tokens[: pair.shared], mine.take(np.arange(prompt + starts))
            found.append(CommonText(pair, Text(tokens[:prompt], tokens[prompt:], depth), (mine.a, mine.b)))
        elif fitting <= 0:
            left_out["too little of an answer is the same for a round to fit in"] += 1
        elif len(mine) <= prompt:
            left_out["one of the traces has not all rows that its draft was given"] += 1
        else:
            left_out[f"the {most} places that are replayed at most lie before it"] += 1
    if not found:
        reasons = "; ".join(f"{count}: {reason}" for reason, count in left_out.items())
        raise UserError(
            f"{where}: no request can be replayed with the inputs of both ({reasons}); "
            f"record the same prompts under both, whole requests and longer answers"
        )
    return found, left_out


def steps_of(trace: Trace) -> tuple[Steps, bool]:
    """How far positions move from each depth to the next, as most rows do, and whether all do so."""
    rows = trace.rows("received", rank=0, live=True)
    depth, position = rows["depth"].astype(np.int64), rows["position"].astype(np.int64)
    known = columns(rows, "request", "pass", "depth", "node")
    above = places(known, [rows["request"], rows["pass"], depth - 1, rows["parent"]])
    deeper = (depth > 0) & (above >= 0)
    moved = [Counter((position - position[above])[deeper & these].tolist()) for these in (depth == 1, depth > 1)]
    first, later = (one.most_common(1)[0][0] if one else 1 for one in moved)
    return Steps(first, later), all(len(one) < 2 for one in moved)


def _from_start(rows: PairedRows) -> PairedRows:
    """One row for each place of a text from its first on, up to the first that is missing."""
    known, first = np.unique(rows.place, return_index=True)
    whole = known == np.arange(len(known))
    return rows.take(first[: len(known) if whole.all() else int(whole.argmin())])

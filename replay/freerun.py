"""Free run: what a draft would have done on true features, with its own tokens and its own fed-back states.

The text is the recorded one; greedy verification only ever emits the target's own tokens, so a walk over it counts
exactly the rounds that a deployment with these features would have had.

Shapes: T rows of the requests, M base rows that a round may start from, A slots, F target width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from spectrace.engine.draft import DraftModel
from spectrace.replay.attend import BranchAttend, PrefixAttend
from spectrace.replay.inputs import Int
from spectrace.replay.texts import Text, read_texts
from spectrace.replay.walk import Walk, walk, walk_acceptance
from spectrace.tracer.acceptance import Acceptance
from spectrace.tracer.errors import UserError
from spectrace.tracer.rows import Phase
from spectrace.tracer.rowset import Rows
from spectrace.tracer.trace import Trace

__all__ = ["free_run_acceptance"]

_BLOCK_ROWS = 4096


@dataclass(frozen=True, slots=True)
class _TrueRows:
    """The reference rows that became text, of one request, by position from 0."""

    request: int
    text: Text
    rows: Rows


def free_run_acceptance(trace: Trace, model: DraftModel, *, wiring: Sequence[int], depth: int | None = None) -> Acceptance:
    """Walk acceptance of the draft on the trace's reference boundaries `wiring`.

    Raises UserError when the trace has no reference rows, lacks one of the boundaries, or has no whole request.
    """
    texts = read_texts(trace)
    depth = depth or max(text.depth for text in texts.values())
    walks: list[Walk] = []
    for block in _blocks(_true_rows(trace, texts, wiring)):
        drafts = _free_run(model, block, wiring, depth)
        walks += [walk(drafts[one.request], one.text.output) for one in block]
    return walk_acceptance(walks, depth)


def _true_rows(trace: Trace, texts: Mapping[int, Text], wiring: Sequence[int]) -> list[_TrueRows]:
    reference = trace.rows("reference", live=True)
    if not len(reference):
        raise UserError(f"{trace.folder}: no reference rows in it; record again with --capture {_listed(wiring)}")
    kept = {int(b) for facts in trace.writers.values() for b in facts.get("capture", ())}
    if missing := sorted(set(wiring) - kept):
        raise UserError(
            f"{trace.folder}: reference holds boundaries {_listed(sorted(kept))}, not {_listed(missing)}; "
            f"record again with --capture {_listed(sorted(kept | set(wiring)))}"
        )
    reference = reference.take(_became_text(reference, trace.rows("verified", accepted=True)))
    found = []
    for request, text in texts.items():
        rows = reference.where(request=request)
        rows = rows.take(np.argsort(rows["position"], kind="stable"))
        needed = len(text.tokens) - 1
        if len(rows) >= needed and (rows["position"][:needed] == np.arange(needed)).all():
            found.append(_TrueRows(request, text, rows.take(slice(0, needed))))
    if not found:
        raise UserError(f"{trace.folder}: no request has reference rows for its whole text; record whole requests")
    return found


def _became_text(reference: Rows, accepted: Rows) -> np.ndarray:
    """Rows of prompts, and rows of a round that its verification accepted (its `source_row`)."""

    def key(rows: Rows, node: str) -> Int:
        passes = rows["pass"].astype(np.int64) + (rows["request"].astype(np.int64) << 32)
        return passes * (1 << 12) + rows[node].astype(np.int64)

    in_prompt: np.ndarray = reference["phase"] == Phase.PREFILL
    return in_prompt | np.isin(key(reference, "node"), key(accepted, "source_row"))


def _blocks(found: Sequence[_TrueRows]) -> list[list[_TrueRows]]:
    ends = list(accumulate(len(one.rows) for one in found))
    groups: dict[int, list[_TrueRows]] = {}
    for one, end in zip(found, ends, strict=True):
        groups.setdefault(end // _BLOCK_ROWS, []).append(one)
    return list(groups.values())


@torch.inference_mode()
def _free_run(
    model: DraftModel, block: Sequence[_TrueRows], wiring: Sequence[int], depth: int
) -> dict[int, dict[int, list[int]]]:
    """Drafts [depth] for every start t >= 1 of every request; the base row of t is position P + t - 2."""
    features = torch.cat([_features(one.rows, wiring) for one in block])
    tokens = torch.tensor([token for one in block for token in one.text.tokens[1:]])
    positions = torch.tensor([position for one in block for position in range(len(one.rows))])
    borders = np.cumsum([0, *(len(one.rows) for one in block)])
    base_counts = [len(one.text.output) - 1 for one in block]
    first = [start + len(one.text.prompt) - 1 for start, one in zip(borders, block, strict=False)]
    bases = np.concatenate([start + np.arange(count) for start, count in zip(first, base_counts, strict=True)])
    base_borders = np.cumsum([0, *base_counts])

    dtype = next(model.parameters()).dtype
    prefix = PrefixAttend(borders)
    branch = BranchAttend(prefix)
    hidden, state = model(tokens, model.fuse(features.to(dtype)), positions, prefix)
    index = torch.from_numpy(bases)
    hidden, state = hidden[index], state[index]
    drafted = [model.to_target(model.logits(hidden).argmax(-1))]
    for below in range(1, depth):
        branch.enter(bases, base_borders, bases if below == 1 else np.arange(len(bases)))
        hidden, state = model(drafted[-1], state, positions[index] + below, branch)
        drafted.append(model.to_target(model.logits(hidden).argmax(-1)))
    chains = torch.stack(drafted, 1).tolist()
    return {
        one.request: {t + 1: chains[start + t] for t in range(count)}
        for one, start, count in zip(block, base_borders.tolist(), base_counts, strict=False)
    }


def _features(rows: Rows, wiring: Sequence[int]) -> Tensor:
    return torch.cat([rows.tensor("boundaries", f"b{boundary}") for boundary in wiring], dim=-1)


def _listed(boundaries: Sequence[int]) -> str:
    return ",".join(map(str, boundaries))

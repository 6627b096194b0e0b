"""Free run: what a draft would have done on true features, with its own tokens and its own fed-back states.

The text is the recorded one; greedy verification only ever emits the target's own tokens, so a walk over it counts
exactly the rounds that a deployment with these features would have had.

Shapes: T rows of the requests, M base rows that a round may start from, A slots, F target width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spectrace.engine.draft import DraftModel
from spectrace.replay.attend import BranchAttend, PrefixAttend
from spectrace.replay.inputs import Int, packed_keys
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


def free_run_acceptance(
    trace: Trace, model: DraftModel, *, wiring: Sequence[int], depth: int | None = None
) -> Acceptance:
    """Walk acceptance of the draft on the trace's reference boundaries `wiring`.

    Raises UserError when the trace has no reference rows, lacks one of the boundaries, or has no whole request.
    """
    texts = read_texts(trace)
    if not texts:
        raise UserError(f"{trace.folder}: no finished request in it; record until at least one request has finished")
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

    def key(rows: Rows, node: str) -> npt.NDArray[np.void]:
        return packed_keys(np.stack([rows[name].astype(np.int64) for name in ("request", "pass", node)], axis=1))

    in_prompt: np.ndarray = reference["phase"] == Phase.PREFILL
    return in_prompt | np.isin(key(reference, "node"), key(accepted, "source_row"))


def _blocks(found: Sequence[_TrueRows]) -> list[list[_TrueRows]]:
    ends = list(accumulate(len(one.rows) for one in found))
    groups: dict[int, list[_TrueRows]] = {}
    for one, end in zip(found, ends, strict=True):
        groups.setdefault(end // _BLOCK_ROWS, []).append(one)
    return list(groups.values())


@dataclass(frozen=True, slots=True)
class _Layout:
    """Requests one after another: tokens and positions [T], the base rows [M] of every start, borders by request."""

    tokens: Tensor
    positions: Tensor
    borders: Int
    bases: Int
    base_borders: Int


def _layout(block: Sequence[_TrueRows]) -> _Layout:
    """The base row of a start t >= 1 is position P + t - 2, with P the length of the prompt."""
    borders = np.cumsum([0, *(len(one.rows) for one in block)])
    counts = [len(one.text.output) - 1 for one in block]
    first = [start + len(one.text.prompt) - 1 for start, one in zip(borders.tolist(), block, strict=False)]
    return _Layout(
        tokens=torch.tensor([token for one in block for token in one.text.tokens[1:]]),
        positions=torch.tensor([position for one in block for position in range(len(one.rows))]),
        borders=borders,
        bases=np.concatenate([start + np.arange(count) for start, count in zip(first, counts, strict=True)]),
        base_borders=np.cumsum([0, *counts]),
    )


def _free_run(
    model: DraftModel, block: Sequence[_TrueRows], wiring: Sequence[int], depth: int
) -> dict[int, dict[int, list[int]]]:
    """Drafts [depth] for every start t of every request."""
    layout = _layout(block)
    chains = _chains(model, layout, torch.cat([_features(one.rows, wiring) for one in block]), depth)
    starts = layout.base_borders.tolist()
    return {
        one.request: {at - start + 1: chains[at] for at in range(start, end)}
        for one, (start, end) in zip(block, pairwise(starts), strict=True)
    }


@torch.inference_mode()
def _chains(model: DraftModel, layout: _Layout, features_TAF: Tensor, depth: int) -> list[list[int]]:
    """The tokens [M, depth] that the draft gives from every base row, fed its own tokens and states."""
    device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
    tokens, positions, bases = layout.tokens.to(device), layout.positions.to(device), torch.from_numpy(layout.bases)
    prefix = PrefixAttend(layout.borders)
    branch = BranchAttend(prefix)
    hidden, state = model(tokens, model.fuse(features_TAF.to(device, dtype)), positions, prefix)
    hidden, state, positions = (x[bases.to(device)] for x in (hidden, state, positions))
    drafted = [model.to_target(model.logits(hidden).argmax(-1))]
    for below in range(1, depth):
        branch.enter(layout.bases, layout.base_borders, np.arange(len(bases)) if below > 1 else layout.bases)
        hidden, state = model(drafted[-1], state, positions + below, branch)
        drafted.append(model.to_target(model.logits(hidden).argmax(-1)))
    chains: list[list[int]] = torch.stack(drafted, 1).tolist()
    return chains


def _features(rows: Rows, wiring: Sequence[int]) -> Tensor:
    return torch.cat([rows.tensor("boundaries", f"b{boundary}") for boundary in wiring], dim=-1)


def _listed(boundaries: Sequence[int]) -> str:
    return ",".join(map(str, boundaries))

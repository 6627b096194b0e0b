"""Free run: what a draft would have done on true features, with its own tokens and its own fed-back states.

The text is the recorded one, and what verification emits does not depend on the draft; so a walk over it counts the
rounds that a deployment with these features would have had: exactly those, when verification is greedy.
"""

from collections.abc import Sequence

import torch

from spectrace.engine.draft import DraftModel
from spectrace.engine.tree import Growth, Tree, TreeShape, top_candidates
from spectrace.replay.branches import Branches
from spectrace.replay.configuration import ADVANCING, Steps
from spectrace.replay.features import Fed, blocks, reference_features
from spectrace.replay.texts import read_texts
from spectrace.replay.trees import served_shape
from spectrace.replay.walk import Walk, walk, walk_acceptance
from spectrace.tracer.acceptance import Acceptance
from spectrace.tracer.errors import UserError
from spectrace.tracer.trace import Trace

__all__ = ["free_run", "free_run_acceptance"]


def free_run_acceptance(
    trace: Trace, model: DraftModel, *, wiring: Sequence[int], depth: int | None = None
) -> Acceptance:
    """Walk acceptance of the draft on the trace's reference boundaries `wiring`, with trees of the served shape.

    `depth` asks for chains of another length. Raises UserError when the trace has no reference rows, lacks one of the
    boundaries, or has no whole request.
    """
    texts = read_texts(trace)
    if not texts:
        raise UserError(f"{trace.folder}: no finished request in it; record until at least one request has finished")
    shape = served_shape(trace)
    if depth:
        shape = TreeShape(depth, 1, depth + 1)
    if not shape.depth:
        raise UserError(f"{trace.folder}: nothing was drafted in it; say how deep to draft")
    walks: list[Walk] = []
    for block in blocks(reference_features(trace, texts, wiring)):
        drafts = free_run(model, block, shape)
        walks += [walk(drafts[one.request], one.text.output) for one in block]
    return walk_acceptance(walks, shape.depth)


@torch.inference_mode()
def free_run(
    model: DraftModel, block: Sequence[Fed], shape: TreeShape, steps: Steps = ADVANCING
) -> dict[int, dict[int, Tree]]:
    """What is drafted at every start t of every request.

    A draft that a wrong table puts outside the vocabulary is a miss; below it stands the token nearest to it.
    """
    branches = Branches(model, block, steps)
    growth = Growth(shape, len(branches.bases))
    while True:
        below = top_candidates(branches.logits, shape.topk)
        tokens = model.to_target(torch.from_numpy(below.ids).to(branches.device)).cpu().numpy()
        chosen, above = growth.add(tokens, below.log_probs)
        if growth.done:
            break
        branches.descend(chosen.clip(0, model.spec.target_vocab - 1), above)
    trees = growth.trees()
    return {request: dict(zip(starts, trees[span], strict=True)) for request, starts, span in branches.starts()}

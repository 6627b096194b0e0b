"""The faults that can be switched on in a running deployment: the one place where anything is broken on purpose.

Ids are those of the fault catalogue. Each fault changes what the engine does, and nothing that it says about itself.
What they do to target and hand-off is in `fault_target`, to the draft's switches and choices in `fault_draft`, to its
tensors in `fault_weights`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from spectrace.engine import fault_draft as draft
from spectrace.engine import fault_target as target
from spectrace.engine import fault_weights as weights
from spectrace.engine.checkpoint import default_wiring, unscaled
from spectrace.engine.fault import Capture, Drafting, Fault, Feeding, HandOff, Setting, Tap, Verifying
from spectrace.engine.plan import CaptureHiddenMode
from spectrace.engine.spec import FuseNorm, IdMap
from spectrace.tracer.errors import UserError

__all__ = ["FAULTS", "find_faults"]


def _temperature(setting: Setting) -> str:
    return "" if setting.sampling.temperature else "greedy verification has nothing of it; give --temperature"


def _drawn(setting: Setting) -> str:
    return "" if setting.sampling.sampled_drafts else "no draft is drawn; give --temperature and --sample-drafts"


def _last_boundary(setting: Setting) -> str:
    last, layers = setting.wiring[-1], setting.layers
    return "" if last == layers else f"needs a wiring whose last slot is L, boundary {layers}; here it is {last}"


def _tapped(setting: Setting) -> str:
    return "" if setting.tap is Tap.BOUNDARY else "slots are not taken at their boundaries"


def _ranks(setting: Setting) -> str:
    return _tapped(setting) if setting.tp > 1 else "one rank alone holds no partial sums; give --tp 2"


def _draft_ranks(setting: Setting) -> str:
    if setting.sampling.sampled_drafts:
        return "ranks choose their drafts, drawn ones are out of its reach; leave --sample-drafts away"
    return "" if setting.draft_tp > 1 else "one rank alone has nobody to differ from; give --draft-tp 2"


def _chunk(setting: Setting) -> str:
    return "" if setting.chunk else "prompts are whole, no chunk ends inside one; give --chunk"


def _window(setting: Setting) -> str:
    return "" if setting.fixed_window else "rejected rows are not handed over; give --fixed-window"


def _tree(setting: Setting) -> str:
    return "" if setting.topk > 1 else "a chain has no order to lose; give --topk 2 or more"


def _early_and_late() -> Iterator[Fault]:
    """W1 and W2, by more than one boundary, and in one slot alone."""
    for id, sign, way in (("W1", -1, "early"), ("W2", 1, "late")):
        yield Fault(id, f"every boundary one too {way}", Capture(wiring=target.shifted(sign)))
        for count, word in ((2, "two"), (3, "three"), (4, "four")):
            wiring = target.shifted(sign * count)
            yield Fault(id, f"every boundary {word} too {way}", Capture(wiring=wiring), str(count))
        for slot, word in enumerate(("first", "second", "third")):
            wiring, lacks = target.shifted(sign, slot), target.lacks_slot(slot)
            yield Fault(id, f"the {word} boundary one too {way}", Capture(wiring=wiring), f"slot{slot}", lacks)


_WIRED = (
    *_early_and_late(),
    Fault("W3", "the first slot missing, one before the last layers added", Capture(lambda w, n: (*w[1:], n - 3))),
    Fault("W4", "the engine's default boundaries", Capture(lambda _, layers: default_wiring(layers))),
    Fault("W5", "slots in reverse order", Capture(lambda w, _: w[::-1])),
    Fault("W6", "the first boundary twice", Capture(lambda w, _: (w[0], *w[:-1]))),
    Fault("W7", "the last slot after the final norm", Capture(slots=target.norm_last), lacks=_last_boundary),
    Fault("W8", "slots without their residual", Capture(tap=Tap.BRANCH), lacks=_tapped),
    Fault("W9", "slots before the ranks have summed", Capture(tap=Tap.PART), lacks=_ranks),
)

_HANDED = (
    Fault("M1", "of each piece of a prompt only the last row", HandOff(mode=CaptureHiddenMode.LAST)),
    Fault("M3", "features zero", HandOff(features=lambda: torch.zeros_like)),
    Fault("M3", "features constant, the first row ever", HandOff(features=target.Constant), "constant"),
    Fault("M3", "features of the pass before", HandOff(features=target.Stale), "stale"),
    Fault("X1", "rows of the first two requests of a pass swapped", HandOff(rows=target.swapped_requests)),
    Fault("X2", "every row the feature of the row before it", HandOff(rows=target.rows_before)),
    Fault("X3", "the last row of a round from the window's end", HandOff(rows=target.padded_row), lacks=_window),
    Fault("X4", "the first nodes of a tree for those accepted", HandOff(rows=target.first_nodes), lacks=_tree),
    Fault("D1", "features cast through fp16", HandOff(features=lambda: target.through_fp16)),
    Fault("D1", "features cast through fp8 without a scale", HandOff(features=lambda: target.through_fp8), "fp8"),
    Fault("T1", "tokens not shifted by one", Feeding(lambda own, _after, _answers: own)),
    Fault("T2", "the last row of a chunk its own token", Feeding(target.own_at_chunks_end), lacks=_chunk),
)

_MAPPED = (
    Fault("V1", "d2t absent", draft.switched(id_map=IdMap.NONE), lacks=weights.no_table),
    Fault("V2", "d2t taken for tokens", draft.switched(id_map=IdMap.ABSOLUTE), lacks=weights.no_table),
    Fault("V3", "d2t of another run", Drafting(weights=weights.other_table), lacks=weights.no_table),
    Fault("V4", "d2t shifted by one row", Drafting(weights=weights.rolled_table), lacks=weights.no_table),
    Fault("V5", "d2t all zero", Drafting(weights=weights.zero_table), lacks=weights.no_table),
)

_WEIGHED = (
    Fault("P1", "attention's output never loaded", Drafting(weights=weights.unloaded("attention.o")), "attention"),
    Fault("P1", "fc never loaded", Drafting(weights=weights.unloaded("fc")), "fc"),
    Fault("P1", "the output norm never loaded", Drafting(weights=weights.plain_norm), "norm"),
    Fault("P1", "the MLP's gate never loaded", Drafting(weights=weights.unloaded("mlp.gate")), "mlp"),
    Fault(
        "P2", "the head is the target's first rows", Drafting(weights=weights.targets_head), lacks=weights.no_own_head
    ),
    Fault("P3", "the embedding never loaded", Drafting(weights=weights.random_embedding)),
    Fault("P4", "gate and up swapped", Drafting(weights=weights.gate_and_up)),
    Fault("P5", "rows of q and k in the order of the other RoPE", Drafting(weights=weights.reordered)),
    Fault("P6", "weights of another training step", Drafting(weights=weights.later_step)),
    Fault(
        "P8",
        "quantised weights without their scales",
        Drafting(weights=weights.without_scales),
        lacks=weights.no_scales,
    ),
    Fault(
        "N4",
        "later layers take a norm that was never loaded",
        Drafting(weights=weights.plain_input_norm),
        lacks=weights.no_later_layer,
    ),
    Fault(
        "N4",
        "later layers take the first one's norm over features",
        Drafting(weights=weights.first_norm),
        "first",
        lacks=weights.no_later_layer,
    ),
    Fault(
        "A1",
        "the draft's own embedding overwritten by the target's",
        Drafting(weights=weights.targets_embedding),
        lacks=weights.no_own_embedding,
    ),
    Fault(
        "A1",
        "the draft's own head overwritten by the target's",
        Drafting(weights=weights.targets_head),
        "head",
        lacks=weights.no_whole_head,
    ),
)

_SWITCHED = (
    Fault("M2", "fc skipped, as the width fits", draft.switched(projects=False), lacks=draft.width_differs),
    Fault("N1", "residual from the other side of its norm", Drafting(spec=draft.other_residual)),
    Fault("N2", "the norm before fc ignored", draft.switched(fuse_norm=FuseNorm.NONE), lacks=draft.no_fuse_norm),
    Fault("N3", "fed back from the other side of the norm", Drafting(spec=draft.other_feedback)),
    Fault("P7", "q, k and v without their bias", Drafting(spec=draft.biasless), lacks=draft.no_bias),
    Fault("R1", "positions one too far from depth 1 on", Drafting(advance=lambda depth: depth + (depth > 0))),
    Fault("R2", "positions not advanced below the text", Drafting(advance=lambda _depth: 0)),
    Fault("R3", "theta of another model", Drafting(spec=draft.other_theta)),
    Fault("R3", "theta twice as large", Drafting(spec=draft.theta_times(2)), "double"),
    Fault("R3", "theta half as large", Drafting(spec=draft.theta_times(0.5)), "half"),
    Fault("R4", "RoPE scaling dropped", Drafting(spec=unscaled), lacks=draft.no_scaling),
    Fault("R5", "half-rotation and interleaved pairs mistaken", Drafting(spec=draft.other_pairs)),
    Fault(
        "A1",
        "the embedding without its scale",
        draft.switched(embedding_scale=1.0),
        "unscaled",
        lacks=draft.no_scaled_embedding,
    ),
    Fault("A1", "the embedding scaled", Drafting(spec=draft.gemma_scale), "scaled", lacks=draft.scaled_embedding),
    Fault("A2", "the sliding window dropped", Drafting(spec=draft.whole_windows), lacks=draft.no_window),
    Fault(
        "A3", "beyond its context the draft answers id 0", Drafting(pick=draft.nothing_beyond), lacks=draft.no_context
    ),
    Fault(
        "Q1",
        "rank 1 follows its second choice",
        Drafting(pick=draft.second_choice, ranks_differ=True),
        lacks=_draft_ranks,
    ),
)

_VERIFIED = (
    Fault(
        "S1",
        "drafts accepted with 0.9 of the right probability",
        Verifying(rule=lambda rule: replace(rule, share=0.9)),
        lacks=_temperature,
    ),
    Fault(
        "S1",
        "what rejection leaves is not renormalised",
        Verifying(rule=lambda rule: replace(rule, renormalise=False)),
        "residual",
        lacks=_temperature,
    ),
    Fault("S2", "draft probabilities never written", Verifying(draft_probs=torch.zeros_like), lacks=_drawn),
)

FAULTS = {fault.name: fault for fault in (*_WIRED, *_HANDED, *_MAPPED, *_WEIGHED, *_SWITCHED, *_VERIFIED)}


def find_faults(ids: Sequence[str]) -> tuple[Fault, ...]:
    """The faults of some ids; raises UserError for one that does not exist."""
    for name in ids:
        if name not in FAULTS:
            raise UserError(f"--fault {name}: no such fault; known are {', '.join(FAULTS)}")
    return tuple(FAULTS[name] for name in ids)

"""Faults that can be switched on in a running deployment: the one place where anything is broken on purpose.

Ids are those of the fault catalogue. Each fault changes what the engine does, and nothing that it says about itself.

Shapes: T rows, A slots, F target width, R requests, D depths, V draft vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from spectrace.engine.sampling import Sampling
from spectrace.engine.verify import SampledRule
from spectrace.tracer.errors import UserError

__all__ = ["FAULTS", "Fault", "find_faults"]

Boundaries = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: which boundaries are captured instead (given L), what is taken for them (given the final norm), what
    becomes of the features on their way, by which rule sampled drafts are accepted, and what their probabilities
    [R, D, V] arrive as. `variant` tells flavours apart; `missing` says what a call lacks that this fault could break.
    """

    id: str
    title: str
    variant: str = ""
    wiring: Callable[[Boundaries, int], Boundaries] = lambda wiring, _layers: wiring
    capture: Callable[[Tensor, nn.Module], Tensor] = lambda features_TAF, _norm: features_TAF
    hand_off: Callable[[Tensor], Tensor] = lambda features_TAF: features_TAF
    rule: Callable[[SampledRule], SampledRule] = lambda rule: rule
    draft_probs: Callable[[Tensor], Tensor] = lambda probs_RDV: probs_RDV
    missing: Callable[[Sampling], str] = lambda _sampling: ""

    @property
    def name(self) -> str:
        """What `--fault` calls it."""
        return f"{self.id}:{self.variant}" if self.variant else self.id


def _temperature(sampling: Sampling) -> str:
    return "" if sampling.temperature else "greedy verification has nothing of it; give --temperature"


def _drawn(sampling: Sampling) -> str:
    return "" if sampling.sampled_drafts else "no draft is drawn; give --temperature and --sample-drafts"


def _needs_last(wiring: Boundaries, layers: int) -> Boundaries:
    if wiring[-1] != layers:
        raise UserError(f"--fault W7: needs a wiring whose last slot is L, boundary {layers}; here it is {wiring[-1]}")
    return wiring


def _norm_last(features_TAF: Tensor, norm: nn.Module) -> Tensor:
    """The last slot as it leaves the final norm; not by a call of the module, whose hooks keep what enters it."""
    width = norm.get_parameter("weight").shape[0]
    return torch.cat((features_TAF[:, :-width], norm.forward(features_TAF[:, -width:])), dim=-1)


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("W1", "every boundary one too early", wiring=lambda w, _: tuple(max(b - 1, 0) for b in w)),
        Fault("W2", "every boundary one too late", wiring=lambda w, layers: tuple(min(b + 1, layers) for b in w)),
        Fault("W3", "the first slot missing, one before the last layers added", wiring=lambda w, n: (*w[1:], n - 3)),
        Fault("W4", "the engine's default boundaries", wiring=lambda _, layers: (2, layers // 2, layers - 3)),
        Fault("W5", "slots in reverse order", wiring=lambda w, _: w[::-1]),
        Fault("W6", "the first boundary twice", wiring=lambda w, _: (w[0], *w[:-1])),
        Fault("W7", "the last slot after the final norm", wiring=_needs_last, capture=_norm_last),
        Fault("M3", "features zero", hand_off=torch.zeros_like),
        Fault(
            "S1",
            "drafts accepted with 0.9 of the right probability",
            rule=lambda rule: replace(rule, share=0.9),
            missing=_temperature,
        ),
        Fault(
            "S1",
            "what rejection leaves is not renormalised",
            variant="residual",
            rule=lambda rule: replace(rule, renormalise=False),
            missing=_temperature,
        ),
        Fault("S2", "draft probabilities never written", draft_probs=torch.zeros_like, missing=_drawn),
    )
}


def find_faults(ids: Sequence[str]) -> tuple[Fault, ...]:
    """The faults of some ids; raises UserError for one that does not exist."""
    for name in ids:
        if name not in FAULTS:
            raise UserError(f"--fault {name}: no such fault; known are {', '.join(FAULTS)}")
    return tuple(FAULTS[name] for name in ids)

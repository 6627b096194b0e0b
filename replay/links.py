"""Links that are an engine's code alone, by the fault that breaks them, and where the same symptom was public.

Data only: a fault's id leads to the stage of the path that it lies in, to what has to hold there, and to reports worth
comparing with. That a symptom is the same does not say that the bug is.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["ENGINE_LINKS", "LINK_OF", "PUBLIC", "TRAINED_OTHERWISE", "EngineLink", "link_of", "public_note"]


@dataclass(frozen=True, slots=True)
class EngineLink:
    """The stage of the path, what has to hold there, and the same for single variants of the fault."""

    stage: str
    rule: str
    variants: Mapping[str, str] = field(default_factory=dict)


_CAST = "hand features over in the precision they are computed in, or with a scale: they are cast through a smaller one"
_BUFFER = "copy what is handed over out of any buffer that the next pass writes into"

LINK_OF: Mapping[str, str] = {
    **dict.fromkeys(("W1", "W2", "W3", "W4", "W5", "W6", "W7", "W8", "W9"), "wiring"),
    **dict.fromkeys(("M1", "M3", "X1", "X2", "X3", "X4", "D1", "D2"), "hand-off"),
    **dict.fromkeys(("V1", "V2", "V3", "V4", "V5"), "vocabulary map"),
    **dict.fromkeys(("P1", "P6"), "weights"),
    **dict.fromkeys(("T1", "T2"), "tokens"),
    **dict.fromkeys(("R1", "R2"), "positions"),
    "M2": "fc", "N1": "residual", "N2": "norm before fc", "N3": "feedback", "N4": "later norm",
    "N5": "state norms",
    "P1:head norms": "head norms", "P2": "head", "P3": "embedding", "P4": "gate and up", "P5": "q and k rows",
    "P7": "attention bias", "P7:mlp": "MLP bias", "P7:fc": "fc bias", "P8": "scales",
    "R3": "rope theta", "R4": "rope scaling", "R5": "rope pairs",
    "A1": "embedding", "A1:head": "head", "A1:scale": "embedding scale", "A2": "window", "A3": "context",
}  # fmt: skip
"""The link that a fault breaks, by its id, or by id and variant; ranks and verification are none of a draft's."""


def link_of(fault: str, variant: str = "") -> str:
    """The link that a fault breaks; empty where it is none of a draft's."""
    return LINK_OF.get(f"{fault}:{variant}") or LINK_OF.get(fault, "")


TRAINED_OTHERWISE: Mapping[str, str] = {"A1": "P3", "A1:head": "P2"}
"""Faults of an engine that have another id where the draft was trained so: then its own tensor is the wrong one."""

ENGINE_LINKS: Mapping[str, EngineLink] = {
    "W5": EngineLink("hand_off", "hand the slots over in the order of the wiring: they change places on their way"),
    "W6": EngineLink("hand_off", "hand every slot over in its own place: one arrives in place of another"),
    "W7": EngineLink(
        "capture",
        "capture the last boundary where it enters the final norm, not where it leaves it",
        {"reverse": "capture the last boundary where it leaves the final norm: the draft was trained so"},
    ),
    "W8": EngineLink(
        "capture",
        "capture the sum of hidden state and residual, not the hidden state alone",
        {"reverse": "capture the hidden state alone, without the residual: the draft was trained so"},
    ),
    "W9": EngineLink("ranks", "capture a boundary after it is summed over the ranks, not one rank's part of the sum"),
    "M1": EngineLink(
        "capture_mode", "capture the hidden states of every row of a pass (CaptureHiddenMode FULL), not of the last"
    ),
    "M2": EngineLink("project", "hand all slots to fc, and feed the draft what it makes of them"),
    "M3": EngineLink(
        "hand_off",
        "hand over what was captured: zeros arrive",
        {
            "constant": "hand over the features of every row: what arrives is the same for all rows of a step",
            "stale": f"hand over the features of this pass, not of one before; {_BUFFER}",
            "truncated": "hand over all slots of every row: fewer arrive than were captured",
        },
    ),
    "N5": EngineLink(
        "layer",
        "norm what the first layer is fed once, by hidden_norm",
        {
            "reverse": "norm what the first layer is fed by input_layernorm, and then by hidden_norm, at every depth: "
            "the draft was trained so, as ModelOpt does since 0.41, and no engine serves it; or train it on with the "
            "state normed once"
        },
    ),
    "T1": EngineLink(
        "tokens",
        "give the draft's row of position p the token of position p + 1, in every pass",
        {"depth": "feed each depth the tokens that the depth above it drafted"},
    ),
    "T2": EngineLink("tokens", "give the last row of a prompt's chunk the first token of the next chunk"),
    "R1": EngineLink(
        "positions",
        "give depth d below position p position p + d: one more for each depth, and no more",
        {
            "text": "give every row of text the position at which the target ran it",
            "reverse": "move positions from depth to depth as the draft was trained to, which this engine does not",
        },
    ),
    "R2": EngineLink(
        "positions",
        "give depth d below position p position p + d: one more for each depth",
        {"reverse": "move positions from depth to depth as the draft was trained to, which this engine does not"},
    ),
    "X1": EngineLink("rows", "pick each request's own rows: rows of two requests are exchanged on their way"),
    "X2": EngineLink("rows", "pick the rows that were accepted, not those beside them"),
    "X3": EngineLink(
        "rows",
        "leave out rows that are no text, rejected by verification or there to fill a batch up: they are used as text",
    ),
    "X4": EngineLink(
        "tree", "keep the accepted rows of a tree in the order of their path, in features and cache alike"
    ),
    "D1": EngineLink("hand_off", _CAST),
    "D2": EngineLink("hand_off", _CAST),
    "Q1": EngineLink(
        "draft_ranks",
        "have every rank draft the same tokens: decide on one rank, and tell the others",
        {
            "features": "hand every rank of the draft the same features",
            "target": "have every rank of the target come to the same tokens: decide on one, and tell the others",
        },
    ),
    "Q4": EngineLink("draft_ranks", "have all ranks share the target's embedding, or none"),
    "S1": EngineLink(
        "verify",
        "accept a draft x with probability min(1, p(x)/q(x)); what rejection leaves is max(p - q, 0), made 1 again",
    ),
    "S2": EngineLink("verify", "hand verification the draft's probabilities: those that arrive were never written"),
    "S3": EngineLink("verify", "switch simulated acceptance off"),
}

PUBLIC: Mapping[str, tuple[str, ...]] = {
    "W1": ("sglang #25454", "vllm #43671"),
    "W2": ("sglang #25454", "sglang #32334", "vllm #43671"),
    "W3": ("vllm #50170", "speculators #142", "speculators #379"),
    "W4": ("vllm #50170", "vllm-rbln #831"),
    "W7": ("sglang #39776", "ModelOpt #1846"),
    "W8": ("sglang #39286", "vllm #14464"),
    "W9": ("sglang #28343", "sglang #39090"),
    "M1": ("sglang #28809", "sglang #25568"),
    "M2": ("sglang #21272",),
    "M3": ("sglang #35546", "vllm #36531"),
    "V1": ("NeMo Automodel #2447",),
    "V2": ("verl-SpeCo #67",),
    "V3": ("SpecForge #534", "SpecForge #602"),
    "V5": ("EAGLE #222", "verl-SpeCo #66"),
    "P1": ("sglang #32226",),
    "P2": ("sglang #27908",),
    "P3": ("TorchSpec #38",),
    "N1": ("speculators #297",),
    "N2": ("sglang #32334",),
    "N3": ("vllm #46075", "vllm #47448", "vllm #46488", "SpecForge #879"),
    "P8": ("sglang #32440", "sglang-qwen38fn #3"),
    "R1": ("sglang #25015", "SpecForge #424"),
    "R2": ("vllm-ascend #10825",),
    "R3": ("SpecForge #270", "vllm-ascend #6612"),
    "R4": ("speculators #574", "SpecForge #287"),
    "T1": ("vllm-metal #721",),
    "T2": ("sglang #26329", "sglang #26800"),
    "X1": ("sglang #26163", "sglang #28496"),
    "X2": ("sglang #26163",),
    "X3": ("sglang #26911", "sglang #28378"),
    "X4": ("sglang #15360",),
    "S1": ("vllm #40551",),
    "S2": ("sglang #12512",),
    "Q4": ("vllm #50158",),
    "A1": ("vllm #27732", "vllm #28549"),
    "A2": ("speculators #684",),
    "A3": ("vllm #58080", "sglang #6783"),
}
"""Reports and fixes with the same symptom, by fault: numbers of issues and pull requests of these projects."""


def public_note(fault: str) -> str:
    """Where the same symptom was public, as a sentence; empty where we know of no report."""
    numbers = PUBLIC.get(fault, ())
    return f"The same symptom was public in {', '.join(numbers)}: compare." if numbers else ""

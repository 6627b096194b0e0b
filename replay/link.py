"""How links read: what each is in a configuration, and as what value an edit writes it.

A new link is one more of `LINKS`, and how an engine's profile edits it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from spectrace.engine.spec import GqaSpec, MlaSpec, RopeKind
from spectrace.replay.configuration import Configuration, listed

__all__ = ["LINKS", "Link"]


def _theta(at: Configuration) -> str:
    return f"{at.spec.rope.theta:g}"


def _scaling(at: Configuration) -> str:
    rope, attention = at.spec.rope, at.spec.attention
    scale = f", softmax scale {attention.softmax_scale:.3g}" if isinstance(attention, MlaSpec) else ""
    return "none" + scale if rope.kind is RopeKind.DEFAULT else f"{rope.kind} by {rope.factor:g}{scale}"


def _pairs(at: Configuration) -> str:
    return "interleaved" if at.spec.rope.interleaved else "halves"


def _windows(at: Configuration) -> str:
    each = ["none" if window is None else str(window) for window in at.spec.windows]
    return each[0] if len(set(each)) == 1 else f"{', '.join(each)} by layer"


def _attention_bias(at: Configuration) -> str:
    shape = at.spec.attention
    biased = {"q, k, v": shape.qkv_bias, "o": shape.o_bias} if isinstance(shape, GqaSpec) else {}
    return ", ".join(name for name, has in biased.items() if has) or "none"


def _head_norms(at: Configuration) -> str:
    return _has(isinstance(at.spec.attention, GqaSpec) and at.spec.attention.head_norms)


def _has(switch: bool) -> str:
    return "applied" if switch else "none"


def _later_norm(at: Configuration) -> str:
    return at.said.get("later norm") or (str(at.spec.later_norm) if at.spec.layers > 1 else "none")


def _context(at: Configuration) -> str:
    return "all of the text" if at.steps.end is None else f"up to position {at.steps.end - 1}"


@dataclass(frozen=True, slots=True)
class Link:
    """One thing that configuration, engine and training can each have their own way: how it reads, and as what value an
    edit writes it. `in_config` links are decided by a draft's config alone; profiles know how to edit them by name.
    """

    read: Callable[[Configuration], str]
    value: Callable[[Configuration], object] | None = None
    in_config: bool = False

    def to_write(self, at: Configuration) -> object:
        """What an edit makes of it."""
        return (self.value or self.read)(at)


def _said(link: str, otherwise: str = "the checkpoint's") -> Link:
    return Link(lambda at: at.said.get(link, otherwise))


LINKS: Mapping[str, Link] = {
    "wiring": Link(lambda at: listed(at.wiring)),
    "fc": Link(lambda at: "applied" if at.spec.projects else "skipped"),
    "fc bias": Link(lambda at: _has(at.spec.fc_bias), in_config=True),
    "norm before fc": Link(lambda at: str(at.spec.fuse_norm), in_config=True),
    "state norms": Link(lambda at: "input_layernorm, then hidden_norm" if at.spec.normed_twice else "hidden_norm"),
    "residual": Link(lambda at: str(at.spec.residual), in_config=True),
    "feedback": Link(lambda at: str(at.spec.feedback), in_config=True),
    "rope theta": Link(_theta, lambda at: at.spec.rope.theta, in_config=True),
    "rope scaling": Link(_scaling, lambda at: at.spec.rope, in_config=True),
    "rope pairs": Link(_pairs, lambda at: at.spec.rope, in_config=True),
    "window": Link(_windows, lambda at: at.spec.windows, in_config=True),
    "context": Link(_context),
    "positions": Link(lambda at: f"+{at.steps.first} to depth 1, +{at.steps.later} to each deeper"),
    "weights": _said("weights"),
    "scales": _said("scales", "applied"),
    "q and k rows": _said("q and k rows"),
    "attention bias": Link(_attention_bias, in_config=True),
    "head norms": Link(_head_norms, in_config=True),
    "gate and up": _said("gate and up"),
    "MLP bias": Link(lambda at: _has(at.spec.mlp_bias), in_config=True),
    "later norm": Link(_later_norm, in_config=True),
    "head": _said("head"),
    "embedding": _said("embedding"),
    "embedding scale": Link(
        lambda at: f"{at.spec.embedding_scale:g}", lambda at: at.spec.embedding_scale, in_config=True
    ),
    "vocabulary map": _said("vocabulary map", "the checkpoint's d2t, as offsets"),
}
"""By name, in the order of the data's path. Evidence, hypotheses, readings and profiles call them so."""

"""What engines have in common in what they do otherwise than a draft's files mean."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from spectrace.engine.spec import DraftSpec, GqaSpec, MlaSpec
from spectrace.replay.profiles.profile import Departure, Given, Refusal

__all__ = ["always", "attention", "latent", "normed", "of_layout", "refuses", "rope", "where"]

Met = Callable[[DraftSpec, Given], bool]


def always(link: str, why: str, **switches: Any) -> Departure:
    """Switches that are the same whatever a config says."""
    return Departure(link, why, lambda spec, _: replace(spec, **switches))


def where(met: Met, one: Departure) -> Departure:
    """A departure for some drafts alone."""
    return replace(one, takes=lambda spec, given: one.takes(spec, given) if met(spec, given) else spec)


def attention(link: str, why: str, **switches: Any) -> Departure:
    """Switches of GQA that are the same whatever a config says."""

    def takes(spec: DraftSpec, _: Given) -> DraftSpec:
        shape = spec.attention
        return replace(spec, attention=replace(shape, **switches)) if isinstance(shape, GqaSpec) else spec

    return Departure(link, why, takes)


def rope(link: str, why: str, **switches: Any) -> Departure:
    """Numbers of RoPE that are the same whatever a config says."""
    return Departure(link, why, lambda spec, _: replace(spec, rope=replace(spec.rope, **switches)))


def latent(spec: DraftSpec, _: Given | None = None) -> bool:
    """Whether a draft has latent attention."""
    return isinstance(spec.attention, MlaSpec)


def normed(spec: DraftSpec, _: Given | None = None) -> bool:
    """Whether queries and keys are normed over heads."""
    return isinstance(spec.attention, GqaSpec) and spec.attention.head_norms


def of_layout(name: str) -> Met:
    """Whether a draft's folder is of a layout."""
    return lambda _, given: given.draft.layout == name


def refuses(why: str, met: Met, *, says: str) -> Refusal:
    """Drafts that are not served, by their switches and files."""
    return Refusal(why, lambda given: met(given.draft.spec, given), says)

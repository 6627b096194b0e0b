"""What can go wrong between a draft's files and its tensors in memory, as steps: lost, exchanged, put elsewhere.

A step is offered where the draft has what it is about: biases, norms of heads, later layers, scales.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import torch
from torch import Tensor

from spectrace.engine.spec import DraftSpec, GqaSpec, LaterNorm
from spectrace.engine.turned import in_other_order, rotated
from spectrace.replay.configuration import Configuration
from spectrace.replay.hypothesis import Apply, Hypothesis, replacing

__all__ = ["BIASES", "layers_of", "loading", "plain_norm", "with_biases"]

_NORMS: Final = ("embedding_norm", "feature_norm", "mlp_norm", "output_norm")
_LATER_NORMS: Final = ("mlp_norm",)
_ADDERS: Final = {"attention.o": "attention", "mlp.down": "mlp"}
BIASES: Final = ("qkv_bias", "o_bias", "mlp_bias", "fc_bias")
"""The switches that say what has biases."""
_GROUPS: Final = {
    ("qkv_bias",): ("attention bias", "", "q, k and v"),
    ("o_bias",): ("attention bias", "o", "attention's output"),
    ("qkv_bias", "o_bias"): ("attention bias", "all", "q, k, v and attention's output"),
    ("mlp_bias",): ("MLP bias", "mlp", "the MLP"),
    ("fc_bias",): ("fc bias", "fc", "fc"),
}
"""Biases that are lost together: the link, the variant of P7, and what they are of."""


def loading(at: Configuration, shared: Mapping[str, Tensor]) -> Iterator[Hypothesis]:
    """Every other way in which the tensors of this draft may have been loaded.

    `shared` are the target's "embedding" and "head", as far as they are known.
    """
    yield from _exchanged(at.spec)
    yield from _turned(at.spec)
    yield from _unloaded(at)
    yield from _biased(at)
    yield from _head_norms(at)
    yield from _later_norms(at)
    yield from _of_the_target(at, shared)
    if unscaled := at.spare.get("unscaled"):
        title = "quantised weights are loaded without their scales"
        yield Hypothesis("scales", "P8", title, replacing("scales", "not applied", lambda _: unscaled))
    if served := at.spare.get("served"):  # last: of equals, what says more of it is likelier
        step = replacing("weights", "those of the folder that was served", lambda _: served)
        yield Hypothesis("weights", "P6", "the weights are those of the folder that was served", step)


def layers_of(spec: DraftSpec) -> tuple[str, ...]:
    """How the names of each layer's tensors begin, the first layer's with nothing."""
    return ("", *(f"later.{layer}." for layer in range(spec.layers - 1)))


def _exchanged(spec: DraftSpec) -> Iterator[Hypothesis]:
    """Gate and up, in all layers; of several also in each alone."""
    layers = layers_of(spec)
    alone = {f"swapped in layer {number}": [layer] for number, layer in enumerate(layers) if spec.layers > 1}
    for said, where in {"swapped": layers, **alone}.items():
        yield Hypothesis("gate and up", "P4", f"gate and up are {said}", replacing("gate and up", said, _swap(where)))


def _swap(layers: Sequence[str]) -> Callable[[Configuration], Mapping[str, Tensor]]:
    pairs = [(f"{layer}mlp.gate.weight", f"{layer}mlp.up.weight") for layer in layers]
    return lambda at: {a: at.tensors[b] for pair in pairs for a, b in (pair, pair[::-1])}


def _turned(spec: DraftSpec) -> Iterator[Hypothesis]:
    """Rows of q and k in another order.

    One that this kind of RoPE would right comes to the other kind, which is tried as such, but for norms of each head.
    """
    kinds = ("pairs (2i, 2i+1)", "halves (i, i + D/2)")
    ours, other = kinds if spec.rope.interleaved else kinds[::-1]
    ways = {f"in the order for {other}": False}
    if isinstance(spec.attention, GqaSpec) and spec.attention.head_norms:
        ways[f"put into the order for {ours} twice"] = True
    alike = ("R5",) if spec.rope_width <= 4 else ()
    for said, back in ways.items():
        step = replacing("q and k rows", said, partial(_turn, back=back))
        variant = "twice" if back else ""
        yield Hypothesis("q and k rows", "P5", f"rows of q and k are {said}", step, variant=variant, alike=alike)


def _turn(at: Configuration, *, back: bool) -> Mapping[str, Tensor]:
    found = rotated(at.tensors, at.spec)
    return {name: in_other_order(at.tensors[name], rows, at.spec, back=back) for name, rows in found}


def plain_norm(norm: Tensor, spec: DraftSpec) -> Tensor:
    """The weight of a norm that scales nothing."""
    return torch.zeros_like(norm) if spec.unit_offset_norms else torch.ones_like(norm)


def _unloaded(at: Configuration) -> Iterator[Hypothesis]:
    """Norms that scale nothing, projections that add nothing."""
    for layer in layers_of(at.spec):
        for norm in _LATER_NORMS if layer else _NORMS:
            name = f"{layer}{norm}"
            held = at.tensors[f"{name}.weight"]
            if not torch.equal(held, plain := plain_norm(held, at.spec)):
                ones = "all zeros" if at.spec.unit_offset_norms else "all ones"
                yield _lost(name, ones, plain, variant="norm")
        for module, part in _ADDERS.items():
            name = f"{layer}{module}"
            yield _lost(name, "zero", torch.zeros_like(at.tensors[f"{name}.weight"]), variant=part)


def _lost(name: str, value: str, new: Tensor, *, variant: str) -> Hypothesis:
    step = replacing("weights", f"{name} {value}", lambda _: {f"{name}.weight": new})
    return Hypothesis("weights", "P1", f"{name} is {value}", step, variant=variant)


def with_biases(spec: DraftSpec, switches: Iterable[str], *, has: bool) -> DraftSpec:
    """The same switches but for these of `BIASES`; MLA's projections have none."""
    changes, shape = dict.fromkeys(switches, has), spec.attention
    if isinstance(shape, GqaSpec):
        qkv, o = changes.get("qkv_bias", shape.qkv_bias), changes.get("o_bias", shape.o_bias)
        shape = replace(shape, qkv_bias=qkv, o_bias=o)
    mlp, fc = changes.get("mlp_bias", spec.mlp_bias), changes.get("fc_bias", spec.fc_bias)
    return replace(spec, attention=shape, mlp_bias=mlp, fc_bias=fc)


def _has_bias(spec: DraftSpec, switch: str) -> bool:
    return with_biases(spec, (switch,), has=False) != spec


def _biased(at: Configuration) -> Iterator[Hypothesis]:
    """Biases dropped, or those applied that the files hold although the config does not say so."""
    for switches, (link, variant, what) in _GROUPS.items():
        if all(_has_bias(at.spec, switch) for switch in switches):
            step: Apply = partial(_biases, switches, {}, False)
            yield Hypothesis(link, "P7", f"the biases of {what} are dropped", step, variant=variant)
        elif all(switch in at.spare and not _has_bias(at.spec, switch) for switch in switches):
            spare = {name: tensor for switch in switches for name, tensor in at.spare[switch].items()}
            title = f"the biases of {what} are applied, which the files hold"
            yield Hypothesis(link, "P7", title, partial(_biases, switches, spare, True), variant=variant)


def _biases(switches: Sequence[str], tensors: Mapping[str, Tensor], has: bool, at: Configuration) -> Configuration:
    return replace(at, spec=with_biases(at.spec, switches, has=has), tensors={**at.tensors, **tensors})


def _head_norms(at: Configuration) -> Iterator[Hypothesis]:
    shape = at.spec.attention
    if isinstance(shape, GqaSpec) and shape.head_norms:
        title = "the norms of q's and k's heads are dropped"
        yield Hypothesis("head norms", "P1", title, _without_head_norms, variant="head norms")


def _without_head_norms(at: Configuration) -> Configuration:
    assert isinstance(at.spec.attention, GqaSpec)
    return replace(at, spec=replace(at.spec, attention=replace(at.spec.attention, head_norms=False)))


def _later_norms(at: Configuration) -> Iterator[Hypothesis]:
    """What layers after the first may apply to their input."""
    spec = at.spec
    names = [f"{layer}input_norm.weight" for layer in layers_of(spec)[1:]]
    if not names:
        return
    [other] = set(LaterNorm) - {spec.later_norm}
    if spare := at.spare.get(other):
        title = f"layers after the first apply their {other}"
        yield Hypothesis("later norm", "N4", title, partial(_other_norm, other, spare))
    plain = {name: plain_norm(at.tensors[name], spec) for name in names}
    if not all(torch.equal(at.tensors[name], norm) for name, norm in plain.items()):
        step = replacing("later norm", "one that scales nothing", lambda _: plain)
        title = "layers after the first apply a norm that scales nothing"
        yield Hypothesis("later norm", "N4", title, step, variant="plain")
    first = dict.fromkeys(names, at.tensors["feature_norm.weight"])
    step = replacing("later norm", "the first layer's hidden_norm", lambda _: first)
    title = "layers after the first apply the first layer's hidden_norm"
    yield Hypothesis("later norm", "N4", title, step, variant="first")


def _other_norm(norm: LaterNorm, tensors: Mapping[str, Tensor], at: Configuration) -> Configuration:
    return replace(at, spec=replace(at.spec, later_norm=norm), tensors={**at.tensors, **tensors})


def _of_the_target(at: Configuration, shared: Mapping[str, Tensor]) -> Iterator[Hypothesis]:
    """The target's head or embedding in the place of the draft's own."""
    spec, head, embedding = at.spec, shared.get("head"), shared.get("embedding")
    if head is not None and spec.own_head and head.shape[1] == spec.width and len(head) >= spec.draft_vocab:
        first = head[: spec.draft_vocab]
        if len(head) == spec.draft_vocab:
            step = replacing("head", "the target's", lambda _: {"head.weight": first})
            yield Hypothesis("head", "A1", "the head is the target's", step, variant="head", alike=("P2",))
        else:
            step = replacing("head", "the target's first rows", lambda _: {"head.weight": first})
            yield Hypothesis("head", "P2", "the head is the target's first rows", step)
    if embedding is not None and spec.own_embedding and embedding.shape == at.tensors["embedding.weight"].shape:
        step = replacing("embedding", "the target's", lambda _: {"embedding.weight": embedding})
        yield Hypothesis("embedding", "A1", "the embedding is the target's", step)

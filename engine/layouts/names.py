"""What the tensors of a draft are called in files: the first layer is `midlayer` or `layers.0`, all else is one way.

A few older names are read, too; they are written by nobody any more.
"""

from collections.abc import Iterable, Iterator, Mapping

from spectrace.engine.spec import DraftSpec, FuseNorm, MlaSpec

__all__ = ["published_names", "stored_names"]

_OUTER = {
    "fc.weight": "fc.weight", "fc.bias": "fc.bias", "embedding.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight", "head.weight": "lm_head.weight", "d2t": "d2t",
}  # fmt: skip
_KINDS = ("weight", "bias")
_LAYER = {"mlp_norm.weight": "post_attention_layernorm.weight"}
_LAYER |= {f"mlp.{one}.{kind}": f"mlp.{one}_proj.{kind}" for one in ("gate", "up", "down") for kind in _KINDS}
_GQA = {f"attention.{one}.{kind}": f"self_attn.{one}_proj.{kind}" for one in "qkvo" for kind in _KINDS}
_GQA |= {f"attention.{one}_norm.weight": f"self_attn.{one}_norm.weight" for one in "qk"}
_MLA = {
    "attention.q.weight": "self_attn.q_proj.weight",
    "attention.q_down.weight": "self_attn.q_a_proj.weight",
    "attention.q_norm.weight": "self_attn.q_a_layernorm.weight",
    "attention.q_up.weight": "self_attn.q_b_proj.weight",
    "attention.kv_down.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.kv_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attention.kv_up.weight": "self_attn.kv_b_proj.weight",
    "attention.o.weight": "self_attn.o_proj.weight",
}
_OLDER = {
    "embedding_norm.weight": "input_embeds_norm.weight",  # ModelOpt before December 2025
    "feature_norm.weight": "hidden_norm.weight",
    "fuse_norms.0.weight": "aux_norm_low.weight",  # SGLang before EAGLE 3.1
    "fuse_norms.1.weight": "aux_norm_mid.weight",
    "fuse_norms.2.weight": "aux_norm_high.weight",
}


def published_names(spec: DraftSpec, first: str) -> dict[str, str]:
    """What each tensor of a `DraftModel` is called, the first layer's within `first`."""
    return {
        **_OUTER,
        "embedding_norm.weight": f"{first}.input_layernorm.weight",
        "feature_norm.weight": f"{first}.hidden_norm.weight",
        **_within(spec, "", first),
        **dict(_later(spec)),
        **_fuse_norms(spec),
    }


def stored_names(stored: Iterable[str], spec: DraftSpec) -> dict[str, str]:
    """What a `DraftModel`'s tensors are called in a checkpoint that stores these: one layout or the other."""
    there = frozenset(stored)
    first = "midlayer" if any(name.startswith("midlayer.") for name in there) else "layers.0"
    names = published_names(spec, first)
    older = {ours: theirs for ours, theirs in _OLDER.items() if ours in names and theirs in there}
    if spec.fuse_norm is not FuseNorm.PER_SLOT:
        older = {ours: theirs for ours, theirs in older.items() if not ours.startswith("fuse_norms.")}
    return names | {ours: theirs for ours, theirs in older.items() if names[ours] not in there}


def _within(spec: DraftSpec, ours: str, theirs: str) -> dict[str, str]:
    held = _LAYER | (_MLA if isinstance(spec.attention, MlaSpec) else _GQA)
    return {f"{ours}{name}": f"{theirs}.{stored}" for name, stored in held.items()}


def _later(spec: DraftSpec) -> Iterator[tuple[str, str]]:
    for layer in range(1, spec.layers):
        ours, theirs = f"later.{layer - 1}.", f"layers.{layer}"
        yield f"{ours}input_norm.weight", f"{theirs}.{spec.later_norm}.weight"
        yield from _within(spec, ours, theirs).items()


def _fuse_norms(spec: DraftSpec) -> Mapping[str, str]:
    if spec.fuse_norm is FuseNorm.WHOLE:
        return {"fuse_norms.0.weight": "input_norm.weight"}
    return {f"fuse_norms.{slot}.weight": f"fc_norm.{slot}.weight" for slot in range(spec.slots)}

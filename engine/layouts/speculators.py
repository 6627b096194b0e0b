"""speculators' layout: the decoder layer's config is an object of its own, written as what differs from its class."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from spectrace.engine.fields import Fields
from spectrace.engine.layouts.layout import TOP_IDS, Layout, Limit, Verifier
from spectrace.engine.layouts.limits import ENGINES_ALONE, EVERYWHERE, OWN_KEYS, limit
from spectrace.engine.layouts.words import (
    attention_words,
    fuse_words,
    rope_words,
    shape_words,
    stream_words,
    window_words,
)
from spectrace.engine.spec import DraftSpec, GqaSpec

__all__ = ["SPECULATORS"]

_GEOMETRY = "transformer_layer_config"
_DEPTH = 3  # drafts a round, for an engine that is not told: what its own converter writes
_ANY = {
    "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
}  # fmt: skip
_LLAMA = {**_ANY, "vocab_size": 32000, "intermediate_size": 11008, "max_position_embeddings": 2048}
_QWEN3 = {
    **_ANY, "vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768,
    "num_key_value_heads": 32, "head_dim": 128,
}  # fmt: skip


def _normed(spec: DraftSpec) -> bool:
    return isinstance(spec.attention, GqaSpec) and spec.attention.head_norms


def _remarks(fields: Fields, _tensors: Mapping[str, Tensor]) -> Iterator[str]:
    if "norm_before_residual" not in fields:
        yield "norm_before_residual is absent: false, as speculators' own class has it, where vLLM takes true"
    body = fields.peek(_GEOMETRY)
    if isinstance(body, dict) and body.get("model_type", "qwen3") == "qwen3" and "rope_theta" not in json.dumps(body):
        yield "rope_theta is absent: 10000, as transformers has it, where vLLM takes 1000000 for Qwen3's layers"


def _config(spec: DraftSpec, boundaries: tuple[int, ...] | None, verifier: Verifier | None) -> dict[str, Any]:
    named = None if verifier is None else verifier.path
    return {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
        "draft_vocab_size": spec.draft_vocab, "target_hidden_size": spec.target_width,
        **stream_words(spec), "norm_before_fc": False, "fc_norm": False, **fuse_words(spec),
        **({TOP_IDS.key: list(boundaries)} if boundaries is not None else {}),
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": _DEPTH}],
            "verifier": {"name_or_path": named, "architectures": list(verifier.architectures) if verifier else []},
        },
        _GEOMETRY: {
            "model_type": "qwen3" if _normed(spec) else "llama", **shape_words(spec), **attention_words(spec),
            **window_words(spec), "rope_parameters": {"rope_theta": spec.rope.theta, **rope_words(spec)},
        },
    }  # fmt: skip


SPECULATORS = Layout(
    name="speculators",
    title="speculators",
    told=lambda fields, _: "speculators_model_type" in fields,
    geometry=_GEOMETRY,
    absent={
        "norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False,
        "draft_vocab_size": 32000,
    },
    classes={"llama": _LLAMA, "qwen3": _QWEN3, "": _QWEN3},
    describes=frozenset({
        "embed_requires_grad", "speculators_config", "speculators_model_type", "speculators_version",
    }),
    first="layers.0",
    config=_config,
    remarks=_remarks,
    window_from_text=True,
    limits=(
        *EVERYWHERE, *OWN_KEYS, *ENGINES_ALONE,
        limit("windows counted from the drafted row", lambda spec: any(spec.windows) != spec.window_from_text),
        limit("biases in the MLP beside norms over heads", lambda spec: spec.mlp_bias and _normed(spec)),
        Limit("a number of slots other than 3, without boundaries", lambda spec, at: at is None and spec.slots != 3),
        Limit("a boundary that feeds two slots", lambda _, at: at is not None and len(set(at)) < len(at)),
    ),
)  # fmt: skip

"""What an engine makes of a draft: the keys it reads, what it falls back to, where in its code a link lies.

A profile is data. A new engine is one more entry in `PROFILES`.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from spectrace.engine.checkpoint import default_wiring
from spectrace.engine.dialect import ID_KEYS, IdKey
from spectrace.engine.spec import FuseNorm, Stream

__all__ = ["GENERIC", "PROFILES", "Profile", "Switch", "filled", "profile_of", "value_at"]


@dataclass(frozen=True, slots=True)
class Switch:
    """One link that a config key decides: the value of every key for every reading, and where the engine acts on it.

    `values` maps a reading to the keys and values that make it; numbers and objects are what `key` holds.
    `default` is the reading where the keys are absent, `note` what else there is to know of them.
    """

    title: str
    code: str
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    key: str = ""
    default: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Profile:
    """What one engine makes of a configuration.

    `ids` are the keys of layer ids that it reads, the first that is there, in the convention it takes them in, which
    need not be the one they were published in; `sorts` says that it hands boundaries over in ascending order, each
    once. `code` maps a stage of the path to where the engine has it, `missing` a draft's tensors, by the part they
    belong to, to what stands in for one that is not there; "" is for all others. `serve` is the command that serves,
    with TARGET, DRAFT and DEPTH in it; `wiring_flag` overrides ids.
    """

    engine: str
    ids: tuple[IdKey, ...]
    default_wiring: str
    switches: Mapping[str, Switch]
    code: Mapping[str, str]
    sorts: bool = False
    missing: Mapping[str, str] = field(default_factory=dict)
    wiring_flag: str = ""
    serve: str = ""
    known: bool = True

    def resolve(self, config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
        """The boundaries that it feeds a draft with this config, on a target of so many layers."""
        for one in self.ids:
            if ids := value_at(config, one.key):
                found = tuple(int(i) + one.offset for i in ids)
                return tuple(sorted(set(found))) if self.sorts else found
        return default_wiring(layers)


_DRAFT = "spectrace.engine.draft.DraftModel"
_STEP = "spectrace.engine.draft_shard.DraftShard.step"
_SPECTRACE_CODE = {
    "capture": "spectrace.engine.target.TargetModel",
    "capture_mode": "spectrace.engine.plan.CaptureHiddenMode",
    "hand_off": "spectrace.engine.target_shard.TargetShard.step",
    "rows": _STEP,
    "tokens": "spectrace.engine.scheduler.Scheduler.apply",
    "positions": _STEP,
    "project": f"{_DRAFT}.fuse",
    "layer": f"{_DRAFT}.forward",
    "feedback": f"{_DRAFT}.forward",
    "rope": "spectrace.engine.rope.rotary_table",
    "vocabulary": f"{_DRAFT}.to_target",
    "window": "spectrace.engine.attention.Reach",
    "context": _STEP,
    "load": "spectrace.engine.checkpoint.build_draft",
    "wiring": "spectrace.engine.serving.resolve_wiring",
    "tree": "spectrace.engine.tree.Growth",
    "verify": "spectrace.engine.verify.verify_sampled",
    "ranks": "spectrace.engine.target.TargetModel",
    "draft_ranks": "spectrace.engine.parallel.split_draft",
}
_SWITCHES = {
    "residual": Switch(
        "the residual", "layer",
        {Stream.PRE_NORM: {"norm_before_residual": False}, Stream.POST_NORM: {"norm_before_residual": True}},
        default=Stream.PRE_NORM,
    ),
    "feedback": Switch(
        "the state that is fed back", "feedback",
        {Stream.PRE_NORM: {"norm_output": False}, Stream.POST_NORM: {"norm_output": True}},
        default=Stream.PRE_NORM,
    ),
    "norm before fc": Switch(
        "the norm before fc", "project",
        {
            FuseNorm.NONE: {"fc_norm": False, "norm_before_fc": False},
            FuseNorm.WHOLE: {"fc_norm": False, "norm_before_fc": True},
            FuseNorm.PER_SLOT: {"fc_norm": True, "norm_before_fc": False},
        },
        default=FuseNorm.NONE,
    ),
    "rope pairs": Switch(
        "which elements RoPE rotates as pairs", "rope",
        {"interleaved": {"rope_interleave": True}, "halves": {"rope_interleave": False}},
        default="interleaved",
        note="the key is read for MLA drafts alone; all others rotate halves",
    ),
    "rope theta": Switch("RoPE's theta", "rope", key="rope_theta", default="10000"),
    "rope scaling": Switch("RoPE's scaling", "rope", key="rope_scaling", default="none"),
    "window": Switch("the sliding window", "window", key="sliding_window", default="none"),
    "context": Switch("the end of the draft's context", "context", key="max_position_embeddings"),
    "attention bias": Switch(
        "attention's bias", "load",
        {
            "none": {"attention_bias": False, "bias": False}, "q, k, v": {"attention_bias": True},
            "q, k, v, o": {"attention_bias": True}, "o": {"attention_bias": False, "bias": True},
        },
        default="none",
    ),
    "MLP bias": Switch(
        "the bias of the MLP", "load", {"none": {"mlp_bias": False}, "applied": {"mlp_bias": True}}, default="none"
    ),
    "embedding scale": Switch("the number that multiplies the embedding", "load", key="embedding_scale", default="1"),
}  # fmt: skip
_DEFAULT_WIRING = "(2, L/2, L-3), with L the number of layers of the target"

_TOP, _NESTED, _LAYER_IDS = (one.key for one in ID_KEYS)
_SPECTRACE = Profile(
    engine="spectrace",
    ids=ID_KEYS,
    default_wiring=_DEFAULT_WIRING,
    switches=_SWITCHES,
    code=_SPECTRACE_CODE,
    wiring_flag="--wiring",
    serve="spectrace run --target TARGET --prompts PROMPTS --out NEW_TRACE --draft DRAFT",
)

_PROPOSER, _RUNNER = "vllm.v1.spec_decode.llm_base_proposer.SpecDecodeBaseProposer", "vllm.v1.worker.gpu_model_runner"
_EAGLE3 = "vllm.model_executor.models.llama_eagle3"
_VLLM_CODE = {
    "capture": "vllm.model_executor.models.interfaces.EagleModelMixin",
    "hand_off": f"{_RUNNER}.GPUModelRunner.propose_draft_token_ids",
    "rows": f"{_PROPOSER}.prepare_inputs_padded",
    "tokens": f"{_PROPOSER}.set_inputs_first_pass",
    "positions": f"{_PROPOSER}.propose",
    "project": f"{_EAGLE3}.Eagle3LlamaForCausalLM.combine_hidden_states",
    "layer": f"{_EAGLE3}.LlamaDecoderLayer.forward",
    "feedback": f"{_PROPOSER}.propose",
    "rope": "vllm.model_executor.layers.rotary_embedding.get_rope",
    "vocabulary": f"{_EAGLE3}.Eagle3LlamaForCausalLM.compute_logits",
    "window": "vllm.model_executor.models.llama.LlamaAttention",
    "context": f"{_RUNNER}.GPUModelRunner._input_fits_in_drafter",
    "load": f"{_EAGLE3}.Eagle3LlamaForCausalLM.load_weights",
    "wiring": f"{_RUNNER}.GPUModelRunner._get_eagle3_aux_layers_from_config",
    "verify": "vllm.v1.sample.rejection_sampler.RejectionSampler",
    "ranks": "vllm.model_executor.models.interfaces.EagleModelMixin",
    "draft_ranks": f"{_PROPOSER}._create_draft_vllm_config",
}
_SPECULATIVE = '{"method": "eagle3", "model": "DRAFT", "num_speculative_tokens": DEPTH}'
_VLLM_SWITCHES = {
    **_SWITCHES,
    "fc": Switch(
        "fc", "project",
        {
            "applied": {"eagle_config.use_aux_hidden_state": True},
            "skipped": {"eagle_config.use_aux_hidden_state": False},
        },
        default="applied",
    ),
    "window": replace(
        _SWITCHES["window"],
        note="vllm goes by layer_types, refuses a window in some of several layers, and has none with latent attention",
    ),
    "context": replace(
        _SWITCHES["context"],
        note="vllm takes the least of this, of the target's length, and of max_model_len in its --speculative-config",
    ),
    "attention bias": replace(
        _SWITCHES["attention bias"],
        note="the classes of Llama's drafts then have a bias of o_proj, too; those with latent attention none at all",
    ),
    "embedding scale": replace(
        _SWITCHES["embedding scale"],
        note="vllm scales no embedding: multiply embed_tokens.weight by it, and store that in the draft",
    ),
}  # fmt: skip
_VLLM = Profile(
    engine="vllm",
    ids=(IdKey(_TOP, 0), IdKey(_NESTED, 0)),
    default_wiring=_DEFAULT_WIRING,
    switches=_VLLM_SWITCHES,
    code=_VLLM_CODE,
    sorts=True,
    missing={
        "d2t": "zeros, so that draft id k is token k",
        "head": "the first rows of the target's head",
        "embedding": "the target's embedding",
        "norm": "ones",
        "": "whatever the memory held",
    },
    serve=f"spectrace record --out NEW_TRACE -- vllm serve TARGET --speculative-config '{_SPECULATIVE}'",
)
"""vLLM 0.32.0 with its V1 runner; another runner reads other keys."""

PROFILES: Mapping[str, Profile] = {
    "spectrace": _SPECTRACE,
    "vllm": _VLLM,
    "vllm V2": replace(
        _VLLM,
        ids=(IdKey(_TOP, 0), IdKey(_LAYER_IDS, 0)),
        code={
            **_VLLM_CODE,
            "wiring": "vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils.get_eagle3_aux_layers_from_config",
        },
    ),
}
"""By the name of the engine, and where it has several, of its runner."""

GENERIC = Profile("an unknown engine", ID_KEYS, _DEFAULT_WIRING, _SWITCHES, {}, known=False)
"""Keys and conventions as drafts are published; of the engine itself nothing is known."""


def profile_of(manifest: Mapping[str, Any]) -> Profile:
    """The profile of the engine that a trace's manifest names; a generic one that knows no code where there is none."""
    name = str(manifest.get("engine") or "")
    runner = (manifest.get("mode") or {}).get("runner")
    found = PROFILES.get(f"{name} {runner}") or PROFILES.get(name) or replace(GENERIC, engine=name or GENERIC.engine)
    known = {
        "TARGET": (manifest.get("target") or {}).get("path"),
        "DEPTH": (manifest.get("serving") or {}).get("depth"),
    }
    return replace(found, serve=filled(found.serve, {name: str(value) for name, value in known.items() if value}))


def filled(command: str, known: Mapping[str, str]) -> str:
    """A command with what is known in the place of its capital words; within JSON, as a string of it."""
    return shlex.join(_filled(word, known) for word in shlex.split(command))


def _filled(word: str, known: Mapping[str, str]) -> str:
    for name, value in known.items():
        word = value if word == name else word.replace(name, json.dumps(value)[1:-1])
    return word


def value_at(config: Mapping[str, Any], key: str) -> Any:
    """A value by its dotted key, None where it is absent."""
    held: Any = config
    for part in key.split("."):
        held = held.get(part) if isinstance(held, dict) else None
    return held

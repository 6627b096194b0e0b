"""vLLM 0.32.0, with either of its runners."""

from dataclasses import replace

from spectrace.engine.dialect import ID_KEYS, IdKey
from spectrace.engine.spec import DraftSpec, FuseNorm, GqaSpec, MlaSpec, Stream
from spectrace.replay.profiles.departures import always, attention, latent, refuses, rope, where
from spectrace.replay.profiles.profile import Capture, Given, Profile, StandIn, Switch
from spectrace.replay.profiles.spectrace import SWITCHES

__all__ = ["VLLM_V1", "VLLM_V2"]

_PROPOSER, _RUNNER = "vllm.v1.spec_decode.llm_base_proposer.SpecDecodeBaseProposer", "vllm.v1.worker.gpu_model_runner"
_EAGLE3 = "vllm.model_executor.models.llama_eagle3"
_CODE = {
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
_SWITCHES = {
    **SWITCHES,
    "fc": Switch(
        "fc", "project",
        {
            "applied": {"eagle_config.use_aux_hidden_state": True},
            "skipped": {"eagle_config.use_aux_hidden_state": False},
        },
        default="applied",
    ),
    "window": replace(
        SWITCHES["window"],
        note="vllm goes by layer_types, refuses a window in some of several layers, and has none with latent attention",
    ),
    "context": replace(
        SWITCHES["context"],
        note="vllm takes the least of this, of the target's length, and of max_model_len in its --speculative-config",
    ),
    "attention bias": replace(
        SWITCHES["attention bias"],
        note="the classes of Llama's drafts then have a bias of o_proj, too; those with latent attention none at all",
    ),
    "embedding scale": replace(
        SWITCHES["embedding scale"],
        note="vllm scales no embedding: multiply embed_tokens.weight by it, and store that in the draft",
    ),
}  # fmt: skip
_DEEPSEEKS = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration")
_TOP, _NESTED, _LAYER_IDS = (one.key for one in ID_KEYS)


def _biased_alone(spec: DraftSpec, given: Given) -> bool:
    """A draft of biases without that of o, whose class then has it all the same."""
    shape = spec.attention
    said = given.says("attention_bias") is True or given.says("bias") is True
    return isinstance(shape, GqaSpec) and said and not shape.o_bias and given.draft.layout != "speculators"


def _no_states(_: DraftSpec, given: Given) -> bool:
    return given.says("eagle_config.use_aux_hidden_state") is False


def _slots_built(spec: DraftSpec, given: Given) -> bool:
    """fc is built for as many slots as `num_aux_hidden_states` says, else as there are nested ids, else for three."""
    told = given.says("num_aux_hidden_states") or len(given.says(_NESTED) or ()) or 3
    return given.draft.layout != "speculators" and told != spec.slots


def _gqa(spec: DraftSpec, _: Given) -> bool:
    return not latent(spec)


def _silent_residual(_: DraftSpec, given: Given) -> bool:
    return given.draft.layout == "speculators" and given.says("norm_before_residual") is None


def _silent_theta(_: DraftSpec, given: Given) -> bool:
    body = given.says("transformer_layer_config") or {}
    held = {**body, **(body.get("rope_parameters") or {}), **(body.get("rope_scaling") or {})}
    qwen3 = body.get("model_type", "qwen3") == "qwen3"
    return given.draft.layout == "speculators" and qwen3 and "rope_theta" not in held


_DEPARTURES = (
    always("head input", "the head always reads behind the output norm", head_reads=Stream.POST_NORM),
    where(_biased_alone, attention("attention bias", "with attention_bias or bias o_proj has one, too", o_bias=True)),
    always("fc bias", "fc has no bias: `bias` is o_proj's alone", fc_bias=False),
    always("window", "a window counts from the row, at every depth", window_from_text=False),
    where(_gqa, rope("rope pairs", "RoPE turns halves, whatever a config says", interleaved=False)),
    where(latent, rope("rope pairs", "latent attention turns interleaved pairs", interleaved=True)),
    always("embedding scale", "embedding_scale is not read", embedding_scale=1.0),
    always("norm gains", "unit_offset_norms is not read", unit_offset_norms=False),
    where(
        _silent_residual,
        always("residual", "an absent norm_before_residual counts as true in this layout", residual=Stream.POST_NORM),
    ),
    where(_no_states, always("fc", "use_aux_hidden_state false: fed the target's last state, past fc", projects=False)),
    where(_silent_theta, rope("rope theta", "an absent rope_theta is 1000000 for Qwen3's layers", theta=1e6)),
)
_REFUSALS = (
    refuses(
        "all layers of a draft have to see alike",
        lambda spec, _: len(set(spec.windows)) > 1,
        says="same kv cache group",
    ),
    refuses(
        "queries of latent attention have to go through a latent (q_lora_rank)",
        lambda spec, _: isinstance(spec.attention, MlaSpec) and spec.attention.q_rank is None,
        says="self_attn.q_proj",
    ),
    refuses(
        "its draft with latent attention has no norm over all slots (input_norm)",
        lambda spec, _: latent(spec) and spec.fuse_norm is FuseNorm.WHOLE,
        says="input_norm",
    ),
    refuses("fc is built for another number of slots than the draft has", _slots_built, says="size"),
    refuses(
        "a d2t of a draft of all tokens is a tensor that its class does not have",
        lambda spec, given: spec.draft_vocab == spec.target_vocab and "d2t" in given.held,
        says="d2t",
    ),
)
_DEEPSEEK = Capture(embedding=False)
_TARGETS = {"": Capture(), **dict.fromkeys(_DEEPSEEKS, _DEEPSEEK)}

VLLM_V1 = Profile(
    engine="vllm",
    version="0.32.0",
    runner="V1",
    ids=(IdKey(_TOP, 0), IdKey(_NESTED, 0)),
    switches=_SWITCHES,
    code=_CODE,
    targets=_TARGETS,
    sorts=True,
    departures=_DEPARTURES,
    refusals=_REFUSALS,
    missing={
        "d2t": StandIn.IDENTITY,
        "head": StandIn.HEAD,
        "embedding": StandIn.EMBEDDING,
        "norm": StandIn.ONES,
        "": StandIn.MEMORY,
    },
    drops=False,
    captures_nothing=lambda given: _no_states(given.draft.spec, given),
    unread_names=frozenset(
        {
            "input_embeds_norm.weight",
            "hidden_norm.weight",
            "aux_norm_low.weight",
            "aux_norm_mid.weight",
            "aux_norm_high.weight",
        }
    ),
    latent_classes=frozenset({"Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"}),
    context="vllm raises it to the target's, and drafts noise beyond",
    serve=f"spectrace record --out NEW_TRACE -- vllm serve TARGET --speculative-config '{_SPECULATIVE}'",
)
"""With the V1 runner; another runner reads other keys."""

VLLM_V2 = replace(
    VLLM_V1,
    runner="V2",
    captures_nothing=lambda _: False,
    ids=(IdKey(_TOP, 0), IdKey("target_layer_ids", 1), IdKey("dflash_config.layer_ids", 0), IdKey(_LAYER_IDS, 0)),
    departures=tuple(one for one in _DEPARTURES if one.link != "fc"),
    refusals=(*_REFUSALS, refuses("use_aux_hidden_state false ends in an error", _no_states, says="Assertion")),
    code={**_CODE, "wiring": "vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils.get_eagle3_aux_layers_from_config"},
)

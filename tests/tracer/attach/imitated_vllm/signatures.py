"""What spectrace relies on in vLLM's source, read without running it: parameters of methods, fields, attributes.

python signatures.py SITE_PACKAGES > signatures.json
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

GPU, DRAFTING = "v1/worker/gpu", "v1/worker/gpu/spec_decode"
_DRAFT = ["combine_hidden_states", "forward", "compute_logits"]
WANTED: dict[str, dict[str, list[str]]] = {
    # V2
    f"{GPU}/model_runner.py": {
        "GPUModelRunner": [
            "execute_model", "sample_tokens", "sample", "get_model", "execute_model_state", "sampler",
            "rejection_sampler", "speculator", "adaptive_verification", "pcp_manager", "batch_sharder", "vllm_config",
            "max_model_len",
            "model_state",
        ],
        "ExecuteModelState": ["input_batch", "hidden_states", "aux_hidden_states", "num_spec_tokens_to_schedule"],
    },
    f"{GPU}/input_batch.py": {
        "InputBatch": [
            "req_ids", "num_reqs", "num_scheduled_tokens", "num_tokens", "num_tokens_after_padding", "num_draft_tokens",
            "num_draft_tokens_per_req", "prefill_len_np", "num_computed_prefill_tokens_np", "is_prefilling_np",
            "input_ids", "positions", "query_start_loc",
        ],
        "InputBuffers": ["input_ids", "positions"],
    },
    f"{GPU}/sample/output.py": {"SamplerOutput": ["sampled_token_ids", "num_sampled", "num_rejected"]},
    f"{GPU}/sample/sampler.py": {"Sampler": ["__call__"]},
    f"{DRAFTING}/rejection_sampler.py": {"RejectionSampler": ["__call__"]},
    f"{DRAFTING}/speculator.py": {
        "DraftModelSpeculator": [
            "model", "input_buffers", "num_speculative_steps", "use_local_argmax_reduction", "draft_tokens",
            "supports_decode_metadata_update",
        ],
    },
    f"{DRAFTING}/target_dependent_ar/speculator.py": {
        "TargetDependentARSpeculator": [
            "propose", "hidden_states", "last_token_indices", "prefill_cudagraph_manager", "decode_cudagraph_manager",
        ],
    },
    f"{GPU}/cudagraph_utils.py": {"CudaGraphManager": ["run_fullgraph", "breakable_cg_runner"]},
    "compilation/breakable_cudagraph.py": {"BreakableCUDAGraphWrapper": ["__call__", "unwrap"]},
    # V1
    "v1/worker/gpu_model_runner.py": {
        "GPUModelRunner": [
            "execute_model", "sample_tokens", "_sample", "_get_positions", "get_model", "execute_model_state",
            "input_batch", "requests", "discard_request_mask", "input_ids", "drafter", "vllm_config",
            "max_model_len",
        ],
        "ExecuteModelState": ["scheduler_output", "spec_decode_metadata", "aux_hidden_states"],
    },
    "v1/spec_decode/llm_base_proposer.py": {
        "SpecDecodeBaseProposer": ["propose", "model", "use_local_argmax_reduction"],
    },
    "v1/spec_decode/metadata.py": {"SpecDecodeMetadata": ["num_draft_tokens"]},
    # both
    "v1/core/sched/output.py": {
        "NewRequestData": ["req_id", "prompt_token_ids", "sampling_params"],
        "CachedRequestData": ["resumed_req_ids"],
        "SchedulerOutput": [
            "scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "total_num_scheduled_tokens",
            "finished_req_ids",
        ],
    },
    "v1/core/sched/scheduler.py": {"Scheduler": ["make_spec_decoding_stats"]},
    "v1/engine/core.py": {"EngineCore": ["shutdown"]},
    "v1/engine/utils.py": {"CoreEngineProcManager": ["shutdown", "processes", "_request_shutdown_timeout"]},
    "v1/worker/gpu_worker.py": {"Worker": ["load_model", "compile_or_warm_up_model", "model_runner"]},
    "v1/worker/cpu_worker.py": {"CPUWorker": ["compile_or_warm_up_model"]},
    "model_executor/models/llama_eagle3.py": {"Eagle3LlamaForCausalLM": [*_DRAFT, "draft_id_to_target_id"]},
    "model_executor/models/qwen3_eagle3.py": {"Eagle3Qwen3ForCausalLM": [*_DRAFT, "draft_id_to_target_id"]},
}  # fmt: skip


def found(source: Path) -> dict[str, dict[str, dict[str, list[str] | str]]]:
    """By file, class and name: a method's parameters, `=` behind those with a default; or that it is there."""
    return {file: _classes(source / file, classes) for file, classes in WANTED.items()}


def _classes(file: Path, classes: dict[str, list[str]]) -> dict[str, dict[str, list[str] | str]]:
    tree = ast.parse(file.read_text("utf-8"))
    nodes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    return {name: _class(nodes[name], wanted) for name, wanted in classes.items()}


def _class(node: ast.ClassDef, wanted: list[str]) -> dict[str, list[str] | str]:
    methods = {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}
    fields = {ast.unparse(one.target) for one in node.body if isinstance(one, ast.AnnAssign)}
    own = {
        target.attr
        for one in ast.walk(node)
        if isinstance(one, ast.Assign | ast.AnnAssign)
        for target in (one.targets if isinstance(one, ast.Assign) else [one.target])
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
    }
    return {
        name: _parameters(methods[name].args)
        if name in methods
        else "field"
        if name in fields
        else "attribute"
        if name in own
        else "missing"
        for name in wanted
    }


def _parameters(given: ast.arguments) -> list[str]:
    plain = [*given.posonlyargs, *given.args]
    defaults = len(plain) - len(given.defaults)
    names = [one.arg + "=" * (at >= defaults) for at, one in enumerate(plain)]
    names += [f"*{given.vararg.arg}"] if given.vararg else ["*"] if given.kwonlyargs else []
    names += [
        one.arg + "=" * (default is not None) for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    return names + ([f"**{given.kwarg.arg}"] if given.kwarg else [])


if __name__ == "__main__":
    print(json.dumps(found(Path(sys.argv[1]) / "vllm"), indent=1))

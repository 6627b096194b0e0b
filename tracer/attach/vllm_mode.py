"""How a vLLM runs, and what that leaves out of sight: known beforehand, and said in the trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["mode_facts", "runner_name"]


def runner_name(runner: Any) -> str:
    """V1 or V2; both classes have the same name, and V2's alone has a speculator."""
    return "V2" if hasattr(runner, "speculator") else "V1"


def mode_facts(runner: Any) -> dict[str, Any]:
    """The runner and its switches as they were resolved; `hidden` says what is not seen, and why."""
    config = runner.vllm_config
    return {
        "runner": runner_name(runner),
        "eager": bool(config.model_config.enforce_eager),
        "cuda_graphs": _graphs(config),
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "prefix_cache": bool(config.cache_config.enable_prefix_caching),
        "hidden": dict(_hidden(runner)),
    }


def _graphs(config: Any) -> str:
    mode = config.compilation_config.cudagraph_mode
    return str(getattr(mode, "name", None) or mode or "NONE")


def _hidden(runner: Any) -> Iterator[tuple[str, str]]:
    config: Any = runner.vllm_config
    drafter: Any = getattr(runner, "speculator", None) or getattr(runner, "drafter", None)
    if config.cache_config.enable_prefix_caching:
        yield "rows of a cached prefix", "they are not computed again: the request that filled the cache has them"
    if not hasattr(drafter, "model"):
        return
    if getattr(drafter, "use_local_argmax_reduction", False):
        yield "drafted: draft_token, logits", "use_local_argmax_reduction: no logits are made of a whole vocabulary"
    if runner_name(runner) == "V2" and "FULL" in _graphs(config):
        where = "in steps that run as CUDA graphs; enforce_eager shows them"
        yield "drafted: hidden, draft_token, logits", where
        yield "drafted: state, but of depth 0 where it answers", where
        depths = int(drafter.num_speculative_steps)
        if depths > 3 and _one_graph(drafter):
            yield f"received, drafted: depths 2 to {depths - 2}", f"one graph runs all depths {where}"


def _one_graph(speculator: Any) -> bool:
    """Whether the draft's deeper forwards are captured as one; what says so had another name before vLLM 0.32."""
    names = ("supports_decode_metadata_update", "use_fused_multi_step_decode")
    return any(bool(getattr(speculator, name, False)) for name in names)

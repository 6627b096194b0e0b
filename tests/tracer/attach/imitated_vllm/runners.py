"""vLLM's two runners, imitated: what lies in which buffer when is as in `gpu/spec_decode/target_dependent_ar`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from imitated_vllm.story import PROMPTS, STALE, H, Host
from imitated_vllm.wheel import Wheel
from torch import Tensor

__all__ = ["MODES", "v1", "v2"]


def v1(wheel: Wheel, depth: int) -> Host:
    """The V1 runner: samples with -1 behind, drafts as Python."""
    host, file = Host(wheel, depth), "v1/worker/gpu_model_runner.py"

    def execute_model(runner: Any, given: Any) -> None:
        batch, output = host.batch, given.scheduler_output
        if batch is None:
            return
        runner.requests |= {one.req_id: one for one in output.scheduled_new_reqs}
        runner.input_batch, runner.input_ids = SimpleNamespace(req_ids=batch.names), SimpleNamespace(gpu=batch.tokens)
        runner.discard_request_mask = SimpleNamespace(np=np.array(batch.silent))
        verifies = wheel.record(
            "v1/spec_decode/metadata.py", "SpecDecodeMetadata", num_draft_tokens=batch.drafts.tolist()
        )
        runner.execute_model_state = wheel.record(
            file, "ExecuteModelState", scheduler_output=output, aux_hidden_states=batch.slots,
            spec_decode_metadata=verifies if batch.drafts.any() else None,
        )  # fmt: skip

    def sample(_runner: Any, _given: Any) -> SimpleNamespace:
        rows = [[*kept, *[-1] * (depth + 1 - len(kept))] for kept in host.batch.sampled]
        return SimpleNamespace(sampled_token_ids=torch.tensor(rows, dtype=torch.int32))

    def sample_tokens(runner: Any, _given: Any) -> None:
        batch = host.batch
        runner.execute_model_state = None
        runner._sample(batch.logits, None)
        starts = SimpleNamespace(query_start_loc_cpu=torch.tensor([0, *np.cumsum(batch.counts)]))
        drafts = runner.drafter.propose(
            num_speculative_tokens=depth, target_token_ids=batch.tokens, target_positions=batch.positions,
            target_hidden_states=torch.cat(batch.slots, -1), next_token_ids=torch.tensor(batch.following),
            token_indices_to_sample=batch.last, common_attn_metadata=starts, sampling_metadata=None,
        )  # fmt: skip
        host.texts.drafted = dict(zip(batch.names, drafts.tolist(), strict=True))

    def propose(drafter: Any, given: Any) -> Tensor:
        model, last = drafter.model, given.token_indices_to_sample
        states, positions = model.combine_hidden_states(given.target_hidden_states), given.target_positions
        tokens, drafts = given.target_token_ids.roll(-1), list[Tensor]()
        tokens[last] = given.next_token_ids.int()
        for step in range(depth):
            hidden, states = model.forward(input_ids=tokens, positions=positions, hidden_states=states)
            if step == 0:
                hidden, states, positions = hidden[last], states[last], positions[last]
            drafts.append(model.compute_logits(hidden).argmax(-1))
            tokens, positions = drafts[-1].int(), positions + 1
        return torch.stack(drafts, 1)

    acts = {"execute_model": execute_model, "sample_tokens": sample_tokens, "_sample": sample}
    positions = {"_get_positions": lambda _, given: host.batch.positions[: given.num_tokens]}
    host.runner = wheel.made(file, "GPUModelRunner", **acts, **positions)()
    host.runner.requests, host.runner.execute_model_state, host.runner.max_model_len = {}, None, 512
    for name in ("input_batch", "discard_request_mask", "input_ids"):
        setattr(host.runner, name, None)
    host.runner.drafter = wheel.made("v1/spec_decode/llm_base_proposer.py", "SpecDecodeBaseProposer", propose=propose)()
    host.runner.drafter.model = host.model
    return host


def v2(wheel: Wheel, depth: int, *, graphs: str = "") -> Host:
    """The V2 runner; `graphs`: none, one for each of the draft's forwards (single), or one for all deeper ones (fused).

    `host.seen` says whether the draft runs as the Python that can be hooked.
    """
    host, gpu = Host(wheel, depth), "v1/worker/gpu"
    padding, host.seen = 2 if graphs else 0, not graphs

    def padded(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, torch.full_like(tensor[:1], 1).expand(padding, *tensor.shape[1:])])

    def execute_model(runner: Any, given: Any) -> None:
        batch = host.batch
        if batch is None or given.dummy_run:
            return
        long = [len(PROMPTS[name]) for name in batch.names]
        starts = batch.positions[torch.tensor(np.cumsum([0, *batch.counts[:-1]]))].numpy()
        runner.execute_model_state = wheel.record(
            f"{gpu}/model_runner.py", "ExecuteModelState", hidden_states=None, num_spec_tokens_to_schedule=depth,
            aux_hidden_states=[padded(slot) for slot in batch.slots],
            input_batch=wheel.record(
                f"{gpu}/input_batch.py", "InputBatch", req_ids=batch.names, num_reqs=len(batch.names),
                num_scheduled_tokens=batch.counts, num_tokens=len(batch.tokens),
                num_tokens_after_padding=len(batch.tokens) + padding, num_draft_tokens=int(batch.drafts.sum()),
                num_draft_tokens_per_req=batch.drafts if batch.drafts.any() else None, prefill_len_np=np.array(long),
                num_computed_prefill_tokens_np=np.minimum(starts, long), is_prefilling_np=starts < np.array(long),
                input_ids=padded(batch.tokens), positions=padded(batch.positions),
            ),
        )  # fmt: skip

    def sample(runner: Any, given: Any) -> tuple[Any, Tensor, Tensor]:
        drafts = given.input_batch.num_draft_tokens
        output = (runner.rejection_sampler if drafts else runner.sampler)(host.batch.logits, given.input_batch)
        return output, output.num_sampled, output.num_rejected

    def sampled(_sampler: Any, given: Any) -> SimpleNamespace:
        batch, columns = host.batch, 1 + depth * bool(given.input_batch.num_draft_tokens)
        rows = [[*kept, *[STALE] * (columns - len(kept))] for kept in batch.sampled]
        counts = torch.tensor([len(kept) for kept in batch.sampled], dtype=torch.int32)
        told = {"sampled_token_ids": torch.tensor(rows), "num_sampled": counts, "num_rejected": batch.rejected}
        return wheel.record(f"{gpu}/sample/output.py", "SamplerOutput", **told)

    def sample_tokens(runner: Any, _given: Any) -> None:
        state, runner.execute_model_state = runner.execute_model_state, None
        if state is None:
            return
        _, counts, rejected = runner.sample(state.hidden_states, state.input_batch, None)
        drafts = runner.speculator.propose(
            state.input_batch, None, None, None, state.aux_hidden_states, counts, rejected, None, None, None, None,
            num_speculative_tokens=state.num_spec_tokens_to_schedule,
        )  # fmt: skip
        host.texts.drafted = dict(zip(host.batch.names, drafts.tolist(), strict=True))

    def propose(speculator: Any, given: Any) -> Tensor:
        batch, buffers, asked = host.batch, speculator.input_buffers, len(host.batch.names)
        rows, ends = len(batch.tokens), np.cumsum(batch.counts).tolist()
        states = speculator.model.combine_hidden_states(torch.cat(given.aux_hidden_states, -1))
        for start, end, last, token in zip([0, *ends], ends, batch.last.tolist(), batch.following, strict=False):
            assert end > last >= start
            buffers.input_ids[start:last], buffers.input_ids[last] = batch.tokens[start + 1 : last + 1], token
            buffers.positions[start : last + 1] = batch.positions[start : last + 1]
        speculator.last_token_indices[:asked] = batch.last
        speculator.hidden_states[: rows + padding] = states
        answer(speculator.prefill_cudagraph_manager, lambda: first(speculator, rows + padding, asked))
        if depth > 1:
            advance(speculator, asked, speculator.draft_tokens[:asked, 0])
            steps = range(1, depth)
            if graphs == "fused":
                answer(speculator.decode_cudagraph_manager, lambda: [deeper(speculator, asked, step) for step in steps])
            else:
                for step in steps:
                    answer(speculator.decode_cudagraph_manager, lambda step=step: deeper(speculator, asked, step))
        return speculator.draft_tokens[:asked]

    def answer(manager: Any, act: Callable[[], Any]) -> None:
        manager.run_fullgraph(act) if graphs else act()

    def run(speculator: Any, rows: int) -> tuple[Tensor, Tensor]:
        buffers = speculator.input_buffers
        given = {"input_ids": buffers.input_ids[:rows], "positions": buffers.positions[:rows]}
        given["hidden_states"] = speculator.hidden_states[:rows]
        return speculator.model.forward(**given) if host.seen else host.math.forward(SimpleNamespace(**given))

    def best(speculator: Any, hidden: Tensor) -> Tensor:
        if host.seen:
            return speculator.model.compute_logits(hidden).argmax(-1)
        return host.math.logits(SimpleNamespace(hidden_states=hidden)).argmax(-1)

    def first(speculator: Any, rows: int, asked: int) -> None:
        last = speculator.last_token_indices[:asked]
        positions = speculator.input_buffers.positions[last]
        hidden, states = run(speculator, rows)
        speculator.draft_tokens[:asked, 0] = best(speculator, hidden[last])
        speculator.hidden_states[:asked] = states[last]
        speculator.input_buffers.positions[:asked] = positions

    def advance(speculator: Any, asked: int, tokens: Tensor) -> None:
        speculator.input_buffers.input_ids[:asked] = tokens
        speculator.input_buffers.positions[:asked] += 1

    def deeper(speculator: Any, asked: int, step: int) -> None:
        hidden, states = run(speculator, asked)
        speculator.draft_tokens[:asked, step] = tokens = best(speculator, hidden)
        if step < depth - 1:
            advance(speculator, asked, tokens)
            speculator.hidden_states[:asked] = states

    acts = {"execute_model": execute_model, "sample_tokens": sample_tokens, "sample": sample}
    runner = host.runner = wheel.made(f"{gpu}/model_runner.py", "GPUModelRunner", **acts)()
    runner.sampler = wheel.made(f"{gpu}/sample/sampler.py", "Sampler", __call__=sampled)()
    rejecting = f"{gpu}/spec_decode/rejection_sampler.py"
    runner.rejection_sampler = wheel.made(rejecting, "RejectionSampler", __call__=sampled)()
    runner.execute_model_state = runner.adaptive_verification = runner.pcp_manager = runner.batch_sharder = None
    runner.max_model_len = 512
    drafting = f"{gpu}/spec_decode/target_dependent_ar/speculator.py"
    speculator = runner.speculator = wheel.made(drafting, "TargetDependentARSpeculator", propose=propose)()
    speculator.model, speculator.num_speculative_steps, speculator.use_local_argmax_reduction = host.model, depth, False
    speculator.input_buffers = wheel.record(
        f"{gpu}/input_batch.py", "InputBuffers",
        input_ids=torch.full((64,), STALE, dtype=torch.int32), positions=torch.full((64,), STALE),
    )  # fmt: skip
    speculator.hidden_states, speculator.draft_tokens = torch.zeros(64, H), torch.full((8, depth), STALE)
    speculator.last_token_indices = torch.zeros(8, dtype=torch.int64)
    captured = wheel.made(f"{gpu}/cudagraph_utils.py", "CudaGraphManager", run_fullgraph=lambda _, given: given.desc())
    for name in ("prefill_cudagraph_manager", "decode_cudagraph_manager"):
        setattr(speculator, name, captured())
        getattr(speculator, name).breakable_cg_runner = None
    return host


MODES: dict[str, Callable[[Any, int], Host]] = {
    "V1": v1,
    "V2, eager": v2,
    "V2, a graph for each": lambda wheel, depth: v2(wheel, depth, graphs="single"),
    "V2, a graph for all": lambda wheel, depth: v2(wheel, depth, graphs="fused"),
}

"""Runs EAGLE-3 drafts through SGLang's own draft classes, in fp32 on the CPU: `python run_sglang.py CASES`.

Real, from the unmodified wheel: how config.json is read, the choice and construction of the model class, its
load_weights, the target from whose table and head the draft is given its own (EagleDraftWorker.init_lm_head), the
draft's forward with its LogitsProcessor, the pools of requests and of keys and values, the torch_native attention
backend, and the map from draft ids to tokens that init_lm_head leaves.

Not real: the scheduler and the worker's loop. Batches are made here as the worker makes them; features and tokens are
the case's. Depth 0 runs as a draft extend, where SGLang scores all rows of a request and not only its last (an MLA
draft's attention is then in its absorbed form, as in DECODE). Every base row goes on from there as a request of its own
that ends at it: one DECODE row for each depth, above the depth-0 rows up to the base and its own branch. SGLang refuses
torch_native for the draft worker that is left out here; with a GPU it has other attention kernels. What only a GPU has
is declared and never run (stand_ins/sglang_cpu.py). An MLA draft is lent two more things: waiting for a GPU does
nothing, and its rotary embedding is chosen by the function that every other device uses: a CPU's knows YaRN only.

A case.json may hold `window`: --speculative-draft-window-size.

Shapes: R requests, T base rows, H draft width, V draft vocabulary.
"""
# ruff: noqa: E402

import json
import logging
import os
import sys
import tempfile
import traceback
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# the last one: else all model files are imported, to find three of them
os.environ.update(SGLANG_USE_CPU_ENGINE="1", TORCHDYNAMO_DISABLE="1", SGLANG_EXTERNAL_MODEL_PACKAGE="stand_ins")

from stand_ins.sglang_cpu import install

install()
warnings.filterwarnings("ignore")

import torch
from asked import clear, folders, write_answer, write_loaded, write_refusal
from safetensors.torch import load_file
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import AttentionArch, ModelConfig
from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.model_runner_components.attention_backend_setup import (
    configure_aux_hidden_state_capture,
)
from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import (
    SpecAuxHiddenStateConfig,
    _resolve_eagle_aux_hidden_state,
)
from sglang.srt.model_loader import get_model
from sglang.srt.models import deepseek_v2, kimi_k25_eagle3, llama, llama_eagle3
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput, EagleDraftInput
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch import Tensor, nn

for module in (llama, llama_eagle3, kimi_k25_eagle3):
    entries = module.EntryClass if isinstance(module.EntryClass, list) else [module.EntryClass]
    ModelRegistry.models.update({entry.__name__: entry for entry in entries})

EAGLE3 = SpeculativeAlgorithm.from_string("EAGLE3")

# what an MLA draft is lent
deepseek_v2.get_rope_wrapper = lambda width, *, device, **settings: get_rope(width, **settings)
torch.cuda.synchronize = lambda *_: None


class Notes(logging.Handler):
    """What SGLang and transformers log as warnings from here on, but for what they say of the server's arguments."""

    loggers = logging.getLogger("sglang"), logging.getLogger("transformers")

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        for logger in self.loggers:
            logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith(("sglang.srt.arg_groups", "sglang.srt.models.registry")):
            self.lines.append(f"{record.name}: {record.getMessage()}")

    def close(self) -> None:
        for logger in self.loggers:
            logger.removeHandler(self)
        super().close()


def configure(case: Path, *, depths: int, window: int | None) -> ServerArgs:
    """The server's arguments for this draft and target, as the command line would give them."""
    arguments = ServerArgs(
        model_path=str(case / "target"),
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        skip_tokenizer_init=True,
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=str(case / "draft"),
        speculative_num_steps=depths,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=depths + 1,
        speculative_draft_window_size=window,
    )
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    if not torch.distributed.is_initialized():
        meeting = f"file://{tempfile.mkdtemp()}/meeting"
        init_distributed_environment(
            backend="gloo", world_size=1, rank=0, local_rank=0, distributed_init_method=meeting
        )
        initialize_model_parallel()
        initialize_dp_attention(server_args=arguments)
    return arguments


def load(config: ModelConfig) -> nn.Module:
    return get_model(model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu"))


def pair(case: Path, arguments: ServerArgs) -> tuple[nn.Module, ModelConfig, Tensor | None]:
    """The draft, with the target's table and head where SGLang gives it them, and the tokens that its ids stand for.

    What its loaders ended up with is told; layer ids are resolved and set on the target as a server does it.
    """
    target_config = ModelConfig.from_server_args(arguments)
    draft_config = ModelConfig.from_server_args(
        arguments,
        model_path=arguments.speculative_draft_model_path,
        is_draft_model=True,
        context_length=target_config.context_len,
    )
    target, draft = load(target_config), load(draft_config)
    runner = SimpleNamespace(model=target, model_config=target_config, load_config=LoadConfig())
    worker = SimpleNamespace(
        target_worker=SimpleNamespace(model_runner=runner),
        draft_runner=SimpleNamespace(model=draft),
        speculative_algorithm=EAGLE3,
    )
    worker._resolve_shared_embed_and_head = partial(EagleDraftWorker._resolve_shared_embed_and_head, worker)
    EagleDraftWorker.init_token_map(worker)
    EagleDraftWorker.init_lm_head(worker)
    capture = SpecAuxHiddenStateConfig()
    _resolve_eagle_aux_hidden_state(
        config=capture, server_args=arguments, model_config=target_config, spec_algorithm=EAGLE3, is_draft_worker=False
    )
    configure_aux_hidden_state_capture(
        model=target,
        eagle_use_aux_hidden_state=capture.eagle_use_aux_hidden_state,
        eagle_aux_hidden_state_layer_ids=capture.eagle_aux_hidden_state_layer_ids,
        dflash_use_aux_hidden_state=False,
        dflash_target_layer_ids=None,
        is_dspark=False,
    )
    write_loaded(
        case,
        boundaries=[b for b in target.model.layers_to_capture if 0 <= b < len(target.model.layers)],
        embedding_shared=draft.model.embed_tokens.weight.data_ptr() == target.model.embed_tokens.weight.data_ptr(),
        head_shared=draft.lm_head.weight.data_ptr() == target.lm_head.weight.data_ptr(),
        tokens=worker.hot_token_id,
    )
    return draft, draft_config, worker.hot_token_id


class Rows:
    """The pools of one case: where each base row's request keeps its rows, and SGLang's attention over them.

    Base row t of a request whose first row is f reads the slots of f..t, then those of its own branch.
    """

    def __init__(self, config: ModelConfig, lengths: list[int], depths: int) -> None:
        self.first = [sum(lengths[:r]) for r, n in enumerate(lengths) for _ in range(n)]
        rows, layers = len(self.first), config.hf_config.num_hidden_layers
        self.requests = ReqToTokenPool(rows, max(lengths) + depths, "cpu", enable_memory_saver=False)
        shared: dict[str, Any] = {"page_size": 1, "dtype": torch.float32, "device": "cpu", "enable_memory_saver": False}
        size = rows * depths + 1
        if config.attention_arch == AttentionArch.MLA:
            lora, rope = config.kv_lora_rank, config.qk_rope_head_dim
            self.slots = MLATokenToKVPool(size, kv_lora_rank=lora, qk_rope_head_dim=rope, layer_num=layers, **shared)
        else:
            heads = config.get_num_kv_heads(1)
            self.slots = MHATokenToKVPool(size, head_num=heads, head_dim=config.head_dim, layer_num=layers, **shared)
        for t, f in enumerate(self.first):  # slot 0 is for padding; request 0, too
            deeper = [1 + d * rows + t for d in range(1, depths)]
            read = torch.tensor([*range(1 + f, 2 + t), *deeper], dtype=torch.int32)
            self.requests.req_to_token[1 + t, : len(read)] = read
        runner = SimpleNamespace(device="cpu", req_to_token_pool=self.requests, token_to_kv_pool=self.slots)
        self.backend = TorchNativeAttnBackend(runner)

    def run(self, draft: nn.Module, batch: ForwardBatch) -> Any:
        self.backend.init_forward_metadata(batch)
        with torch.no_grad(), forward_context(ForwardContext(attn_backend=self.backend), forward_batch=batch):
            return draft.forward(batch.input_ids, batch.positions, batch)


def extend(lengths: list[int], tokens_T: Tensor, features: Tensor) -> ForwardBatch:
    """Depth 0: every row of every request in one batch, as after a verification."""
    n_R = torch.tensor(lengths)
    ends_R = n_R.cumsum(0)
    positions_T = torch.cat([torch.arange(n) for n in lengths])
    return ForwardBatch(
        forward_mode=ForwardMode.DRAFT_EXTEND_V2,
        batch_size=len(lengths),
        input_ids=tokens_T,
        req_pool_indices=ends_R,  # the request of a last row, counted from 1
        seq_lens=n_R,
        seq_lens_cpu=n_R,
        seq_lens_sum=int(n_R.sum()),
        out_cache_loc=torch.arange(len(tokens_T)) + 1,
        positions=positions_T,
        mrope_positions=positions_T.expand(3, -1),
        extend_num_tokens=len(tokens_T),
        extend_seq_lens=n_R,
        extend_seq_lens_cpu=lengths,
        extend_prefix_lens=torch.zeros_like(n_R),
        extend_prefix_lens_cpu=[0] * len(lengths),
        extend_start_loc=ends_R - n_R,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        spec_algorithm=EAGLE3,
        spec_info=EagleDraftExtendInput(hidden_states=features),
    )


def decode(rows: Rows, depth: int, tokens_T: Tensor, states_TH: Tensor) -> ForwardBatch:
    """One row below each base row."""
    base_T = torch.arange(len(tokens_T))
    positions_T = base_T - torch.tensor(rows.first) + depth
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=len(tokens_T),
        input_ids=tokens_T,
        req_pool_indices=base_T + 1,
        seq_lens=positions_T + 1,
        seq_lens_cpu=positions_T + 1,
        seq_lens_sum=int((positions_T + 1).sum()),
        out_cache_loc=1 + depth * len(tokens_T) + base_T,
        positions=positions_T,
        mrope_positions=positions_T.expand(3, -1),
        capture_hidden_mode=CaptureHiddenMode.LAST,
        spec_algorithm=EAGLE3,
        spec_info=EagleDraftInput(hidden_states=states_TH, num_tokens_per_req=1, num_tokens_for_logprob_per_req=1),
    )


def compute(case: Path) -> dict[str, Tensor]:
    settings = json.loads((case / "case.json").read_text())
    depths: int = settings["depths"]
    draft, config, tokens_V = pair(case, configure(case, depths=depths, window=settings.get("window")))
    inputs = load_file(case / "inputs.safetensors")
    lengths: list[int] = inputs["lengths"].tolist()
    rows = Rows(config, lengths, depths)
    starts_T = torch.tensor([f + depths * r for r, n in enumerate(lengths) for f in [sum(lengths[:r])] * n])
    at_T = torch.cat([torch.arange(n) for n in lengths]) + starts_T  # where base row t's own token stands in the texts

    seen: dict[str, Any] = {}
    draft.model.fc.register_forward_hook(lambda *a: seen.update(fused=a[2][0] if isinstance(a[2], tuple) else a[2]))
    draft.model.register_forward_hook(lambda *a: seen.update(hidden=a[2][0]))
    made: dict[str, Tensor] = {}
    states = inputs["features"]
    for depth in range(depths):
        tokens_T = inputs["texts"][at_T + 1 + depth]
        batch = decode(rows, depth, tokens_T, states) if depth else extend(lengths, tokens_T, states)
        out = rows.run(draft, batch)
        if not depth and "fused" in seen:
            made["fused"] = seen["fused"]
        states = out.hidden_states
        best_T = out.next_token_logits.argmax(-1)
        made |= {
            f"rows.{depth}": torch.arange(len(tokens_T)),
            f"tokens.{depth}": tokens_T,
            f"positions.{depth}": batch.positions,
            f"hidden.{depth}": seen["hidden"],
            f"state.{depth}": states,
            f"logits.{depth}": out.next_token_logits,
            f"choice.{depth}": best_T if tokens_V is None else tokens_V[best_T],
        }
    return {name: tensor.clone().contiguous() for name, tensor in made.items()}


def run(case: Path) -> None:
    clear(case)
    notes = Notes()
    try:
        outputs = compute(case)
    except Exception as error:
        traceback.print_exc()
        write_refusal(case, error)
    else:
        write_answer(case, outputs, notes.lines)
    finally:
        notes.close()


if __name__ == "__main__":
    for folder in folders(Path(sys.argv[1])):
        run(folder)
        print(folder.name, "refused" if (folder / "refused.txt").exists() else "ran", flush=True)

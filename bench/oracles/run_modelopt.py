"""What ModelOpt 0.47.0 trains as EAGLE-3 drafts: tiny pairs made, run and exported by its own code.

    ENV/bin/python bench/oracles/run_modelopt.py FOLDER

ModelOpt has no loader for what it exports, so here the oracle makes the cases: FOLDER/NAME/ gets target/, draft/,
inputs.safetensors, outputs.safetensors and case.json as the other oracles' cases have them. Real: the conversion of a
transformers model (`mtsp.convert`) with the architecture's and the export's defaults, the hooks that capture its
features, the loading of a draft vocabulary, the training forward with its own shift, steps, masks and cache, and the
exporter. Values are taken by hooks on its modules; the token that a row takes is told by its embedding, which is a row
of the table. `choice` goes through `_map_logits_to_draft_vocab`, the training's own reading of d2t. There is one step
more than there are depths, so that what the last depth hands on is seen where it is taken. Both requests are one batch,
padded on the right.

Not real are the weights, which are random, and that nothing is compiled (`eagle_use_torch_compile`).

Beyond what other oracles write: `fed.D` [N, H], what enters the draft's first layer, `attended.D` [N, 2H], what its
query projection takes, and `streams` [L + 1, N, F], the target's residual stream at every boundary, each by base row.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import modelopt.torch.speculative as mtsp
import torch
import transformers
from modelopt.torch.export import export_speculative_decoding
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

DEPTHS, LENGTHS = 4, (17, 6)
VOCAB, LAYERS = 160, 8
ARCHITECTURE = {
    "draft_vocab_size": 96,
    "head_dim": 32,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
FIRST_NORM = "layers.0.input_layernorm.weight"


@dataclass(frozen=True)
class Case:
    """A draft: what its architecture has otherwise, and the gain of its first norm where that is one for all."""

    architecture: dict[str, Any] = field(default_factory=dict)
    gain: float | None = None


CASES = {
    "plain": Case(),
    "constant-gain": Case(gain=2.0),
    "two-layers": Case({"num_hidden_layers": 2}),
    "full-vocabulary": Case({"draft_vocab_size": VOCAB}),
    "attention-bias": Case({"attention_bias": True}),
    "head-dim": Case({"head_dim": 48}),
    "layer-ids": Case({"eagle_aux_hidden_state_layer_ids": [0, 3, 6]}),
    "unsorted-ids": Case({"eagle_aux_hidden_state_layer_ids": [6, 0, 3]}),
    "theta": Case({"rope_theta": 300, "rope_scaling": {"rope_type": "default", "rope_theta": 300}}),
}


class Seen:
    """What hooks saw, by name, in the order of the steps; tensors are [requests, positions, ...]."""

    def __init__(self) -> None:
        self.found: dict[str, list[Tensor]] = {}

    def __getitem__(self, name: str) -> list[Tensor]:
        return self.found[name]

    def keep(self, name: str, value: Tensor) -> None:
        self.found.setdefault(name, []).append(value.detach().clone())

    def taken(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        """A hook that keeps what a module takes."""
        return lambda _module, args: self.keep(name, args[0])

    def made(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        """A hook that keeps what a module returns."""
        return lambda _module, _args, out: self.keep(name, out)

    def _draft(self, _module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        self.keep("embeddings", args[1])
        self.keep("positions", kwargs["position_ids"])

    def watch(self, model: nn.Module) -> None:
        """Hook the target's layers and the draft's modules."""
        draft, first = model.eagle_module, model.eagle_module.layers[0]
        for module in (*model.model.layers, model.model.norm):
            module.register_forward_pre_hook(self.taken("streams"))
        draft.register_forward_pre_hook(self._draft, with_kwargs=True)
        draft.fc.register_forward_pre_hook(self.taken("features"))
        draft.fc.register_forward_hook(self.made("fused"))
        first.register_forward_pre_hook(self.taken("fed"))
        first.self_attn.q_proj.register_forward_pre_hook(self.taken("attended"))
        head = draft.lm_head if hasattr(draft, "lm_head") else model.lm_head
        head.register_forward_pre_hook(self.taken("hidden"))
        head.register_forward_hook(self.made("logits"))


def scatter(module: nn.Module) -> None:
    """Random weights under which all that is computed shows: gains far from one, biases as large as what they go to."""
    for name, weight in module.named_parameters():
        if "norm" in name:
            weight.uniform_(0.5, 1.5)
        elif "embed_tokens" in name or name.endswith(".bias"):
            weight.normal_()
        else:
            weight.normal_(std=weight.shape[-1] ** -0.5)


def make_target(folder: Path) -> LlamaForCausalLM:
    """A random target of a few layers, as transformers saves and loads it."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=256, rms_norm_eps=1e-5, tie_word_embeddings=False,
    )  # fmt: skip
    target = LlamaForCausalLM(config)
    scatter(target)
    target.save_pretrained(folder / "target")
    return LlamaForCausalLM.from_pretrained(folder / "target")


def make_draft(model: LlamaForCausalLM, case: Case, folder: Path) -> None:
    """Turn a target into ModelOpt's model of both, with a random draft whose vocabulary is in no order."""
    architecture = {**ARCHITECTURE, **case.architecture}
    config = {
        "eagle_architecture_config": architecture,
        "eagle_ttt_steps": DEPTHS + 1,
        "eagle_use_torch_compile": False,
    }
    mtsp.convert(model, [("eagle", config)])
    scatter(model.eagle_module)
    if case.gain is not None:
        model.eagle_module.get_parameter(FIRST_NORM).fill_(case.gain)
    ids = torch.randperm(VOCAB)[: architecture["draft_vocab_size"]]
    torch.save(ids - torch.arange(len(ids)), folder / "d2t.pt")
    mtsp.plugins.HFEagleModel.load_draft_vocab_cache(model, str(folder / "d2t.pt"))
    (folder / "d2t.pt").unlink()


def make_batch(texts: list[Tensor]) -> dict[str, Tensor]:
    """Requests padded on the right to the longest."""
    ids = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    lengths = torch.tensor([len(text) for text in texts])
    return {"input_ids": ids, "attention_mask": torch.arange(ids.shape[1]) < lengths[:, None]}


def to_tokens(rows: Tensor, table: Tensor) -> Tensor:
    """Which rows of the embedding these are, bit for bit."""
    distances, tokens = torch.cdist(rows, table, compute_mode="donot_use_mm_for_euclid_dist").min(-1)
    assert not distances.any(), "a row that is no token's embedding"
    return tokens


def choices(model: nn.Module, logits: Tensor) -> Tensor:
    """The tokens of the best scores, as training maps one vocabulary to the other."""
    best = logits.argmax(-1)
    if model.eagle_config.draft_vocab_size == model.eagle_config.vocab_size:
        return best
    return model._map_logits_to_draft_vocab(torch.arange(VOCAB)[None, None])[0, 0][best]


def collect(model: nn.Module, seen: Seen) -> dict[str, Tensor]:
    """Outputs, by base row: ModelOpt leaves tokens and positions where they are, and moves the state by one a step."""
    requests = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    bases = torch.cat([torch.arange(length) for length in LENGTHS])

    def at(name: str, depth: int, step: int) -> Tensor:
        value = seen[name][step]
        return value.expand(len(LENGTHS), *value.shape[1:])[requests, bases + depth].contiguous()

    for name in ("hidden", "logits"):  # of a head that is the target's, without what the target scored
        seen.found[name] = seen[name][-DEPTHS - 1 :]
    streams = [at("streams", 0, boundary) for boundary in range(LAYERS + 1)]
    out = {"fused": at("fused", 0, 0), "streams": torch.stack(streams)}
    for depth in range(DEPTHS):
        taken = {name: at(name, depth, depth) for name in ("positions", "fed", "attended", "hidden", "logits")}
        taken["rows"] = torch.arange(len(bases))
        taken["tokens"] = to_tokens(at("embeddings", depth, depth), model.model.embed_tokens.weight)
        taken["state"] = at("fed", depth + 1, depth + 1)
        taken["choice"] = choices(model, taken["logits"])
        out |= {f"{name}.{depth}": value for name, value in taken.items()}
    return out


@torch.no_grad()
def run(case: Case, folder: Path) -> None:
    """Make a pair, run a training forward, export, and write what went in and came out."""
    torch.manual_seed(20260101)
    model = make_target(folder)
    make_draft(model, case, folder)
    texts = [torch.randint(0, VOCAB, (length + DEPTHS,)) for length in LENGTHS]
    seen = Seen()
    seen.watch(model)
    model.train()(**make_batch(texts))
    export_speculative_decoding(model, export_dir=folder / "draft")
    outputs = collect(model, seen)
    spans = zip(seen["features"][0], LENGTHS, strict=True)
    inputs = {
        "lengths": torch.tensor(LENGTHS),
        "texts": torch.cat(texts),
        "features": torch.cat([rows[:length] for rows, length in spans]),
    }
    save_file(inputs, folder / "inputs.safetensors")
    save_file(outputs, folder / "outputs.safetensors")
    (folder / "case.json").write_text(json.dumps({"depths": DEPTHS}))


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for name, case in CASES.items():
        began = time.perf_counter()
        folder = Path(sys.argv[1]) / name
        folder.mkdir(parents=True, exist_ok=True)
        run(case, folder)
        print(f"{name}: ran ({time.perf_counter() - began:.2f} s)", flush=True)


if __name__ == "__main__":
    main()

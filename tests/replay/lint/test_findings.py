"""Every kind of finding: a draft that provokes it, and one as near to it as can be that does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from spectrace.replay.lint.finding import CODES
from spectrace.replay.lint.lint import lint_draft
from spectrace.replay.profiles.known import profile_named

Break = Callable[[Any], object]
IDS, NESTED = "eagle_aux_hidden_state_layer_ids", "eagle_config.eagle_aux_hidden_state_layer_ids"
FC, HEAD, EMBEDDING = "fc.weight", "lm_head.weight", "embed_tokens.weight"
UP, GATE, NORM = "midlayer.mlp.up_proj.weight", "midlayer.mlp.gate_proj.weight", "midlayer.input_layernorm.weight"


def put(key: str, value: object) -> Break:
    return lambda pair: pair.put(key, value)


def lose(name: str) -> Break:
    return lambda pair: pair.tensors.pop(name)


def both(*each: Break) -> Break:
    return lambda pair: [one(pair) for one in each]


def change(name: str, made: Callable[[torch.Tensor], torch.Tensor]) -> Break:
    return lambda pair: pair.tensors.update({name: made(pair.tensors[name])})


def add(name: str, tensor: torch.Tensor) -> Break:
    return lambda pair: pair.tensors.update({name: tensor})


def write(name: str, content: bytes) -> Break:
    return lambda pair: pair.files.update({name: content})


def nothing(_: Any) -> None:
    """The draft as it is."""


def target(**values: object) -> Break:
    return lambda pair: pair.target_config.update(values)


def without_t2d(one: Break) -> Break:
    return both(lose("t2d"), one)


def own_rows(pair: Any) -> None:
    """A head of the target's own rows, as trainers start one."""
    tokens = pair.tensors["d2t"] + torch.arange(len(pair.tensors["d2t"]))
    pair.tensors[HEAD] = pair.target_tensors[HEAD][tokens].clone()


def other_rows(pair: Any) -> None:
    own_rows(pair)
    pair.tensors[HEAD] = pair.tensors[HEAD].roll(5, 0)


def all_tokens(pair: Any) -> None:
    """A draft of the whole vocabulary, with a table."""
    pair.put("draft_vocab_size", 128)
    pair.tensors[HEAD] = pair.target_tensors[HEAD].clone()
    pair.tensors["d2t"] = torch.zeros(128, dtype=torch.int64)
    pair.tensors.pop("t2d")


def of_modelopt(gain: torch.Tensor) -> Break:
    """ModelOpt's layout, with such a gain in the norm that it applies twice."""

    def apply(pair: Any) -> None:
        pair.rename("midlayer.", "layers.0.")
        pair.put(IDS, None)
        pair.put("eagle_config", {IDS: [-1, 2, 4], "use_aux_hidden_state": True, "use_last_layernorm": True})
        pair.tensors["layers.0.input_layernorm.weight"] = gain.bfloat16()

    return apply


def copied(pair: Any) -> None:
    pair.tensors[EMBEDDING] = pair.target_tensors["model.embed_tokens.weight"].clone()


def for_sglang(*each: Break) -> Break:
    """Such a draft, with ids where SGLang reads them."""
    return both(lose(EMBEDDING), put(IDS, None), put(NESTED, [-1, 2, 4]), *each)


def second_layer(norm: str) -> Break:
    """A second layer, whose norm is called so."""

    def apply(pair: Any) -> None:
        pair.put("num_hidden_layers", 2)
        held = {name: one for name, one in pair.tensors.items() if name.startswith("midlayer.")}
        for name, one in held.items():
            narrow = one[:, :80] if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")) else one
            pair.tensors[name.replace("midlayer", "layers.1")] = narrow + 0.01 * torch.randn(narrow.shape).bfloat16()
        pair.tensors.pop(f"layers.1.{'hidden_norm' if norm == 'input_layernorm' else 'input_layernorm'}.weight")

    return apply


SGLANG, ROWS = "sglang==0.5.23", {"q": 96, "k": 48, "v": 48}
NOISE = torch.randn(128, 80, generator=torch.Generator().manual_seed(9)).bfloat16()
KINDS: dict[str, tuple[Break, Break, str]] = {
    "unreadable": (put("hidden_act", "gelu"), put("hidden_act", "silu"), ""),
    "not-eagle3": (put("architectures", ["MedusaModel"]), put("architectures", ["LlamaForCausalLMEagle3"]), ""),
    "quantised": (
        put("quantization_config", {"quant_method": "gptq", "bits": 4}),
        put("quantization_config", {"quant_method": "fp8"}), "",
    ),
    "files": (
        write("draft/other.safetensors", save({FC: torch.zeros(80, 240)})),
        write("draft/other.safetensors", save({"other": torch.zeros(2, 2)})), "",
    ),
    "files-passed-over": (write("draft/pytorch_model.bin", b"x"), write("draft/training_args.bin", b"x"), ""),
    "tensor-misnamed": (lambda pair: pair.rename("fc.", "project."), nothing, ""),
    "tensor-missing": (lose(NORM), nothing, ""),
    "tensor-unused": (add("verifier_norm.weight", torch.ones(80)), nothing, ""),
    "tensor-shape": (change(UP, lambda one: one[:-1]), nothing, ""),
    "tensor-values": (
        change(FC, lambda one: one.index_fill(0, torch.tensor([1]), torch.inf)), change(FC, lambda one: one * 10), "",
    ),
    "tensor-unwritten": (change(FC, lambda one: one * 1e8), change(FC, lambda one: one * 100), ""),
    "tensor-constant": (change(FC, torch.ones_like), change(NORM, torch.ones_like), ""),
    "tensor-twice": (
        lambda pair: pair.tensors.update({UP: pair.tensors[GATE].clone()}),
        lambda pair: pair.tensors.update({UP: pair.tensors[GATE] * 1.01}), "",
    ),
    "d2t-missing": (without_t2d(lose("d2t")), nothing, ""),
    "d2t-absolute": (change("d2t", lambda one: one + torch.arange(len(one))), nothing, ""),
    "d2t-zero": (change("d2t", torch.zeros_like), all_tokens, ""),
    "d2t-shifted": (change("d2t", lambda one: one.roll(1)), nothing, ""),
    "d2t-range": (change("d2t", lambda one: one + 1000), nothing, ""),
    "d2t-broken": (
        without_t2d(change("d2t", lambda one: one.index_fill(0, torch.tensor([7]), int(one[6]) - 1))), lose("t2d"), "",
    ),
    "d2t-whole": (both(all_tokens, change("d2t", lambda one: one + 1)), all_tokens, ""),
    "head-missing": (lose(HEAD), both(all_tokens, lose(HEAD)), ""),
    "head-rows": (other_rows, own_rows, ""),
    "wiring-fit": (put(IDS, [0, 3]), nothing, ""),
    "wiring-range": (put(IDS, [0, 3, 9]), put(IDS, [0, 3, 8]), ""),
    "wiring-twice": (put(IDS, [0, 3, 3]), nothing, ""),
    "wiring-unsorted": (put(IDS, [3, 0, 5]), nothing, ""),
    "wiring-absent": (put(IDS, None), nothing, ""),
    "wiring-contradiction": (put(NESTED, [0, 3, 4]), put(NESTED, [-1, 2, 4]), ""),
    "wiring-convention": (
        both(target(num_hidden_layers=32), put(IDS, [1, 15, 28])),
        both(target(num_hidden_layers=32), put(IDS, [2, 16, 29])), "",
    ),
    "wiring-unread": (both(for_sglang(), put(NESTED, None), put(IDS, [0, 3, 5])), for_sglang(), SGLANG),
    "wiring-misread": (both(put(IDS, None), put(NESTED, [-1, 2, 4])), nothing, "vllm V1"),
    "wiring-graphs": (for_sglang(put(NESTED, [0, 2, 4])), for_sglang(put(NESTED, [1, 3, 4])), "sglang==0.5.9"),
    "engine-refuses": (
        both(put("architectures", ["Eagle3Qwen3ForCausalLM"]), *(
            add(f"midlayer.self_attn.{one}_norm.weight", torch.ones(24)) for one in "qk")),
        for_sglang(), SGLANG,
    ),
    "engine-unwritten": (
        for_sglang(put("attention_bias", True), *(
            add(f"midlayer.self_attn.{one}_proj.bias", torch.randn(rows)) for one, rows in ROWS.items()
        )),
        for_sglang(), SGLANG,
    ),
    "engine-replaces": (
        both(put(IDS, None), put(NESTED, [-1, 2, 4])),
        lambda pair: [for_sglang()(pair), copied(pair)], SGLANG,
    ),
    "engine-ignores": (for_sglang(put("norm_before_residual", True)), for_sglang(), SGLANG),
    "engine-drops": (for_sglang(second_layer("input_layernorm")), for_sglang(second_layer("hidden_norm")), SGLANG),
    "switch-untrained": (put("norm_before_residual", True), put("norm_before_residual", False), ""),
    "norm-twice": (of_modelopt(torch.linspace(0.5, 1.5, 80)), of_modelopt(torch.full((80,), 0.7)), ""),
    "target-unread": (lambda pair: pair.target_tensors.clear(), nothing, ""),
    "target-differs": (target(hidden_size=96), nothing, ""),
    "tokenizer-differs": (
        both(write("draft/tokenizer.json", b"{}"), write("target/tokenizer.json", b"{ }")),
        both(write("draft/tokenizer.json", b"{}"), write("target/tokenizer.json", b"{}")), "",
    ),
    "embedding-unrelated": (add(EMBEDDING, NOISE), nothing, ""),
    "embedding-own": (nothing, lose(EMBEDDING), ""),
    "embedding-copied": (
        copied, nothing, "",
    ),
    "rope-differs": (
        put("rope_theta", 1e6),
        lambda pair: pair.target_config.update(
            rope_parameters=pair.config["rope_scaling"] | {"rope_theta": pair.config["rope_theta"]}), "",
    ),
    "context-shorter": (put("max_position_embeddings", 256), put("max_position_embeddings", 512), ""),
    "dtype-differs": (change(FC, torch.Tensor.float), nothing, ""),
    "field-unread": (put("aux_loss", 0.1), put("use_cache", False), ""),
    "field-assumed": (put("num_key_value_heads", None), nothing, ""),
    "odd": (
        both(put("layer_types", ["sliding_attention"]), put("sliding_window", 8)),
        put("sliding_window", None), "",
    ),
}  # fmt: skip


def codes(breaks: Break, engine: str, toy: Any, folder: Path) -> list[str]:
    pair = toy("gqa")
    breaks(pair)
    draft, target = pair.save(folder)
    profile = profile_named(engine) if engine else None
    return [one.code for one in lint_draft(draft, target_folder=target, profile=profile).findings]


def test_every_kind_has_its_two_drafts() -> None:
    assert KINDS.keys() == CODES.keys()


@pytest.mark.parametrize("code", CODES)
def test_a_finding_is_made_where_it_is_due(code: str, toy: Any, tmp_path: Path) -> None:
    provokes, _, engine = KINDS[code]
    assert code in codes(provokes, engine, toy, tmp_path)


@pytest.mark.parametrize("code", CODES)
def test_a_finding_is_not_made_where_it_is_not_due(code: str, toy: Any, tmp_path: Path) -> None:
    _, spares, engine = KINDS[code]
    assert code not in codes(spares, engine, toy, tmp_path)


def test_findings_are_whole_sentences_with_something_to_do(toy: Any, tmp_path: Path) -> None:
    for code, (provokes, _, engine) in KINDS.items():
        pair = toy("gqa")
        provokes(pair)
        draft, target = pair.save(tmp_path / code)
        for one in lint_draft(draft, target_folder=target, profile=profile_named(engine) if engine else None).findings:
            assert one.title and one.evidence and all(one.evidence) and one.consequence and one.fix, one

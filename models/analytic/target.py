"""The target of an analytic pair: a checkpoint that transformers loads, every weight of it written by hand.

Layer b puts the code of boundary b + 1 into the register, in place of the code of b, and into a block of its own. The
last layer's attention also fetches the codes of earlier tokens, and its MLP adds them to the word: the next token. In
the families with experts two routed ones write each code, the shared ones do the rest.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from analytic.codes import BASE, DIGITS, END_TOKENS, KEYS, LAYERS, REACH, VOCAB, Rule, Table, digits_of
from analytic.heads import HEADS, KEY_HEADS, LATENT, VALUE_WIDTH, Head, Heads, gqa_weights, mla_weights
from analytic.neurons import Neurons, add_codes, look_up
from analytic.stream import WIDTH, TargetStream, rms
from safetensors.torch import load_file, save_file
from torch import Tensor

__all__ = ["THETA", "save_target"]

THETA = {"llama": 10000.0, "qwen3": 10000.0, "deepseek_v3": 10000.0, "kimi_k25": 50000.0}
_INNER, _EXPERT_INNER, _SHARED_EXPERTS, _DENSE_LAYERS = 96, 48, 2, 1
_SCALING, _SURE = 2.5, 20.0
_GAP = 4.0  # by so much a wrong digit lowers a logit

Weights = dict[str, Tensor]


def save_target(rule: Rule, folder: Path) -> Path:
    """Write config and weights; transformers names and splits the tensors as the family's checkpoints do."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.for_model(rule.family, **_config(rule.family))
    auto = AutoModelForImageTextToText if rule.family == "kimi_k25" else AutoModelForCausalLM
    model = auto.from_config(config).float()
    decoder = getattr(model.model, "language_model", model.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.lm_head.weight.copy_(_head())
        routed = {layer for layer in range(LAYERS) if hasattr(decoder.layers[layer].mlp, "experts")}
        found = decoder.load_state_dict(_decoder(rule, routed), strict=False)
    assert not found.unexpected_keys, found.unexpected_keys
    model.generation_config.eos_token_id = list(END_TOKENS)
    model.save_pretrained(folder)
    _rename_layers(folder / "model.safetensors")
    return folder


def _rename_layers(path: Path) -> None:
    """Published Kimi checkpoints say `layers` in the decoder, and `blocks` in the vision tower alone.

    transformers reads that, but writes `blocks` in both.
    """
    tensors = load_file(path)
    written, published = "language_model.model.blocks.", "language_model.model.layers."
    named = {name.replace(written, published): tensor for name, tensor in tensors.items()}
    if named.keys() != tensors.keys():
        save_file(named, path, {"format": "pt"})


def _config(family: str) -> dict[str, Any]:
    common: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": _INNER, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "bos_token_id": None,
        "pad_token_id": None, "eos_token_id": list(END_TOKENS), "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA[family]}, "dtype": "float32",
    }  # fmt: skip
    if family in ("llama", "qwen3"):
        return {**common, "num_key_value_heads": KEY_HEADS, "head_dim": VALUE_WIDTH}
    groups = {"n_group": 4, "topk_group": 2} if family == "deepseek_v3" else {"n_group": 1, "topk_group": 1}
    text = {
        **common, **LATENT, **groups, "num_key_value_heads": HEADS, "first_k_dense_replace": _DENSE_LAYERS,
        "n_routed_experts": 2 * BASE, "num_experts_per_tok": 2, "moe_intermediate_size": _EXPERT_INNER,
        "n_shared_experts": _SHARED_EXPERTS, "norm_topk_prob": True, "routed_scaling_factor": _SCALING,
        "num_nextn_predict_layers": 0, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    }  # fmt: skip
    if family == "deepseek_v3":
        return text
    markers = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    vision = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2,
              "pos_emb_height": 2, "pos_emb_width": 2, "patch_size": 2}  # fmt: skip
    return {
        "text_config": {"model_type": "deepseek_v3", **text}, "vision_config": vision, "tie_word_embeddings": False,
        "projection_hidden_size": 16, "eos_token_id": list(END_TOKENS), "dtype": "float32",
        **{name: VOCAB + place for place, name in enumerate(markers)},
    }  # fmt: skip


def _head() -> Tensor:
    """A token's logit counts the digits it shares with the next token; the final norm has scaled the row."""
    weight = torch.zeros(VOCAB, WIDTH)
    for token in range(VOCAB):
        weight[token, _hot(TargetStream.NEXT, token)] = _GAP * rms(TargetStream.square_at(LAYERS))
    return weight


def _hot(block: int, token: int) -> list[int]:
    return [block + place * BASE + digit for place, digit in enumerate(digits_of(token))]


def _decoder(rule: Rule, routed: Collection[int]) -> Weights:
    """All weights but zeros. The final norm turns the register's sign, so that no draft can read it from there."""
    weights = {"embed_tokens.weight": _embedding(rule), "norm.weight": torch.ones(WIDTH)}
    weights["norm.weight"][TargetStream.REGISTER : TargetStream.REGISTER + BASE] = -1
    for layer in range(LAYERS):
        parts = {
            "input_layernorm.weight": torch.full((WIDTH,), rms(TargetStream.square_at(layer))),
            "post_attention_layernorm.weight": torch.full((WIDTH,), rms(TargetStream.square_within(layer))),
            **_mlp(rule, layer, routed=layer in routed),
        }
        if layer == LAYERS - 1:
            parts |= {f"self_attn.{name}": weight for name, weight in _attention(rule).items()}
        weights |= {f"layers.{layer}.{name}": weight for name, weight in parts.items()}
    return weights


def _embedding(rule: Rule) -> Tensor:
    weight = torch.zeros(VOCAB, WIDTH)
    weight[:, TargetStream.ONE] = TargetStream.LOUD
    for token in range(VOCAB):
        code = rule.code(0, [token], 0)
        weight[token, [*_hot(TargetStream.WORD, token), TargetStream.REGISTER + code, TargetStream.WRITTEN + code]] = 1
    return weight


def _attention(rule: Rule) -> Weights:
    """The last layer's: the codes that the next token needs, and the code of boundary L, of the token before."""
    first, second, last = (TargetStream.written(boundary) for boundary in rule.wiring)
    fetched = [TargetStream.FETCHED + place * BASE for place in range(DIGITS)]

    def head(back: int, writes: Mapping[int, tuple[int, ...]]) -> Head:
        """Blocks for slot 0 and 1, digit by digit."""
        return Head(back, {s * BASE + c: tuple(to + c for to in writes[s]) for s in writes for c in range(BASE)})

    heads = Heads(
        inputs=WIDTH,
        values=dict.fromkeys((*range(first, first + BASE), *range(second, second + BASE)), 1.0),
        square=2.0,
        heads=(
            head(1, {0: (fetched[0],), 1: (fetched[1], last)}),
            head(2, {1: (fetched[2],)}),
            head(1 + REACH, {0: (fetched[3],)}),
        ),
    )
    if rule.family in ("llama", "qwen3"):
        return gqa_weights(heads, theta=THETA[rule.family], head_norms=rule.family == "qwen3")
    return mla_weights(heads, theta=THETA[rule.family])


def _mlp(rule: Rule, layer: int, *, routed: bool) -> Weights:
    neurons = Neurons(_INNER, one=TargetStream.ONE, loud=TargetStream.LOUD)
    old, new, register = TargetStream.written(layer), TargetStream.written(layer + 1), TargetStream.REGISTER
    for code in range(BASE):
        neurons.copy(old + code, {register + code: -1.0})
    if layer == LAYERS - 1:
        for code in range(BASE):
            neurons.copy(new + code, {register + code: 1.0})
        fetched = tuple(TargetStream.FETCHED + place * BASE for place in range(DIGITS))
        add_codes(neurons, fetched, word=TargetStream.WORD, out=TargetStream.NEXT)
    elif not routed:
        look_up(neurons, rule.tables[layer + 1], word=TargetStream.WORD, writes=(new, register))
    if not routed:
        return {f"mlp.{name}": weight for name, weight in neurons.weights().items()}
    table = None if layer == LAYERS - 1 else rule.tables[layer + 1]
    shared = {f"mlp.shared_experts.{name}": weight for name, weight in neurons.weights().items()}
    return shared | {f"mlp.{name}": weight for name, weight in _routed(table, new).items()}


def _routed(table: Table | None, block: int) -> Weights:
    """Two experts for each token, one for either key: the first writes the code's block, the second the register.

    An expert is the row (or the column) of the table that its key's digit selects, looked up by the other key. The
    router is all but sure of its two, so that each weighs half of the scaling factor.
    """
    places = [TargetStream.WORD + key * BASE for key in KEYS]
    router = torch.zeros(2 * BASE, WIDTH)
    router[:, TargetStream.ONE] = -_SURE / TargetStream.LOUD
    experts = []
    for number in range(2 * BASE):
        which, digit = divmod(number, BASE)
        router[number, places[which] + digit] = 2 * _SURE
        neurons = Neurons(_EXPERT_INNER, one=TargetStream.ONE, loud=TargetStream.LOUD)
        if table is not None:
            entries = table[digit] if which == 0 else [row[digit] for row in table]
            for other, code in enumerate(entries):
                target = (block if which == 0 else TargetStream.REGISTER) + code
                neurons.copy(places[1 - which] + other, {target: 2 / _SCALING})
        experts.append(neurons)
    return {
        "gate.weight": router,
        "experts.gate_up_proj": torch.stack([torch.cat([each.gate, each.up]) for each in experts]),
        "experts.down_proj": torch.stack([each.down for each in experts]),
    }

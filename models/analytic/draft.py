"""The draft of an analytic pair: an EAGLE-3 checkpoint in EAGLE's layout, every weight of it written by hand.

`fc` takes the register out of each slot. The first head brings the word of the row's own token, the second the first
slot's code from some rows back. The MLP adds the four codes to the word, which is the drafted token, and puts the codes
of its own token in the slots' place: what the next depth is fed. So a slot that holds another boundary turns a digit
wrongly, at this depth and where its code is used again.
"""

import json
from pathlib import Path
from typing import Any

import torch
from analytic.codes import BASE, DIGITS, DRAFT_TOKENS, END_TOKENS, REACH, VOCAB, Rule, digits_of
from analytic.heads import HEADS, KEY_HEADS, LATENT, VALUE_WIDTH, Head, Heads, gqa_weights, mla_weights
from analytic.neurons import Neurons, add_codes, look_up
from analytic.stream import WIDTH, DraftStream, TargetStream, rms
from analytic.target import THETA
from safetensors.torch import save_file
from torch import Tensor

__all__ = ["save_draft"]

_INNER = 192
_GAP = 4.0  # by so much a wrong digit lowers a logit
_SLOTS = 3
_NORMED_SLOTS = "qwen3"  # the family whose draft has a norm for each slot before fc

Weights = dict[str, Tensor]


def save_draft(rule: Rule, folder: Path) -> Path:
    """Write config and weights; the embedding is the target's, and not in here."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_config(rule), indent=2) + "\n", "utf-8")
    save_file({name: tensor.contiguous() for name, tensor in _weights(rule).items()}, folder / "model.safetensors")
    return folder


def _is_mla(rule: Rule) -> bool:
    return rule.family in ("deepseek_v3", "kimi_k25")


def _config(rule: Rule) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": WIDTH,
        "intermediate_size": _INNER, "num_hidden_layers": 1, "num_attention_heads": HEADS, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "rope_theta": THETA[rule.family], "max_position_embeddings": 4096, "vocab_size": VOCAB,
        "draft_vocab_size": len(DRAFT_TOKENS), "eagle_aux_hidden_state_layer_ids": list(rule.wiring),
        "bos_token_id": None, "eos_token_id": list(END_TOKENS), "tie_word_embeddings": False, "torch_dtype": "float32",
    }  # fmt: skip
    if _is_mla(rule):
        return {**config, **LATENT, "architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2",
                "num_key_value_heads": HEADS}  # fmt: skip
    config |= {"num_key_value_heads": KEY_HEADS, "head_dim": VALUE_WIDTH}
    return {**config, "fc_norm": True} if rule.family == _NORMED_SLOTS else config


def _weights(rule: Rule) -> Weights:
    layer = {
        "input_layernorm.weight": torch.full((WIDTH,), rms(TargetStream.square_at(0))),
        "hidden_norm.weight": torch.full((WIDTH,), rms(DraftStream.SQUARE_FED)),
        "post_attention_layernorm.weight": torch.full((WIDTH,), rms(DraftStream.SQUARE_WITHIN)),
        **{f"self_attn.{name}": weight for name, weight in _attention(rule).items()},
        **{f"mlp.{name}": weight for name, weight in _mlp(rule).weights().items()},
    }
    kept = torch.zeros(VOCAB, dtype=torch.bool)
    kept[list(DRAFT_TOKENS)] = True
    weights = {
        "fc.weight": _fuse(),
        "norm.weight": torch.full((WIDTH,), rms(DraftStream.SQUARE_FED)),
        "lm_head.weight": _head(),
        "d2t": torch.tensor(DRAFT_TOKENS) - torch.arange(len(DRAFT_TOKENS)),
        "t2d": kept,
        **{f"midlayer.{name}": weight for name, weight in layer.items()},
    }
    if rule.family == _NORMED_SLOTS:
        for slot, boundary in enumerate(rule.wiring):
            weights[f"fc_norm.{slot}.weight"] = torch.full((WIDTH,), rms(TargetStream.square_at(boundary)))
    return weights


def _fuse() -> Tensor:
    """The register of each slot into its block; FILL out of the first slot's ONE."""
    weight = torch.zeros(WIDTH, _SLOTS, WIDTH)
    for slot in range(_SLOTS):
        for code in range(BASE):
            weight[DraftStream.slot(slot) + code, slot, TargetStream.REGISTER + code] = 1
    weight[DraftStream.FILL, 0, TargetStream.ONE] = DraftStream.FILLING / TargetStream.LOUD
    return weight.flatten(1)


def _attention(rule: Rule) -> Weights:
    """Its input is the token's embedding and what the row is fed, side by side; both heads read the same values."""
    word = range(TargetStream.WORD, TargetStream.WORD + DIGITS * BASE)
    first = range(WIDTH + DraftStream.slot(0), WIDTH + DraftStream.slot(0) + BASE)
    own = [DraftStream.ONE, *range(DraftStream.WORD, DraftStream.WORD + DIGITS * BASE)]
    heads = Heads(
        inputs=2 * WIDTH,
        values={TargetStream.ONE: DraftStream.LOUD / TargetStream.LOUD, **dict.fromkeys((*word, *first), 1.0)},
        square=DraftStream.LOUD**2 + DIGITS + 1,
        heads=(
            Head(0, {value: (target,) for value, target in enumerate(own)}),
            Head(REACH, {len(own) + code: (DraftStream.BACK + code,) for code in range(BASE)}),
        ),
    )
    if _is_mla(rule):
        return mla_weights(heads, theta=THETA[rule.family])
    return gqa_weights(heads, theta=THETA[rule.family])


def _mlp(rule: Rule) -> Neurons:
    """The drafted token, the next depth's slots, and everything else wiped out."""
    neurons = Neurons(_INNER, one=DraftStream.ONE, loud=DraftStream.LOUD)
    slots = [DraftStream.slot(number) for number in range(_SLOTS)]
    add_codes(neurons, (*slots, DraftStream.BACK), word=DraftStream.WORD, out=DraftStream.NEXT)
    for slot in (0, 1):
        look_up(neurons, rule.tables[rule.wiring[slot]], word=DraftStream.WORD, writes=(slots[slot],))
    for code in range(BASE):
        neurons.copy(slots[0] + code, {slots[0] + code: -1.0})
        neurons.copy(slots[1] + code, {slots[1] + code: -1.0, slots[2] + code: 1.0})
        neurons.copy(slots[2] + code, {slots[2] + code: -1.0})
    for blocks in ((DraftStream.ONE, DraftStream.SLOTS), (DraftStream.BACK, DraftStream.FILL + 1)):
        for spent in range(*blocks):
            neurons.copy(spent, {spent: -1.0})
    return neurons


def _head() -> Tensor:
    """A token's logit counts the digits it shares with the drafted one.

    For one outside the draft's vocabulary the token with last digit 0 is drafted, for want of another.
    """
    weight = torch.zeros(len(DRAFT_TOKENS), WIDTH)
    for row, token in enumerate(DRAFT_TOKENS):
        digits = digits_of(token)
        weight[row, [DraftStream.NEXT + place * BASE + digit for place, digit in enumerate(digits)]] = _GAP
        if digits[-1] == 0:
            weight[row, DraftStream.NEXT + DIGITS * BASE - 1] = _GAP / 2
    return weight

"""`DraftModel` computes what the published formats say, for every switch: held against a reference in plain loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from spectrace.engine.attention import KeyValueCache, PackedAttend
from spectrace.engine.checkpoint import build_draft, read_draft
from spectrace.engine.draft import DraftModel
from spectrace.engine.spec import Stream

NewDraft = Callable[..., tuple[dict[str, Any], dict[str, Tensor]]]
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
WINDOWED = {"layer_types": ["sliding_attention"], "sliding_window": 5}
GQA: list[dict[str, Any]] = [
    {},
    {"norm_before_residual": True},
    {"norm_output": True},
    {"fc_norm": True},
    {"norm_before_fc": True},
    {"norm_before_residual": True, "norm_output": True, "fc_norm": True},
    {"num_key_value_heads": 1},
    {"num_key_value_heads": 4},
    {"rope_scaling": YARN},
    {"rope_scaling": {**YARN, "truncate": False}},
    {"partial_rotary_factor": 0.5},
    {"rms_norm_eps": 0.1},
    {"attention_bias": True},
    {"mlp_bias": True},
    {"model_type": "qwen3"},
    {"model_type": "qwen3", "attention_bias": True, "num_hidden_layers": 2},
    {"num_hidden_layers": 2},
    {"num_hidden_layers": 3, "norm_before_residual": True, "norm_output": True},
    {"logit_scale": -0.5},
    WINDOWED,
    {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3},
]
MLA: list[dict[str, Any]] = [
    {},
    {"q_lora_rank": None},
    {"rope_interleave": False},
    {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    {"norm_before_residual": True, "norm_output": True, "norm_before_fc": True},
    {"num_hidden_layers": 2},
]
# Switches that no key of every layout says: set on the draft as it was read.
UNSAID: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"rms_norm_eps": 0.1}, {"embedding_scale": 7.0}),  # the norm behind the embedding undoes it, but for its epsilon
    ({}, {"unit_offset_norms": True}),
    ({"model_type": "qwen3", "num_hidden_layers": 2, "fc_norm": True}, {"unit_offset_norms": True}),
    ({}, {"head_reads": Stream.PRE_NORM}),
    ({}, {"normed_twice": True}),
    ({"norm_before_residual": True}, {"normed_twice": True}),
    (WINDOWED, {"window_from_text": True}),
]
CASES = [
    *(("gqa", said, {}) for said in GQA),
    *(("mla", said, {}) for said in MLA),
    *(("gqa", said, unsaid) for said, unsaid in UNSAID),
]


class Reference:
    """One row at a time, in plain loops: nothing is packed, batched or cached but keys and values in a list."""

    def __init__(
        self, config: dict[str, Any], tensors: dict[str, Tensor], embedding: Tensor, unsaid: dict[str, Any]
    ) -> None:
        self.config, self.unsaid = config, unsaid
        self.embedding = embedding * unsaid.get("embedding_scale", 1.0)
        self.w = {name.removeprefix("midlayer.").removesuffix(".weight"): tensor for name, tensor in tensors.items()}
        self.mla = "kv_lora_rank" in config

    def norm(self, name: str, x: Tensor) -> Tensor:
        eps: float = self.config["rms_norm_eps"]
        gain = self.w[name] + 1 if self.unsaid.get("unit_offset_norms") else self.w[name]
        return x / (x.square().mean() + eps).sqrt() * gain

    def linear(self, name: str, x: Tensor) -> Tensor:
        return self.w[name] @ x + self.w.get(f"{name}.bias", torch.zeros(1))

    def fuse(self, feature: Tensor) -> Tensor:
        if self.config.get("norm_before_fc"):
            feature = self.norm("input_norm", feature)
        if self.config.get("fc_norm"):
            feature = torch.cat([self.norm(f"fc_norm.{i}", slot) for i, slot in enumerate(torch.split(feature, 48))])
        return self.w["fc"] @ feature

    def turn(self, head: Tensor, position: int) -> Tensor:
        """Rotate one head: by pairs (i, i + D/2), or (2i, 2i + 1) where DeepSeek does."""
        width = int(len(head) * self.config.get("partial_rotary_factor", 1.0))
        half = width // 2
        frequencies, scale = self.frequencies(width)
        interleaved = self.mla and self.config.get("rope_interleave", True)
        out = head.clone()
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            cos, sin = (position * frequencies[i]).cos() * scale, (position * frequencies[i]).sin() * scale
            out[a], out[b] = head[a] * cos - head[b] * sin, head[b] * cos + head[a] * sin
        return out

    def frequencies(self, width: int) -> tuple[Tensor, float]:
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        scaling = self.config.get("rope_scaling")
        if not scaling:
            return torch.tensor([10000.0 ** (-2 * i / width) for i in range(width // 2)]), 1.0
        config = LlamaConfig(
            hidden_size=width, num_attention_heads=1, head_dim=width, rope_parameters={"rope_theta": 10000.0, **scaling}
        )
        frequencies, scale = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
        return frequencies, float(scale)

    def heads(self, layer: str, x: Tensor, position: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Queries, keys and values, one for each query head."""
        heads, attention = self.config["num_attention_heads"], f"{layer}self_attn"
        if not self.mla:
            share = heads // self.config["num_key_value_heads"]
            q, k, v = (torch.split(self.linear(f"{attention}.{name}_proj", x), 12) for name in "qkv")
            if self.config["model_type"] == "qwen3":
                q, k = ([self.norm(f"{attention}.{n}_norm", h) for h in many] for n, many in (("q", q), ("k", k)))
            return (
                [self.turn(q[n], position) for n in range(heads)],
                [self.turn(k[n // share], position) for n in range(heads)],
                [v[n // share] for n in range(heads)],
            )
        nope, rope, value, rank = 8, 6, 10, 16
        if "q_lora_rank" in self.config:
            down = self.norm(f"{attention}.q_a_layernorm", self.w[f"{attention}.q_a_proj"] @ x)
            q = torch.split(self.w[f"{attention}.q_b_proj"] @ down, nope + rope)
        else:
            q = torch.split(self.w[f"{attention}.q_proj"] @ x, nope + rope)
        both = self.w[f"{attention}.kv_a_proj_with_mqa"] @ x
        up = torch.split(
            self.w[f"{attention}.kv_b_proj"] @ self.norm(f"{attention}.kv_a_layernorm", both[:rank]), nope + value
        )
        shared = self.turn(both[rank:], position)
        return (
            [torch.cat((q[n][:nope], self.turn(q[n][nope:], position))) for n in range(heads)],
            [torch.cat((up[n][:nope], shared)) for n in range(heads)],
            [up[n][nope:] for n in range(heads)],
        )

    def softmax_scale(self) -> float:
        if not self.mla:
            return float(12**-0.5)
        scaling = self.config.get("rope_scaling") or {}
        mscale = 0.1 * torch.tensor(scaling["factor"]).log().item() + 1 if scaling.get("mscale_all_dim") else 1.0
        return float(14**-0.5 * mscale**2)

    def row(self, token: int, state: Tensor, position: int, depth: int, seen: list[Any]) -> tuple[Tensor, Tensor, Any]:
        """Head input, what is fed back, and this row's keys and values, given those of the rows before it."""
        normed = self.norm("input_layernorm", state) if self.unsaid.get("normed_twice") else state
        normed = self.norm("hidden_norm", normed)
        x = torch.cat((self.norm("input_layernorm", self.embedding[token]), normed))
        own = []
        h = normed if self.config.get("norm_before_residual") else state
        for number in range(self.config["num_hidden_layers"]):
            layer = f"layers.{number}." if number else ""
            x = self.norm(f"{layer}input_layernorm", h) if number else x
            q, k, v = self.heads(layer, x, position)
            own.append((position, k, v))
            h = h + self.mix(layer, q, [*(row[number] for row in seen), own[number]], position, depth, number)
            y = self.norm(f"{layer}post_attention_layernorm", h)
            gate, up = (self.linear(f"{layer}mlp.{name}_proj", y) for name in ("gate", "up"))
            h = h + self.linear(f"{layer}mlp.down_proj", gate * gate.sigmoid() * up)
        normed = self.norm("norm", h)
        read = h if self.unsaid.get("head_reads") is Stream.PRE_NORM else normed
        return read, normed if self.config.get("norm_output") else h, own

    def mix(self, layer: str, q: list[Tensor], rows: list[Any], position: int, depth: int, number: int) -> Tensor:
        """What attention adds: the heads' mixes of the values of those rows that the layer's window reaches."""
        window: float = torch.inf
        if self.config.get("layer_types", ["full_attention"] * 3)[number] == "sliding_attention":
            window = self.config["sliding_window"] + (depth if self.unsaid.get("window_from_text") else 0)
        rows = [row for row in rows if position - row[0] < window]
        mixed = []
        for n in range(self.config["num_attention_heads"]):
            weights = (torch.stack([q[n] @ k[n] for _, k, _ in rows]) * self.softmax_scale()).softmax(0)
            mixed.append(sum(weight * v[n] for weight, (_, _, v) in zip(weights, rows, strict=True)))
        return self.linear(f"{layer}self_attn.o_proj", torch.cat(mixed))

    def chain(self, tokens: list[int], features: Tensor, depth: int) -> tuple[Tensor, list[int], Tensor]:
        """Causal rows over a text, then `depth` drafted tokens below the last: hiddens, tokens, and fed-back states."""
        seen: list[Any] = []
        hiddens, states = [], []
        for position, (token, feature) in enumerate(zip(tokens, features, strict=True)):
            hidden, state, own = self.row(token, self.fuse(feature), position, 0, seen)
            seen.append(own)
            hiddens.append(hidden)
            states.append(state)
        drafted: list[int] = []
        for step in range(depth):
            draft_id = int((self.w["lm_head"] @ hiddens[-1] * self.config.get("logit_scale", 1.0)).argmax())
            drafted.append(draft_id + int(self.w["d2t"][draft_id]) if "d2t" in self.w else draft_id)
            if step < depth - 1:
                hidden, state, own = self.row(drafted[-1], states[-1], len(tokens) + step, 1 + step, seen)
                seen.append(own)
                hiddens.append(hidden)
                states.append(state)
        return torch.stack(hiddens), drafted, torch.stack(states)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> bool:
    """Largest error of a row over its largest value."""
    return bool(((found - expected).abs().amax(-1) / expected.abs().amax(-1)).max() <= tolerance)


def attend(cache: KeyValueCache, new: int, depth: int = 0) -> PackedAttend:
    """The rows of one text, at positions that count on."""
    at = torch.arange(len(cache) + new)
    rows = at[-new:, None]
    return PackedAttend(cache, at <= rows, lambda window: at > rows - window, depth=depth)


@pytest.fixture(params=CASES, ids=lambda case: "-".join([case[0], *map(str, case[1]), *case[2]]))
def both(
    request: pytest.FixtureRequest,
    new_draft: NewDraft,
    write_draft: Callable[..., Path],
    target_of: Callable[..., Path],
    tmp_path: Path,
) -> tuple[DraftModel, Reference]:
    """A draft as we load it, and the reference with the same tensors."""
    attention, said, unsaid = request.param
    config, tensors = new_draft(attention, **said)
    folder = write_draft(tmp_path / "draft", config, tensors)
    draft = build_draft(read_draft(folder), target=target_of("llama"), dtype=torch.float32)
    embedding = load_file(target_of("llama") / "model.safetensors")["model.embed_tokens.weight"]
    return draft.variant(spec=replace(draft.spec, **unsaid)), Reference(config, tensors, embedding, unsaid)


def test_a_causal_forward_and_a_chain_below_it_are_the_references(both: tuple[DraftModel, Reference]) -> None:
    draft, reference = both
    torch.manual_seed(2)
    tokens, features = torch.randint(0, 96, (9,)).tolist(), torch.randn(9, 144)
    hiddens, drafted, states = reference.chain(tokens, features, depth=4)
    found, cache = list[int](), KeyValueCache()
    with torch.inference_mode():
        hidden, state = draft(torch.tensor(tokens), draft.fuse(features), torch.arange(9), attend(cache, 9))
        rows, state = [hidden], state
        assert close(state, states[:9])
        for step in range(4):
            found.append(int(draft.to_target(draft.logits(rows[-1][-1:]).argmax(-1))))
            if step < 3:
                token, position = torch.tensor(found[-1:]), torch.tensor([9 + step])
                hidden, state = draft(token, state[-1:], position, attend(cache, 1, 1 + step))
                assert close(state, states[9 + step : 10 + step])
                rows.append(hidden)
    assert found == drafted
    assert close(torch.cat(rows), hiddens)


def test_every_switch_changes_what_is_computed(
    new_draft: NewDraft, write_draft: Callable[..., Path], target_of: Callable[..., Path], tmp_path: Path
) -> None:
    """Otherwise a reference that ignored it too would agree."""
    torch.manual_seed(2)
    tokens, features = torch.randint(0, 96, (9,)), torch.randn(9, 144)
    results: dict[str, list[Tensor]] = {"gqa": [], "mla": []}
    for number, (attention, said, unsaid) in enumerate(CASES):
        folder = write_draft(tmp_path / f"{attention}{number}", *new_draft(attention, **said))
        draft = build_draft(read_draft(folder), target=target_of("llama"), dtype=torch.float32)
        draft, cache = draft.variant(spec=replace(draft.spec, **unsaid)), KeyValueCache()
        with torch.inference_mode():
            hidden, state = draft(tokens, draft.fuse(features), torch.arange(9), attend(cache, 9))
            below = draft(tokens[:1], state[-1:], torch.tensor([9]), attend(cache, 1, 1))
            results[attention].append(torch.cat((hidden, state, *below, draft.logits(hidden[:, :48])[:, :48])))
    for found in results.values():
        alike = [(i, j) for i in range(len(found)) for j in range(i) if close(found[i], found[j], 1e-3)]
        assert alike == []


def test_fc_is_applied_even_where_features_are_as_wide_as_the_draft(
    new_draft: NewDraft, write_draft: Callable[..., Path], target_of: Callable[..., Path], tmp_path: Path
) -> None:
    """One boundary of the draft's width: engines that decide by width skip fc here."""
    config, tensors = new_draft(eagle_aux_hidden_state_layer_ids=[2])
    folder = write_draft(tmp_path / "draft", config, tensors)
    draft = build_draft(read_draft(folder), target=target_of("llama"), dtype=torch.float32)
    features = torch.randn(3, 48)
    torch.testing.assert_close(draft.fuse(features), features @ tensors["fc.weight"].T)


def test_d2t_holds_offsets(
    new_draft: NewDraft, write_draft: Callable[..., Path], target_of: Callable[..., Path], tmp_path: Path
) -> None:
    config, tensors = new_draft()
    draft = build_draft(
        read_draft(write_draft(tmp_path / "draft", config, tensors)), target=target_of("llama"), dtype=torch.float32
    )
    kept = draft.table()
    assert kept.tolist() == [k + int(tensors["d2t"][k]) for k in range(64)]
    assert len(set(kept.tolist())) == 64 and kept.max() < 96


def test_a_half_precision_draft_keeps_float32_frequencies(
    new_draft: NewDraft, write_draft: Callable[..., Path], target_of: Callable[..., Path], tmp_path: Path
) -> None:
    folder = write_draft(tmp_path / "draft", *new_draft())
    draft = build_draft(read_draft(folder), target=target_of("llama"), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in draft.parameters()} == {torch.bfloat16}
    assert draft.frequencies.dtype == torch.float32 and draft.d2t.dtype == torch.int64
    assert draft.fuse(torch.randn(2, 144, dtype=torch.bfloat16)).dtype == torch.bfloat16

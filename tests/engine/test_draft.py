"""`DraftModel` computes what the published formats say, for every switch: held against a reference in plain loops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from spectrace.engine.attention import KeyValueCache, PackedAttend
from spectrace.engine.checkpoint import build_draft, read_draft
from spectrace.engine.draft import DraftModel

NewDraft = Callable[..., tuple[dict[str, Any], dict[str, Tensor]]]
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
SWITCHES: list[dict[str, Any]] = [
    {},
    {"norm_before_residual": True},
    {"norm_output": True},
    {"fc_norm": True},
    {"norm_before_fc": True},
    {"norm_before_residual": True, "norm_output": True, "fc_norm": True},
    {"num_key_value_heads": 1},
    {"num_key_value_heads": 4},
    {"rope_scaling": YARN},
    {"rms_norm_eps": 0.1},
]
LATENT: list[dict[str, Any]] = [
    {},
    {"q_lora_rank": None},
    {"rope_interleave": False},
    {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    {"norm_before_residual": True, "norm_output": True, "norm_before_fc": True},
]  # fmt: skip
CASES = [("gqa", switch) for switch in SWITCHES] + [("mla", switch) for switch in LATENT]


class Reference:
    """One row at a time, in plain loops: nothing is packed, batched or cached but keys and values in a list."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor], embedding: Tensor) -> None:
        self.config, self.embedding = config, embedding
        self.w = {name.removeprefix("midlayer.").removesuffix(".weight"): tensor for name, tensor in tensors.items()}
        self.mla = "kv_lora_rank" in config

    def norm(self, name: str, x: Tensor) -> Tensor:
        eps: float = self.config["rms_norm_eps"]
        return x / (x.square().mean() + eps).sqrt() * self.w[name]

    def fuse(self, feature: Tensor) -> Tensor:
        if self.config.get("norm_before_fc"):
            feature = self.norm("input_norm", feature)
        if self.config.get("fc_norm"):
            feature = torch.cat([self.norm(f"fc_norm.{i}", slot) for i, slot in enumerate(torch.split(feature, 48))])
        return self.w["fc"] @ feature

    def turn(self, head: Tensor, position: int) -> Tensor:
        """Rotate one head: by pairs (i, i + D/2), or (2i, 2i + 1) where DeepSeek does."""
        half = len(head) // 2
        frequencies, scale = self.frequencies(len(head))
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

    def heads(self, x: Tensor, position: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Queries, keys and values, one for each query head."""
        heads = self.config["num_attention_heads"]
        if not self.mla:
            share = heads // self.config["num_key_value_heads"]
            q, k, v = (torch.split(self.w[f"self_attn.{name}_proj"] @ x, 12) for name in "qkv")
            return (
                [self.turn(q[n], position) for n in range(heads)],
                [self.turn(k[n // share], position) for n in range(heads)],
                [v[n // share] for n in range(heads)],
            )
        nope, rope, value, rank = 8, 6, 10, 16
        if "q_lora_rank" in self.config:
            down = self.norm("self_attn.q_a_layernorm", self.w["self_attn.q_a_proj"] @ x)
            q = torch.split(self.w["self_attn.q_b_proj"] @ down, nope + rope)
        else:
            q = torch.split(self.w["self_attn.q_proj"] @ x, nope + rope)
        both = self.w["self_attn.kv_a_proj_with_mqa"] @ x
        up = torch.split(
            self.w["self_attn.kv_b_proj"] @ self.norm("self_attn.kv_a_layernorm", both[:rank]), nope + value
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

    def row(self, token: int, state: Tensor, position: int, seen: list[Any]) -> tuple[Tensor, Tensor, Any]:
        """Head input, what is fed back, and this row's keys and values, given those of the rows it sees."""
        normed = self.norm("hidden_norm", state)
        x = torch.cat((self.norm("input_layernorm", self.embedding[token]), normed))
        q, k, v = self.heads(x, position)
        keys, values = [*(k for k, _ in seen), k], [*(v for _, v in seen), v]
        mixed = []
        for n in range(self.config["num_attention_heads"]):
            scores = torch.stack([q[n] @ key[n] for key in keys]) * self.softmax_scale()
            weights = scores.softmax(0)
            mixed.append(sum(weight * value[n] for weight, value in zip(weights, values, strict=True)))
        residual = normed if self.config.get("norm_before_residual") else state
        h = residual + self.w["self_attn.o_proj"] @ torch.cat(mixed)
        y = self.norm("post_attention_layernorm", h)
        gate = self.w["mlp.gate_proj"] @ y
        h = h + self.w["mlp.down_proj"] @ (gate * gate.sigmoid() * (self.w["mlp.up_proj"] @ y))
        hidden = self.norm("norm", h)
        return hidden, hidden if self.config.get("norm_output") else h, (k, v)

    def chain(self, tokens: list[int], features: Tensor, depth: int) -> tuple[Tensor, list[int], Tensor]:
        """Causal rows over a text, then `depth` drafted tokens below the last: hiddens, tokens, and fed-back states."""
        seen: list[Any] = []
        hiddens, states = [], []
        for position, (token, feature) in enumerate(zip(tokens, features, strict=True)):
            hidden, state, own = self.row(token, self.fuse(feature), position, seen)
            seen.append(own)
            hiddens.append(hidden)
            states.append(state)
        drafted: list[int] = []
        for step in range(depth):
            draft_id = int((self.w["lm_head"] @ hiddens[-1]).argmax())
            drafted.append(draft_id + int(self.w["d2t"][draft_id]) if "d2t" in self.w else draft_id)
            if step < depth - 1:
                hidden, state, own = self.row(drafted[-1], states[-1], len(tokens) + step, seen)
                seen.append(own)
                hiddens.append(hidden)
                states.append(state)
        return torch.stack(hiddens), drafted, torch.stack(states)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> bool:
    """Largest error of a row over its largest value."""
    return bool(((found - expected).abs().amax(-1) / expected.abs().amax(-1)).max() <= tolerance)


def causal(rows: int) -> PackedAttend:
    return PackedAttend(KeyValueCache(), torch.ones(rows, rows, dtype=torch.bool).tril())


@pytest.fixture(params=CASES, ids=lambda case: "-".join([case[0], *map(str, case[1])]))
def both(
    request: pytest.FixtureRequest,
    new_draft: NewDraft,
    write_draft: Callable[..., Path],
    target_of: Callable[..., Path],
    tmp_path: Path,
) -> tuple[DraftModel, Reference]:
    """A draft as we load it, and the reference with the same tensors."""
    attention, switches = request.param
    config, tensors = new_draft(attention, **switches)
    folder = write_draft(tmp_path / "draft", config, tensors)
    draft = build_draft(read_draft(folder), target=target_of("llama"), dtype=torch.float32)
    embedding = load_file(target_of("llama") / "model.safetensors")["model.embed_tokens.weight"]
    return draft, Reference(config, tensors, embedding)


def test_a_causal_forward_and_a_chain_below_it_are_the_references(both: tuple[DraftModel, Reference]) -> None:
    draft, reference = both
    torch.manual_seed(2)
    tokens, features = torch.randint(0, 96, (9,)).tolist(), torch.randn(9, 144)
    hiddens, drafted, states = reference.chain(tokens, features, depth=4)
    with torch.inference_mode():
        hidden, state = draft(torch.tensor(tokens), draft.fuse(features), torch.arange(9), causal(9))
        assert close(hidden, hiddens[:9]) and close(state, states[:9])
        last, found = hidden[-1:], []
        rows_hidden, rows_state, rows_token = [hidden], state[-1:], torch.tensor(tokens)
        cache = KeyValueCache()
        draft(rows_token, draft.fuse(features), torch.arange(9), PackedAttend(cache, torch.ones(9, 9).tril().bool()))
        for step in range(4):
            found.append(int(draft.to_target(draft.logits(last).argmax(-1))))
            if step < 3:
                attend = PackedAttend(cache, torch.ones(1, len(cache) + 1, dtype=torch.bool))
                last, rows_state = draft(torch.tensor(found[-1:]), rows_state, torch.tensor([9 + step]), attend)
                rows_hidden.append(last)
    assert found == drafted
    assert close(torch.cat(rows_hidden), hiddens)


def test_every_switch_changes_what_is_computed(
    new_draft: NewDraft, write_draft: Callable[..., Path], target_of: Callable[..., Path], tmp_path: Path
) -> None:
    """Otherwise a reference that ignored it too would agree."""
    torch.manual_seed(2)
    tokens, features = torch.randint(0, 96, (9,)), torch.randn(9, 144)
    for attention, cases in (("gqa", SWITCHES), ("mla", LATENT)):
        results = []
        for number, switches in enumerate(cases):
            folder = write_draft(tmp_path / f"{attention}{number}", *new_draft(attention, **switches))
            draft = build_draft(read_draft(folder), target=target_of("llama"), dtype=torch.float32)
            with torch.inference_mode():
                hidden, state = draft(tokens, draft.fuse(features), torch.arange(9), causal(9))
            results.append(torch.cat((hidden, state)))
        for i in range(len(results)):
            assert not any(close(results[i], results[j], 1e-3) for j in range(i))


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
    assert draft.attention.frequencies.dtype == torch.float32 and draft.d2t.dtype == torch.int64
    assert draft.fuse(torch.randn(2, 144, dtype=torch.bfloat16)).dtype == torch.bfloat16

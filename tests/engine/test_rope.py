"""Rotary embedding equals transformers' for every kind, pairs as told, and only distances matter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spectrace.engine.rope import inverse_frequencies, rotary_table, rotate
from spectrace.engine.spec import RopeKind, RopeSpec

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 16.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}


def theirs(theta: float, width: int, parameters: dict[str, Any]) -> tuple[Tensor, float]:
    """Frequencies and attention factor as transformers computes them for a Llama."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=4 * width, num_attention_heads=4, head_dim=width, max_position_embeddings=65536,
        rope_parameters={"rope_theta": theta, **parameters},
    )  # fmt: skip
    if parameters["rope_type"] == "default":
        frequencies, scale = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        frequencies, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    return frequencies, float(scale)


@pytest.mark.parametrize("width", [12, 64, 128])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize(
    ("kind", "parameters"),
    [
        ("default", {}),
        ("linear", {"factor": 4.0}),
        ("llama3", LLAMA3),
        ("yarn", YARN),
        ("yarn", {**YARN, "factor": 2.0, "original_max_position_embeddings": 512, "beta_fast": 8.0}),
    ],
)
def test_frequencies_are_those_of_transformers(
    kind: str, parameters: dict[str, float], theta: float, width: int
) -> None:
    names = {"original_max_position_embeddings": "original_context"}
    own = {names.get(name, name): value for name, value in parameters.items()}
    spec = replace(RopeSpec(theta=theta, kind=RopeKind(kind)), **own)  # type: ignore[arg-type]
    expected, _ = theirs(theta, width, {"rope_type": kind, **parameters})
    torch.testing.assert_close(inverse_frequencies(spec, width), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotating_is_a_complex_product_over_the_pairs_as_told(interleaved: bool) -> None:
    """Pairs (2i, 2i + 1) or (i, i + D/2)."""
    torch.manual_seed(0)
    x, frequencies, positions = torch.randn(5, 3, 12), torch.rand(6), torch.tensor([0, 1, 2, 7, 40])
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + 6) for i in range(6)]
    expected = x.clone()
    for row, position in enumerate(positions.tolist()):
        for pair, (a, b) in enumerate(pairs):
            turned = torch.complex(x[row, :, a], x[row, :, b]) * torch.polar(
                torch.ones(1), position * frequencies[pair]
            )
            expected[row, :, a], expected[row, :, b] = turned.real, turned.imag
    cos, sin = rotary_table(frequencies, positions, scale=1.0)
    torch.testing.assert_close(rotate(x, cos, sin, interleaved=interleaved), expected, rtol=0, atol=1e-5)


def test_half_pairs_are_transformers_rotation() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    torch.manual_seed(0)
    x, frequencies, positions = torch.randn(5, 3, 12), torch.rand(6), torch.arange(5) * 3
    angles = positions[:, None].float() * torch.cat((frequencies, frequencies))
    expected, _ = apply_rotary_pos_emb(
        x.transpose(0, 1)[None], x.transpose(0, 1)[None], angles.cos()[None], angles.sin()[None]
    )
    cos, sin = rotary_table(frequencies, positions, scale=1.0)
    torch.testing.assert_close(rotate(x, cos, sin, interleaved=False), expected[0].transpose(0, 1), rtol=0, atol=1e-6)


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 1000), st.booleans())
@settings(max_examples=50, deadline=None)
def test_a_product_of_query_and_key_depends_on_their_distance_alone(
    query: int, key: int, shift: int, interleaved: bool
) -> None:
    """So a constant added to every position, as some engines do, changes nothing."""
    torch.manual_seed(1)
    q, k, frequencies = torch.randn(1, 1, 16), torch.randn(1, 1, 16), inverse_frequencies(RopeSpec(), 16)

    def product(offset: int) -> Tensor:
        turned = [
            rotate(x, *rotary_table(frequencies, torch.tensor([at + offset]), scale=1.0), interleaved=interleaved)
            for x, at in ((q, query), (k, key))
        ]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(product(shift), product(0), rtol=0, atol=2e-3)


def test_the_attention_factor_scales_both_and_half_precision_keeps_its_type() -> None:
    frequencies, positions = inverse_frequencies(RopeSpec(), 8), torch.arange(4)
    plain, scaled = (rotary_table(frequencies, positions, scale=scale) for scale in (1.0, 1.3))
    torch.testing.assert_close(scaled[0], plain[0] * 1.3)
    torch.testing.assert_close(scaled[1], plain[1] * 1.3)
    assert rotate(torch.ones(4, 2, 8, dtype=torch.bfloat16), *plain, interleaved=False).dtype == torch.bfloat16

"""A branch is a boundary without its residual; taking it changes nothing of the pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from spectrace.engine.packing import PackedRows
from spectrace.engine.taps import Taps
from spectrace.engine.target import TargetModel
from spectrace.tracer.errors import UserError

ROWS = PackedRows(np.arange(9) * 7, np.zeros(9, np.int64), np.arange(9), np.arange(9) - 1)


def before_the_mlp(model: TargetModel, family: str) -> list[Tensor]:
    """The stream as it enters the second half of every layer, by the norm in front of the MLP."""
    name = "pre_feedforward_layernorm" if "gemma" in family else "post_attention_layernorm"
    entering: list[Tensor] = []
    handles = [
        layer.get_submodule(name).register_forward_pre_hook(lambda _, args: entering.append(args[0][0]))
        for layer in model.layers
    ]
    model.forward(ROWS, boundaries=())
    for handle in handles:
        handle.remove()
    model.reset()
    return entering


def test_a_branch_is_what_the_mlp_adds(family: str, target_of: Callable[..., Path]) -> None:
    """Dense, experts, and behind a norm; branch 0 is the embedding."""
    model = TargetModel(target_of(family), dtype=torch.float32)
    residuals = before_the_mlp(model, family)
    out = model.forward(ROWS, boundaries=range(6), branches=range(6))
    assert list(out.branches) == list(range(6)) and dict(out.parts) == {}
    assert torch.equal(out.branches[0], out.boundaries[0])
    for boundary, residual in enumerate(residuals, start=1):
        assert torch.equal(residual + out.branches[boundary], out.boundaries[boundary])
        assert out.branches[boundary].abs().max() > 0


def test_only_the_wanted_branches_are_taken_and_no_hook_stays(target_of: Callable[..., Path]) -> None:
    model = TargetModel(target_of("llama"), dtype=torch.float32)
    plain = model.forward(ROWS, boundaries=[2])
    model.reset()
    out = model.forward(ROWS, boundaries=[2], branches=[3, 0])
    assert list(out.branches) == [0, 3] and list(out.boundaries) == [2]
    assert torch.equal(out.logits, plain.logits) and torch.equal(out.boundaries[2], plain.boundaries[2])
    modules: list[Any] = list(model.model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)


def test_what_has_no_branch_or_no_part_says_so(target_of: Callable[..., Path]) -> None:
    bare = Taps(nn.ModuleList([nn.Linear(2, 2)]), nn.LayerNorm(2))
    with pytest.raises(UserError, match="Linear has no `mlp`, so what it adds"), bare.taken(branches=[1]):
        raise AssertionError("it was taken")
    model = TargetModel(target_of("llama"), dtype=torch.float32)
    with pytest.raises(UserError, match="LlamaDecoderLayer: what it adds to the stream is no sum over ranks"):
        model.forward(ROWS, boundaries=(), parts=[2])

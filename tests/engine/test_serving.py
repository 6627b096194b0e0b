"""A call that cannot be served is refused before anything runs or is written, by what is wrong and what is right."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spectrace.engine.checkpoint import DraftCheckpoint, read_draft
from spectrace.engine.deployment import Deployment
from spectrace.engine.sampling import Sampling
from spectrace.engine.serving import Serving, check_prompts, resolve_wiring
from spectrace.tracer.errors import UserError

NewDraft = Callable[..., tuple[dict[str, Any], dict[str, Tensor]]]
Write = Callable[..., Path]


@pytest.fixture
def draft(new_draft: NewDraft, write_draft: Write, tmp_path: Path) -> DraftCheckpoint:
    return read_draft(write_draft(tmp_path / "draft", *new_draft()))


@pytest.mark.parametrize(
    ("serving", "told"),
    [
        (Serving(depth=-1), "depth is -1"),
        (Serving(wiring=(0, 2, 6)), "--wiring: boundary 6 does not exist; this target has boundaries 0 to 5"),
        (Serving(wiring=(-1, 2, 4)), "--wiring: boundary -1 does not exist"),
        (Serving(wiring=(0, 2)), "--wiring: 2 boundaries, but fc of .* takes 3"),
        (Serving(wiring=()), "--wiring: 0 boundaries, but fc of .* takes 3"),
        (Serving(wiring=(0, 2, 3, 4)), "--wiring: 4 boundaries, but fc of .* takes 3"),
        (Serving(capture=(0, 9)), "--capture: boundary 9 does not exist; this target has boundaries 0 to 5"),
        (Serving(faults=("W1", "X9")), "--fault X9: no such fault; known are W1"),
        (Serving(topk=0), "topk 0 and 4 draft tokens are no tree"),
        (Serving(draft_tokens=1), "topk 1 and 1 draft tokens are no tree"),
        (Serving(draft_tokens=5), "5 draft tokens, .*depth 3 and topk 1 give only 3 below the root; .* 4 at most"),
        (Serving(topk=4), "topk 4 needs --num-draft-tokens"),
        (Serving(depth=2, topk=4, draft_tokens=22), "give only 20 below the root; give --num-draft-tokens 21 at most"),
        (Serving(topk=65, draft_tokens=8), "topk 65, but the vocabulary of .* is 64 tokens"),
        (Serving(sampling=Sampling(-0.5)), "temperature is -0.5"),
        (Serving(sampling=Sampling(math.nan)), "temperature is nan"),
        (Serving(sampling=Sampling(1.0, seed=-1)), "seed is -1"),
        (Serving(sampling=Sampling(0.0, sampled_drafts=True)), "sampled drafts need a temperature above 0"),
        (Serving(topk=2, draft_tokens=4, sampling=Sampling(1.0, 0, True)), "sampled drafts are chains"),
        (Serving(faults=("S1:residual",)), "--fault S1:residual: greedy verification has nothing of it"),
        (Serving(faults=("S2",), sampling=Sampling(1.0)), "--fault S2: no draft is drawn"),
        (Serving(depth=0, faults=("W6",)), "--fault W6: without a draft nothing is handed over"),
        (Serving(wiring=(5, 5, 5), faults=("W3",)), None),
        (Serving(wiring=(0, 0, 0), faults=("W1",)), None),
    ],
)
def test_settings_are_held_against_the_pair(serving: Serving, told: str | None, draft: DraftCheckpoint) -> None:
    if told is None:
        assert resolve_wiring(serving, draft, layers=5).boundaries == serving.wiring
    else:
        with pytest.raises(UserError, match=told):
            resolve_wiring(serving, draft, layers=5)


def test_a_fault_that_this_pair_cannot_have_is_refused(new_draft: NewDraft, write_draft: Write, tmp_path: Path) -> None:
    """The engine's three default boundaries for a draft of two, or of a target too shallow for them."""
    config, tensors = new_draft(eagle_aux_hidden_state_layer_ids=[0, 2])
    two = read_draft(write_draft(tmp_path / "draft", config, tensors))
    with pytest.raises(UserError, match="--fault W4: makes 3 boundaries of 2; use another fault"):
        resolve_wiring(Serving(faults=("W4",)), two, layers=5)
    with pytest.raises(UserError, match="--fault W3: boundary -1 does not exist; this target has boundaries 0 to 2"):
        resolve_wiring(Serving(faults=("W3",)), two, layers=2)


def test_depth_needs_a_draft() -> None:
    with pytest.raises(UserError, match="depth 3 needs a draft; give --draft DIR or --depth 0"):
        resolve_wiring(Serving(depth=3), None, layers=5)
    assert resolve_wiring(Serving(depth=0), None, layers=5).boundaries == ()


def test_the_wiring_says_where_it_came_from(
    draft: DraftCheckpoint, new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    own = resolve_wiring(Serving(), draft, layers=5)
    assert (own.boundaries, own.key) == ((0, 2, 4), "eagle_aux_hidden_state_layer_ids")
    given = resolve_wiring(Serving(wiring=(1, 3, 5)), draft, layers=5)
    assert (given.boundaries, given.key) == ((1, 3, 5), "--wiring")
    config, tensors = new_draft()
    del config["eagle_aux_hidden_state_layer_ids"]
    silent = read_draft(write_draft(tmp_path / "silent", config, tensors))
    default = resolve_wiring(Serving(), silent, layers=5)
    assert (default.boundaries, default.key) == ((2, 2, 2), "default")
    with pytest.raises(UserError, match="names no layer ids, and the default: boundary -1 does not exist"):
        resolve_wiring(Serving(), silent, layers=2)


def test_a_drafts_own_ids_must_exist_in_the_target(draft: DraftCheckpoint) -> None:
    with pytest.raises(
        UserError, match=r"config.json: eagle_aux.*: boundary 4 does not exist.*ids of another convention"
    ):
        resolve_wiring(Serving(), draft, layers=3)


@pytest.mark.parametrize(
    ("serving", "prompts", "told"),
    [
        (Serving(), [], "no prompts: give at least one"),
        (Serving(), [[1], []], "prompt 1 is empty"),
        (Serving(), [[1, 96]], "prompt 0: token 96 is not in the target's vocabulary, 0 to 95"),
        (Serving(), [[-1]], "prompt 0: token -1"),
        (Serving(max_new=0), [[1]], "max_new is 0; expected at least 1"),
        (Serving(max_new=(3, 0)), [[1], [2]], "max_new is 0"),
        (Serving(max_new=(3,)), [[1], [2]], "max_new: 1 limits for 2 prompts"),
        (Serving(concurrency=0), [[1]], "concurrency is 0; expected at least 1"),
        (Serving(chunk=0), [[1]], "chunk is 0; expected at least 1"),
    ],
)
def test_prompts_and_limits_are_checked(serving: Serving, prompts: list[list[int]], told: str) -> None:
    with pytest.raises(UserError, match=told):
        check_prompts(serving, prompts, vocab=96)


def test_nothing_is_written_for_a_call_that_is_refused(pair_of: Callable[..., Deployment], tmp_path: Path) -> None:
    pair, trace = pair_of("llama", "gqa"), tmp_path / "trace"
    for serving in (Serving(wiring=(0, 2, 6)), Serving(wiring=(0,)), Serving(capture=(6,)), Serving(faults=("W9",))):
        with pytest.raises(UserError):
            pair.serve([[1]], serving, trace=trace)
        with pytest.raises(UserError):
            pair.check(serving)
    with pytest.raises(UserError):
        pair.serve([[]], Serving(), trace=trace)
    assert not trace.exists()
    pair.serve([[1]], Serving(max_new=2), trace=trace)
    before = sorted(path.name for path in trace.rglob("*"))
    with pytest.raises(UserError, match="exists and is not an empty folder: give a new path for the trace"):
        pair.serve([[1]], Serving(max_new=2), trace=trace)
    assert sorted(path.name for path in trace.rglob("*")) == before
    assert len(pair.serve([[1]], Serving(max_new=2)).requests) == 1


def test_a_draft_of_another_target_is_refused_when_the_pair_is_made(
    target_of: Callable[..., Path],
    new_draft: NewDraft,
    write_draft: Write,
    new_target: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """By width, by vocabulary, and by a d2t whose tokens do not exist, such as one that holds ids."""
    target = target_of("llama")

    def refused(target: Path, draft: Path, told: str) -> None:
        with pytest.raises(UserError, match=told) as raised:
            Deployment(target, draft)
        assert str(draft) in raised.value.message

    draft = write_draft(tmp_path / "draft", *new_draft())
    assert Deployment(target, draft).layers == 5
    wide = new_target(tmp_path / "wide", "llama", hidden_size=64)
    refused(
        wide, draft, "drafts for a target of width 48, but .*wide has width 64: this is the draft of another target"
    )
    large = new_target(tmp_path / "large", "llama", vocab_size=100)
    refused(large, draft, "target of vocabulary 96, but .*large has vocabulary 100")
    config, tensors = new_draft()
    ids = tensors["d2t"] + torch.arange(64)
    direct = write_draft(tmp_path / "direct", config, {**tensors, "d2t": ids})
    refused(target, direct, "tensor d2t names token .*, but the vocabulary is 0 to 95; d2t holds offsets")
    refused(target, tmp_path / "nowhere", "no such folder")
    refused(target, target, "not an EAGLE-3 draft but a whole target model")


def test_a_target_that_is_none_is_refused_when_the_pair_is_made(
    target_of: Callable[..., Path], new_draft: NewDraft, write_draft: Write, tmp_path: Path
) -> None:
    draft = write_draft(tmp_path / "draft", *new_draft())
    with pytest.raises(UserError, match="this is a draft; --target wants the model that it drafts for"):
        Deployment(draft, draft)
    with pytest.raises(UserError, match="no such folder"):
        Deployment(tmp_path / "nowhere", draft)


def test_a_target_whose_weights_are_broken_is_refused_by_the_actor_in_our_words(
    cluster: None, new_target: Callable[..., Path], tmp_path: Path
) -> None:
    """The config is whole, so only loading finds out; the error arrives as what it is, and no process stays."""
    folder = new_target(tmp_path / "target", "llama")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with (
        pytest.raises(UserError, match="transformers cannot load it as a causal language model"),
        Deployment(folder, None),
    ):
        raise AssertionError("it came up")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    assert config["vocab_size"] == 96

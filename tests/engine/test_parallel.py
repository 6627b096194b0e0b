"""Tensor parallelism changes no token: targets of five families and both kinds of draft, split over ranks or not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spectrace.engine.checkpoint import build_draft, read_draft
from spectrace.engine.deployment import Deployment, Served, Serving
from spectrace.engine.sampling import Sampling
from spectrace.replay.lab import replay_trace
from spectrace.tracer.errors import RunFailed, UserError
from spectrace.tracer.rows import Level
from spectrace.tracer.rowset import Rows
from spectrace.tracer.trace import Trace

Alone = Callable[..., list[int]]
Pair = tuple[str, str]
Recorded = Callable[[Pair, int, int], tuple[Trace, Served]]
FAMILIES = ("llama", "qwen3", "deepseek_v3", "kimi_k25", "gemma3_text")
PAIRS: list[Pair] = [
    *((family, "gqa") for family in FAMILIES), ("llama", "mla"), ("kimi_k25", "mla"), ("llama", "deep"),
]  # fmt: skip
RANKS = [(1, 1), (2, 1), (1, 2), (2, 2)]
KINDS = {
    "emitted": ("slots", "logits"),
    "received": ("features", "state"),
    "drafted": ("fused", "hidden", "state", "logits"),
    "reference": ("boundaries",),
}


class Lab:
    """Pairs on so and so many ranks, one deployment running at a time, and what each has recorded, once."""

    def __init__(self, target_of: Callable[..., Path], draft_of: Callable[..., Path], folder: Path) -> None:
        self.target_of, self.draft_of, self.folder = target_of, draft_of, folder
        self.running = ExitStack()
        self.ranks: tuple[int, int] | None = None
        self.traces: dict[tuple[Pair, int, int], tuple[Trace, Served]] = {}

    def deployment(self, pair: Pair, tp: int, draft_tp: int) -> Deployment:
        folders = self.target_of(pair[0]), self.draft_of(*pair)
        if self.ranks != (tp, draft_tp):
            self.running.close()
            self.now = self.running.enter_context(Deployment(*folders, threads=1, tp=tp, draft_tp=draft_tp))
            self.ranks = tp, draft_tp
        elif self.now.target_folder != folders[0] or self.now.draft_folder != folders[1]:
            self.now.swap(*folders)
        return self.now

    def recorded(
        self, pair: Pair, tp: int, draft_tp: int, prompts: list[list[int]], limits: tuple[int, ...]
    ) -> tuple[Trace, Served]:
        """Chunked prompts, requests that join and leave; every rank records."""
        key = pair, tp, draft_tp
        if key not in self.traces:
            serving = Serving(
                depth=3, max_new=limits, concurrency=3, chunk=5, ignore_end=True, capture=(0, 3, 5), level=Level.FULL
            )
            folder = self.folder / str(len(self.traces))
            served = self.deployment(*key).serve(prompts, serving, trace=folder)
            self.traces[key] = Trace.open(folder), served
        return self.traces[key]


@pytest.fixture(scope="module")
def lab(
    cluster: None,
    target_of: Callable[..., Path],
    draft_of: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Lab]:
    found = Lab(target_of, draft_of, tmp_path_factory.mktemp("ranks"))
    with found.running:
        yield found


@pytest.fixture(scope="module")
def recorded(lab: Lab, prompts: list[list[int]], limits: tuple[int, ...]) -> Recorded:
    """`recorded(pair, tp, draft_tp)`: a trace, and what was served."""
    return lambda pair, tp, draft_tp: lab.recorded(pair, tp, draft_tp, prompts, limits)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("ranks", RANKS, ids=str)
def test_ranks_lose_nothing(
    pair: Pair,
    ranks: tuple[int, int],
    recorded: Recorded,
    prompts: list[list[int]],
    limits: tuple[int, ...],
    alone: Alone,
) -> None:
    trace, served = recorded(pair, *ranks)
    assert [request.output for request in served.requests] == [
        alone(pair[0], prompt, limit) for prompt, limit in zip(prompts, limits, strict=True)
    ]
    assert served.losses == () and sum(request.correct_drafts for request in served.requests) > 0
    assert trace.sealed and trace.verify() == []
    assert trace.manifest["tensor_parallel"] == {"target": ranks[0], "draft": ranks[1]}
    writers = [f"target-{rank}" for rank in range(ranks[0])] + [f"draft-{rank}" for rank in range(ranks[1])]
    assert set(trace.writers) == {*writers, "scheduler-0"}


@pytest.mark.parametrize("ranks", RANKS[1:], ids=str)
def test_drawn_texts_and_trees_do_not_depend_on_the_number_of_ranks(
    ranks: tuple[int, int], lab: Lab, pair_of: Callable[..., Deployment], prompts: list[list[int]], alone: Alone
) -> None:
    """Every draw is keyed, and what drafts were drawn from goes to all ranks of the target."""
    sampling = Sampling(temperature=0.7, seed=5, sampled_drafts=True)
    drawn = Serving(depth=3, max_new=20, ignore_end=True, sampling=sampling)
    split = lab.deployment(("llama", "gqa"), *ranks)
    served, expected = (pair.serve(prompts[:4], drawn) for pair in (split, pair_of("llama", "gqa")))
    assert [request.output for request in served.requests] == [request.output for request in expected.requests]
    assert sum(request.correct_drafts for request in served.requests) > 0
    served = split.serve(prompts[:4], Serving(depth=3, topk=2, draft_tokens=6, max_new=20, ignore_end=True))
    assert [request.output for request in served.requests] == [alone("llama", prompt, 20) for prompt in prompts[:4]]


def test_a_rank_alone_has_no_torch_world(pair_of: Callable[..., Deployment]) -> None:
    import ray

    actors = [actor for group in pair_of("llama", "gqa").groups for actor in group.actors]
    loaded = [actor.__ray_call__.remote(lambda _: torch.distributed.is_initialized()) for actor in actors]
    assert ray.get(loaded) == [False, False]


def sorted_rows(trace: Trace, family: str, rank: int) -> Rows:
    """A rank's rows in the order of their keys."""
    rows = trace.rows(family, rank=rank)
    keys = np.stack([rows[name].astype(np.int64) for name in ("request", "pass", "depth", "node")])
    return rows.take(np.lexsort(keys[::-1]))


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_ranks_have_the_same_hashes_and_rank_0_alone_keeps_tensors(pair: Pair, recorded: Recorded) -> None:
    trace, _ = recorded(pair, 2, 2)
    for family, kinds in KINDS.items():
        first, second = sorted_rows(trace, family, 0), sorted_rows(trace, family, 1)
        assert len(first) == len(second) > 0
        for column in ("request", "pass", "depth", "node", "position", "token"):
            assert np.array_equal(first[column], second[column])
        hashes = "state_hash" if family == "drafted" else "hashes"
        assert all(np.array_equal(a, b) for a, b in zip(first[hashes], second[hashes], strict=True))
        for kind in kinds:
            assert first.has(kind).any() and not second.has(kind).any()


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_states_of_a_split_target_are_those_of_a_whole_one(pair: Pair, recorded: Recorded) -> None:
    """At every recorded boundary; an embedding's are equal, since a split table adds nothing but zeros."""
    whole, split = (sorted_rows(recorded(pair, tp, 1)[0], "reference", 0) for tp in (1, 2))
    assert np.array_equal(whole["token"], split["token"]) and len(whole) > 100
    for boundary, limit in (("b0", 0.0), ("b3", 1e-5), ("b5", 1e-5)):
        expected, found = (rows.tensor("boundaries", boundary) for rows in (whole, split))
        assert ((found - expected).abs().amax(-1) / expected.abs().amax(-1)).max() <= limit


@pytest.mark.parametrize("pair", [("llama", "gqa"), ("kimi_k25", "mla"), ("llama", "deep")], ids="-".join)
def test_replay_reproduces_what_ranks_have_drafted(
    pair: Pair,
    recorded: Recorded,
    target_of: Callable[..., Path],
    draft_of: Callable[..., Path],
) -> None:
    """The whole draft in one process, fed from the trace, against the split one."""
    model = build_draft(read_draft(draft_of(*pair)), target=target_of(pair[0]), dtype=torch.float32)
    report = replay_trace(recorded(pair, 2, 2)[0], model)
    assert report.comparison.tokens_equal == report.comparison.answers > 100
    assert report.comparison.max_error is not None and report.comparison.max_error <= 1e-5
    assert report.requests == 8 and report.incomplete == 0 and report.replayed == report.served


def test_what_is_split_is_in_the_manifest(recorded: Recorded) -> None:
    sharded = recorded(("kimi_k25", "mla"), 2, 2)[0].manifest["sharded"]
    assert recorded(("kimi_k25", "mla"), 1, 1)[0].manifest["sharded"] == {"target": {}, "draft": {}}
    assert set(sharded["draft"].values()) == {"Shard(dim=0)", "Shard(dim=1)"}
    assert {"fc.weight", "head.weight", "attention.q_up.weight", "mlp.down.weight"} <= sharded["draft"].keys()
    assert not {"attention.q_down.weight", "embedding.weight"} & sharded["draft"].keys()
    assert any("experts" in name for name in sharded["target"])
    assert not any("self_attn" in name for name in sharded["target"])


def bend(pair: Deployment, module: str, by: float) -> None:
    """Let rank 1 of the target take what leaves a module for so much more than it is, and nothing else any longer."""
    import ray

    def change(actor: Any) -> None:
        if bent := getattr(actor, "bent", None):
            bent.remove()
        bending = actor.shard.model.model.get_submodule(module)
        actor.bent = bending.register_forward_hook(lambda _module, _inputs, out: out * (1 + by))

    ray.get(pair.target.actors[1].__ray_call__.remote(change))


@pytest.fixture(scope="module")
def bendable(cluster: None, target_of: Callable[..., Path], draft_of: Callable[..., Path]) -> Iterator[Deployment]:
    """Two ranks of each, one of which tests spoil."""
    with Deployment(target_of("llama"), draft_of("llama", "gqa"), threads=1, tp=2, draft_tp=2) as deployment:
        yield deployment


def test_where_ranks_disagree_every_rank_keeps_its_tensors(
    bendable: Deployment, prompts: list[list[int]], tmp_path: Path
) -> None:
    """A difference too small for any token to notice is in the hashes; draft rank 1 is fed by target rank 1."""
    bend(bendable, "model.layers.0", 1e-6)
    serving = Serving(depth=2, max_new=4, ignore_end=True, capture=(1,), level=Level.FULL)
    bendable.serve(prompts[:2], serving, trace=tmp_path / "trace")
    trace = Trace.open(tmp_path / "trace")
    assert trace.sealed and trace.verify() == []
    for family, kind in (("emitted", "slots"), ("reference", "boundaries"), ("received", "features")):
        chosen = {"depth": 0} if family == "received" else {}
        first, second = (trace.rows(family, rank=rank, **chosen) for rank in (0, 1))
        assert first.has(kind).all() and second.has(kind).all()
        assert (first["hashes"] != second["hashes"]).any(axis=1).mean() > 0.9


def test_ranks_that_decide_differently_are_an_error(bendable: Deployment, prompts: list[list[int]]) -> None:
    """Every rank judges by the logits of all, so nothing short of this makes them differ."""
    bend(bendable, "lm_head", -2.0)
    with pytest.raises(RunFailed, match=r"^ranks 0 and 1 of the target disagree in step \d+ about request \d"):
        bendable.serve(prompts, Serving(depth=2, max_new=20, ignore_end=True))


def test_ranks_that_cannot_share_a_model_are_refused(
    target_of: Callable[..., Path], draft_of: Callable[..., Path], tmp_path: Path
) -> None:
    """Before anything is started, with what would do."""
    target, draft = target_of("llama"), draft_of("llama", "gqa")
    with pytest.raises(UserError, match=r"--tp 4 does not divide num_key_value_heads 2; it can be 1, 2$"):
        Deployment(target, draft, tp=4)
    with pytest.raises(UserError, match=r"--draft-tp 3 does not divide num_attention_heads 4, num_key_value_heads 2"):
        Deployment(target, draft, draft_tp=3)
    with pytest.raises(UserError, match=r"--draft-tp 8 does not divide num_attention_heads 4; it can be 1, 2, 4$"):
        Deployment(target_of("kimi_k25"), draft_of("kimi_k25", "mla"), draft_tp=8)
    fields = {"model_type": "opt", "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(fields), "utf-8")
    with pytest.raises(UserError, match="transformers has no tensor-parallel plan for opt, so --tp 2 is not possible"):
        Deployment(tmp_path, None, tp=2)


def test_ranks_by_attention_are_no_limit_where_attention_is_not_split(target_of: Callable[..., Path]) -> None:
    """DeepSeek's plan splits the MLP and the experts alone: 96 and 48 features over 3 ranks, though it has 4 heads."""
    assert Deployment(target_of("deepseek_v3"), None, tp=3).tp == 3


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 3])
def test_nine_heads_over_three_ranks(tp: int, cluster: None, tmp_path: Path) -> None:
    """SmolLM2 has 9 heads and 3 key heads."""
    from transformers import AutoModelForCausalLM

    models = Path(__file__).parents[2] / "models" / "smollm2"
    target = Path.home() / ".cache" / "spectrace" / "SmolLM2-135M-Instruct"
    if not (target / "model.safetensors").is_file():
        pytest.skip("the target is made by `make target`")
    prompts = [[1, 4093, 198, 17, 300, 9, 28], [1, 9690, 198, 2683, 359, 253]]
    serving = Serving(depth=3, max_new=12, ignore_end=True)
    with Deployment(target, models / "draft", threads=1, tp=tp) as pair:
        served = pair.serve(prompts, serving, trace=tmp_path / "trace")
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    model.generation_config.eos_token_id = None
    for prompt, request in zip(prompts, served.requests, strict=True):
        ids = torch.tensor([prompt])
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
        assert request.output == answer[0, len(prompt) :].tolist()
    assert Trace.open(tmp_path / "trace").sealed

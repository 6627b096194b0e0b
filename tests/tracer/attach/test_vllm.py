"""Real vLLM on the CPU, nobody's edits: what it records is what it served, and replays to the token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from spectrace.cli.check import examine
from spectrace.engine.checkpoint import build_draft, read_draft
from spectrace.engine.convert import WRITABLE, convert_draft
from spectrace.engine.fields import read_config
from spectrace.engine.prompts import read_prompts
from spectrace.replay.compare import served_dtype
from spectrace.replay.diagnose import diagnose
from spectrace.replay.diagnosis import Verdict
from spectrace.replay.diff.diff import Verdict as Compared
from spectrace.replay.diff.diff import diff
from spectrace.replay.lab import replay_trace
from spectrace.tracer.acceptance import acceptance_of_rows
from spectrace.tracer.trace import Trace

pytestmark = pytest.mark.vllm

Pair = Callable[[str], tuple[Path, Path]]
Serve = Callable[..., Any]
RANKS = {"tensor_parallel_size": 2, "processes": "ranks"}
COMPILED = {"enforce_eager": False}
SEVERAL = {"processes": "several"}


@dataclass(frozen=True, slots=True)
class Run:
    """A pair, how it is served, and how far rounding may part a boundary from Hugging Face's."""

    pair: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> bool:
        return "tensor_parallel_size" in self.options


RUNS = {
    "llama, eager, one process": Run("llama"),
    "llama, compiled, one process": Run("llama", COMPILED),
    "llama, eager, two ranks": Run("llama", RANKS),
    "qwen3, compiled, several processes": Run("qwen3", {**COMPILED, **SEVERAL}),
    "qwen3, compiled, two ranks": Run("qwen3", {**COMPILED, **RANKS}),
    "SmolLM2, eager, several processes": Run("SmolLM2", SEVERAL),
    "SmolLM2, compiled, one process": Run("SmolLM2", COMPILED),
}


@pytest.fixture(scope="module")
def heldout(smollm2: tuple[Path, Path]) -> list[list[int]]:
    """Prompts that the shipped draft was not trained on."""
    file = smollm2[1].parent / "prompts" / "heldout.jsonl"
    return [list(prompt) for prompt in read_prompts(file, smollm2[0])[:6]]


@pytest.mark.parametrize("name", RUNS)
def test_a_trace_of_vllm_is_what_vllm_counted_and_replays_to_the_token(
    name: str, serve: Serve, analytic_pair: Pair, smollm2: tuple[Path, Path], heldout: list[list[int]]
) -> None:
    run = RUNS[name]
    target, draft = smollm2 if run.pair == "SmolLM2" else analytic_pair(run.pair)
    asked = {"prompts": heldout, "max_new": 48} if run.pair == "SmolLM2" else {}
    served = serve(target, draft, asked=asked, **run.options)
    trace = served.trace
    assert examine(trace.folder).ok
    counted_as_served(served)

    checkpoint = read_draft(draft)
    replayed = replay_trace(trace, build_draft(checkpoint, target=target, dtype=served_dtype(trace)))
    comparison = replayed.comparison
    assert comparison.tokens_equal == comparison.answers > 200 and replayed.agrees
    assert {stage.stage for stage in comparison.stages} >= {"fused", "hidden", "state", "logits"}
    assert max(stage.max_error for stage in comparison.stages) < 1e-5

    told = diagnose(trace, checkpoint, target=target)
    assert told.verdict in ((Verdict.HEALTHY, Verdict.WEAK_DRAFT) if run.pair == "SmolLM2" else (Verdict.HEALTHY,))
    assert told.causes == () and [one.best for one in told.identified] == [one.configured for one in told.identified]
    assert max(one.error for one in told.identified) < 1e-5 < 1e-2 < min(one.runner_up_error for one in told.identified)
    assert told.coverage["loaded tensors compared"] > 12 and told.coverage["received rows equal"] > 250
    assert bool(told.coverage["rows compared between ranks"]) == run.ranks
    for status in trace.statuses.values():
        assert status.share is None or status.share < 0.5, "a figure for docs/engines/vllm.md, not a limit on speed"


def counted_as_served(served: Any) -> None:
    """Untrimmed acceptance and texts of a trace are the engine's own."""
    trace = served.trace
    found = acceptance_of_rows(trace.rows("verified"))
    assert found.rounds_untrimmed == served.counters["spec_decode_num_drafts"] > 0
    assert found.correct_drafts_untrimmed == served.counters["spec_decode_num_accepted_tokens"]
    assert sorted(map(list, trace.rows("requests")["output_tokens"].tolist())) == sorted(served.outputs)


def test_recording_changes_nothing_that_is_served(serve: Serve, analytic_pair: Pair) -> None:
    pair = analytic_pair("llama")
    with_us, without = serve(*pair, level="features"), serve(*pair, level=None)
    assert with_us.outputs == without.outputs and with_us.counters == without.counters


def test_a_converted_draft_serves_as_the_one_that_it_was_made_of(
    serve: Serve, smollm2: tuple[Path, Path], heldout: list[list[int]], tmp_path: Path
) -> None:
    """The same tokens and the same counts, from a folder of every layout that is written."""
    target, draft = smollm2
    asked = {"prompts": heldout, "max_new": 48}
    original = serve(target, draft, asked=asked, level=None)
    assert original.counters["spec_decode_num_accepted_tokens"] > 40
    for layout in WRITABLE:
        convert_draft(draft, tmp_path / layout, layout, target=target)
        served = serve(target, tmp_path / layout, asked=asked, level=None)
        assert served.outputs == original.outputs and served.counters == original.counters, layout


def test_later_layers_and_biases_are_known_in_memory_and_missed_where_a_copy_lost_them(
    serve: Serve,
    analytic_pair: Pair,
    new_draft: Callable[..., Any],
    write_draft: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """Of a random draft; vLLM serves none of which some layers have a window."""
    target, _ = analytic_pair("llama")
    told = read_config(target)
    width, vocab = told["hidden_size"], told["vocab_size"]
    config, tensors = new_draft(
        "deep", model_type="llama", hidden_size=width, target_hidden_size=width, vocab_size=vocab, head_dim=32,
        num_attention_heads=2, num_key_value_heads=1, draft_vocab_size=vocab, max_position_embeddings=512,
        layer_types=None, sliding_window=None, use_sliding_window=None,
    )  # fmt: skip
    draft = write_draft(tmp_path / "draft", config, tensors)
    copy = write_draft(
        tmp_path / "copy",
        {**config, "mlp_bias": False},
        {k: t for k, t in tensors.items() if "mlp" not in k or "bias" not in k},
    )
    whole, lost = (
        diagnose(serve(target, one, asked={"max_new": 48}).trace, read_draft(draft), target=target)
        for one in (draft, copy)
    )
    assert whole.causes == () and whole.coverage["loaded tensors compared"] > 28
    assert {(link, one.engine) for link, one in whole.readings.items() if one.engine != one.configured} == set()
    [cause] = lost.causes
    assert (cause.fault, cause.variant) == ("P7", "mlp") and "mlp.gate_proj.bias" in cause.fix, cause


def test_requests_that_are_preempted_and_resumed_are_recorded_as_one_text(serve: Serve, analytic_pair: Pair) -> None:
    """Blocks for about three of eight answers: some lose their cache on the way, and are computed again."""
    target, draft = analytic_pair("llama")
    asked = {"prompts": [[5 + at, 9, 30] for at in range(8)], "max_new": 120}
    served = serve(target, draft, asked=asked, num_gpu_blocks_override=14, block_size=32, max_model_len=128)
    assert served.counters["num_preemptions"] > 0
    assert examine(served.folder).ok
    counted_as_served(served)
    told = diagnose(served.trace, read_draft(draft), target=target)
    assert told.verdict is Verdict.HEALTHY, told


def test_requests_on_a_cached_prefix_are_replayed_with_its_rows(serve: Serve, analytic_pair: Pair) -> None:
    """One after another, with a beginning in common: vLLM computes it once."""
    target, draft = analytic_pair("llama")
    beginning = [5 + at % 50 for at in range(80)]
    asked = {"prompts": [[*beginning, 9 + at, 30] for at in range(12)], "max_new": 30}
    served = serve(target, draft, asked=asked, max_num_seqs=1, enable_prefix_caching=True, block_size=32)
    trace = served.trace
    assert examine(trace.folder).ok and trace.manifest["mode"]["prefix_cache"]
    cached = trace.rows("requests")["cached_prefix"]
    assert cached[0] == 0 and min(cached[1:]) >= 32
    replayed = replay_trace(trace, build_draft(read_draft(draft), target=target, dtype=served_dtype(trace)))
    assert replayed.requests == 12 and not replayed.incomplete
    comparison = replayed.comparison
    assert comparison.tokens_equal == comparison.answers > 60 and replayed.agrees
    assert diagnose(trace, read_draft(draft), target=target).verdict is Verdict.HEALTHY


def test_one_config_means_the_same_in_vllm_and_in_the_reference_engine(
    serve: Serve, smollm2: tuple[Path, Path], heldout: list[list[int]], spectrace: Callable[..., Any], tmp_path: Path
) -> None:
    """Wiring (0, 3, 16) out of one config.json, the same prompts: the same rounds, and rows that pair and agree."""
    target, draft = smollm2
    theirs = serve(target, draft, asked={"prompts": heldout, "max_new": 48, "ignore_end": False}).trace
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"tokens": {prompt}}}\n' for prompt in heldout), "utf-8")
    done = spectrace(
        "run", "--target", target, "--draft", draft, "--prompts", prompts, "--depth", 3, "--max-new", 48,
        "--dtype", "float32", "--level", "full", "--out", tmp_path / "ours",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ours = Trace.open(tmp_path / "ours")
    wirings = [trace.manifest["wiring"]["resolved"] for trace in (theirs, ours)]
    assert [tuple(wiring["boundaries"]) for wiring in wirings] == [(0, 3, 16)] * 2
    found = diff(ours, theirs)
    assert found.verdict is Compared.WITHIN and not found.moved
    for family, pairs in found.plan.families.items():
        assert pairs.rows > 0.95 * max(len(trace.rows(family, live=True)) for trace in (theirs, ours)), family
    assert not [flip for flip in found.decisions.flips if flip.flips > flip.ties]
    assert found.decisions.tokens_lost == pytest.approx(0, abs=0.02)

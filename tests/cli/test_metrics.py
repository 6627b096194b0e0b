"""`info --metrics` shows every definition, and a trace's acceptance in each that it can be said in."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from spectrace.replay.metric import Measured
from spectrace.replay.metric_refusals import REFUSALS
from spectrace.replay.metrics import CONVERSIONS, METRICS
from spectrace.tracer import Keys, Recorder, create_trace, seal_trace

Say = Callable[..., object]
CHAINS = [(3, False), (0, False), (1, False), (2, True), (0, False)]
"""Correct drafts of each round, and whether an end cut it."""


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def write(folder: Path, rounds: list[tuple[int, bool]], *, parents: tuple[int, ...], p: float = np.nan) -> Path:
    """One request whose rounds verify a path; node j of it stands below `parents[j]`."""
    create_trace(folder, {})
    nodes = len(parents)
    with Recorder(folder, role="scheduler", strict=True) as recorder:
        for round_, (correct, cut) in enumerate(rounds):
            tested = np.arange(nodes) <= correct + 1
            recorder.verified(
                Keys(request=0, pass_=round_, position=0, node=np.arange(nodes), round=round_),
                parent=np.array(parents), token=0, target_token=0, accepted=np.arange(nodes) <= correct, cut=cut,
                source_row=0, p=np.where(tested & (np.arange(nodes) > 0), p, np.nan),
                q=np.where(np.arange(nodes) > 0, 1.0, np.nan),
            )  # fmt: skip
        recorder.requests(
            Keys(request=0, pass_=0, position=0, node=0), id="one", prompt_tokens=[[1]], output_tokens=[[7] * 11],
            cached_prefix=0, temperature=0.0, finish_reason="stop", rounds=len(rounds), correct_drafts=6, depth_limit=3,
        )  # fmt: skip
    seal_trace(folder)
    return folder


@pytest.fixture
def chains(tmp_path: Path) -> Path:
    return write(tmp_path / "chains", CHAINS, parents=(-1, 0, 1, 2), p=0.5)


def values(spectrace: Say, trace: Path) -> dict[str, dict[str, object]]:
    said = spectrace("info", "--metrics", trace, "--json")
    assert said.code == 0, said.err
    return {one["key"]: one for one in json.loads(said.out)["acceptance"]["metrics"]}


def test_the_page_has_every_definition_conversion_and_refusal(spectrace: Say) -> None:
    said = spectrace("info", "--metrics")
    page = " ".join(said.out.split())
    assert said.code == 0
    for metric in METRICS.values():
        for text in (metric.key, *map(str, metric.names), metric.says, metric.formula, metric.range, metric.source):
            assert " ".join(text.split()) in page, text
    assert all(one.formula in page for one in CONVERSIONS)
    assert all(text in page for one in REFUSALS for text in (one.title, one.reason))


def test_the_document_has_them_too(spectrace: Say) -> None:
    said = json.loads(spectrace("info", "--metrics", "--json").out)
    assert [one["key"] for one in said["metrics"]] == list(METRICS)
    fields = {"names", "says", "formula", "numerator", "denominator", "counting", "bonus", "measured", "outside"}
    assert all(one.keys() >= fields | {"counted", "range", "source", "group"} for one in said["metrics"])
    assert {(one["source"], one["to"]) for one in said["conversions"]} == {(one.source, one.to) for one in CONVERSIONS}
    assert [one["title"] for one in said["refusals"]] == [one.title for one in REFUSALS]


def test_without_a_trace_info_wants_one(spectrace: Say) -> None:
    said = spectrace("info")
    assert said.code == 2 and "Missing argument 'TRACE'" in said.err


def test_a_trace_of_chains_in_every_word_of_engines(spectrace: Say, chains: Path) -> None:
    found = values(spectrace, chains)
    expected = {
        "cumulative": ([0.5, 0.25, 0.25], [0.6, 0.4, 0.2]),
        "conditional": ([0.5, 0.5, 1.0], [0.6, 2 / 3, 0.5]),
        "sglang.histogram": ([2, 1, 0, 1], [2, 1, 1, 1]),
        "vllm.counters": ([4, 12, 4], [5, 15, 6]),
        "acceptance_length": (2.0, 2.2),
        "drafts_per_round": (1.0, 1.2),
        "vllm.acceptance_rate": (1 / 3, 0.4),
        "sglang.accept_rate": (1 / 3, 0.4),
        "sglang.old_accept_rate": (0.5, 0.55),
        "sglang.request_length": (None, [11 / 5]),
        "greedy.alpha": ([0.5, 0.5, 0.5], [0.5, 0.5, 0.5]),
    }
    for key, (whole, every) in expected.items():
        assert found[key]["why"] is None
        for said, true in ((found[key]["whole"], whole), (found[key]["every"], every)):
            assert said == (true if true is None else pytest.approx(true)), key
    assert {key for key, one in found.items() if one["why"] is None} == set(expected)
    assert set(found) == set(METRICS)


def test_it_is_the_acceptance_that_info_shows(spectrace: Say, chains: Path) -> None:
    found, plain = values(spectrace, chains), json.loads(spectrace("info", chains, "--json").out)["acceptance"]
    assert found["acceptance_length"]["whole"] == plain["acceptance_length"]
    assert found["acceptance_length"]["every"] == plain["acceptance_untrimmed"]
    assert found["conditional"]["whole"] == plain["conditional_rates"]
    assert found["cumulative"]["whole"] == plain["cumulative_rates"]


def test_the_page_of_a_trace_says_what_it_cannot_say_and_why(spectrace: Say, chains: Path) -> None:
    said = spectrace("info", chains, "--metrics")
    page = " ".join(said.out.split())
    assert said.code == 0 and "5 rounds, 1 of them cut by an end" in page and "chains: K = 3, n = 4" in page
    assert "vLLM: Mean acceptance length" in page and "2.200 to 2.200 of 1 requests" in page
    for metric in METRICS.values():
        assert metric.key in page
        if metric.measured is Measured.TEACHER_FORCED:
            assert metric.key in page.partition("Not of this trace")[2]
    assert "a replay over all starts" in page


def test_a_tree_has_no_share_of_drafted_tokens(spectrace: Say, tmp_path: Path) -> None:
    found = values(spectrace, write(tmp_path / "tree", CHAINS, parents=(-1, 0, 1, 2, 0)))
    assert "n - 1 is not K" in found["vllm.acceptance_rate"]["why"] and found["vllm.acceptance_rate"]["every"] is None
    assert found["sglang.accept_rate"]["every"] == pytest.approx(6 / 5 / 4)
    assert found["acceptance_length"]["every"] == pytest.approx(2.2)
    assert "several tokens at a place" in found["greedy.alpha"]["why"]


def test_rounds_that_were_all_cut_are_in_one_column_alone(spectrace: Say, tmp_path: Path) -> None:
    trace = write(tmp_path / "cut", [(1, True)], parents=(-1, 0, 1, 2))
    one = values(spectrace, trace)["acceptance_length"]
    assert (one["whole"], one["every"], one["why"]) == (None, 2.0, None)
    assert "temperature 0" in values(spectrace, trace)["greedy.alpha"]["why"]
    assert spectrace("info", "--metrics", trace).code == 0


def test_a_trace_without_rounds_has_no_acceptance(spectrace: Say, tmp_path: Path) -> None:
    seal_trace(create_trace(tmp_path / "none", {}))
    assert json.loads(spectrace("info", "--metrics", tmp_path / "none", "--json").out)["acceptance"] is None
    assert "no verified rows" in spectrace("info", "--metrics", tmp_path / "none").out

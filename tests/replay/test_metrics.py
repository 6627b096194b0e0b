"""Definitions convert exactly or not at all: round trips, published numbers, and a reason for every refusal."""

import doctest
import re
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spectrace.replay.metric import Counting, Given, Group, Measured, Value
from spectrace.replay.metric_refusals import ANOTHER_DEPTH, REFUSALS, refusal
from spectrace.replay.metrics import CONVERSIONS, METRICS, convert, route
from spectrace.tracer.acceptance import acceptance_of
from spectrace.tracer.errors import UserError

PUBLISHED = {
    "vLLM #32030 Llama-3.1-8B": ((0.73, 0.52, 0.35), 2.60, (0.73, 0.71, 0.67)),
    "vLLM #32030 Qwen3-8B": ((0.65, 0.40, 0.20), 2.26, (0.65, 0.62, 0.50)),
    "vLLM #32030 gpt-oss-20b": ((0.72, 0.51, 0.32), 2.56, (0.72, 0.71, 0.63)),
    "vLLM #42764 existing": ((0.622, 0.356, 0.203, 0.119, 0.060), 2.359, (0.62, 0.57, 0.57, 0.59, 0.50)),
    "vLLM #42764 EAGLE-3.1": ((0.610, 0.342, 0.202, 0.120, 0.072), 2.346, (0.61, 0.56, 0.59, 0.59, 0.60)),
    "vLLM #28549": ((0.65, 0.40, 0.24), 2.29, (0.65, 0.62, 0.60)),
    "kimi-k2.6-eagle3-mla": ((0.633, 0.404, 0.264), 2.30, (0.63, 0.64, 0.65)),
    "ATOM kimi-k2.5": ((0.851, 0.688, 0.501), 3.04, (0.85, 0.81, 0.73)),
    "ATOM kimi-k2.6": ((0.783, 0.588, 0.418), 2.79, (0.78, 0.75, 0.71)),
}
SHARES = st.lists(st.floats(0.01, 1), min_size=1, max_size=6).map(tuple)
TALLIES = st.lists(st.integers(0, 50), min_size=2, max_size=7).filter(any)


def one(value: Value) -> float:
    assert isinstance(value, float)
    return value


def several(value: Value) -> list[float]:
    assert isinstance(value, tuple)
    return [x for x in value if x is not None]


@pytest.mark.parametrize(("rates", "length", "conditional"), PUBLISHED.values(), ids=PUBLISHED)
def test_published_rates_come_to_the_published_length(
    rates: tuple[float, ...], length: float, conditional: tuple[float, ...]
) -> None:
    assert one(convert(rates, "cumulative", "acceptance_length")) == pytest.approx(length, abs=0.011)  # two digits
    assert several(convert(rates, "cumulative", "conditional")) == pytest.approx(conditional, abs=0.0051)


def test_rates_on_a_card_that_calls_them_conditional_are_cumulative() -> None:
    """That of kimi-k2.6-eagle3-mla says an acceptance length of 2.30."""
    card = (0.633, 0.404, 0.264)
    assert one(convert(card, "cumulative", "acceptance_length")) == pytest.approx(2.301)
    assert one(convert(card, "conditional", "acceptance_length")) == pytest.approx(1.956, abs=1e-3)


@pytest.mark.parametrize(("length", "rate"), [(3.42, 0.570), (3.77, 0.628), (2.88, 0.480)])
def test_an_accept_rate_far_below_accuracy_is_a_length_over_six_nodes(length: float, rate: float) -> None:
    """thoughtworks/GLM-4.7-Flash-Eagle3: three steps, six nodes, bonus token and root counted."""
    given = {"depth": 3, "num_draft_tokens": 6}
    assert one(convert(length, "acceptance_length", "sglang.old_accept_rate", **given)) == pytest.approx(rate, abs=6e-4)
    assert one(convert(rate, "sglang.old_accept_rate", "drafts_per_round", **given)) == pytest.approx(
        length - 1, abs=6e-3
    )


def test_falling_rates_of_a_flat_draft() -> None:
    """EAGLE #191 reads r as accuracy."""
    found = several(convert((0.70, 0.37, 0.21, 0.125, 0.08), "cumulative", "conditional"))
    assert found == pytest.approx([0.70, 0.53, 0.57, 0.60, 0.64], abs=0.01)


def test_accuracies_that_hit_together_do_not_multiply() -> None:
    """A revision of the Kimi draft, trained to an EAL of 2.62."""
    assert one(convert((0.799, 0.517, 0.306), "speculators.full_acc", "speculators.eal")) == pytest.approx(2.622)
    first = several(convert((0.614, 0.253, 0.085), "speculators.full_acc", "speculators.cond_acc"))
    assert first[1:] == pytest.approx([0.412, 0.336], abs=1e-3)


@pytest.mark.parametrize(
    ("c", "lengths"),
    [
        (0.70, (2.53, 2.77, 2.94, 3.14, 3.20)),
        (0.75, (2.73, 3.05, 3.29, 3.60, 3.70)),
        (0.80, (2.95, 3.36, 3.69, 4.16, 4.33)),
    ],
)
def test_a_constant_rate_is_a_geometric_sum(c: float, lengths: tuple[float, ...]) -> None:
    for depth, length in zip((3, 4, 5, 7, 8), lengths, strict=True):
        found = one(convert((c,) * depth, "conditional", "acceptance_length"))
        assert found == pytest.approx((1 - c ** (depth + 1)) / (1 - c)) and found == pytest.approx(length, abs=6e-3)


@given(SHARES)
def test_conditional_rates_come_back(rates: tuple[float, ...]) -> None:
    for ways in (("conditional", "cumulative"), ("speculators.cond_acc", "speculators.full_acc")):
        there = convert(rates, *ways)
        assert several(convert(there, *reversed(ways))) == pytest.approx(rates)


@given(st.floats(1, 6), st.integers(5, 9))
def test_lengths_come_back_from_every_rate(length: float, depth: int) -> None:
    for rate in ("drafts_per_round", "vllm.acceptance_rate", "sglang.accept_rate", "sglang.old_accept_rate"):
        known = {"depth": depth, "num_draft_tokens": depth + 1}
        there = convert(length, "acceptance_length", rate, **known)
        assert one(convert(there, rate, "acceptance_length", **known)) == pytest.approx(length)


@given(SHARES)
def test_simulated_lengths_differ_by_the_bonus_token(accuracies: tuple[float, ...]) -> None:
    for trainer in ("eagle.acc", "specforge.acc", "modelopt.acc", "nemo.acc"):
        without, length = (one(convert(accuracies, trainer, f"simulated_{x}")) for x in ("drafts", "length"))
        assert length == pytest.approx(1 + without)
        assert one(convert(length, "simulated_length", "simulated_drafts")) == pytest.approx(without)


@given(TALLIES)
def test_a_histogram_says_what_rounds_say(tally: list[int]) -> None:
    """Held against acceptance as it is computed from rounds."""
    depth = len(tally) - 1
    runs = [correct for correct, rounds in enumerate(tally) for _ in range(rounds)]
    true = acceptance_of(runs, False, depth)
    assert several(convert(tally, "sglang.histogram", "cumulative")) == pytest.approx(list(true.cumulative_rates))
    assert convert(tally, "sglang.histogram", "conditional") == pytest.approx(true.conditional_rates)
    assert one(convert(tally, "sglang.histogram", "acceptance_length")) == pytest.approx(true.acceptance_length)
    known = {"depth": depth}
    counters = convert(tally, "sglang.histogram", "vllm.counters", **known)
    assert counters == (true.rounds, true.rounds * depth, true.correct_drafts)
    rates = [
        one(convert(x, source, "vllm.acceptance_rate", **known))
        for x, source in ((counters, "vllm.counters"), (tally, "sglang.histogram"))
    ]
    assert rates[0] == pytest.approx(rates[1]) == pytest.approx(true.correct_drafts / true.rounds / depth)


def test_a_histogram_is_as_long_as_the_best_round_and_not_as_deep_as_drafts() -> None:
    assert convert([6, 4], "sglang.histogram", "cumulative", depth=3) == (0.4, 0.0, 0.0)
    assert convert([6, 4], "sglang.histogram", "conditional", depth=3) == (0.4, 0.0, None)
    with pytest.raises(UserError, match="depth"):
        convert([6, 4], "sglang.histogram", "vllm.acceptance_rate")
    with pytest.raises(UserError, match="2 correct drafts, but a depth of 1"):
        convert([6, 4, 1], "sglang.histogram", "cumulative", depth=1)


REFUSED: dict[str, tuple[Value, str, str, dict[str, int]]] = {
    "rates of one depth to another": ((0.7, 0.5), "cumulative", "acceptance_length", {"depth": 3}),
    "accuracy of single steps to anything served": ((0.75, 0.71), "eagle.acc", "acceptance_length", {}),
    "accuracy of steps that hit together to anything served": (
        (0.6, 0.3), "speculators.full_acc", "acceptance_length", {},
    ),
    "anything served to a trainer's accuracy": ((0.6, 0.3), "cumulative", "specforge.acc", {}),
    "probabilities to counts, or one rule of drafting to another": ((0.6, 0.3), "sampled.alpha", "greedy.alpha", {}),
    "length of one request to or from the length over rounds": (
        2.1, "sglang.request_length", "acceptance_length", {},
    ),
    "trees between rates per node and per depth": (
        0.3, "sglang.accept_rate", "vllm.acceptance_rate", {"depth": 3, "num_draft_tokens": 8},
    ),
    "single steps to steps that hit together": ((0.6, 0.5), "modelopt.acc", "speculators.full_acc", {}),
    "steps that hit together to single steps": ((0.6, 0.5), "speculators.full_acc", "modelopt.acc", {}),
    "another vocabulary": ((0.6, 0.5), "modelopt.acc", "eagle.acc", {}),
    "another mask": ((0.6, 0.5), "eagle.acc", "specforge.acc", {}),
    "a ratio to counts": ((0.6, 0.5), "cumulative", "sglang.histogram", {}),
    "one number to rates per position": (2.1, "acceptance_length", "cumulative", {"depth": 3}),
}  # fmt: skip


@pytest.mark.parametrize("refused", REFUSALS, ids=lambda one: one.title)
def test_what_does_not_convert_is_refused_with_the_reason_and_what_it_takes(refused) -> None:  # type: ignore[no-untyped-def]
    value, source, to, known = REFUSED[refused.title]
    with pytest.raises(UserError) as told:
        convert(value, source, to, **known)
    assert refused.reason in told.value.message and refused.needs in told.value.message
    assert source in told.value.message and "\n" not in told.value.message


def test_every_pair_converts_or_is_refused() -> None:
    """And none does both."""
    known = Given(3, 4)
    for source, to in permutations(METRICS, 2):
        if refusal(METRICS[source], METRICS[to], known) is None:
            assert route(source, to, known)[-1].to == to
        else:
            with pytest.raises(UserError, match="no exact way is known"):
                route(source, to, known)


def test_no_conversion_leads_from_training_to_serving() -> None:
    for step in CONVERSIONS:
        assert METRICS[step.source].measured is METRICS[step.to].measured
    assert not ANOTHER_DEPTH.applies(METRICS["cumulative"], METRICS["conditional"], Given())


@pytest.mark.parametrize(
    ("value", "source", "says"),
    [
        ((1.42, 2.52), "speculators.full_acc", "each 0 to 1"),  # speculators #759: summed over ranks twice
        ((0.5, 0.6), "cumulative", "none above the one before"),
        ((0.5, 0.6), "acceptance_length", "several numbers"),
        (0.5, "cumulative", "one number"),
        ((), "cumulative", "cannot be one"),
        (0.9, "acceptance_length", "1 to K + 1"),
        (4.5, "acceptance_length", "1 to K + 1"),
        (float("nan"), "vllm.acceptance_rate", "0 to 1"),
        ((None, 0.5), "conditional", "each 0 to 1"),
        ((0.5, None), "eagle.acc", "each 0 to 1"),
        ((0, 0), "sglang.histogram", "whole numbers"),
        ((4, 10, 11), "vllm.counters", "whole numbers"),
        (2.0, "tau", "is not known; expected one of"),
    ],
)
def test_what_cannot_be_one_is_refused(value: Value, source: str, says: str) -> None:
    known = {} if isinstance(value, tuple) else {"depth": 3}
    with pytest.raises(UserError, match=re.escape(says)):
        convert(value, source, "drafts_per_round", **known)


def test_what_is_missing_is_named() -> None:
    for to, needs in (("vllm.acceptance_rate", "depth"), ("sglang.accept_rate", "num_draft_tokens")):
        with pytest.raises(UserError, match=needs):
            convert(2.5, "acceptance_length", to)
    for known in ({"depth": 0}, {"num_draft_tokens": 1}):
        with pytest.raises(UserError, match="or more"):
            convert(2.5, "acceptance_length", "drafts_per_round", **known)


WITH_BONUS = {"acceptance_length", "sglang.request_length", "sglang.old_accept_rate", "simulated_length"}


def test_definitions_say_all_of_themselves() -> None:
    for key, metric in METRICS.items():
        assert key == metric.key and metric.names and metric.source and metric.range
        assert bool(metric.denominator) is (metric.group is not Group.COUNTS)
        assert metric.bonus is (metric.key in WITH_BONUS | {"speculators.eal"})
        assert metric.measured in Measured and metric.counting in Counting
    assert set(REFUSED) == {one.title for one in REFUSALS}


def test_the_examples_of_the_page_hold() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
    found = doctest.testfile(str(page), module_relative=False, encoding="utf-8")
    assert found.attempted > 5 and not found.failed

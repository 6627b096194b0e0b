"""What does not convert, and why: a first match of two definitions by what they count."""

from collections.abc import Callable
from dataclasses import dataclass

from spectrace.replay.metric import Counting, Given, Group, Measured, Metric

__all__ = ["ANOTHER_DEPTH", "REFUSALS", "Refusal", "refusal"]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why one kind of definition says nothing exact of another, and what it takes instead."""

    title: str
    reason: str
    needs: str
    applies: Callable[[Metric, Metric, Given], bool]

    def __str__(self) -> str:
        return f"{self.reason}; it takes {self.needs}"

    def to_json(self) -> dict[str, str]:
        return {"title": self.title, "reason": self.reason, "needs": self.needs}


def refusal(source: Metric, to: Metric, given: Given) -> Refusal | None:
    """The first that applies; None where nothing speaks against a conversion."""
    return next((one for one in REFUSALS if one.applies(source, to, given)), None)


def _trained(metric: Metric) -> bool:
    return metric.measured is Measured.TEACHER_FORCED


def _probability(metric: Metric) -> bool:
    return metric.group is Group.PROBABILITIES


def _hits(metric: Metric) -> bool:
    """Whether it is a trainer's accuracy of single steps."""
    return _trained(metric) and metric.shape.per_position and metric.counting is Counting.MARGINAL


def _joint(metric: Metric) -> bool:
    """Whether it counts steps that all hit together."""
    return metric.counting is not Counting.MARGINAL


ANOTHER_DEPTH = Refusal(
    "rates of one depth to another",
    "rounds that draft another number of tokens start at other places",
    "a run or a replay at that depth",
    lambda *_: False,  # a value shows it, two definitions do not
)
REFUSALS: tuple[Refusal, ...] = (
    ANOTHER_DEPTH,
    Refusal(
        "accuracy of single steps to anything served",
        "it averages over all starts of a text with true tokens before every step, and rounds start where the last one "
        "ended; the walk over rounds has been 0.3 to 1.5 off the product, in a direction that depends on the data",
        "the run length at every start (the ladder of `spectrace diagnose --trained-accuracy`)",
        lambda a, b, _: _trained(a) and not _trained(b) and a.counting is Counting.MARGINAL,
    ),
    Refusal(
        "accuracy of steps that hit together to anything served",
        "it has the runs right, and averages them over all starts of a text; rounds skip the starts within a run",
        "the run length at every start (the ladder of `spectrace diagnose --trained-accuracy`)",
        lambda a, b, _: _trained(a) and not _trained(b),
    ),
    Refusal(
        "anything served to a trainer's accuracy",
        "rounds show what happens where rounds start, and nothing of the other starts",
        "a replay over all starts (`spectrace diagnose --trained-accuracy` on a trace with features)",
        lambda a, b, _: not _trained(a) and _trained(b),
    ),
    Refusal(
        "probabilities to counts, or one rule of drafting to another",
        "a chance averaged over places is neither what came of it in one run nor the chance under another rule: "
        "min(p, q), p(argmax q) and whether the best tokens agree are three functions of two distributions",
        "both distributions at every place (record at level full)",
        lambda a, b, _: _probability(a) or _probability(b),
    ),
    Refusal(
        "length of one request to or from the length over rounds",
        "one counts the prefill's token and not what a stop cut off, which is 1 / rounds and more of a difference",
        "the request's spec_num_correct_drafts and spec_verify_ct: 1 + correct / verify_ct",
        lambda a, b, _: "sglang.request_length" in (a.key, b.key),
    ),
    Refusal(
        "trees between rates per node and per depth",
        "a tree verifies more nodes than a path is long (n - 1 is not K), so that its rate per node cannot reach 1 and "
        "there is no share of K drafted tokens",
        "the acceptance length, which counts the path alone",
        lambda a, b, given: given.tree and "vllm.acceptance_rate" in (a.key, b.key),
    ),
    Refusal(
        "single steps to steps that hit together",
        "accuracies multiply to the chance that all steps hit only if steps are independent, and hits come in runs",
        "the hits of every start, step by step",
        lambda a, b, _: _trained(a) and _trained(b) and not _joint(a) and _joint(b),
    ),
    Refusal(
        "steps that hit together to single steps",
        "it counts no hit of a step behind one that missed",
        "the hits of every start, step by step",
        lambda a, b, _: _trained(a) and _trained(b) and _joint(a) and not _joint(b),
    ),
    Refusal(
        "another vocabulary",
        "tokens outside the draft's vocabulary are misses in one and cannot be in the other, and coverage alone bounds "
        "the difference (no more than 1 - coverage) without saying it",
        "the hits, split by whether the target's choice over its whole vocabulary is one of the draft's tokens",
        lambda a, b, _: _hits(a) and _hits(b) and a.restricted is not b.restricted,
    ),
    Refusal(
        "another mask",
        "the definition is the same, and the tokens counted are not",
        "the hits of every start, to count them under the other mask",
        lambda a, b, _: _hits(a) and _hits(b),
    ),
    Refusal(
        "a ratio to counts",
        "a ratio does not say how many rounds it is of",
        "the counts themselves",
        lambda a, b, _: b.group is Group.COUNTS and (a.key, b.key) != ("sglang.histogram", "vllm.counters"),
    ),
    Refusal(
        "one number to rates per position",
        "many rows of rates have the same sum",
        "accepted tokens per position (vLLM), or the histogram of correct drafts (SGLang)",
        lambda a, b, _: b.shape.per_position and not a.shape.per_position and a.key != "sglang.histogram",
    ),
)

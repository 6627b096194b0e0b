"""What engines and papers print of rounds that were served, as data.

K is how many tokens a round drafts in a row, k counts them from 0; n is SGLang's num_draft_tokens, the root included.
"""

from functools import partial

from spectrace.replay.metric import Counting, Group, Measured, Metric, Name, Shape

__all__ = ["SERVED"]

_VLLM, _SGLANG = "0.32.0", "0.5.23"
_LOG = "v1/spec_decode/metrics.py"
_REPORTER = "srt/managers/scheduler_components/metrics_reporter.py"
_MANAGER = "srt/managers/tokenizer_manager.py"

_served = partial(
    Metric,
    counting=Counting.CUMULATIVE,
    measured=Measured.SERVED,
    bonus=False,
    outside="a miss",
    counted="rounds of generation; a prefill is none",
)


SERVED: tuple[Metric, ...] = (
    _served(
        "cumulative",
        group=Group.POSITIONS,
        names=(Name("vLLM", "Per-position acceptance rate", _VLLM), Name("spectrace", "cumulative_rates")),
        says="the share of rounds in which drafts 0 to k were all accepted",
        formula="r_k = rounds with more than k correct drafts / rounds",
        numerator="rounds with more than k correct drafts",
        denominator="rounds",
        shape=Shape.FALLING,
        source=f"vLLM {_LOG}",
    ),
    _served(
        "conditional",
        group=Group.POSITIONS,
        names=(Name("EAGLE paper", "n-alpha, of chains", "2503.01840"), Name("spectrace", "conditional_rates")),
        says="of the rounds in which drafts 0 to k-1 were accepted, the share in which k was, too",
        formula="c_k = r_k / r_(k-1), c_0 = r_0",
        numerator="rounds with more than k correct drafts",
        denominator="rounds with k correct drafts or more",
        counting=Counting.CONDITIONAL,
        shape=Shape.SHARES,
        source="arXiv 2503.01840, figure 7",
    ),
    _served(
        "sglang.histogram",
        group=Group.COUNTS,
        names=(Name("SGLang", "spec_correct_drafts_histogram", _SGLANG),),
        says="how many rounds had 0, 1, 2, ... correct drafts; as long as the best round, not as K",
        formula="h_j = rounds with j correct drafts",
        numerator="rounds with j correct drafts",
        denominator="",
        shape=Shape.TALLY,
        source=f"SGLang {_MANAGER}",
    ),
    _served(
        "vllm.counters",
        group=Group.COUNTS,
        names=(Name("vLLM", "spec_decode_num_drafts, .._num_draft_tokens, .._num_accepted_tokens", _VLLM),),
        says="the three totals: rounds that had drafts, tokens drafted, tokens accepted",
        formula="drafts, draft tokens, accepted tokens",
        numerator="three totals",
        denominator="",
        shape=Shape.COUNTERS,
        source=f"vLLM {_LOG}",
    ),
    _served(
        "acceptance_length",
        group=Group.LENGTHS,
        names=(
            Name("vLLM", "Mean acceptance length", _VLLM),
            Name("SGLang", "accept len", _SGLANG),
            Name("EAGLE paper", "tau", "2503.01840"),
            Name("spectrace", "acceptance_length"),
        ),
        says="tokens that a round brings, the target's own included",
        formula="AL = 1 + sum r_k = 1 + accepted / rounds",
        numerator="correct drafts and one bonus token a round",
        denominator="rounds",
        bonus=True,
        shape=Shape.LENGTH,
        source=f"vLLM {_LOG}; SGLang {_REPORTER}",
    ),
    _served(
        "drafts_per_round",
        group=Group.LENGTHS,
        names=(Name("EAGLE issues #132, #146, #153, #160, #195", "accept length without the +1"),),
        says="correct drafts that a round brings, the bonus token left out",
        formula="AL - 1 = sum r_k = accepted / rounds",
        numerator="correct drafts",
        denominator="rounds",
        shape=Shape.DRAFTS,
        source="EAGLE #132, #146, #153, #160, #195",
    ),
    _served(
        "sglang.request_length",
        group=Group.LENGTHS,
        names=(Name("SGLang", "spec_accept_length", _SGLANG),),
        says="tokens of one answer over its rounds: the prefill's token counts, what a stop cut off does not",
        formula="completion_tokens / spec_verify_ct",
        numerator="tokens of the answer, that of the prefill included",
        denominator="rounds of this request",
        bonus=True,
        counted="one request, the round at its end included and what lies beyond the end not",
        shape=Shape.ABOVE_ZERO,
        source=f"SGLang {_MANAGER}",
    ),
    _served(
        "vllm.acceptance_rate",
        group=Group.RATES,
        names=(Name("vLLM", "Avg Draft acceptance rate", _VLLM),),
        says="the share of drafted tokens that was accepted, those behind a rejected one included",
        formula="accepted / draft tokens = sum r_k / K",
        numerator="accepted drafts",
        denominator="drafted tokens",
        shape=Shape.SHARE,
        source=f"vLLM {_LOG}",
    ),
    _served(
        "sglang.accept_rate",
        group=Group.RATES,
        names=(Name("SGLang", "accept rate, spec_accept_rate", _SGLANG),),
        says="correct drafts over verified nodes without the root; with trees these are more than a path is long",
        formula="correct / (rounds * (n - 1))",
        numerator="correct drafts",
        denominator="rounds times nodes without the root",
        shape=Shape.SHARE,
        bounds="0 to K / (n - 1), which is 1 for chains alone",
        source=f"SGLang {_REPORTER}",
    ),
    _served(
        "sglang.old_accept_rate",
        group=Group.RATES,
        names=(Name("SGLang", "accept rate", "before the bonus token left it"),),
        says="the acceptance length over verified nodes, bonus token and root included",
        formula="AL / n",
        numerator="correct drafts and one bonus token a round",
        denominator="rounds times nodes, the root included",
        bonus=True,
        shape=Shape.SHARE,
        bounds="1 / n to (K + 1) / n",
        source="SGLang scheduler_metrics_mixin.py: spec_num_accepted_tokens / (forward_ct * num_draft_tokens)",
    ),
    _served(
        "sampled.alpha",
        group=Group.PROBABILITIES,
        names=(Name("Leviathan et al.", "alpha", "2211.17192"),),
        says="the chance that a drawn draft is accepted at step k, where all before it were",
        formula="mean of sum_v min(p(v), q(v)) = 1 - TV(p, q)",
        numerator="sum of min(p, q)",
        denominator="rounds that reach step k",
        counting=Counting.CONDITIONAL,
        shape=Shape.SHARES,
        source="arXiv 2211.17192; engines that draw drafts",
    ),
    _served(
        "greedy.alpha",
        group=Group.PROBABILITIES,
        names=(Name("vLLM", "drafts greedily at any temperature (#20459)", _VLLM), Name("SGLang", "target-only trees")),
        says="the chance that the draft's best token is accepted at step k, where all before it were",
        formula="mean of p(argmax q)",
        numerator="the target's probability of the draft's best token",
        denominator="rounds that reach step k",
        counting=Counting.CONDITIONAL,
        shape=Shape.SHARES,
        source="vLLM #20459",
    ),
)

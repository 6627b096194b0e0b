"""What trainers print, as data: true tokens fed at every step, over all starts of a text.

a_k is the accuracy of step k, counted from 0, whatever the project takes it to be.
"""

from functools import partial

from spectrace.replay.metric import Counting, Group, Measured, Metric, Name, Shape

__all__ = ["TRAINED"]

_EAGLE, _SPECFORGE, _SPECULATORS, _MODELOPT = "cb7e084", "0.2.0", "0.9.0", "a2fbac7"
_MISS = "a miss"
_NONE_MISSES = "none: the target chooses among the draft's tokens, which is optimistic"
_FULL = "of the target's choices over its whole vocabulary"
_OWN = "of the target's choices within the draft's vocabulary"
_ANSWERS = "answer tokens (loss mask)"

_trained = partial(
    Metric, group=Group.POSITIONS, counting=Counting.MARGINAL, measured=Measured.TEACHER_FORCED, bonus=False,
    formula="a_k = hits at step k / starts", numerator="starts at which step k hits", denominator="starts",
    outside=_MISS, counted=_ANSWERS, shape=Shape.SHARES,
)  # fmt: skip
_simulated = partial(
    Metric, group=Group.LENGTHS, counting=Counting.MARGINAL, measured=Measured.TEACHER_FORCED, denominator="one round",
    outside="as in the a_k it is made of", counted="as in the a_k it is made of", restricted=None,
)  # fmt: skip

TRAINED: tuple[Metric, ...] = (
    _trained(
        "eagle.acc",
        names=(Name("EAGLE", "position k, Acc", _EAGLE), Name("AngelSlim", "acc_k", "67394ce")),
        says=f"the share {_FULL} that step k hits, true tokens before it",
        source="EAGLE traineagle3, AngelSlim trainer",
    ),
    _trained(
        "specforge.acc",
        names=(Name("SpecForge", "eval/per_position_acc", _SPECFORGE),),
        says=f"the share {_FULL} that step k hits, true tokens before it",
        counted=f"{_ANSWERS}, that of step 0 not shifted (SpecForge #885)",
        source="SpecForge specforge/eval/evaluator.py",
    ),
    _trained(
        "modelopt.acc",
        names=(Name("ModelOpt", "train_acc/parallel_i_step_k", _MODELOPT),),
        says=f"the share {_OWN} that step k hits, true tokens before it",
        outside=_NONE_MISSES,
        counted="all tokens, prompts included, unless a mask is asked for",
        restricted=True,
        source="Model-Optimizer, callback on_log",
    ),
    _trained(
        "nemo.acc",
        names=(Name("NeMo Automodel", "train_acc"),),
        says="the share of supervised positions that step k hits, counts summed over ranks",
        denominator="supervised positions",
        outside="not said",
        restricted=None,
        source="NeMo Automodel #2959",
    ),
    _trained(
        "speculators.full_acc",
        names=(Name("speculators", "full_acc_k", _SPECULATORS),),
        says=f"the share {_OWN} where steps 0 to k all hit",
        formula="full_k = starts at which steps 0..k hit / starts",
        numerator="starts at which steps 0 to k all hit",
        counting=Counting.CUMULATIVE,
        outside=_NONE_MISSES,
        restricted=True,
        shape=Shape.FALLING,
        source="speculators models/metrics.py",
    ),
    _trained(
        "speculators.cond_acc",
        names=(Name("speculators", "cond_acc_k", _SPECULATORS),),
        says=f"the share {_OWN} that step k hits where all before hit",
        formula="cond_k = starts at which steps 0..k hit / starts at which 0..k-1 hit",
        numerator="starts at which steps 0 to k all hit",
        denominator="starts at which steps 0 to k-1 all hit",
        counting=Counting.CONDITIONAL,
        outside=_NONE_MISSES,
        restricted=True,
        source="speculators models/metrics.py",
    ),
    _simulated(
        "simulated_drafts",
        names=(Name("SpecForge", "eval/simulated_acc_len", _SPECFORGE),),
        says="drafts that would be accepted in a row, if every start were alike and steps independent",
        formula="sum_k prod_(i<=k) a_i",
        numerator="sum of products of a_k",
        bonus=False,
        shape=Shape.DRAFTS,
        source="SpecForge specforge/eval/evaluator.py",
    ),
    _simulated(
        "simulated_length",
        names=(
            Name("NeMo Automodel", "train_tau_sim"),
            Name("ModelOpt", "Estimated Training AR", _MODELOPT),
            Name("Lumen-RL", "eval/simulated_acc_len"),
        ),
        says="the same and the bonus token; under one of these names another project leaves it out",
        formula="1 + sum_k prod_(i<=k) a_i",
        numerator="1 + sum of products of a_k",
        bonus=True,
        shape=Shape.LENGTH,
        source="NeMo Automodel #2959; Model-Optimizer, callback on_log",
    ),
    _simulated(
        "speculators.eal",
        names=(Name("speculators", "eal", _SPECULATORS),),
        says="1 + drafts right in a row, mean over all starts",
        formula="EAL = 1 + sum_k full_k",
        numerator="drafts right in a row, and 1",
        denominator="starts",
        counting=Counting.CUMULATIVE,
        bonus=True,
        outside=_NONE_MISSES,
        counted=_ANSWERS,
        restricted=True,
        shape=Shape.LENGTH,
        source="speculators models/metrics.py",
    ),
    _trained(
        "specforge.acceptance_rate",
        group=Group.PROBABILITIES,
        names=(Name("SpecForge", "acceptance_rate_k", _SPECFORGE),),
        says="the chance that a draft drawn at step k is accepted, true tokens before it",
        formula="mean over starts of sum_v min(p(v), q(v))",
        numerator="sum of min(p, q) over the draft's tokens",
        outside="those starts are left out",
        counted=f"{_ANSWERS} within the draft's vocabulary",
        restricted=True,
        source="SpecForge specforge/core/lk_loss.py",
    ),
)

"""What a definition of accuracy or acceptance is: who prints it, what it counts, and which values it may have.

Every field is something by which two numbers of one name have differed in public.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from math import inf, isfinite
from typing import Any, TypeAlias

from spectrace.tracer.errors import UserError

__all__ = ["Counting", "Given", "Group", "Measured", "Metric", "Name", "Shape", "Value", "checked"]

Value: TypeAlias = float | tuple[float | None, ...]


class Counting(StrEnum):
    """What step k counts: hits at all starts; hits at all starts, if every earlier step hit, too; or hits at those
    starts alone where every earlier step hit. Of a single number: what it is summed up from.
    """

    MARGINAL = "marginal"
    CUMULATIVE = "cumulative"
    CONDITIONAL = "conditional"


class Measured(StrEnum):
    """Over all starts of a text, the true tokens fed at every step; or over the rounds that were served."""

    TEACHER_FORCED = "teacher-forced"
    SERVED = "served"


class Group(StrEnum):
    """The order of the page."""

    POSITIONS = "Rates per position"
    COUNTS = "Counts"
    LENGTHS = "Lengths"
    RATES = "Single rates"
    PROBABILITIES = "Probabilities"


class Shape(StrEnum):
    """Which values there are: one number, or several. The text is the range as a page says it."""

    SHARE = "0 to 1"
    SHARES = "each 0 to 1"
    FALLING = "each 0 to 1, none above the one before"
    DRAFTS = "0 to K"
    LENGTH = "1 to K + 1"
    TALLY = "whole numbers: rounds with 0, 1, 2, ... correct drafts"
    COUNTERS = "whole numbers: drafts, draft tokens, accepted tokens"
    ABOVE_ZERO = "above 0"

    @property
    def several(self) -> bool:
        return self in (Shape.SHARES, Shape.FALLING, Shape.TALLY, Shape.COUNTERS)

    @property
    def per_position(self) -> bool:
        return self in (Shape.SHARES, Shape.FALLING)


@dataclass(frozen=True, slots=True)
class Name:
    """What a project calls it where it prints it, and the version in which that was read."""

    project: str
    printed: str
    version: str | None = None

    def __str__(self) -> str:
        return f"{self.printed} ({self.project}{f' {self.version}' if self.version else ''})"


@dataclass(frozen=True, slots=True)
class Metric:
    """One definition, whatever it is called.

    `restricted`: the target's choice is taken among the draft's tokens, so that none outside them is a miss; None where
    the project does not say, or a sum of others. `outside` says what becomes of such tokens. Counts are over nothing.
    """

    key: str
    group: Group
    names: tuple[Name, ...]
    says: str
    formula: str
    numerator: str
    denominator: str
    counting: Counting
    measured: Measured
    bonus: bool
    outside: str
    counted: str
    shape: Shape
    source: str
    restricted: bool | None = False
    bounds: str | None = None

    @property
    def range(self) -> str:
        return self.bounds or str(self.shape)

    def __str__(self) -> str:
        """The key, and what the first project calls it."""
        return f"{self.key} ({self.names[0].project}: {self.names[0].printed})"

    def to_json(self) -> dict[str, Any]:
        held = {name: value for name, value in asdict(self).items() if name != "bounds"}
        return {**held, "shape": self.shape.name.lower(), "range": self.range}


@dataclass(frozen=True, slots=True)
class Given:
    """What a value alone does not say: K, the tokens drafted along a path; and how many nodes a round verifies, with
    the root, which is SGLang's num_draft_tokens.
    """

    depth: int | None = None
    nodes: int | None = None

    @property
    def tree(self) -> bool:
        """Whether a round is known to verify other than one chain."""
        return self.depth is not None and self.nodes is not None and self.nodes != self.depth + 1

    @property
    def below(self) -> int | None:
        """Nodes below the root."""
        return None if self.nodes is None else self.nodes - 1

    @property
    def most_drafts(self) -> float:
        """The most drafts that a round can have right."""
        return min((one for one in (self.depth, self.below) if one is not None), default=inf)


def checked(metric: Metric, value: float | Sequence[float | None], given: Given) -> Value:
    """The value, if the metric can have it. Raises UserError if not."""
    several = isinstance(value, Sequence)
    if several != metric.shape.several:
        raise UserError(f"{metric}: {value!r} is {'several numbers' if several else 'one number'}, not {metric.range}")
    if not isinstance(value, Sequence):
        _require(metric, value, isfinite(value) and _fits(metric.shape, value, given))
        return float(value)
    _require(metric, value, len(value) > 0 and all(one is None or isfinite(one) for one in value))
    _require(metric, value, _all_fit(metric, tuple(value)))
    return tuple(value)


def _require(metric: Metric, value: object, fits: bool) -> None:
    if not fits:
        raise UserError(f"{metric}: {value!r} cannot be one; expected {metric.range}")


def _fits(shape: Shape, value: float, given: Given) -> bool:
    slack = 1e-9 * max(abs(value), 1.0)  # what rounding does to a quotient multiplied again
    low, high = {
        Shape.DRAFTS: (0.0, given.most_drafts),
        Shape.LENGTH: (1.0, 1 + given.most_drafts),
        Shape.ABOVE_ZERO: (2 * slack, inf),
    }.get(shape, (0.0, 1.0))
    return low - slack <= value <= high + slack


def _all_fit(metric: Metric, values: tuple[float | None, ...]) -> bool:
    """A conditional rate is None where no round came so far: after a 0, or another None. Nothing else may be None."""
    shape, found = metric.shape, [0.0 if one is None else one for one in values]
    pairs = list(zip(values, found[1:], values[1:], strict=False))
    if shape.per_position:
        empty = metric.counting is Counting.CONDITIONAL and values[0] is not None
        nones = all(after is not None or (empty and not before) for before, _, after in pairs) and values[0] is not None
        falls = shape is not Shape.FALLING or all(after <= (before or 0.0) for before, after, _ in pairs)
        return nones and falls and all(0 <= one <= 1 for one in found)
    whole = None not in values and all(one >= 0 and one == int(one) for one in found)
    if shape is Shape.TALLY:
        return whole and sum(found) > 0
    return whole and len(found) == 3 and found[0] > 0 and found[2] <= found[1]

"""What every repair will bring: free runs with some links as they were broken, the others as the draft was trained."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from spectrace.replay.causes import Readings
from spectrace.replay.configuration import Configuration
from spectrace.replay.diagnosis import Cause
from spectrace.replay.foretell import Foreteller, Foretold, acceptance_length
from spectrace.replay.found import Broken
from spectrace.replay.links import public_note
from spectrace.replay.plan import TRUE_ROWS, first_requests
from spectrace.replay.truth import Truth

__all__ = ["Repairs", "foretell_repairs"]

_ROWS_AT_ONCE = 2048


@dataclass(frozen=True, slots=True)
class Repairs:
    """Acceptance lengths with every link repaired, and with each broken one repaired alone; None where not known."""

    all: float | None
    alone: tuple[float | None, ...]

    def causes(self, broken: Sequence[Broken], served: float | None) -> list[Cause]:
        """The broken links with what their repair is worth."""
        return [
            Cause(
                fault=one.fault,
                variant=one.variant,
                title=one.title,
                confidence=one.confidence,
                evidence=one.evidence,
                served_acceptance=served,
                predicted_acceptance=predicted,
                fix=". ".join(filter(None, (one.edit.text, public_note(one.fault)))),
                command=one.edit.command,
                alike=one.alike,
            )
            for one, predicted in zip(broken, self.alone, strict=True)
        ]


def foretell_repairs(
    readings: Readings | None,
    broken: Sequence[Broken],
    truth: Truth,
    requests: Sequence[int],
    foreteller: Foreteller,
) -> Repairs:
    """Run free over the texts of these requests, once for every repair; one pass over the true boundaries."""
    nothing = Repairs(None, (None,) * len(broken))
    if readings is None:
        return nothing
    wanted: list[Configuration | None] = [_with(readings, ()), *(_alone(readings, broken, one) for one in broken)]
    possible = {
        at: one for at, one in enumerate(wanted) if one is not None and all(truth.has(slot) for slot in one.wiring)
    }
    if 0 not in possible:
        return nothing
    lengths = {request: len(text.tokens) for request, text in truth.texts.items()}
    chosen = [request for request in requests or first_requests(lengths, TRUE_ROWS) if request in truth.texts]
    found = _walk(possible, truth, chosen, foreteller)
    return Repairs(found.get(0), tuple(found.get(at + 1) for at in range(len(broken))))


def _walk(
    configurations: Mapping[int, Configuration], truth: Truth, requests: Sequence[int], foreteller: Foreteller
) -> dict[int, float | None]:
    slots = {slot for one in configurations.values() for slot in one.wiring}
    walked: dict[int, list[Foretold]] = {at: [] for at in configurations}
    for group in _groups(truth, requests):
        texts = truth.read(group, slots)
        for at, configuration in configurations.items():
            walked[at] += foreteller.walks(configuration, texts)
    return {at: acceptance_length(found) for at, found in walked.items()}


def _groups(truth: Truth, requests: Sequence[int]) -> Iterator[list[int]]:
    group, rows = list[int](), 0
    for request in requests:
        group.append(request)
        rows += len(truth.texts[request].tokens)
        if rows >= _ROWS_AT_ONCE:
            yield group
            group, rows = [], 0
    if group:
        yield group


def _alone(readings: Readings, broken: Sequence[Broken], one: Broken) -> Configuration | None:
    """With this link repaired and the others left as they are; None where a free run cannot have those broken."""
    others = [other for other in broken if other is not one]
    return None if any(not other.simulated for other in others) else _with(readings, others)


def _with(readings: Readings, wrong: Sequence[Broken]) -> Configuration:
    """Everything as trained, but for some links as the engine had them."""
    links = {one.link for one in wrong}
    at = readings.configured
    steps = [
        *(readings.engine.steps if readings.engine else ()),
        *(one.step for one in wrong if one.step and one.proven),
    ]
    for step in steps:
        at = step.apply(at) if step.link in links else at
    for step in readings.trained.steps if readings.trained else ():
        at = at if step.link in links else step.apply(at)
    if "wiring" in links:
        at = replace(at, wiring=readings.delivered or readings.configured.wiring)
    return at

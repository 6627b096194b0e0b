"""What an analytic pair must do, from its rule alone: the target's text, and every round of the draft.

The independent side of every comparison: it knows no tensor, no engine and no recorder.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from analytic.codes import BASE, DIGITS, DRAFT_TOKENS, END_TOKENS, REACH, STEPS, Rule, digits_of, token_of

__all__ = ["Answer", "Delivered", "Round", "acceptance_length", "answer", "continuation"]

Delivered = tuple[int | None, int | None, int | None]


@dataclass(frozen=True, slots=True)
class Round:
    """A round that starts after `start` tokens of the answer; `cut` when it went past the answer's end."""

    start: int
    correct: int
    cut: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """One request: its output up to the end, why it ended there, and all its rounds."""

    output: tuple[int, ...]
    finish_reason: str
    rounds: tuple[Round, ...]

    @property
    def correct_drafts(self) -> int:
        """Over all rounds, as engines count them: past the answer's end too."""
        return sum(one.correct for one in self.rounds)


def continuation(rule: Rule, prompt: Sequence[int], length: int) -> list[int]:
    """The next `length` tokens of the target's greedy text, whatever they end."""
    text = list(prompt)
    for _ in range(length):
        text.append(_next_token(rule, text))
    return text[len(prompt) :]


def _next_token(rule: Rule, text: Sequence[int]) -> int:
    last, (first, second, _) = len(text) - 1, rule.wiring
    return _add(
        text[last],
        rule.code(first, text, last - 1),
        rule.code(second, text, last - 1),
        rule.code(second, text, last - 2),
        rule.code(first, text, last - 1 - REACH),
    )


def _add(token: int, *codes: int) -> int:
    digits = digits_of(token)
    return token_of([(digits[(place + 1) % DIGITS] + STEPS[place] + codes[place]) % BASE for place in range(DIGITS)])


def answer(
    rule: Rule,
    prompt: Sequence[int],
    *,
    max_new: int,
    depth: int,
    delivered: Delivered | None = None,
    ends: Collection[int] = END_TOKENS,
) -> Answer:
    """One request served with chains of `depth` drafts, greedily; `delivered` are the boundaries that its slots hold.

    None in a slot is nothing that the draft can read: zeros, or the last stream after the final norm.
    """
    text = [*prompt, *continuation(rule, prompt, max_new + depth + 1)]
    full = text[len(prompt) : len(prompt) + max_new]
    end = next((i for i, token in enumerate(full) if token in ends), None)
    output = full if end is None else full[: end + 1]
    rounds, start = [], 1
    while depth and start < len(output):
        correct = _correct_drafts(rule, text, len(prompt) + start - 2, depth, delivered or rule.wiring)
        rounds.append(Round(start, correct, cut=start + correct >= len(output)))
        start += correct + 1
    return Answer(tuple(output), "length" if end is None else "stop", tuple(rounds))


def _correct_drafts(rule: Rule, text: Sequence[int], row: int, depth: int, delivered: Delivered) -> int:
    """How many drafts of a chain are right whose first row stands at position `row`, and so drafts `text[row + 2]`."""
    for step in range(depth):
        at = row + step
        wanted = _add(text[at + 1], *_codes_held(rule, text, row, at, delivered))
        drafted = wanted if wanted in DRAFT_TOKENS else token_of((*digits_of(wanted)[:-1], 0))
        if drafted != text[at + 2]:
            return step
    return depth


def _codes_held(rule: Rule, text: Sequence[int], row: int, at: int, delivered: Delivered) -> tuple[int, ...]:
    """The four codes that the draft's row at position `at` adds, in a chain that begins at `row` and is right so far.

    A row with features has the codes of its three slots. A deeper one has those of the token that the row above it was
    given, and of the token before that. Both have the first slot's code of the row `REACH` back.
    """

    def slot(number: int, position: int) -> int:
        boundary = delivered[number]
        return 0 if boundary is None else rule.code(boundary, text, position)

    def carried(number: int, position: int) -> int:
        return rule.code(rule.wiring[number], text, position)

    back = max(at - REACH, 0)
    fourth = slot(0, back) if back <= row else carried(0, back)
    if at == row:
        return slot(0, at), slot(1, at), slot(2, at), fourth
    third = slot(1, row) if at == row + 1 else carried(1, at - 1)
    return carried(0, at), carried(1, at), third, fourth


def acceptance_length(answers: Sequence[Answer]) -> float:
    """1 + correct drafts per round, over the rounds that were not cut."""
    correct = [one.correct for each in answers for one in each.rounds if not one.cut]
    return 1 + sum(correct) / len(correct)

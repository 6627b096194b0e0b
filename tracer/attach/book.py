"""What became of each request, kept in the order of its passes: numbers, rounds, answers, and where they end.

An engine says what it sampled; where an answer ends, and which round is cut by it, follows from the request's own
limits by the rule that engines share: an end token ends it, itself included, and so does the limit of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Book", "Story"]


@dataclass(slots=True)
class Story:
    """One request. `passes` and `rounds` count those that are over; `ended` says why nothing follows, empty if not.

    `computed` is how many positions of its text have been computed at least once.
    """

    number: int
    name: str
    prompt: tuple[int, ...]
    max_new: int
    ends: frozenset[int]
    temperature: float = 0.0
    seed: int | None = None
    cached_prefix: int = 0
    output: list[int] = field(default_factory=list)
    passes: int = 0
    computed: int = 0
    rounds: int = 0
    correct_drafts: int = 0
    ended: str = ""
    arrived_secs: float | None = None
    first_token_secs: float | None = None
    finished_secs: float | None = None

    def take(self, tokens: Sequence[int], at_secs: float) -> bool:
        """Tokens of one pass, in order; returns whether the answer's end cut some of them off.

        What an engine samples beyond the end, which it may not know of yet, is none of the answer.
        """
        if self.ended:
            return False
        if self.first_token_secs is None and tokens:
            self.first_token_secs = at_secs
        for taken, token in enumerate(tokens, 1):
            self.output.append(token)
            if token in self.ends:
                self.ended = "stop"
            elif len(self.output) >= self.max_new:
                self.ended = "length"
            if self.ended:
                self.finished_secs = at_secs
                return taken < len(tokens)
        return False

    def leave(self, at_secs: float) -> bool:
        """The engine let go of it; returns whether that is news."""
        news = not self.ended
        if news:
            self.ended, self.finished_secs = "abort", at_secs
        return news


class Book:
    """The requests in flight, by the engine's own names for them; numbered in the order in which they came."""

    def __init__(self) -> None:
        self.stories: dict[str, Story] = {}
        self._met = 0

    def meet(self, name: str, **known: object) -> Story:
        """A request that is seen for the first time."""
        story = self.stories[name] = Story(number=self._met, name=name, **known)  # type: ignore[arg-type]
        self._met += 1
        return story

    def forget(self, name: str) -> Story | None:
        return self.stories.pop(name, None)

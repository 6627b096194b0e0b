"""Where an answer ends, and what that cuts."""

from typing import Any

import pytest

from spectrace.tracer.attach.book import Book, Story


def story(**changes: Any) -> Story:
    return Book().meet("a", **{"prompt": (1, 2), "max_new": 5, "ends": frozenset({9}), **changes})


@pytest.mark.parametrize(
    ("passes", "output", "ended", "cuts"),
    [
        ([[3], [4, 5]], [3, 4, 5], "", [False, False]),
        ([[3], [4, 5, 6, 7]], [3, 4, 5, 6, 7], "length", [False, False]),
        ([[3], [4, 5, 6, 7, 8]], [3, 4, 5, 6, 7], "length", [False, True]),
        ([[3], [4, 9]], [3, 4, 9], "stop", [False, False]),
        ([[3], [9, 4, 5]], [3, 9], "stop", [False, True]),
        ([[3], [4, 5, 6, 9]], [3, 4, 5, 6, 9], "stop", [False, False]),
        ([[9]], [9], "stop", [False]),
        ([[9], [4, 5]], [9], "stop", [False, False]),
    ],
)
def test_an_answer_ends_at_an_end_token_or_at_its_limit(
    passes: list[list[int]], output: list[int], ended: str, cuts: list[bool]
) -> None:
    one = story()
    assert [one.take(tokens, float(at)) for at, tokens in enumerate(passes)] == cuts
    assert (one.output, one.ended) == (output, ended)
    assert one.first_token_secs == 0.0 and (one.finished_secs is None) == (not ended)


def test_whoever_leaves_before_an_end_was_aborted_and_that_is_news_once() -> None:
    one, done = story(), story(max_new=1)
    done.take([3], 1.0)
    assert (one.leave(2.0), one.leave(3.0), done.leave(3.0)) == (True, False, False)
    assert (one.ended, one.finished_secs, done.ended) == ("abort", 2.0, "length")


def test_requests_are_numbered_in_the_order_in_which_they_came_and_never_anew() -> None:
    book, known = Book(), {"prompt": (1,), "max_new": 1, "ends": frozenset[int]()}
    assert [book.meet(name, **known).number for name in "ab"] == [0, 1]
    assert book.forget("a") is not None and book.forget("a") is None
    assert book.meet("a", **known).number == 2

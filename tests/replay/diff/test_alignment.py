"""However two traces were batched, cut into pieces, ordered and sampled: rows that are the same pair, and no others."""

from __future__ import annotations

from collections import Counter
from itertools import permutations, zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from spectrace.replay.diff.alignment import Alignment, PairedRows, align
from spectrace.replay.diff.alignment import base_of as places_of
from spectrace.replay.diff.placing import Placed, Side, read_side
from spectrace.replay.diff.texts import TextPair, pair_texts
from spectrace.replay.texts import Text
from spectrace.tracer import Keys, Recorder, Trace, UserError, create_trace
from spectrace.tracer.rowset import Rows

Tokens: TypeAlias = tuple[int, ...]
Key: TypeAlias = tuple[str, int, int, int, int]
Sides: TypeAlias = tuple[Any, Any]
ENGINES = st.fixed_dictionaries(
    {
        "depth": st.integers(0, 3),
        "width": st.integers(1, 2),
        "chunk": st.integers(1, 9),
        "concurrency": st.integers(1, 4),
    }
    | {"shift": st.integers(0, 1)}
    | {name: st.booleans() for name in ("window", "feeds_end", "again_live", "compact", "capture", "mishaps", "strays")}
)
SEEDS = st.integers(0, 1 << 20)


@st.composite
def universes(draw: st.DrawFn) -> list[tuple[Tokens, int]]:
    """Texts and the length of their prompts: some begin as others do, go on from them, or are the same."""
    found: list[tuple[Tokens, int]] = []
    for at in range(draw(st.integers(1, 4))):
        like = found[draw(st.integers(0, at - 1))] if at else ((), 0)
        begins = like[0][: draw(st.integers(0, 20))]
        tokens = (*begins, *draw(st.lists(st.integers(0, 2), min_size=20 - len(begins), max_size=20 - len(begins))))
        prompt = draw(st.sampled_from([like[1] or 1, draw(st.integers(1, 6))]))
        found.append((tokens, prompt))
    return found


@st.composite
def sides(draw: st.DrawFn) -> tuple[list[tuple[Tokens, int]], list[tuple[dict[str, Any], int]]]:
    return draw(universes()), [(draw(ENGINES), draw(SEEDS)) for _ in range(2)]


def served(simulated: SimpleNamespace, drawn: Any, schedules: int = 1) -> list[Sides]:
    """Both sides, each recorded under so many schedules."""
    texts, engines = drawn
    made = [(simulated.Engine(**engine), seed) for engine, seed in engines]
    stories = [simulated.run(texts, engine, seed) for engine, seed in made]
    assume(all(any(story.text for story in side) for side in stories))
    return [
        tuple(simulated.write(side, engine, seed + again) for side, (engine, seed) in zip(stories, made, strict=True))
        for again in range(schedules)
    ]


def keys(rows: Rows, family: str) -> list[Key]:
    columns = (rows[name].tolist() for name in ("request", "pass", "depth", "node"))
    return [(family, request, *rest) for request, *rest in zip(*columns, strict=True)]  # type: ignore[misc]


def paired_keys(pairs: PairedRows) -> list[tuple[Key, Key]]:
    family_a, _, family_b = pairs.family.partition("/")
    return list(zip(keys(pairs.a, family_a), keys(pairs.b, family_b or family_a), strict=True))


def base_of(row: Any, story: Any) -> int:
    """The place in the text where its branch began, or its own."""
    return int(row.trunk if row.family == "received" else min(row.trunk, len(story.text) - 1))


def of_text(row: Any, story: Any) -> bool:
    return bool(row.own and (row.family == "received" or row.trunk < len(story.text)))


def identity(row: Any) -> tuple[int, Tokens]:
    """What makes rows of one family the same; a node of a round is one at its depth in it."""
    return row.depth, row.context


def true_state(row: Any) -> Tokens:
    """What makes a row's true state, and so the features that a draft is fed of it: the tokens up to its place."""
    return row.context[: row.trunk + 1] if row.own and row.depth == 0 else (*row.context, -1)


def contexts(side: Any, family: str, request: int, shared: int) -> Counter[tuple[int, Tokens]]:
    """What a side holds of a request; behind the shared text a row is known by those before it, if all are there."""
    story = side.stories[request]
    rows = [row for key, row in side.rows.items() if key[:2] == (family, request) and row.context is not None]
    there = {row.trunk for row in rows if row.own and of_text(row, story)}
    found: Counter[tuple[int, Tokens]] = Counter()
    for row in rows:
        behind = set(range(shared - 1, base_of(row, story))) if family != "verified" else set()
        found[identity(row)] += behind <= there
    return found


def partners(alignment: Alignment) -> tuple[dict[int, TextPair], dict[int, TextPair]]:
    return {pair.a: pair for pair in alignment.texts}, {pair.b: pair for pair in alignment.texts}


def check_no_pair_is_wrong(alignment: Alignment, a: Any, b: Any) -> None:
    for family, pairs in alignment.families.items():
        found = paired_keys(pairs)
        assert len({one for one, _ in found}) == len({other for _, other in found}) == len(pairs)
        for text, (one, other) in zip(pairs.text.tolist(), found, strict=True):
            assert (alignment.texts[text].a, alignment.texts[text].b) == (one[1], other[1])
            same = true_state if "/" in family else identity
            assert a.rows[one].context is not None
            assert same(a.rows[one]) == same(b.rows[other])


def check_no_pair_is_missed(alignment: Alignment, a: Any, b: Any) -> None:
    for family in ("emitted", "reference", "received", "verified"):
        if not all(any(key[0] == family for key in side.rows) for side in (a, b)):
            assert family not in alignment.families
            continue
        held = [
            contexts(a, family, pair.a, pair.shared) & contexts(b, family, pair.b, pair.shared)
            for pair in alignment.texts
        ]
        assert len(alignment.families[family]) == sum(sum(one.values()) for one in held), family
    if "received" in alignment.families:
        answered = [
            ("drafted", *one[1:]) in a.rows and ("drafted", *other[1:]) in b.rows
            for one, other in paired_keys(alignment.families["received"])
        ]
        assert len(alignment.families["drafted"]) == sum(answered)


def why_alone(row: Any, story: Any, pair: TextPair | None, other: Any, held: Any) -> str:
    if pair is None:
        return "its request has no partner"
    if row.context is None:
        return "its place in the text is not known"
    if held[identity(row)]:
        return "the other has it fewer times"
    reach = base_of(row, story) + (2 if row.family == "received" else 1)
    if reach > pair.shared and pair.parts:
        return "behind the place where the texts part"
    if reach > len(other.text):
        return "behind the end of the other's text"
    if of_text(row, story):
        lent = other.finished and base_of(row, story) < other.cached
        return "the other took it from its prefix cache" if lent else "the other has no row for it"
    return "the other has not drafted this here"


def check_the_counts_add_up(alignment: Alignment, a: Any, b: Any) -> None:
    for family, pairs in alignment.families.items():
        if family == "drafted" or "/" in family:
            continue
        for mine, rows, other, by, reasons, name in (
            (a, pairs.a, b, partners(alignment)[0], pairs.unpaired[0], "b"),
            (b, pairs.b, a, partners(alignment)[1], pairs.unpaired[1], "a"),
        ):
            paired, expected = set(keys(rows, family)), Counter[str]()
            for key, row in mine.rows.items():
                if key[0] == family and key not in paired:
                    pair = by.get(key[1])
                    number = getattr(pair, name) if pair else -1
                    held = contexts(other, family, number, pair.shared) if pair else None
                    expected[why_alone(row, mine.stories[key[1]], pair, other.stories.get(number), held)] += 1
            assert reasons == expected, family
            assert len(paired) + sum(reasons.values()) == sum(key[0] == family for key in mine.rows)


def check_answers_are_accounted_for(alignment: Alignment, a: Any, b: Any) -> None:
    if "received" not in alignment.families:
        return
    sides_ = list(zip(*paired_keys(alignment.families["received"]), strict=True)) or [(), ()]
    for mine, fed, reasons in zip((a, b), sides_, alignment.families["drafted"].unpaired, strict=True):
        answers = {key[1:] for key in mine.rows if key[0] == "drafted"}
        without = len(answers - {key[1:] for key in fed})
        unanswered = len(answers) - without - len(alignment.families["drafted"])
        told = {"what it was made of has no partner": without, "the other has no answer to it": unanswered}
        assert reasons == {reason: count for reason, count in told.items() if count}


def named(alignment: Alignment, a: Any, b: Any) -> set[tuple[Any, ...]]:
    """All pairs, under names that no schedule gives."""
    return {
        (one[0], a.stories[one[1]].name, *one[2:], b.stories[other[1]].name, *other[2:])
        for pairs in alignment.families.values()
        for one, other in paired_keys(pairs)
    }


@settings(max_examples=120, deadline=None)
@given(sides())
def test_rows_that_are_the_same_pair_and_no_others(simulated: SimpleNamespace, drawn: Any) -> None:
    [(a, b)] = served(simulated, drawn)
    if not pair_texts(a.side.texts, b.side.texts):
        with pytest.raises(UserError, match="no rows pair"):
            align(a.side, b.side)
        return
    alignment = align(a.side, b.side)
    check_no_pair_is_wrong(alignment, a, b)
    check_no_pair_is_missed(alignment, a, b)
    check_the_counts_add_up(alignment, a, b)
    check_answers_are_accounted_for(alignment, a, b)


@settings(max_examples=30, deadline=None)
@given(sides())
def test_neither_schedule_nor_side_changes_the_pairs(simulated: SimpleNamespace, drawn: Any) -> None:
    (a, b), (a2, b2) = served(simulated, drawn, schedules=2)
    assume(pair_texts(a.side.texts, b.side.texts))
    there, back = align(a.side, b.side), align(b.side, a.side)
    assert named(there, a, b) == named(align(a2.side, b.side), a2, b)
    assert named(there, a, b) == named(align(a.side, b2.side), a, b2)
    assert {(pair.a, pair.b, pair.shared) for pair in there.texts} == {(p.b, p.a, p.shared) for p in back.texts}
    for family, pairs in there.families.items():
        mirror = back.families["/".join(reversed(family.split("/")))]
        assert pairs.unpaired == mirror.unpaired[::-1]
        assert dict(zip(paired_keys(pairs), pairs.place.tolist(), strict=True)) == {
            (one, other): place for (other, one), place in zip(paired_keys(mirror), mirror.place.tolist(), strict=True)
        }


TEXTS = st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=5), st.integers(1, 3)), max_size=4)


def asked(drawn: list[tuple[list[int], int]]) -> dict[int, Text]:
    """By numbers that do not go with the order."""
    texts = [Text(tuple(tokens[:prompt]), tuple(tokens[prompt:]), 3) for tokens, prompt in drawn]
    return {(3 * at + 1) % 7: text for at, text in enumerate(texts)}


def shared(one: Text, other: Text) -> int:
    both = zip_longest(one.tokens, other.tokens)
    return next((at for at, (a, b) in enumerate(both) if a != b), len(one.tokens))


def may_pair(one: Text, other: Text) -> bool:
    return shared(one, other) >= min(len(one.prompt), len(other.prompt))


@settings(max_examples=300, deadline=None)
@given(TEXTS, TEXTS)
def test_requests_that_share_most_pair(drawn_a: Any, drawn_b: Any) -> None:
    """No two would both share more with each other than with their partners; whoever has none has nobody left."""
    a, b = asked(drawn_a), asked(drawn_b)
    pairs = pair_texts(a, b)
    with_a, with_b = {pair.a: pair.shared for pair in pairs}, {pair.b: pair.shared for pair in pairs}
    assert len(with_a) == len(with_b) == len(pairs)
    for pair in pairs:
        assert (pair.text_a, pair.text_b) == (a[pair.a], b[pair.b])
        assert pair.shared == shared(a[pair.a], b[pair.b]) and may_pair(a[pair.a], b[pair.b])
    for one, text in a.items():
        for other, theirs in b.items():
            if may_pair(text, theirs):
                assert shared(text, theirs) <= max(with_a.get(one, 0), with_b.get(other, 0))


@settings(max_examples=300, deadline=None)
@given(TEXTS, TEXTS)
def test_where_every_prompt_is_shared_as_much_text_as_can_be_is(drawn_a: Any, drawn_b: Any) -> None:
    """With prompts of one token none keeps a pair from being one."""
    a, b = (asked([(tokens, 1) for tokens, _ in drawn]) for drawn in (drawn_a, drawn_b))
    fewer, more = sorted((list(a.values()), list(b.values())), key=len)
    best = max(sum(map(shared, fewer, chosen)) for chosen in permutations(more, len(fewer)))
    assert sum(pair.shared for pair in pair_texts(a, b)) == best


@settings(max_examples=100, deadline=None)
@given(TEXTS, TEXTS, st.randoms(use_true_random=False))
def test_of_equal_texts_the_kth_pairs_with_the_kth_in_whatever_order_they_end(
    drawn_a: Any, drawn_b: Any, random: Any
) -> None:
    a, b = asked(drawn_a), asked(drawn_b)
    pairs = {(pair.a, pair.b, pair.shared) for pair in pair_texts(a, b)}
    for text in a.values():
        numbers = [sorted(number for number, other in side.items() if other == text) for side in (a, b)]
        assert {(one, other, len(text.tokens)) for one, other in zip(*numbers, strict=False)} <= pairs
    shuffled = [dict(random.sample(list(side.items()), len(side))) for side in (a, b)]
    assert {(pair.a, pair.b, pair.shared) for pair in pair_texts(*shuffled)} == pairs
    assert {(pair.b, pair.a, pair.shared) for pair in pair_texts(b, a)} == pairs


def test_an_equal_prompt_goes_before_one_that_goes_on() -> None:
    a, b = {0: Text((1,), (5,), 0)}, {0: Text((1, 2), (5,), 0), 1: Text((1,), (6,), 0)}
    assert [(pair.a, pair.b, pair.shared, pair.parts) for pair in pair_texts(a, b)] == [(0, 1, 1, True)]


def recorded(folder: Path, texts: list[Tokens], **families: dict[str, Any]) -> Side:
    """One request for each text, of whose tokens the last is its answer, and rows of the first under some families."""
    create_trace(folder, {})
    with Recorder(folder, role="engine", strict=True) as recorder:
        for family, of in families.items():
            position = of.pop("position", range(len(texts[0]) - 1))
            getattr(recorder, family)(Keys(request=[0] * len(position), pass_=0, position=position), **of)
        for number, text in enumerate(texts):
            recorder.requests(
                Keys(request=[number], pass_=0, position=0), id=[str(number)], prompt_tokens=[text[:-1]],
                output_tokens=[text[-1:]], cached_prefix=0, temperature=0.0, finish_reason="length", rounds=0,
                correct_drafts=0, depth_limit=3,
            )  # fmt: skip
    return read_side(Trace.open(folder))


PROMPTS = [(4, 7, 5, 8), (3, 4, 5, 6, 7)]


@pytest.mark.parametrize("front", [(1,), (1, 2)])
def test_something_in_front_of_the_prompts_of_one_trace_is_named(front: Tokens, tmp_path: Path) -> None:
    bare = recorded(tmp_path / "bare", PROMPTS)
    begun = recorded(tmp_path / "begun", [(*front, *prompt) for prompt in PROMPTS[::-1]])
    with pytest.raises(UserError, match=rf"those of B have \[{front[0]}.*\] in front"):
        align(bare, begun)
    with pytest.raises(UserError, match=rf"those of A have \[{front[0]}.*\] in front"):
        align(begun, bare)


def test_nothing_shared_is_an_error_that_shows_both(tmp_path: Path) -> None:
    a, b = recorded(tmp_path / "a", PROMPTS), recorded(tmp_path / "b", [(9, 9, 9)])
    with pytest.raises(UserError, match=r"no rows pair: .*begins \[4, 7, 5\] and .*begins \[9, 9\].*same prompts"):
        align(a, b)


def test_a_trace_without_text_cannot_be_aligned(tmp_path: Path) -> None:
    create_trace(tmp_path / "trace", {})
    with Recorder(tmp_path / "trace", role="engine") as recorder:
        recorder.received(Keys(request=[0], pass_=0, position=[0]), token=[1])
    with pytest.raises(UserError, match="no text by which to align"):
        read_side(Trace.open(tmp_path / "trace"))


def test_true_states_pair_with_the_features_that_were_handed_over_for_their_place(tmp_path: Path) -> None:
    """What follows a place plays no part in its true state: only the last row's next token differs."""
    text = (3, 4, 5, 6, 7)
    states = {"token": text[:-1], "boundaries": {2: np.ones((4, 2), np.float32)}}
    a = recorded(tmp_path / "a", [text], reference=states)
    b = recorded(tmp_path / "b", [(*text[:-1], 8)], received={"position": [1, 2, 3], "token": [5, 6, 8]})
    for one, other, name in ((a, b, "reference/received"), (b, a, "received/reference")):
        [(family, pairs)] = align(one, other).families.items()
        assert family == name and pairs.place.tolist() == [1, 2, 3]
        assert pairs.a["position"].tolist() == pairs.b["position"].tolist() == [1, 2, 3]
        assert {"the other has no row for it": 1} in pairs.unpaired and {} in pairs.unpaired


@pytest.mark.parametrize(("shift", "placed"), [(0, 4), (1, 0)])
def test_positions_are_believed_only_where_all_tokens_are_right(shift: int, placed: int, tmp_path: Path) -> None:
    """Where nothing says which rows of the target they are; a token that repeats is right one place on, too."""
    text = (3, 7, 7, 7, 5)
    fed = {"position": [place + shift for place in range(4)], "token": text[1:]}
    side = recorded(tmp_path / "trace", [text], received=fed)
    assert (side.families["received"].place >= 0).sum() == placed


def test_a_branch_that_is_a_circle_ends_and_has_no_place() -> None:
    """As where an engine records row 0 as the source of every node."""
    placed = Placed(None, np.array([4, -1, -1]), np.array([-1, 0, 2]))  # type: ignore[arg-type]
    assert places_of(placed).tolist() == [4, 4, -1]

"""Whatever the drafts say and however requests are cut up and interleaved, the output is the target's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrace.engine.plan import Decision, DraftGroup, DraftStep, DraftTree, TargetGroup, TargetStep
from spectrace.engine.scheduler import Request, Scheduler
from spectrace.engine.tree import Tree
from spectrace.engine.verify import verify_greedy
from spectrace.tracer.rows import Phase

VOCAB = 11


def next_token(prefix: Sequence[int]) -> int:
    """A target: the next token depends on every token before it and on their order."""
    state = 7
    for token in prefix:
        state = (state * 31 + token + 1) % 10007
    return state % VOCAB


def continuation(prompt: Sequence[int], max_new: int, ends: frozenset[int]) -> list[int]:
    """What the target alone answers."""
    text = list(prompt)
    while len(text) - len(prompt) < max_new:
        text.append(next_token(text))
        if text[-1] in ends:
            break
    return text[len(prompt) :]


@dataclass
class FakeTarget:
    """Keeps each request's committed tokens, as the cache of a real target would, and answers after every row."""

    cache: dict[int, list[int]] = field(default_factory=dict)

    def step(self, step: TargetStep) -> list[Decision]:
        for request in step.released:
            del self.cache[request]
        return [self._group(group) for group in step.groups]

    def _group(self, group: TargetGroup) -> Decision:
        committed = self.cache.setdefault(group.request, [])
        assert group.position == len(committed)
        prefixes: list[list[int]] = []
        for token, parent in zip(group.tokens, group.parents, strict=True):
            prefixes.append([*(prefixes[parent] if parent >= 0 else committed), token])
        own = tuple(next_token(prefix) for prefix in prefixes)
        if group.phase is Phase.PREFILL:
            path, bonus = tuple(range(len(own))), own[-1] if group.answers else None
        else:
            verdict = verify_greedy(group.parents, group.tokens, own)
            path, bonus = verdict.path, verdict.bonus
        self.cache[group.request] = prefixes[path[-1]]
        return Decision(group.request, own, path, bonus)


@dataclass
class FakeDraft:
    """Holds every group against the alignment invariant; drafts chains or trees that are right as often as told."""

    truth: dict[int, list[int]]
    right: Callable[[], bool]
    branching: bool
    depth: int
    fed: dict[int, list[int]] = field(default_factory=dict)
    alive: set[int] = field(default_factory=set)

    def step(self, step: DraftStep, handed: Sequence[tuple[int, int | None]]) -> list[DraftTree]:
        """`handed` are (request, position) of the rows that the target handed over."""
        assert not set(step.released) & {group.request for group in step.groups}
        self.alive -= set(step.released)
        for group in step.groups:
            self.alive.add(group.request)
            fed, count = self.fed.setdefault(group.request, []), len(group.tokens)
            assert group.position == len(fed)
            positions = range(group.position, group.position + group.live)
            assert list(handed[group.source : group.source + count]) == [
                (group.request, group.position + i if i < group.live else None) for i in range(count)
            ]
            assert list(group.tokens[: group.live]) == [self.truth[group.request][p + 1] for p in positions]
            fed += group.tokens[: group.live]
        return [self._tree(group) for group in step.groups if group.drafts]

    def _tree(self, group: DraftGroup) -> DraftTree:
        text = self.truth[group.request][: group.position + group.live + 1]
        tokens, parents, above = [], [], -1
        for _ in range(self.depth):
            token = next_token(text)
            text.append(token if self.right() else (token + 1) % VOCAB)
            if self.branching:
                tokens.append((text[-1] + 3) % VOCAB)
                parents.append(above)
            tokens.append(text[-1])
            parents.append(above)
            above = len(tokens) - 1
        return DraftTree(group.request, Tree(tuple(tokens), tuple(parents)))


@dataclass(frozen=True)
class Case:
    """A call."""

    prompts: list[tuple[list[int], int]]
    depth: int
    concurrency: int
    chunk: int | None
    ends: frozenset[int]
    right: list[bool]
    branching: bool
    fixed_window: bool = False


def cases() -> st.SearchStrategy[Case]:
    tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9)
    return st.builds(
        Case,
        prompts=st.lists(st.tuples(tokens, st.integers(1, 12)), min_size=1, max_size=6),
        depth=st.integers(0, 5),
        concurrency=st.integers(1, 4),
        chunk=st.none() | st.integers(1, 8),
        ends=st.frozensets(st.integers(0, VOCAB - 1), max_size=2),
        right=st.lists(st.booleans(), min_size=1, max_size=9),
        branching=st.booleans(),
        fixed_window=st.booleans(),
    )


@dataclass
class Played:
    """What became of a case, step by step."""

    scheduler: Scheduler
    target: FakeTarget
    draft: FakeDraft
    steps: list[TargetStep] = field(default_factory=list)
    drafts: list[DraftStep] = field(default_factory=list)


def play(case: Case) -> Played:
    """Drive a scheduler as a deployment does."""
    scheduler = Scheduler(
        depth=case.depth,
        concurrency=case.concurrency,
        chunk=case.chunk,
        end_tokens=case.ends,
        fixed_window=case.fixed_window,
    )
    truth = {}
    for number, (prompt, max_new) in enumerate(case.prompts):
        scheduler.add(Request(number, str(number), tuple(prompt), max_new))
        truth[number] = [*prompt, *continuation(prompt, 60, frozenset())]
    answers = iter(case.right * 1000)
    played = Played(scheduler, FakeTarget(), FakeDraft(truth, lambda: next(answers), case.branching, case.depth))
    while (step := scheduler.plan()) is not None:
        played.steps.append(step)
        assert len(played.steps) < 400
        positions = {group.request: group.position for group in step.groups}
        decisions = played.target.step(step)
        handed: list[tuple[int, int | None]] = []
        for d in decisions:
            handed += [(d.request, positions[d.request] + i) for i in range(len(d.path))]
            handed += [(d.request, None) for _ in d.rejected if case.fixed_window]
        drafts = scheduler.apply(decisions)
        if drafts.groups:
            played.drafts.append(drafts)
            scheduler.take_drafts(played.draft.step(drafts, handed))
        else:
            assert not drafts.released  # it would go to nobody
    return played


@given(cases())
@settings(max_examples=300, deadline=None)
def test_outputs_are_the_targets_own_whatever_the_drafts_say(case: Case) -> None:
    scheduler = play(case).scheduler
    assert sorted(request.number for request in scheduler.finished) == list(range(len(case.prompts)))
    for number, (prompt, max_new) in enumerate(case.prompts):
        request = scheduler.requests[number]
        expected = continuation(prompt, max_new, case.ends)
        assert request.output == expected
        assert request.finish_reason == ("stop" if expected[-1] in case.ends else "length")


@given(cases())
@settings(max_examples=150, deadline=None)
def test_steps_stay_within_chunk_and_concurrency_and_count_passes_and_rounds_up(case: Case) -> None:
    played = play(case)
    passes: dict[int, int] = {}
    rounds: dict[int, int] = {}
    assert [step.number for step in played.steps] == list(range(len(played.steps)))
    for step in played.steps:
        assert 0 < len(step.groups) <= case.concurrency
        assert len({group.request for group in step.groups}) == len(step.groups)
        prompt_rows = sum(len(group.tokens) for group in step.groups if group.phase is Phase.PREFILL)
        assert case.chunk is None or prompt_rows <= case.chunk
        for group in step.groups:
            assert group.pass_ == passes.get(group.request, 0)
            passes[group.request] = group.pass_ + 1
            verifies = group.phase is Phase.VERIFY and case.depth > 0
            assert group.round == (rounds.get(group.request, 0) if verifies else -1)
            rounds[group.request] = rounds.get(group.request, 0) + verifies
    for number, request in played.scheduler.requests.items():
        assert (request.passes, request.rounds) == (passes[number], rounds[number])


@given(cases())
@settings(max_examples=150, deadline=None)
def test_a_verified_tree_is_the_one_drafted_for_its_round(case: Case) -> None:
    """The pass that ends a prompt feeds round 0, a verify pass the round after its own; the draft is asked once."""
    played = play(case)
    asked = [(group.request, group.round) for step in played.drafts for group in step.groups if group.drafts]
    assert len(set(asked)) == len(asked)
    verified = [(group.request, group.round) for step in played.steps for group in step.groups if group.round >= 0]
    assert sorted(asked) == sorted(verified)


@given(cases())
@settings(max_examples=150, deadline=None)
def test_the_finished_are_released_once_and_nothing_is_kept(case: Case) -> None:
    """Each cache hears of a finished request with the next step it gets, even if no step follows the last one."""
    played = play(case)
    for steps in (played.steps, played.drafts):
        released = [request for step in steps for request in step.released]
        assert len(set(released)) == len(released)
    last = {group.request for group in played.steps[-1].groups}
    assert set(played.target.cache) <= last | set(played.scheduler._target_frees)
    if played.drafts:
        assert played.draft.alive <= {group.request for group in played.drafts[-1].groups} | set(
            played.scheduler._draft_frees
        )


def test_a_request_that_finishes_in_a_step_without_drafts_is_still_released_to_the_draft() -> None:
    """One place: the first request ends in a pass that no draft follows, so the next draft step carries its release."""
    case = Case([([1, 2, 3], 4), ([4, 5], 1), ([6, 7], 3)], 2, 1, None, frozenset(), [False], False)
    played = play(case)
    silent = {step.number for step in played.steps} - {step.number for step in played.drafts}
    assert silent
    assert next(set(step.released) for step in played.drafts if step.groups[0].request == 2) == {0, 1}


@pytest.mark.parametrize(("right", "rounds", "correct"), [(True, 2, 8), (False, 9, 0)])
def test_rounds_and_correct_drafts_are_counted_untrimmed(right: bool, rounds: int, correct: int) -> None:
    """Ten tokens, four drafted a round: 1 + 5 + 4 of 5 where every draft is right, one by one where none is."""
    case = Case([([1, 2, 3], 10)], 4, 1, None, frozenset(), [right], False)
    request = play(case).scheduler.requests[0]
    assert (request.rounds, request.correct_drafts) == (rounds, correct)
    assert request.untrimmed == 1 + rounds + correct
    assert len(request.output) == 10


def test_prompts_share_a_chunk_in_the_order_of_arrival() -> None:
    """Rounds of those that answer already go along and take nothing from it."""
    case = Case([([1] * 3, 8), ([2] * 6, 2), ([3] * 2, 2)], 2, 3, 4, frozenset(), [True], False)
    sizes = [[(group.request, len(group.tokens)) for group in step.groups] for step in play(case).steps[:3]]
    assert sizes == [[(0, 3), (1, 1)], [(0, 3), (1, 4)], [(0, 3), (1, 1), (2, 2)]]

"""One step of an engine as an adapter captured it, and the rows that it becomes.

The engine's thread makes a `Step` of copies; the scribe's thread waits for them, keeps the book, and calls the
recorder's verbs. Shapes: B requests, T rows of the target's pass, D rows of the draft's first forward, N rows with
logits, A slots, F target width, H draft width, S tokens sampled at most.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spectrace.tracer.attach.book import Book, Story
from spectrace.tracer.keys import Keys
from spectrace.tracer.recorder import Recorder
from spectrace.tracer.rows import Phase
from spectrace.tracer.staging import Bits, Staged

__all__ = ["Forward", "Group", "Logits", "Scribe", "Step"]

Int = np.ndarray


@dataclass(frozen=True, slots=True)
class Group:
    """One request in a step: `rows` of its text, the last `drafts` of them drafted.

    `fed` are its rows in the draft's first forward. `silent`: its prompt goes on, so nothing is sampled for it.
    `filled`: its drafts are an engine's filling, which nobody drafted, and which the engine counts.
    """

    name: str
    rows: int
    drafts: int = 0
    fed: int = 0
    silent: bool = False
    filled: bool = False


@dataclass(frozen=True, slots=True)
class Logits:
    """Of rows: the ids and values of the best [rows, k], and the logsumexp over all [rows]."""

    ids: Staged
    values: Staged
    logsumexp: Staged


@dataclass(slots=True)
class Forward:
    """One forward of the draft: all rows at depth 0 [D], one for each request [B] deeper; answers are of B.

    Where all rows' `state` is out of sight, that of the rows that answer [B] may be there.
    """

    tokens: Staged
    positions: Staged
    inputs: Staged | None = None
    fused: Staged | None = None
    hidden: Staged | None = None
    state: Staged | None = None
    draft_tokens: Staged | None = None
    logits: Logits | None = None


@dataclass(slots=True)
class Step:
    """What is None was not there to be seen. `met` says of new requests what a `Story` begins with, `left` are gone.

    `tokens` and `positions` are [T], `slots` [T, A*F], `targets` [N] the best token of each row with logits, which
    `logits` are of, `sampled` [B, S] with negative numbers behind what was accepted, `last` [B] the rows of the draft's
    first forward that answer. `forwards` are one for each depth, None where it ran out of sight.
    A `thin` step came when there was no room for its tensors: of it the book is kept, and its other rows are lost.
    """

    number: int
    at_secs: float
    met: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    left: Sequence[str] = ()
    groups: Sequence[Group] = ()
    tokens: Staged | None = None
    positions: Staged | None = None
    slots: Staged | None = None
    slot_width: int | None = None
    targets: Staged | None = None
    logits: Logits | None = None
    sampled: Staged | None = None
    last: Staged | None = None
    forwards: list[Forward | None] = field(default_factory=list)
    drafts: Staged | None = None
    thin: bool = False


@dataclass(frozen=True, slots=True)
class _Passes:
    """The requests of a step [B] as they were before it, and what came of it: how many tokens each sampled."""

    stories: Sequence[Story]
    groups: Sequence[Group]
    passes: Int
    rounds: Int
    live: np.ndarray
    counts: Int
    firsts: Int
    computed: Int

    def again(self, owners: Int, nodes: Int) -> np.ndarray:
        """Which rows of the text were computed before, and are again because their request lost its cache."""
        before: np.ndarray = self.firsts[owners] + nodes < self.computed[owners]
        return before

    @property
    def each(self) -> list[tuple[Group, Story]]:
        return list(zip(self.groups, self.stories, strict=True))

    @property
    def verifies(self) -> np.ndarray:
        return np.array([group.drafts > 0 for group in self.groups])

    def keys(self, owners: Int, step: int, **given: object) -> Keys:
        numbers = np.array([story.number for story in self.stories])
        return Keys(request=numbers[owners], pass_=self.passes[owners], step=step, **given)


@dataclass(frozen=True, slots=True)
class _Answers:
    """What requests [B] were answered by one forward, at the rows of it that answer."""

    at: _Passes
    answering: Int
    rows: int
    token: Int | None

    def spread(self, values: Int | None) -> Int | None:
        """Over all rows of the forward: -1 where nothing was asked."""
        if values is None:
            return None
        found: Int = np.full(self.rows, -1, np.int64)
        found[self.answering] = np.where([group.silent for group in self.at.groups], -1, values[: len(self.answering)])
        return found


class Scribe:
    """Writes steps as rows: the target's, the draft's, and on the rank that keeps the book what became of requests."""

    def __init__(
        self,
        target: Recorder,
        draft: Recorder | None,
        scheduler: Recorder | None,
        *,
        depth: int,
        hash_only: bool = False,
    ) -> None:
        self.target, self.draft, self.scheduler = target, draft, scheduler
        self.depth, self.hash_only = depth, hash_only
        self.book = Book()

    def write(self, step: Step) -> None:
        """Everything that one step says. Whoever is gone has no rows in it, and the name may be another's by now."""
        for name in step.left:
            story = self.book.forget(name)
            if story and story.leave(step.at_secs):
                self._request(story, step.number)
        for name, known in step.met.items():
            self.book.meet(name, **known)
        if step.groups and step.tokens is not None and step.positions is not None and step.sampled is not None:
            self._write(step, _array(step.tokens), _array(step.positions), _array(step.sampled))

    def end(self) -> None:
        """The requests that are under way when the recording ends, as far as they got."""
        now_secs = time.time()
        for story in self.book.stories.values():
            if story.leave(now_secs):
                self._request(story, story.passes)

    def _write(self, step: Step, tokens: Int, positions: Int, sampled: Int) -> None:
        groups = step.groups
        stories = [self.book.stories[group.name] for group in groups]
        firsts = positions[np.cumsum([0, *(group.rows for group in groups[:-1])])]
        for story, first in zip(stories, firsts.tolist(), strict=True):
            story.cached_prefix = story.cached_prefix if story.passes else first
        valid = [
            [] if group.silent else [int(token) for token in row if token >= 0]
            for group, row in zip(groups, sampled, strict=True)
        ]
        at = _Passes(
            stories,
            groups,
            passes=np.array([story.passes for story in stories]),
            rounds=np.array([story.rounds for story in stories]),
            live=np.array([not story.ended for story in stories]),
            counts=np.array([len(row) for row in valid]),
            firsts=firsts,
            computed=np.array([story.computed for story in stories]),
        )
        targets = _targets(step, valid, len(tokens))
        if step.thin:
            self.target.dropped("emitted", len(tokens))
        else:
            self._emitted(step, at, tokens, positions, targets)
        cuts = [
            story.take(row, step.at_secs) or group.filled
            for story, row, group in zip(stories, valid, groups, strict=True)
        ]
        if self.scheduler:
            self._verified(step, at, tokens, positions, targets, cuts)
        ends = positions[np.cumsum([group.rows for group in groups]) - 1]
        for story, group, count, was_live, end in zip(
            stories, groups, at.counts.tolist(), at.live.tolist(), ends.tolist(), strict=True
        ):
            story.passes += 1
            story.computed = max(story.computed, end + 1 - (0 if group.silent else group.drafts + 1 - count))
            if group.drafts and was_live:
                story.rounds += 1
                story.correct_drafts += count - 1
        if self.draft and step.thin:
            for family in ("received", "drafted"):
                self.draft.dropped(family, sum(group.fed for group in groups))
        elif self.draft and step.forwards:
            self._drafted(step, at)
        for story, was_live in zip(stories, at.live.tolist(), strict=True):
            if story.ended and was_live:
                self._request(story, step.number)

    def _emitted(self, step: Step, at: _Passes, tokens: Int, positions: Int, targets: Int) -> None:
        lengths = np.array([group.rows for group in at.groups])
        owners, nodes = np.repeat(np.arange(len(lengths)), lengths), _offsets(lengths)
        firsts = positions[np.cumsum(lengths) - lengths]
        known = [len(story.prompt) + len(story.output) if story.output else np.inf for story in at.stories]
        decodes = at.verifies | (firsts + 1 >= known)
        keys = at.keys(
            owners,
            step.number,
            node=nodes,
            position=positions,
            phase=np.where(decodes, Phase.VERIFY, Phase.PREFILL)[owners],
            round=np.where(at.verifies, at.rounds, -1)[owners],
            live=at.live[owners] & ~at.again(owners, nodes),
        )
        for rows, logits in _by_answer(len(tokens), np.flatnonzero(targets >= 0), step.logits):
            self.target.emitted(
                keys.take(rows),
                token=tokens[rows],
                slots=_rows_of(step.slots, rows),
                slot_width=step.slot_width,
                target_token=targets[rows],
                hash_only=self.hash_only,
                **logits,
            )

    def _verified(
        self, step: Step, at: _Passes, tokens: Int, positions: Int, targets: Int, cuts: Sequence[bool]
    ) -> None:
        """The nodes of every round: its root, which is the last token emitted, and its drafts."""
        assert self.scheduler
        lengths = np.array([group.rows for group in at.groups])
        owners, nodes = np.repeat(np.arange(len(lengths)), lengths), _offsets(lengths)
        chosen = np.flatnonzero((at.verifies & at.live)[owners])
        if not len(chosen):
            return
        own, node = owners[chosen], nodes[chosen]
        self.scheduler.verified(
            at.keys(own, step.number, node=node, position=positions[chosen], phase=Phase.VERIFY, round=at.rounds[own]),
            parent=node - 1,
            token=tokens[chosen],
            target_token=targets[chosen],
            accepted=node < at.counts[own],
            cut=np.array(cuts)[own],
            source_row=node,
        )

    def _drafted(self, step: Step, at: _Passes) -> None:
        """Every forward of the draft: of all rows first, then of one for each request."""
        requests = np.arange(len(at.groups))
        lengths = np.array([group.fed for group in at.groups])
        starts = np.cumsum(lengths) - lengths
        last = starts + lengths - 1 if step.last is None else _array(step.last)
        goes_on = at.live & [not (group.silent or story.ended) for group, story in at.each]
        none, tokens = np.zeros(len(requests), np.int64), _optional(step.drafts)
        for depth, forward in enumerate(step.forwards):
            if forward is None:
                continue
            if depth == 0:
                owners, nodes, parents, answering = np.repeat(requests, lengths), _offsets(lengths), None, last
                live = at.live[owners] & (np.arange(len(owners)) <= last[owners])
                live &= ~at.again(owners, nodes)
            else:
                owners, nodes, parents, answering = requests, none, last - starts if depth == 1 else none, requests
                live = goes_on
            keys = at.keys(
                owners,
                step.number,
                depth=depth,
                node=nodes,
                position=_array(forward.positions)[: len(owners)],
                phase=Phase.DRAFT_DECODE if depth else Phase.DRAFT_EXTEND,
                round=np.array([-1 if group.silent else story.rounds for group, story in at.each])[owners],
                live=live,
            )
            token = tokens[:, depth] if tokens is not None and depth < tokens.shape[1] else None
            self._forward(step, forward, keys, parents, _Answers(at, answering, len(owners), token))

    def _forward(self, step: Step, forward: Forward, keys: Keys, parents: Int | None, answers: _Answers) -> None:
        assert self.draft
        first = parents is None
        self.draft.received(
            keys,
            token=_array(forward.tokens)[: answers.rows],
            parent=parents,
            features=forward.inputs if first else None,
            slot_width=step.slot_width if first else None,
            state=None if first else forward.inputs,
            hash_only=self.hash_only,
        )
        draft_tokens, tokens = answers.spread(_optional(forward.draft_tokens)), answers.spread(answers.token)
        state = forward.state
        partial = state is not None and state.shape[0] != answers.rows
        for rows, told in _by_answer(answers.rows, answers.answering, forward.logits, state if partial else None):
            told.setdefault("state", None if partial else _rows_of(state, rows))
            self.draft.drafted(
                keys.take(rows),
                draft_token=None if draft_tokens is None else draft_tokens[rows],
                token=None if tokens is None else tokens[rows],
                fused=_rows_of(forward.fused, rows),
                hidden=_rows_of(forward.hidden, rows),
                hash_only=self.hash_only,
                **told,
            )

    def _request(self, story: Story, step: int) -> None:
        if self.scheduler is None:
            return
        self.scheduler.requests(
            Keys(request=[story.number], pass_=0, node=0, position=0, step=step),
            id=[story.name],
            prompt_tokens=[story.prompt],
            output_tokens=[story.output],
            cached_prefix=story.cached_prefix,
            temperature=story.temperature,
            seed=story.seed,
            finish_reason=story.ended,
            rounds=story.rounds,
            correct_drafts=story.correct_drafts,
            depth_limit=self.depth,
            arrived_secs=story.arrived_secs,
            first_token_secs=story.first_token_secs,
            finished_secs=story.finished_secs,
        )


def _array(staged: Staged) -> Int:
    return staged.wait().array


def _optional(staged: Staged | None) -> Int | None:
    return None if staged is None else _array(staged)


def _rows_of(staged: Staged | None, rows: Int) -> Staged | None:
    """Some rows of a tensor; all of it, where it is all of them, without a copy."""
    if staged is None or len(rows) == staged.shape[0]:
        return staged
    bits = staged.wait()
    return Bits(bits.array[rows], bits.dtype)


def _by_answer(
    rows: int, answering: Int, logits: Logits | None, state: Staged | None = None
) -> Iterator[tuple[Int, dict[str, Any]]]:
    """Rows that do not answer and, with what there is of answers alone, those that do; all at once if there is none."""
    told: dict[str, Any] = {} if state is None else {"state": state}
    if logits is not None:
        ids, values, logsumexp = (one.wait() for one in (logits.ids, logits.values, logits.logsumexp))
        told |= {"logits": (ids, values), "logsumexp": logsumexp.array}
    others = np.setdiff1d(np.arange(rows), answering) if told else answering[:0]
    if len(others):
        yield others, {}
    yield (answering if told else np.arange(rows)), told


def _offsets(lengths: Int) -> Int:
    """0, 1, 2 and so on within each group."""
    starts = np.cumsum(lengths) - lengths
    offsets: Int = np.arange(int(lengths.sum())) - np.repeat(starts, lengths)
    return offsets


def _targets(step: Step, sampled: Sequence[Sequence[int]], rows: int) -> Int:
    """The token that came after each row that was accepted, else the target's best; -1 where there are no logits.

    There are of the last row of each group, and of all of its drafts.
    """
    found: Int = np.full(rows, -1, np.int64)
    if step.targets is not None:
        ends = np.cumsum([group.rows for group in step.groups]).tolist()
        own = [np.arange(end - group.drafts - 1, end) for group, end in zip(step.groups, ends, strict=True)]
        found[np.concatenate(own)] = _array(step.targets)
        for places, came in zip(own, sampled, strict=True):
            found[places[: len(came)]] = came
    return found

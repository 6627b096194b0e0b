"""A simulated engine: requests run pass by pass under any schedule, with what only the simulator knows of every row.

That is its context: all the tokens that made the row what it is, or None where a trace does not tell whose it is.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import pytest

from spectrace.replay.diff.placing import Side, read_side
from spectrace.tracer import Keys, Recorder, Trace, create_trace
from spectrace.tracer.rows import Phase

Tokens: TypeAlias = tuple[int, ...]
Key: TypeAlias = tuple[str, int, int, int, int]
_FAMILIES = ("emitted", "reference", "received", "drafted", "verified")
_MORE = 8  # tokens of a text behind its end, which rounds that are cut run into


@dataclass(frozen=True, slots=True)
class Engine:
    """How a side runs: the draft's depth and width, pieces of prompts, requests at once, and its habits."""

    depth: int
    width: int
    chunk: int
    concurrency: int
    window: bool  # the draft is fed rejected rows, too, as padding
    shift: int  # of the positions that the draft is given
    feeds_end: bool  # the draft is fed the last pass of a request, too
    again_live: bool  # rows that are computed again after preemption are live
    compact: bool  # a tree's rows are not in the order of its nodes
    capture: bool  # true states are recorded
    mishaps: bool  # requests are preempted, sampled away, torn, begin on a cached prefix, and passes are lost
    strays: bool  # texts part


@dataclass(frozen=True, slots=True)
class Row:
    """`trunk` is the place of the last token of its context that became text, `own` says that it is the row's own.

    The `depth` of a round's node is that in its tree, which a trace does not say.
    """

    family: str
    pass_: int
    depth: int
    node: int
    position: int
    phase: Phase
    round: int
    live: bool
    token: int
    context: Tokens | None
    trunk: int
    own: bool
    more: dict[str, Any] = field(default_factory=dict)


class Story:
    """One request as an engine runs it: `passes` are rows, `text` is what a trace says that it came to."""

    def __init__(self, name: int, full: Tokens, prompt: int, limit: int, engine: Engine, random: Random) -> None:
        self.name, self.full, self.prompt, self.engine, self.random = name, full, prompt, engine, random
        self.text = full[: prompt + limit]
        self.passes: list[list[Row]] = []
        self.ends: list[int] = []
        self.rounds = self.correct = 0
        self.finished = True
        self.tree: list[tuple[int, int]] = []
        self.cached = random.randrange(prompt) if self._now(0.3) else 0
        at = self._pieces(self.cached, prompt, again=0)
        while at + 1 < len(self.text):
            at = self._preempted(at) if self._now(0.15) else self._round(at) if self.tree else self._decode(at)
        if self._now(0.2):
            self._tear()
        elif self._now(0.15):
            self.passes, self.finished = [], self._now(0.5)
            self.text = self.text if self.finished else ()
        elif self._now(0.4):
            self._lose()

    def _now(self, odds: float) -> bool:
        return self.engine.mishaps and self.random.random() < odds

    def _pieces(self, start: int, end: int, *, again: int) -> int:
        """Rows of the text in pieces; those before `again` were computed before."""
        for first in range(start, end, self.engine.chunk):
            self._in_text(first, min(first + self.engine.chunk, end), Phase.PREFILL, again, drafts=end)
        return end

    def _preempted(self, at: int) -> int:
        """All over again, or from a cached prefix on; up to the last token that was emitted, or to the one before."""
        self.tree = []
        return self._pieces(self.random.randrange(at), at + self.random.randrange(2), again=at)

    def _decode(self, at: int) -> int:
        self._in_text(at, at + 1, Phase.VERIFY, 0, drafts=at + 1)
        return at + 1

    def _in_text(self, start: int, end: int, phase: Phase, again: int, *, drafts: int) -> None:
        rows = []
        for place in range(start, end):
            live = place >= again or self.engine.again_live
            rows.append(self._target("emitted", place - start, place, phase, -1, live, self.full[: place + 1], place))
        asks = end == drafts and (end > again or self.engine.again_live)
        self._end_pass(rows, range(start, end), end, asks, again)

    def _round(self, at: int) -> int:
        paths = [self.full[: at + 1]]
        for parent, token in self.tree[1:]:
            paths.append((*paths[parent], token))
        accepted = [path == self.full[: len(path)] for path in paths]
        end = at + sum(accepted)
        order = list(range(len(paths)))
        if self.engine.compact:
            self.random.shuffle(order)
        rows, nodes = [], []
        for node, path in enumerate(paths):
            trunk = _shared(path, self.full) - 1
            of = (Phase.VERIFY, self.rounds, True, path)
            rows.append(self._target("emitted", order[node], len(path) - 1, *of, trunk))
            judged = {
                "parent": self.tree[node][0], "target_token": self.full[trunk + 1], "accepted": accepted[node],
                "cut": end + 1 > len(self.text), "source_row": order[node],
            }  # fmt: skip
            row = self._target("verified", node, len(path) - 1, *of, at)
            nodes.append(replace(row, depth=len(path) - 1 - at, own=node == 0, more=judged))
        self.rounds += 1
        self.correct += end - at - 1
        rows.sort(key=lambda row: row.node)
        self._end_pass(rows + nodes, range(at, end), end, asks=True, again=0, padding=len(paths) - end + at)
        return end

    def _target(
        self, family: str, node: int, position: int, phase: Phase, round: int, live: bool, context: Tokens, trunk: int
    ) -> Row:
        own = trunk == len(context) - 1
        return Row(family, len(self.passes), 0, node, position, phase, round, live, context[-1], context, trunk, own)

    def _end_pass(self, rows: list[Row], places: range, end: int, asks: bool, again: int, padding: int = 0) -> None:
        finished = end + 1 >= len(self.text)
        if self.engine.capture:
            rows += [replace(row, family="reference") for row in rows if row.family == "emitted"]
        if self.engine.depth and (self.engine.feeds_end or not finished):
            fed = [self._fed(node, place, again, asks) for node, place in enumerate(places)]
            if self.engine.window:
                last = fed[-1]
                more = range(len(fed), len(fed) + padding)
                fed += [replace(last, node=node, live=False, context=None) for node in more]
            if asks and not finished:
                fed += self._draft(places[-1], len(places) - 1)
            rows += fed + [replace(row, family="drafted", more={}) for row in fed]
        self.passes.append(rows)
        self.ends.append(max([end, *self.ends[-1:]]))

    def _fed(self, node: int, place: int, again: int, asks: bool) -> Row:
        position, round = place + self.engine.shift, self.rounds if asks else -1
        live, context = place >= again or self.engine.again_live, self.full[: place + 2]
        of = (Phase.DRAFT_EXTEND, round, live, self.full[place + 1], context, place)
        return Row("received", len(self.passes), 0, node, position, *of, own=True)

    def _draft(self, place: int, last: int) -> list[Row]:
        """Grow a tree below a row of the text; each depth's rows but the first's."""
        self.tree, rows = [(-1, self.full[place + 1])], []
        above = [(0, last, self.full[: place + 2])]
        for depth in range(1, self.engine.depth + 1):
            found = []
            for parent, node, context in above:
                for token in self._guesses(context):
                    kept = parent >= 0 and (self.engine.width == 1 or self.random.random() < 0.8)
                    if kept:
                        self.tree.append((parent, token))
                    found.append((len(self.tree) - 1 if kept else -1, node, (*context, token)))
            above = []
            for node, (name, parent, context) in enumerate(self.random.sample(found, self.engine.width)):
                above.append((name, node, context))
                if depth < self.engine.depth:
                    of = (Phase.DRAFT_DECODE, self.rounds, True, context[-1], context, place)
                    position = place + depth + self.engine.shift
                    row = Row("received", len(self.passes), depth, node, position, *of, own=False)
                    rows.append(replace(row, more={"parent": parent}))
        return rows

    def _guesses(self, context: Tokens) -> list[int]:
        first = self.full[len(context)] if self.random.random() < 0.6 else self.random.randrange(3)
        return [first, (first + 1) % 3][: self.engine.width]

    def _tear(self) -> None:
        """The recording ends somewhere; maybe before the last round's verdict was written."""
        self.finished = False
        kept = self.random.randint(1, len(self.passes))
        self.passes, self.text = self.passes[:kept], self.full[: self.ends[kept - 1]]
        if self._now(0.5) and any(row.family == "verified" for row in self.passes[-1]):
            self.text = self.full[: min(row.trunk for row in self.passes[-1])]
            self._without(kept - 1, "verified")
        if self.cached:
            self.text = ()

    def _lose(self) -> None:
        for pass_ in range(1, len(self.passes)):
            if self._now(0.2):
                self._without(pass_, self.random.choice(_FAMILIES))

    def _without(self, pass_: int, family: str) -> None:
        """Lose a family's rows of one pass, and what the others have to tell of it."""
        verdict = family == "verified" and any(row.family == family for row in self.passes[pass_])
        self.passes[pass_] = [row for row in self.passes[pass_] if row.family != family]
        if verdict or family == "emitted":
            self._blind(pass_, ("received", "emitted", "reference") if verdict else ("received",))

    def _blind(self, pass_: int, families: tuple[str, ...]) -> None:
        """What a draft was fed is known by its position and token alone, where positions can be believed."""
        for at, row in enumerate(self.passes[pass_]):
            told = row.family == "received" and not self.engine.shift and row.trunk + 1 < len(self.text)
            if row.family in families and not told:
                self.passes[pass_][at] = replace(row, context=None)


def _shared(one: Tokens, other: Tokens) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@dataclass(frozen=True, slots=True)
class Written:
    """A recorded side: its requests by number, and its live rows by key."""

    side: Side
    stories: dict[int, Story]
    rows: dict[Key, Row]


def run(texts: Sequence[tuple[Tokens, int]], engine: Engine, seed: int) -> list[Story]:
    """Requests for some (text, length of the prompt), or for others that begin alike."""
    random, stories = Random(seed), []
    for full, prompt in texts:
        limit = random.randint(1, len(full) - prompt - _MORE)
        if engine.strays and random.random() < 0.5:
            at = random.randrange(1, len(full))
            full = (*full[:at], (full[at] + 1) % 3, *(random.randrange(3) for _ in full[at + 1 :]))
        stories.append(Story(len(stories), full, prompt, limit, engine, random))
    return stories


def write(stories: Sequence[Story], engine: Engine, seed: int) -> Written:
    """Record requests in any order, in any batches, under any numbers; of equal texts the first has the lowest."""
    random = Random(seed)
    numbers = random.sample(range(3 * len(stories)), len(stories))
    for text in {story.text for story in stories}:
        equal = [story.name for story in stories if story.text == text]
        for name, number in zip(equal, sorted(numbers[name] for name in equal), strict=True):
            numbers[name] = number
    with tempfile.TemporaryDirectory() as folder:
        create_trace(Path(folder) / "trace", {})
        with Recorder(Path(folder) / "trace", role="engine", strict=True) as recorder:
            for step, batch in enumerate(_batches(stories, engine, random)):
                _record(recorder, step, [(numbers[story.name], story, pass_) for story, pass_ in batch])
        side = read_side(Trace.open(Path(folder) / "trace"))
        for family in _FAMILIES:
            side.trace.rows(family)
    rows = {
        (row.family, numbers[story.name], row.pass_, 0 if row.family == "verified" else row.depth, row.node): row
        for story in stories for pass_ in story.passes for row in pass_ if row.live
    }  # fmt: skip
    return Written(side, {numbers[story.name]: story for story in stories}, rows)


def _batches(stories: Sequence[Story], engine: Engine, random: Random) -> Iterator[list[tuple[Story, int]]]:
    """The passes of each request in order, those of several requests side by side."""
    waiting = random.sample(list(stories), len(stories))
    running: dict[int, tuple[Story, int]] = {}
    while waiting or running:
        while waiting and len(running) < engine.concurrency:
            story = waiting.pop()
            running[story.name] = (story, 0)
        batch = random.sample(list(running.values()), random.randint(1, len(running)))
        yield batch
        for story, pass_ in batch:
            running[story.name] = (story, pass_ + 1)
            if pass_ + 1 >= len(story.passes):
                del running[story.name]


def _record(recorder: Recorder, step: int, batch: Sequence[tuple[int, Story, int]]) -> None:
    found: dict[tuple[str, int], list[tuple[int, Row]]] = defaultdict(list)
    for number, story, pass_ in batch:
        for row in story.passes[pass_] if story.passes else ():
            found[row.family, row.depth if row.family in ("received", "drafted") else 0].append((number, row))
    for (family, depth), rows in found.items():
        names = ("position", "phase", "round", "live", "node", "pass_")
        columns = {name: [getattr(row, name) for _, row in rows] for name in names}
        keys = Keys(request=[number for number, _ in rows], depth=depth, step=step, **columns)
        more = {name: [row.more[name] for _, row in rows] for name in rows[0][1].more}
        if family == "reference":
            more["boundaries"] = {0: np.array([[row.token] for _, row in rows], np.float32)}
        getattr(recorder, family)(keys, token=[row.token for _, row in rows], **more)
    for number, story, pass_ in batch:
        if story.finished and pass_ + 1 >= len(story.passes):
            recorder.requests(
                Keys(request=[number], pass_=0, node=0, position=0, step=step), id=[str(story.name)],
                prompt_tokens=[story.text[: story.prompt]], output_tokens=[story.text[story.prompt :]],
                cached_prefix=story.cached, temperature=0.0, finish_reason="length", rounds=story.rounds,
                correct_drafts=story.correct, depth_limit=story.engine.depth,
            )  # fmt: skip


@pytest.fixture(scope="session")
def simulated() -> SimpleNamespace:
    """`Engine`, `run` and `write`."""
    return SimpleNamespace(Engine=Engine, run=run, write=write)

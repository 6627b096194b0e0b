"""A reference: a target's true boundaries for given texts, recorded as the deployment records them with `--capture`.

Nothing is served: texts are fed as they are, and what the target itself would answer after every row is recorded beside
them (`emitted`), so that a target can be told from another by its answers. Only what is whole gets a seal.

Shapes: T rows of a group, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from spectrace.engine.dialect import Wiring, check_boundaries
from spectrace.engine.layerwise import LayerwiseTarget
from spectrace.engine.packing import grouped, pack_texts
from spectrace.engine.provenance import describe_run
from spectrace.engine.recording import Recording, shut
from spectrace.engine.scratch import Scratch
from spectrace.tracer.errors import RunFailed, UserError
from spectrace.tracer.keys import Keys
from spectrace.tracer.manifest import create_trace, seal_trace
from spectrace.tracer.recorder import Recorder
from spectrace.tracer.rows import TOP_K, Level

__all__ = ["GivenText", "record_reference"]

_ROWS_AT_ONCE = 512  # of which the logits are small
_BYTES_AT_ONCE = 32 << 20  # a recorder's queue holds several times as much
_WRITTEN_SECS = 600.0

Told: TypeAlias = Callable[[str, int, int], None]
"""What is being done, and how much of it is done of how much."""


@dataclass(frozen=True, slots=True)
class GivenText:
    """A text by the number and the name of its request; without an answer, a prompt alone."""

    number: int
    name: str
    prompt: tuple[int, ...]
    output: tuple[int, ...] = ()
    temperature: float = 0.0

    @property
    def fed(self) -> tuple[int, ...]:
        """What a target is fed of it: the last token of an answer never is."""
        return self.prompt + self.output[:-1]


@dataclass(frozen=True, slots=True)
class _Answers:
    """What the target says after each row: its best token, and at level full more of its logits."""

    best: Tensor
    logsumexp: Tensor | None
    ids: Tensor | None
    values: Tensor | None


def record_reference(
    target: LayerwiseTarget,
    texts: Sequence[GivenText],
    out: Path,
    *,
    boundaries: Sequence[int],
    level: Level = Level.FEATURES,
    source: Path | None = None,
    progress: Told = lambda what, done, total: None,
) -> None:
    """Record these boundaries of the target for some texts into a new, sealed trace; `source` is where they are from.

    Raises UserError for texts or boundaries that the target does not have, and where there is no room: before anything
    is computed, but for a disk that others fill meanwhile.
    """
    _check_texts(texts, target.vocab)
    check_boundaries("--boundaries", boundaries, target.layers)
    wanted = sorted(set(boundaries))
    groups = [pack_texts(group) for group in grouped({text.number: text.fed for text in texts}, _ROWS_AT_ONCE)]
    scratch = Scratch(out, wanted, sum(map(len, groups)), target.width, target.dtype)
    progress("fingerprints of the target's files", 0, target.layers)
    manifest = _manifest(target, level, wanted, source)
    hidden: list[Tensor] = []
    for boundary, hidden in target.boundaries(groups):
        progress(f"boundary {boundary}", boundary, target.layers)
        scratch.keep(boundary, hidden)
    answers = _joined([_answers(logits, level) for logits in target.logits(groups, hidden)])
    create_trace(out, manifest)
    facts = {"target": {"capture": wanted, "expects": ["emitted", "reference", "requests"]}}
    recorder = Recording(out.absolute(), level, facts).open("target")
    try:
        first = 0
        for step, text in enumerate(texts):
            progress("writing", step, len(texts))
            _write(recorder, text, step, scratch, answers, first)
            first += len(text.fed)
    finally:
        lost = shut(recorder)
    if lost:
        raise UserError(
            f"{out}: the reference is incomplete and was not sealed: {lost}; remove it, and record it again"
        )
    seal_trace(out)


def _check_texts(texts: Sequence[GivenText], vocab: int) -> None:
    if not texts:
        raise UserError("no texts: give at least one")
    for text in texts:
        tokens = text.prompt + text.output
        if not text.prompt:
            raise UserError(f"text {text.number} is empty; expected one token at least")
        if wrong := [token for token in tokens if not 0 <= token < vocab]:
            raise UserError(
                f"text {text.number}: token {wrong[0]} is not in the target's vocabulary, 0 to {vocab - 1}; are these "
                f"texts of another target, or tokens that were hashed?"
            )


def _manifest(target: LayerwiseTarget, level: Level, boundaries: list[int], source: Path | None) -> dict[str, Any]:
    """As of a run without a draft; that there are `texts` in it says that nothing was answered here."""
    manifest = describe_run(
        target=target.folder,
        draft=None,
        wiring=Wiring((), "no draft", ()),
        dtype=str(target.dtype).removeprefix("torch."),
        tensor_parallel={"target": 1, "draft": 0},
        sharded={},
        serving={"depth": 0, "level": level.name.lower(), "capture": boundaries},
    )
    return {**manifest, "texts": {"from": str(source.absolute()) if source else None}}


def _answers(logits_TV: Tensor, level: Level) -> _Answers:
    logits, full = logits_TV.float(), level is Level.FULL
    top = logits.topk(min(TOP_K, logits.shape[-1])) if full else None
    return _Answers(
        logits.argmax(-1).cpu(),
        logits.logsumexp(-1).cpu() if full else None,
        top.indices.int().cpu() if top else None,
        top.values.cpu() if top else None,
    )


def _joined(parts: Sequence[_Answers]) -> _Answers:
    """The answers of all groups, one behind another."""

    def of_all(name: str) -> Any:
        tensors = [getattr(part, name) for part in parts]
        return None if tensors[0] is None else torch.cat(tensors)

    return _Answers(*(of_all(name) for name in _Answers.__slots__))


def _write(recorder: Recorder, text: GivenText, step: int, scratch: Scratch, answers: _Answers, first: int) -> None:
    """One text, whose rows begin at `first`, in pieces that the recorder has room for; then its request."""
    at_once = max(_BYTES_AT_ONCE // scratch.row_bytes, 1)
    for start in range(0, len(text.fed), at_once):
        token = text.fed[start : start + at_once]
        places = range(start, start + len(token))
        keys = Keys(request=[text.number] * len(token), pass_=0, node=places, position=places, step=step)
        rows = slice(first + start, first + start + len(token))
        top = None if answers.ids is None or answers.values is None else (answers.ids[rows], answers.values[rows])
        recorder.emitted(
            keys,
            token=token,
            target_token=answers.best[rows],
            logits=top,
            logsumexp=None if answers.logsumexp is None else answers.logsumexp[rows],
        )
        recorder.reference(keys, token=token, boundaries=scratch.read(rows))
        if not recorder.flush(_WRITTEN_SECS):
            raise RunFailed(f"{recorder.name}: not written within {_WRITTEN_SECS:.0f} s; is the disk still there?")
    recorder.requests(
        Keys(request=[text.number], pass_=0, node=0, position=0, step=step),
        id=[text.name],
        prompt_tokens=[text.prompt],
        output_tokens=[text.output],
        cached_prefix=0,
        temperature=text.temperature,
        finish_reason="given",
        rounds=0,
        correct_drafts=0,
        depth_limit=0,
    )

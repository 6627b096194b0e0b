"""What every switch of the toy drafts is worth: served acceptance, and the free run with one thing set wrong.

Run it to write the tables of README.md. Of `draft` the weights stay as they are in every row, and only what they are
taken for changes; `deep` is broken as the engine breaks a draft on purpose.
"""

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
import numpy as np
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[1]))

from toy.language import Language
from toy.target import LAYERS, TARGET
from toy.train import DEEP, DEPTH, DRAFT

from spectrace.engine.attention import Attend
from spectrace.engine.checkpoint import build_draft, read_draft
from spectrace.engine.draft import DraftModel
from spectrace.engine.fault import Drafting, Source
from spectrace.engine.faults import FAULTS
from spectrace.engine.spec import DraftSpec, FuseNorm, MlaSpec, RopeKind, Stream
from spectrace.replay.freerun import free_run_acceptance
from spectrace.tracer.acceptance import acceptance_of_rows
from spectrace.tracer.trace import Trace

__all__ = ["DEEP_FAULTS", "Flip", "flips", "free_run", "prompts", "record", "worth"]

_README = Path(__file__).resolve().parent / "README.md"
_SEED = 2
_BEGIN, _END = "<!-- written by switches.py{} -->", "<!-- end -->"
DEEP_FAULTS = ("N3", "N4", "N4:first", "P5", "P6", "P7", "R3", "R5", "A1", "A1:head", "A1:unscaled", "A2")


@dataclass(frozen=True, slots=True)
class Flip:
    """One thing set wrong: other switches, another wiring, or positions moved by so much at a depth."""

    fault: str
    what: str
    spec: DraftSpec
    wiring: tuple[int, ...]
    moved: Callable[[int], int] = lambda _depth: 0


class _Misplaced(DraftModel):
    """A draft whose positions are moved, by an amount that depends on how deep it has drafted."""

    moved: Callable[[int], int]
    depth = 0

    def fuse(self, features_TAF: Tensor) -> Tensor:
        self.depth = -1
        return super().fuse(features_TAF)

    def forward(
        self, tokens_T: Tensor, states_TH: Tensor, positions_T: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        self.depth += 1
        return super().forward(tokens_T, states_TH, positions_T + self.moved(self.depth), attend)


def flips(spec: DraftSpec, wiring: tuple[int, ...]) -> list[Flip]:
    """Every switch of the draft set wrong, one at a time."""
    return [*_norms(spec, wiring), *_positions(spec, wiring), *_wirings(spec, wiring)]


def _other(stream: Stream) -> Stream:
    return Stream.PRE_NORM if stream is Stream.POST_NORM else Stream.POST_NORM


def _norms(spec: DraftSpec, wiring: tuple[int, ...]) -> list[Flip]:
    return [
        Flip("N1", "residual from the other side of its norm", replace(spec, residual=_other(spec.residual)), wiring),
        Flip("N2", "no norm before `fc`", replace(spec, fuse_norm=FuseNorm.NONE), wiring),
        Flip("", "one norm over all slots before `fc`", replace(spec, fuse_norm=FuseNorm.WHOLE), wiring),
        Flip("N3", "feedback from the other side of its norm", replace(spec, feedback=_other(spec.feedback)), wiring),
    ]


def _positions(spec: DraftSpec, wiring: tuple[int, ...]) -> list[Flip]:
    rope, attention = spec.rope, spec.attention
    assert isinstance(attention, MlaSpec)
    plain, flat = replace(rope, kind=RopeKind.DEFAULT), replace(attention, softmax_scale=1.0)
    return [
        Flip("R1", "positions one too far from step 1 on", spec, wiring, lambda depth: min(depth, 1)),
        Flip("R2", "positions not advanced", spec, wiring, lambda depth: -depth),
        Flip("R3", "theta 10000", replace(spec, rope=replace(rope, theta=10000.0)), wiring),
        Flip("R3", "theta doubled", replace(spec, rope=replace(rope, theta=2 * rope.theta)), wiring),
        Flip("R4", "RoPE scaling dropped, softmax scale kept", replace(spec, rope=plain), wiring),
        Flip("R4", "RoPE scaling and softmax scale dropped", replace(spec, rope=plain, attention=flat), wiring),
        Flip("", "softmax scale dropped", replace(spec, attention=flat), wiring),
        Flip("R5", "halves rotated, not pairs", replace(spec, rope=replace(rope, interleaved=False)), wiring),
    ]


def _wirings(spec: DraftSpec, wiring: tuple[int, ...]) -> list[Flip]:
    wrong = {
        "one boundary early (0 stays)": ("W1", tuple(max(b - 1, 0) for b in wiring)),
        "one boundary late": ("W2", tuple(b + 1 for b in wiring)),
        "embedding slot missing, L added": ("", (*wiring[1:], LAYERS)),
    }
    for slot, by in ((slot, by) for slot in range(len(wiring)) for by in (-1, 1)):
        moved = tuple(b + by * (i == slot) for i, b in enumerate(wiring))
        if min(moved) >= 0:
            wrong[f"slot {slot} one boundary {'late' if by > 0 else 'early'}"] = ("", moved)
    return [Flip(fault, what, spec, boundaries) for what, (fault, boundaries) in wrong.items()]


def worth(trace: Trace, flip: Flip) -> float:
    """Walk acceptance of a free run with this set wrong, on the recorded texts and their true features."""
    model = build_draft(read_draft(DRAFT), target=TARGET, dtype=torch.float32)
    wrong = _Misplaced(flip.spec)
    wrong.moved = flip.moved
    wrong.load_state_dict(_weights(model.state_dict(), flip.spec.fuse_norm))
    length = free_run_acceptance(trace, wrong.eval(), wiring=flip.wiring).acceptance_length
    assert length is not None
    return length


def free_run(trace: Trace, fault: str = "") -> float:
    """Walk acceptance of a free run of `deep`, as it is or with one of the engine's faults in it."""
    checkpoint = read_draft(DEEP)
    assert checkpoint.wiring
    model = build_draft(checkpoint, target=TARGET, dtype=torch.float32)
    if fault:
        model = _broken(model, FAULTS[fault].breaks)
    length = free_run_acceptance(trace, model, wiring=checkpoint.wiring.boundaries).acceptance_length
    assert length is not None
    return length


def _broken(model: DraftModel, breaks: object) -> DraftModel:
    assert isinstance(breaks, Drafting)
    if breaks.spec:
        return model.variant(spec=breaks.spec(model.spec))
    assert breaks.weights
    return model.variant(tensors=breaks.weights(model.state_dict(), Source(model.spec, TARGET)))


def _weights(state: Mapping[str, Tensor], fuse_norm: FuseNorm) -> dict[str, Tensor]:
    """The draft's weights for another norm before `fc`: the slots' norms one after another, or none."""
    norms = [state[name] for name in state if name.startswith("fuse_norms.")]
    rest = {name: tensor for name, tensor in state.items() if not name.startswith("fuse_norms.")}
    match fuse_norm:
        case FuseNorm.NONE:
            return rest
        case FuseNorm.WHOLE:
            return {**rest, "fuse_norms.0.weight": torch.cat(norms)}
        case FuseNorm.PER_SLOT:
            return dict(state)


def prompts(count: int) -> list[list[int]]:
    """Prompts to measure on; neither model was trained on them."""
    return Language.drawn().prompts(count, np.random.default_rng(_SEED))


def record(folder: Path, asked: Sequence[Sequence[int]], *, max_new: int, draft: Path = DRAFT) -> Trace:
    """Serve the target with a draft on some prompts, with every boundary recorded."""
    from spectrace.engine.deployment import Deployment, Serving

    serving = Serving(depth=DEPTH, max_new=max_new, concurrency=len(asked), capture=tuple(range(LAYERS + 1)))
    with Deployment(TARGET, draft, threads=1) as pair:
        pair.serve(asked, serving, trace=folder)
    return Trace.open(folder)


def _served(trace: Trace, right: float) -> str:
    served = acceptance_of_rows(trace.rows("verified"))
    rates = ", ".join(f"{rate:.3f}" for rate in served.conditional_rates)
    return (
        f"Served acceptance length {served.acceptance_length:.3f}, free run {right:.3f}; "
        f"per depth {rates} (conditional), {served.rounds} rounds."
    )


def _table(trace: Trace) -> str:
    checkpoint = read_draft(DRAFT)
    assert checkpoint.wiring
    spec, wiring = checkpoint.spec, checkpoint.wiring.boundaries
    right = worth(trace, Flip("", "as trained", spec, wiring))
    lines = [
        _served(trace, right), "", "| fault | set wrong | wiring | acceptance length | cost |", "|---|---|---|---|---|"
    ]  # fmt: skip
    for flip in flips(spec, wiring):
        length = worth(trace, flip)
        lines.append(f"| {flip.fault} | {flip.what} | {flip.wiring} | {length:.3f} | {right - length:.3f} |")
    return "\n".join(lines)


def _deep_table(trace: Trace) -> str:
    right = free_run(trace)
    lines = [_served(trace, right), "", "| fault | broken | acceptance length | cost |", "|---|---|---|---|"]
    for name in DEEP_FAULTS:
        length = free_run(trace, name)
        lines.append(f"| {name} | {FAULTS[name].title} | {length:.3f} | {right - length:.3f} |")
    return "\n".join(lines)


_TABLES = {"": (DRAFT, _table), ": deep": (DEEP, _deep_table)}
"""By what stands in the mark that a table goes behind."""


@click.command()
@click.option("--count", default=64, help="How many prompts.")
@click.option("--max-new", default=96)
@click.option("--readme", type=Path, default=_README, help="Where the tables go, between their marks.")
def main(count: int, max_new: int, readme: Path) -> None:
    """Measure the committed pairs and write the tables."""
    for mark, (draft, table_of) in _TABLES.items():
        with tempfile.TemporaryDirectory() as folder:
            table = table_of(record(Path(folder) / "trace", prompts(count), max_new=max_new, draft=draft))
        print(table)
        begin = _BEGIN.format(mark)
        before, _, rest = readme.read_text("utf-8").partition(begin)
        _, _, after = rest.partition(_END)
        readme.write_text(f"{before}{begin}\n\n{table}\n\n{_END}{after}", "utf-8")


if __name__ == "__main__":
    main()

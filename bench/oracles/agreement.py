"""An implementation run on random drafts by its own environment's python, and our draft held against what it computed.

What it does otherwise than a draft's config says, its profile foretells, and has to be so: our draft is run as the
profile says that the implementation runs it, and where that is not what the config says, the two have to differ.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from oracles.cases import CASES, Case
from safetensors.torch import load_file, save_file
from torch import Tensor

from spectrace.engine.checkpoint import build_draft
from spectrace.engine.convert import verifier_at, write_draft
from spectrace.engine.dialect import Wiring
from spectrace.engine.draft import DraftModel
from spectrace.engine.layouts.known import writable
from spectrace.engine.spec import DraftSpec
from spectrace.replay.attend import BranchAttend, PrefixAttend
from spectrace.replay.compare import row_error
from spectrace.replay.profiles.profile import Given, Profile, StandIn
from spectrace.replay.profiles.running import Running, facts_of, given, run_by, weights_of

__all__ = [
    "TOLERANCE",
    "Compared",
    "Oracle",
    "compare",
    "foretold",
    "refusal",
    "run_oracle",
]

TOLERANCE = 1e-5
DEPTHS, LENGTHS = 4, (17, 6)
_CLEARLY, _PATIENCE_SECS = 1e-2, 400
_FILLED = {"MALLOC_PERTURB_": "180"}  # what glibc hands out reads as 1.3e7, not as zeros: use of it shows
_SCRIPTS = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Oracle:
    """An implementation: where its environment is said, its layout, and what it makes of drafts.

    `own_layout`: it reads no other, so drafts that its layout has no words for are not asked of it.
    """

    name: str
    environment: str
    layout: str
    profile: Profile
    own_layout: bool = False

    @property
    def script(self) -> str:
        """What its script is called."""
        return self.name.lower()

    @property
    def python(self) -> Path | None:
        """The python of its environment, None where no environment is given."""
        folder = os.environ.get(self.environment)
        return Path(folder).absolute() / "bin" / "python" if folder else None

    def cases(self) -> list[Case]:
        """The drafts that it is asked to run."""
        return [case for case in CASES.values() if not self.own_layout or self.layout_of(case) == self.layout]

    def layout_of(self, case: Case) -> str:
        """The layout that a draft is given to it in: its own, or where that has no words for it, EAGLE's."""
        if case.layout:
            return case.layout
        said = not writable(self.layout).unsaid(case.spec, wiring_of(case.spec))
        return self.layout if said else "eagle"


@dataclass(frozen=True, slots=True)
class Compared:
    """Largest error by stage, over all rows of all depths; how many rows there were, and how many chose otherwise."""

    errors: Mapping[str, float]
    rows: int
    other_tokens: int

    @property
    def worst(self) -> float:
        """The largest error of any stage."""
        return max(self.errors.values())

    @property
    def agrees(self) -> bool:
        """Whether rows were compared, and all of them are ours."""
        return self.rows > 0 and self.worst <= TOLERANCE and not self.other_tokens


def make_case(case: Case, layout: str, folder: Path, target: Path) -> None:
    """A case's folder: the draft as it is published, its target, and what it is to be run on."""
    torch.manual_seed(20260101)
    spec, rows = case.spec, sum(LENGTHS)
    folder.mkdir(parents=True)
    wiring = wiring_of(spec)
    named = Wiring(wiring, "eagle_aux_hidden_state_layer_ids", wiring)
    write_draft(folder / "draft", layout, spec, named, _random(spec), verifier=verifier_at(target))
    config = folder / "draft" / "config.json"
    values = _take_out(case.absent, json.loads(config.read_text("utf-8"))) | case.keys
    config.write_text(json.dumps(values), "utf-8")
    (folder / "target").symlink_to(target)
    inputs = {
        "lengths": torch.tensor(LENGTHS),
        "texts": torch.randint(0, spec.target_vocab, (rows + DEPTHS * len(LENGTHS),)),
        "features": torch.randn(rows, spec.features_width) * torch.linspace(0.5, 4, spec.features_width),
    }
    save_file(inputs, folder / "inputs.safetensors")
    told = {"depths": DEPTHS, "load_target_embedding": not spec.own_embedding}
    (folder / "case.json").write_text(json.dumps(told), "utf-8")


def wiring_of(spec: DraftSpec) -> tuple[int, ...]:
    """Boundaries that no engine takes by default, and that SpecForge can say."""
    return tuple(range(1, 2 * spec.slots, 2))


def _random(spec: DraftSpec) -> dict[str, Tensor]:
    """Weights under which every switch shows: gains far from one, biases as large as what they are added to."""
    tensors = {name: _drawn(name, one.shape) for name, one in DraftModel(spec).state_dict().items() if name != "d2t"}
    if not spec.own_embedding:
        del tensors["embedding.weight"]
    if not spec.own_head:
        del tensors["head.weight"]
    kept = torch.randperm(spec.target_vocab)[: spec.draft_vocab].sort().values
    offsets = {"d2t": kept - torch.arange(spec.draft_vocab)}
    return tensors | (offsets if spec.draft_vocab < spec.target_vocab else {})


def _drawn(name: str, shape: Sequence[int]) -> Tensor:
    if "norm" in name:
        return torch.rand(*shape) + 0.5
    return torch.randn(*shape) / (shape[-1] ** 0.5 if len(shape) > 1 else 1)


def _take_out(keys: Collection[str], value: Any) -> Any:
    """A config without these keys, wherever they are in it."""
    if not isinstance(value, dict):
        return value
    return {key: _take_out(keys, one) for key, one in value.items() if key not in keys}


def run_oracle(oracle: Oracle, folder: Path, target: Path) -> None:
    """Make all cases of an implementation and have it run them; what it says goes into the folder's `log.txt`."""
    python = oracle.python
    assert python
    for case in oracle.cases():
        make_case(case, oracle.layout_of(case), folder / _slug(case.name), target)
    script = _SCRIPTS / f"run_{oracle.script}.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": "", **_FILLED}
    with (folder / "log.txt").open("w") as log:
        subprocess.run(
            [python, script, folder], env=environment, stdout=log, stderr=log, check=True, timeout=_PATIENCE_SECS
        )


def refusal(folder: Path, case: Case) -> str:
    """What an implementation said instead of loading a draft; empty where it ran it."""
    said = folder / _slug(case.name) / "refused.txt"
    return said.read_text("utf-8") if said.exists() else ""


@dataclass(frozen=True, slots=True)
class Judged:
    """What came of one draft on one implementation, and whether it is what is known of it; `figure` is an error."""

    kind: str
    holds: bool
    figure: float | None = None
    words: str = ""


def judge(oracle: Oracle, folder: Path, case: Case) -> Judged:
    """Hold our draft, as the profile says that it is run, against what an implementation computed or said of it."""
    place, said = folder / _slug(case.name), refusal(folder, case)
    facts, running = foretold(oracle, folder, case)
    words = "; ".join(dict.fromkeys(one.why for one in (*running.refusals, *running.departures)))
    if said:
        expected = [one for one in running.refusals if one.says in said]
        why = expected[0].why if expected else said.strip().splitlines()[0]
        return Judged("refused", bool(expected), words=why)
    meant = build_draft(facts.draft, target=place / "target", dtype=torch.float32)
    told = compare(place, meant)
    if running.refusals:
        return Judged("ran", False, told.worst, "it was said to refuse this")
    if running.unwritten:
        unwritten = ", ".join(running.names[name] for name in running.unwritten)
        why = f"nothing is written to {unwritten}"
        return Judged("undefined", not told.worst <= _CLEARLY, words=f"{words}; {why}" if words else why)
    if wrong := otherwise_loaded(place, running, facts):
        return Judged("loaded otherwise", False, words=wrong)
    tensors = weights_of(running, facts, place / "target")
    ran = compare(place, DraftModel.over(running.spec, tensors))
    replaced = [name for name, taken in running.taken.items() if name in facts.draft.tensors or taken is StandIn.ONES]
    if not running.departures and not replaced:
        return Judged("agrees", ran.agrees, ran.worst)
    named = [f"{running.names[name]} is {running.taken[name]}" for name in replaced]
    return Judged(
        "otherwise", ran.agrees and told.worst > _CLEARLY, ran.worst, "; ".join(filter(None, (words, *named)))
    )


def foretold(oracle: Oracle, folder: Path, case: Case) -> tuple[Given, Running]:
    """What an implementation is given of a draft, and what its profile says that it runs."""
    place = folder / _slug(case.name)
    facts = given(place / "draft", facts_of(place / "target"))
    return facts, run_by(oracle.profile, facts)


def otherwise_loaded(place: Path, running: Running, facts: Given) -> str:
    """What an engine's loader ended up with that its profile does not say; empty where it says all of it."""
    told = place / "loaded.json"
    if running.profile.trainer:
        return ""
    loaded = json.loads(told.read_text("utf-8"))
    offsets = facts.draft.tensors.get("d2t")
    mapped = None if offsets is None else (offsets.long() + torch.arange(len(offsets))).tolist()
    said = {
        "boundaries": list(running.boundaries or ()),
        "embedding_shared": running.taken.get("embedding.weight") is StandIn.EMBEDDING,
        "head_shared": running.taken.get("head.weight") is StandIn.HEAD,
        "tokens": mapped,
    }
    return "; ".join(f"{name} is {loaded[name]}, said {said[name]}" for name in said if loaded[name] != said[name])


def compare(place: Path, draft: DraftModel) -> Compared:
    """Our draft, fed the same rows, against what an implementation computed."""
    found, inputs = load_file(place / "outputs.safetensors"), load_file(place / "inputs.safetensors")
    errors: dict[str, float] = {}
    rows = other_tokens = 0
    for depth, (fused, hidden, state) in enumerate(_run(draft, found, inputs["features"])):
        logits = draft.logits(hidden)
        ours = {"hidden": hidden, "state": state, "logits": logits}
        stages = {stage: (found[f"{stage}.{depth}"], tensor) for stage, tensor in ours.items()}
        if depth == 0 and "fused" in found:
            stages["fused"] = (found["fused"], fused)
        for stage, (theirs, tensor) in stages.items():
            errors[stage] = max(errors.get(stage, 0.0), float(row_error(theirs, tensor).max()))
        rows += len(hidden)
        other_tokens += int((draft.to_target(logits.argmax(-1)) != found[f"choice.{depth}"]).sum())
    return Compared(errors, rows, other_tokens)


@torch.inference_mode()
def _run(
    draft: DraftModel, found: Mapping[str, Tensor], features_TAF: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """What `fc` made, what the head reads and what is fed back, of the rows that were run at each depth."""
    starts = np.cumsum([0, *LENGTHS])
    above = found["rows.0"].numpy()
    assert np.array_equal(above, np.arange(starts[-1])), "every row is run at depth 0"
    prefix = PrefixAttend(starts, found["positions.0"].numpy())
    branch = BranchAttend(prefix)
    fused = draft.fuse(features_TAF)
    hidden, state = draft(found["tokens.0"], fused, found["positions.0"], prefix)
    yield fused, hidden, state
    for depth in range(1, DEPTHS):
        bases, positions = found[f"rows.{depth}"].numpy(), found[f"positions.{depth}"]
        parents = np.searchsorted(above, bases)
        assert len(bases) and np.array_equal(above[parents], bases), "each row stands below one of the depth above"
        branch.enter(bases, np.searchsorted(bases, starts), parents, positions.numpy())
        hidden, state = draft(found[f"tokens.{depth}"], state[torch.from_numpy(parents)], positions, branch)
        above = bases
        yield fused, hidden, state


def _slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)

"""Each fault shows in a trace where it should and nowhere else, changes no answer, and is nowhere named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spectrace.engine.attention import KeyValueCache, PackedAttend
from spectrace.engine.checkpoint import build_draft, read_draft, weight_fingerprints
from spectrace.engine.deployment import Deployment, Serving
from spectrace.engine.draft import DraftModel
from spectrace.engine.faults import FAULTS, find_faults
from spectrace.engine.sampling import Sampling
from spectrace.tracer.errors import UserError
from spectrace.tracer.rows import Level
from spectrace.tracer.trace import Trace

WIRING = (0, 2, 4)
PLAIN: dict[str, Any] = {
    "max_new": 16, "concurrency": 3, "chunk": 7, "capture": tuple(range(6)), "level": Level.FULL, "ignore_end": True,
}  # fmt: skip
SAMPLED = {"sampling": Sampling(1.0, sampled_drafts=True), "max_new": 48}
# What a fault is tried with, beyond PLAIN. "narrow" is a draft of one slot with a norm before fc and scaled RoPE, and
# "deep" has two layers, a window, biases, scales, an embedding of its own that is scaled, a context that texts pass.
NEEDS: dict[str, dict[str, Any]] = {
    "W7": {"wiring": (0, 2, 5)},
    "X3": {"fixed_window": True},
    "X4": {"topk": 3, "draft_tokens": 12, "max_new": 40},
    "S1": SAMPLED,
    "S1:residual": SAMPLED,
    "S2": SAMPLED,
    "A3": {"max_new": 24},
}
NARROW = {"M2", "N2", "R4"}
DEEP = {"N4", "N4:first", "P7", "P8", "A1", "A1:head", "A1:unscaled", "A2", "A3"}
RANKS = {"W9", "Q1"}  # of which test_fault_ranks tells
# Which of the promises below a fault breaks; those that are not named here break none that can be seen at this size.
BREAKS = {
    "slots": {name for name in FAULTS if name[0] == "W"},
    "rows": {"M3", "M3:constant", "M3:stale", "X1", "X2", "X3", "X4", "D1", "D1:fp8"},
    "whole": {"M1"},
    "tokens": {"T1", "T2"},
    "positions": {"R1", "R2"},
    "map": {"V1", "V2", "V3", "V4", "V5"},
    "loaded": {
        "V1", "V3", "V4", "V5", "N2", "P1:attention", "P1:fc", "P1:norm", "P1:mlp", "P2", "P3", "P4", "P5", "P6",
        "P7", "P8", "N4", "N4:first", "A1", "A1:head",
    },
    "hidden": {"M2", "N1", "N2", "R3", "R3:double", "R3:half", "R4", "R5", "P3", "P4", "P5", "P6", "P7", "P8"}
    | {"P1:attention", "P1:fc", "P1:norm", "P1:mlp", "N4", "N4:first", "A1", "A1:unscaled", "A2"},
    "state": {"N3"},
    "head": {"P2", "P6", "A1:head"},
    "choice": {"A3"},
}  # fmt: skip


class Recorded:
    """A trace of PLAIN, or of a fault, and the promises that it keeps."""

    def __init__(self, folder: Path, outputs: list[list[int]], prompts: list[list[int]], draft: DraftModel) -> None:
        self.trace, self.outputs, self.draft = Trace.open(folder), outputs, draft
        self.texts = [[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)]
        self.wiring = list(self.trace.manifest["wiring"]["resolved"]["boundaries"])
        self.received = self.trace.rows("received", depth=0, live=True)

    def broken(self) -> set[str]:
        """The promises that it does not keep."""
        return {name for name in BREAKS if not getattr(self, name)()}

    def slots(self) -> bool:
        emitted, reference = self.trace.rows("emitted"), self.trace.rows("reference")
        return bool((emitted["hashes"] == reference["hashes"][:, self.wiring]).all())

    def rows(self) -> bool:
        """A draft row gets the feature of its own position, of an accepted node: one with the token of the text."""
        emitted, held = self.trace.rows("emitted"), set()
        columns = (emitted[name].tolist() for name in ("request", "pass", "position", "token", "hashes"))
        for request, pass_, position, token, hashes in zip(*columns, strict=True):
            if self.texts[request][position : position + 1] == [token]:
                held.add((request, pass_, position, *hashes))
        columns = (self.received[name].tolist() for name in ("request", "pass", "position", "hashes"))
        return all((*key, *hashes) in held for *key, hashes in zip(*columns, strict=True))

    def whole(self) -> bool:
        """A request's rows leave no position out."""
        positions = [self.received["position"][self.received["request"] == number] for number in range(3)]
        return all((np.sort(one) == np.arange(len(one))).all() for one in positions)

    def tokens(self) -> bool:
        columns = (self.received[name].tolist() for name in ("request", "position", "token"))
        return all(
            self.texts[request][position + 1] == token for request, position, token in zip(*columns, strict=True)
        )

    def positions(self) -> bool:
        """A deeper row stands so many positions beyond the last row of text of its pass as it is deep."""
        last: dict[tuple[int, int], int] = {}
        for request, pass_, position in zip(*(self.received[c].tolist() for c in KEY), strict=True):
            last[request, pass_] = max(position, last.get((request, pass_), 0))
        deeper = self.trace.rows("received", depth=[1, 2])
        columns = (deeper[name].tolist() for name in (*KEY, "depth"))
        return all(
            last[request, pass_] + depth == position for request, pass_, position, depth in zip(*columns, strict=True)
        )

    def map(self) -> bool:
        drafted = self.trace.rows("drafted")
        answers = drafted["draft_token"] >= 0
        ids = torch.from_numpy(drafted["draft_token"][answers].astype(np.int64))
        return self.draft.to_target(ids).tolist() == drafted["token"][answers].tolist()

    def loaded(self) -> bool:
        return bool(self.trace.writers["draft-0"]["loaded"] == weight_fingerprints(self.draft))

    def hidden(self) -> bool:
        return self._same("hidden", self._computed()[0])

    def state(self) -> bool:
        """Given that the head reads what it should."""
        return not self.hidden() or self._same("state", self._computed()[1])

    def head(self) -> bool:
        drafted = self.trace.rows("drafted")
        answers = drafted.take(drafted.has("logits").nonzero()[0])
        return close(answers.tensor("logits", "values"), self.draft.logits(answers.tensor("hidden")).topk(16).values)

    def choice(self) -> bool:
        """A row answers with its best token, unless drafts are drawn."""
        drafted = self.trace.rows("drafted")
        answers = drafted.take(drafted.has("logits").nonzero()[0])
        best = answers.tensor("logits", "ids")[:, 0].tolist()
        drawn = self.trace.manifest["serving"]["sampling"]["sampled_drafts"]
        return drawn or bool(answers["draft_token"].tolist() == best)

    @torch.inference_mode()
    def _computed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the draft that was believed to serve makes of the first step: a piece of the first prompt."""
        rows = self.trace.rows("received", step=0, depth=0)
        tokens, positions = (torch.from_numpy(rows[name].astype(np.int64)) for name in ("token", "position"))
        back = positions[:, None] - positions
        attend = PackedAttend(KeyValueCache(), back >= 0, lambda window: back < window)
        return self.draft(tokens, self.draft.fuse(rows.tensor("features")), positions, attend)

    def _same(self, kind: str, expected: torch.Tensor) -> bool:
        drafted = self.trace.rows("drafted", step=0, depth=0)
        return close(drafted.take(np.argsort(drafted["node"])).tensor(kind), expected)


KEY = ("request", "pass", "position")


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Largest error of a row over its largest value."""
    return bool(((found - expected).abs().amax(-1) / expected.abs().amax(-1)).max() <= 1e-4)


def kind_of(name: str) -> str:
    return "narrow" if name in NARROW else "deep" if name in DEEP else "usual"


class Lab:
    """Running pairs, and what they have recorded with and without a fault."""

    def __init__(self, pairs: dict[str, Deployment], prompts: list[list[int]], folder: Path) -> None:
        self.pairs, self.prompts, self.folder = pairs, prompts[2:5], folder
        self.drafts = {kind: draft_of_pair(pair) for kind, pair in pairs.items()}
        self.healthy = cache(self._healthy)

    def broken(self, name: str) -> Recorded:
        return self.record(kind_of(name), self.folder / name, faults=(name,), **NEEDS.get(name, {}))

    def _healthy(self, name: str) -> Recorded:
        return self.record(kind_of(name), self.folder / f"healthy-{name}", **NEEDS.get(name, {}))

    def record(self, kind: str, folder: Path, **changes: Any) -> Recorded:
        wiring = {} if kind == "narrow" else {"wiring": WIRING}
        served = self.pairs[kind].serve(self.prompts, Serving(**{**PLAIN, **wiring, **changes}), trace=folder)
        assert served.losses == ()
        return Recorded(folder, [request.output for request in served.requests], self.prompts, self.drafts[kind])


def quantised(tensors: dict[str, torch.Tensor], *endings: str) -> dict[str, torch.Tensor]:
    """Some tensors in eight bits, with a scale for each row."""
    found = dict(tensors)
    for name in (name for name in tensors if name.endswith(endings)):
        scale = tensors[name].abs().amax(1, keepdim=True) / 448
        found[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        found[name.removesuffix("weight") + "weight_scale"] = scale
    return found


def draft_of_pair(pair: Deployment) -> DraftModel:
    assert pair.draft_folder
    return build_draft(read_draft(pair.draft_folder), target=pair.target_folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def lab(
    pair_of: Callable[..., Deployment],
    target_of: Callable[..., Path],
    new_draft: Callable[..., Any],
    write_draft: Callable[..., Path],
    prompts: list[list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Lab]:
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    config = new_draft(eagle_aux_hidden_state_layer_ids=[2], norm_before_fc=True, rope_scaling=yarn)
    narrow = write_draft(tmp_path_factory.mktemp("narrow"), *config)
    told, tensors = new_draft(
        "deep", draft_vocab_size=None, sliding_window=3, embedding_scale=7.0, max_position_embeddings=20
    )
    tensors["embed_tokens.weight"] = 1e-3 * torch.randn(96, 48, generator=torch.Generator().manual_seed(5))
    deep = write_draft(
        tmp_path_factory.mktemp("deep"), told, quantised(tensors, "fc.weight", "1.self_attn.q_proj.weight")
    )
    folder, target = tmp_path_factory.mktemp("faults"), target_of("llama")
    with Deployment(target, narrow, threads=1) as one, Deployment(target, deep, threads=1) as two:
        yield Lab({"usual": pair_of("llama", "gqa"), "narrow": one, "deep": two}, prompts, folder)


def test_every_fault_has_a_name_of_its_own_and_breaks_something() -> None:
    silent = {name for name in FAULTS if not any(name in names for names in BREAKS.values())}
    assert silent == {"Q1", "S1", "S1:residual", "S2", "A1:scaled"}  # a loud embedding is normed whatever its scale
    for name, fault in FAULTS.items():
        assert fault.name == name and name.startswith(fault.id) and fault.title


def test_a_healthy_trace_keeps_every_promise(lab: Lab) -> None:
    for name in ("N3", "N2", "N4", *NEEDS):
        assert lab.healthy(name).broken() == set(), name


@pytest.mark.parametrize("name", [name for name in FAULTS if name not in RANKS])
def test_a_fault_shows_where_its_title_says_and_nowhere_else(name: str, lab: Lab) -> None:
    """In the trace alone: answers stay, unless verification is broken, and what the engine says about itself stays."""
    like = {"narrow": "N2", "deep": "N4", "usual": "N3"}[kind_of(name)]
    healthy, broken = lab.healthy(name if name in NEEDS else like), lab.broken(name)
    assert (broken.outputs == healthy.outputs) == (not name.startswith("S"))
    unmoved = name in ("W1:slot0",)  # boundary 0 cannot be taken earlier
    assert broken.broken() == set() if unmoved else broken.broken() == {what for what in BREAKS if name in BREAKS[what]}
    own = {"created_unix_secs", "started_unix_secs", "trace", "loaded"}
    writers = zip(broken.trace.writers.values(), healthy.trace.writers.values(), strict=True)
    for told, same in ((broken.trace.manifest, healthy.trace.manifest), *writers):
        assert {k: v for k, v in told.items() if k not in own} == {k: v for k, v in same.items() if k not in own}


def test_a_fault_that_is_switched_off_leaves_nothing_behind(lab: Lab) -> None:
    healthy = lab.record("usual", lab.folder / "before")
    lab.record("usual", lab.folder / "between", faults=("W8", "M3:stale", "T1", "X1", "V5", "P3", "N3", "R5", "R1"))
    again = lab.record("usual", lab.folder / "after")
    assert again.broken() == set()
    assert (healthy.received["hashes"] == again.received["hashes"]).all()
    states = [recorded.trace.rows("drafted")["state_hash"] for recorded in (healthy, again)]
    assert (states[0] == states[1]).all()


def test_a_wrong_wiring_costs_acceptance(pair_of: Callable[..., Deployment], prompts: list[list[int]]) -> None:
    """Which is what the recorder is there to explain."""

    def correct(**changes: Any) -> int:
        serving = Serving(max_new=40, ignore_end=True, **changes)
        return sum(request.correct_drafts for request in pair_of("llama", "gqa").serve(prompts, serving).requests)

    healthy = correct()
    assert correct(faults=("W5",)) < healthy
    assert correct(faults=("M3",)) < healthy
    assert correct(wiring=(0, 2, 4)) == healthy


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("W7", {}, "needs a wiring whose last slot is L, boundary 5; here it is 4"),
        ("W9", {}, "one rank alone holds no partial sums; give --tp 2"),
        ("M2", {}, "features of width 144 do not fit a draft of 48 without fc; use a draft of one slot"),
        ("N2", {}, "the draft has no norm before fc; use one with norm_before_fc or fc_norm"),
        ("R4", {}, "the draft's RoPE is not scaled; use a draft with rope_scaling"),
        ("T2", {}, "prompts are whole, no chunk ends inside one; give --chunk"),
        ("X3", {}, "rejected rows are not handed over; give --fixed-window"),
        ("X4", {}, "a chain has no order to lose; give --topk 2 or more"),
        ("P7", {}, "the draft's q, k and v have no bias; use a draft with attention_bias"),
        ("P8", {}, "the draft is not quantised: there are no scales; use one that is"),
        ("N4", {}, "the draft has one layer; use a draft of several"),
        ("A1", {}, "the draft has the target's embedding already; use a draft with one of its own"),
        ("A1:head", {}, "the draft's head has 64 rows, the target's 96; use a draft of the whole vocabulary"),
        ("A1:unscaled", {}, "the draft's embedding is not scaled; use a draft with embedding_scale"),
        ("A2", {}, "no layer of the draft has a sliding window; use a draft with one"),
        ("A3", {}, "the draft has no max_position_embeddings; use a draft with one"),
        (
            "A3",
            {"topk": 2, "draft_tokens": 4},
            "beyond a context chains of chosen tokens end; leave --topk and --sample-drafts away",
        ),
        ("Q1", {}, "one rank alone has nobody to differ from; give --draft-tp 2"),
        ("S1", {}, "greedy verification has nothing of it; give --temperature"),
        ("S2", {"sampling": Sampling(1.0)}, "no draft is drawn; give --temperature and --sample-drafts"),
    ],
)
def test_what_a_fault_needs_is_said(
    name: str, changes: dict[str, Any], told: str, pair_of: Callable[..., Deployment]
) -> None:
    with pytest.raises(UserError, match=f"^--fault {name}: {told}$"):
        pair_of("llama", "gqa").check(Serving(faults=(name,), **changes))


@pytest.mark.parametrize(
    ("name", "attention", "changes", "told"),
    [
        ("V1", "mla", {}, "the draft's vocabulary is the whole of the target's: there is no d2t"),
        ("W2:slot2", "gqa", {"eagle_aux_hidden_state_layer_ids": [2]}, "breaks slot 2, but the wiring has only 1"),
        (
            "P2",
            "gqa",
            {"hidden_size": 24, "target_hidden_size": 48},
            "the target's head is of width 48, but the draft is of 24",
        ),
        (
            "A1:head",
            "mla",
            {"hidden_size": 24, "target_hidden_size": 48},
            "the target's head is of width 48, but the draft",
        ),
        (
            "A1:scaled",
            "gqa",
            {"embedding_scale": 7.0},
            "the draft's embedding is scaled, by 7; use a draft without a scale",
        ),
    ],
)
def test_a_draft_that_cannot_have_a_fault_is_refused(
    name: str, attention: str, changes: dict[str, Any], told: str, target_of: Any, new_draft: Any, write_draft: Any,
    tmp_path: Path,
) -> None:  # fmt: skip
    draft = write_draft(tmp_path / "draft", *new_draft(attention, **changes))
    with pytest.raises(UserError, match=f"--fault {name}: {told}"):
        Deployment(target_of("llama"), draft).check(Serving(faults=(name,)))


def test_a_draft_on_two_ranks_is_not_rebuilt(target_of: Any, draft_of: Any) -> None:
    pair = Deployment(target_of("llama"), draft_of("llama", "gqa"), draft_tp=2)
    for name in ("V3", "P1:fc", "N3", "R5"):
        with pytest.raises(UserError, match=f"--fault {name}: a draft on 2 ranks is served as it was loaded; give"):
            pair.check(Serving(faults=(name,)))
    pair.check(Serving(faults=("R1", "M3", "X2", "Q1")))


@pytest.mark.parametrize(
    ("names", "wiring", "told"),
    [
        (("V1", "V2"), WIRING, "V2: V1"),
        (("V1", "V3"), WIRING, "V3: V1"),
        (("V1", "N1", "V5"), WIRING, "V5: V1"),
        (("N1", "V1", "V1"), WIRING, "V1: V1"),
        (("W8", "W9"), WIRING, "W9: W8"),
        (("W9", "X2", "W8"), WIRING, "W8: W9"),
        (("W5", "W7"), (0, 2, 5), "W7: W5"),
    ],
)
def test_a_fault_that_another_leaves_nothing_to_break_is_refused(
    names: tuple[str, ...], wiring: tuple[int, ...], told: str, target_of: Any, draft_of: Any
) -> None:
    pair = Deployment(target_of("llama"), draft_of("llama", "gqa"), tp=2)
    with pytest.raises(UserError, match=f"^--fault {told} before it takes away what it breaks; give one of the two$"):
        pair.check(Serving(wiring=wiring, faults=names))


def test_faults_that_leave_each_other_something_are_served_together(target_of: Any, draft_of: Any) -> None:
    pair = Deployment(target_of("llama"), draft_of("llama", "gqa"), tp=2)
    for names in (("V2", "V3", "V1"), ("V5", "V4"), ("W2", "W7"), ("W5", "W8"), ("N1", "N3", "R3", "P4")):
        pair.check(Serving(wiring=WIRING, faults=names))


def test_an_unknown_fault_is_named_with_those_that_exist() -> None:
    with pytest.raises(UserError, match="--fault W99: no such fault; known are W1, W1:2"):
        find_faults(["W1", "W99"])

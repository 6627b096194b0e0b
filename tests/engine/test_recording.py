"""A trace of the reference deployment says what happened: every row held against the others and the models."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spectrace.engine.checkpoint import build_draft, read_draft
from spectrace.engine.deployment import Deployment, Serving
from spectrace.engine.recording import Recording, shut
from spectrace.engine.scheduler import Request
from spectrace.tracer.acceptance import acceptance_of_rows
from spectrace.tracer.keys import Keys
from spectrace.tracer.manifest import create_trace
from spectrace.tracer.rows import Level, Phase
from spectrace.tracer.rowset import Rows
from spectrace.tracer.trace import Trace
from spectrace.tracer.writer import FolderWriter

FAMILIES = ("emitted", "received", "drafted", "verified", "requests", "reference")
PAIRS = [("llama", "gqa"), ("llama", "mla")]


@dataclass(frozen=True)
class Run:
    """A recorded call: the trace, what was served, and the pair."""

    trace: Trace
    requests: tuple[Request, ...]
    target: Path
    draft: Path

    def text(self, request: int) -> list[int]:
        """Prompt and output of a request."""
        return [*self.requests[request].prompt, *self.requests[request].output]


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def run(
    request: pytest.FixtureRequest,
    pair_of: Callable[..., Deployment],
    prompts: list[list[int]],
    limits: tuple[int, ...],
    tmp_path_factory: pytest.TempPathFactory,
) -> Run:
    """Chunked prompts, requests that join and leave, everything recorded, every boundary hooked."""
    pair, folder = pair_of(*request.param), tmp_path_factory.mktemp("run") / "trace"
    serving = Serving(depth=4, max_new=limits, concurrency=3, chunk=5, capture=tuple(range(6)), level=Level.FULL)
    served = pair.serve(prompts, serving, trace=folder)
    assert served.losses == ()
    trace = Trace.open(folder)
    assert trace.sealed and trace.verify() == []
    assert pair.draft_folder
    return Run(trace, served.requests, pair.target_folder, pair.draft_folder)


def by_key(rows: Rows, *names: str) -> dict[tuple[int, ...], int]:
    """Row numbers by some of their columns, which must tell all rows apart."""
    keys = list(zip(*(rows[name].tolist() for name in names), strict=True))
    assert len(set(keys)) == len(keys) == len(rows) > 0
    return {key: row for row, key in enumerate(keys)}


def accepted_rows(trace: Trace) -> Rows:
    """The emitted rows that became text, in the order of their passes: all of a prompt's, the accepted of a round's."""
    verified, emitted = trace.rows("verified"), trace.rows("emitted")
    verdicts = by_key(verified, "request", "pass", "source_row")
    keys = zip(*(emitted[name].tolist() for name in ("request", "pass", "node")), strict=True)
    keep = [
        phase == Phase.PREFILL or bool(verified["accepted"][verdicts[key]])
        for phase, key in zip(emitted["phase"].tolist(), keys, strict=True)
    ]
    return emitted.take(np.array(keep))


def test_every_family_has_rows_and_a_row_has_one_key(run: Run) -> None:
    for family in FAMILIES:
        by_key(run.trace.rows(family), "request", "pass", "depth", "node")


def test_passes_of_a_request_are_counted_without_gaps(run: Run) -> None:
    emitted = run.trace.rows("emitted")
    for number in range(len(run.requests)):
        passes = np.unique(emitted.where(request=number)["pass"])
        assert passes.tolist() == list(range(len(passes)))


def test_the_draft_received_exactly_what_the_target_emitted(run: Run) -> None:
    """By hash and by value, row i of a draft's extension being the i-th accepted row of the pass that fed it."""
    received, emitted = run.trace.rows("received", depth=0), accepted_rows(run.trace)
    places: dict[tuple[int, int], list[int]] = {}
    for row, key in enumerate(zip(emitted["request"].tolist(), emitted["pass"].tolist(), strict=True)):
        places.setdefault(key, []).append(row)
    keys = zip(*(received[name].tolist() for name in ("request", "pass", "node")), strict=True)
    sources = [places[request, pass_][node] for request, pass_, node in keys]
    assert received["hashes"].shape[1] == 3
    assert np.array_equal(received["hashes"], emitted["hashes"][sources])
    assert np.array_equal(received["position"], emitted["position"][sources])
    assert np.array_equal(received.payload("features"), emitted.payload("slots")[sources])


def test_draft_rows_obey_the_alignment_invariant(run: Run) -> None:
    """Row p takes the token after position p, once for every position before the last pass, whose rows nobody needs."""
    received, emitted = run.trace.rows("received", depth=0), run.trace.rows("emitted")
    for request in run.requests:
        mine, text = received.where(request=request.number), run.text(request.number)
        assert mine["position"].tolist() == list(range(len(mine)))
        assert mine["token"].tolist() == text[1 : len(mine) + 1]
        passes = emitted.where(request=request.number)
        assert len(mine) == passes.where(**{"pass": passes["pass"].max(), "node": 0})["position"][0]


def test_a_deeper_row_takes_the_token_and_the_state_of_the_row_above(run: Run) -> None:
    received, drafted = run.trace.rows("received"), run.trace.rows("drafted")
    below = by_key(drafted, "request", "pass", "depth", "node")
    deeper = received.take(np.flatnonzero(received["depth"] > 0))
    assert set(deeper["depth"].tolist()) == {1, 2, 3}
    last_node = {
        (request, pass_): drafted.where(request=request, depth=0, **{"pass": pass_})["node"].max()
        for request, pass_ in set(zip(deeper["request"].tolist(), deeper["pass"].tolist(), strict=True))
    }
    for row in range(len(deeper)):
        request, pass_, depth = (int(deeper[name][row]) for name in ("request", "pass", "depth"))
        above = below[request, pass_, depth - 1, int(last_node[request, pass_]) if depth == 1 else 0]
        assert deeper["hashes"][row].tolist() == [drafted["state_hash"][above]]
        assert deeper["token"][row] == drafted["token"][above]
        assert deeper["position"][row] == drafted["position"][above] + 1


def test_what_was_drafted_is_what_the_next_round_verified(run: Run) -> None:
    verified, drafted = run.trace.rows("verified"), run.trace.rows("drafted")
    answers = drafted.take(drafted["token"] >= 0)
    drafts = by_key(answers, "request", "round", "depth")
    nodes = [row for row in range(len(verified)) if verified["node"][row] > 0]
    for row in nodes:
        request, round_, node = (int(verified[name][row]) for name in ("request", "round", "node"))
        assert verified["token"][row] == answers["token"][drafts[request, round_, node - 1]]
        assert verified["parent"][row] == node - 1
    assert len(nodes) == 4 * len(np.unique(verified["request"] * 1000 + verified["round"]))
    assert len(drafts) == len(nodes)  # nothing is drafted that no round verifies


def test_draft_tokens_are_told_before_and_after_d2t(run: Run) -> None:
    drafted, checkpoint = run.trace.rows("drafted"), read_draft(run.draft)
    answers = drafted.take(drafted["token"] >= 0)
    offsets = checkpoint.tensors.get("d2t", torch.zeros(96, dtype=torch.int64)).numpy()
    assert np.array_equal(answers["token"], answers["draft_token"] + offsets[answers["draft_token"]])
    assert np.array_equal(answers["draft_token"], answers.payload("logits", "ids")[:, 0].astype(int))


def test_acceptance_in_the_trace_is_the_schedulers(run: Run) -> None:
    """Per request and over all; a node is accepted exactly if the target would have said it and its parent is."""
    found = acceptance_of_rows(run.trace.rows("verified"))
    assert found.rounds_untrimmed == sum(request.rounds for request in run.requests)
    assert found.correct_drafts_untrimmed == sum(request.correct_drafts for request in run.requests) > 0
    told = run.trace.rows("requests")
    assert sorted(told["request"].tolist()) == [request.number for request in run.requests]
    for row, number in enumerate(told["request"].tolist()):
        request, verified = run.requests[number], run.trace.rows("verified", request=number)
        assert (told["rounds"][row], told["correct_drafts"][row]) == (request.rounds, request.correct_drafts)
        assert told["prompt_tokens"][row].tolist() == list(request.prompt)
        assert told["output_tokens"][row].tolist() == request.output
        assert told["finish_reason"][row] == request.finish_reason
        assert (told["depth_limit"][row], told["cached_prefix"][row], told["temperature"][row]) == (4, 0, 0.0)
        assert told["arrived_secs"][row] <= told["first_token_secs"][row] <= told["finished_secs"][row]
        accepted = verified["accepted"].reshape(request.rounds, 5)
        follows = verified["target_token"].reshape(-1, 5)[:, :-1] == verified["token"].reshape(-1, 5)[:, 1:]
        assert np.array_equal(accepted[:, 1:], np.logical_and.accumulate(follows, axis=1))


def test_only_a_round_that_brought_more_than_was_kept_is_cut(run: Run) -> None:
    for request in run.requests:
        verified = run.trace.rows("verified", request=request.number)
        if not len(verified):
            continue
        accepted = verified["accepted"].reshape(-1, 5).sum(1)
        brought = 1 + np.cumsum(accepted)
        cut = verified["cut"].reshape(-1, 5)
        assert (cut == cut[:, :1]).all()
        assert np.array_equal(cut[:, 0], brought > len(request.output))
        assert not cut[:-1].any()


def test_reference_rows_are_the_hidden_states_of_transformers(run: Run, hf_model: Callable[[str], Any]) -> None:
    """Of every accepted row and boundary, 0 to L; the last one before the final norm."""
    model, inputs = hf_model("llama"), []
    handle = model.model.norm.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    try:
        kept = accepted_rows(run.trace)
        accepted = by_key(kept, "request", "pass", "node")
        reference = run.trace.rows("reference")
        rows = by_key(reference, "request", "pass", "node")
        places = {(r, int(kept["position"][at])): rows[r, p, n] for (r, p, n), at in accepted.items()}
        for request in run.requests:
            text = run.text(request.number)
            with torch.inference_mode():
                states = [*model(torch.tensor([text]), output_hidden_states=True).hidden_states[:-1], inputs.pop()]
            length = max(position for number, position in places if number == request.number) + 1
            assert length >= len(text) - 1
            index = np.array([places[request.number, position] for position in range(min(length, len(text)))])
            for boundary, state in enumerate(states):
                recorded = reference.take(index).tensor("boundaries", f"b{boundary}")
                expected = state[0, : len(index)]
                error = (recorded - expected).abs().amax(-1) / expected.abs().amax(-1)
                assert error.max() <= (0.0 if boundary == 0 else 1e-5)
    finally:
        handle.remove()


def test_emitted_slots_are_the_reference_at_the_wiring(run: Run) -> None:
    """Bit for bit, since one forward gave both; so identifying a slot by value has something to find."""
    emitted, reference = run.trace.rows("emitted"), run.trace.rows("reference")
    index = [by_key(reference, "request", "pass", "node")[key] for key in by_key(emitted, "request", "pass", "node")]
    slots = emitted.tensor("slots").reshape(len(emitted), 3, -1)
    for slot, boundary in enumerate((0, 2, 4)):
        assert torch.equal(slots[:, slot], reference.tensor("boundaries", f"b{boundary}")[index])
        assert np.array_equal(emitted["hashes"][:, slot], reference["hashes"][index, boundary])


def test_drafted_rows_are_what_the_draft_makes_of_received_ones(run: Run) -> None:
    """fc out of the features; logits, logsumexp and answer out of the hidden state."""
    draft = build_draft(read_draft(run.draft), target=run.target, dtype=torch.float32)
    received, drafted = run.trace.rows("received"), run.trace.rows("drafted")
    below = by_key(received, "request", "pass", "depth", "node")
    index = np.array([below[key] for key in by_key(drafted, "request", "pass", "depth", "node")])
    extends = drafted["depth"] == 0
    with torch.inference_mode():
        fused = draft.fuse(received.take(index[extends]).tensor("features"))
        torch.testing.assert_close(drafted.take(extends).tensor("fused"), fused, rtol=0, atol=1e-5)
        answers = drafted.take(drafted["token"] >= 0)
        logits = draft.logits(answers.tensor("hidden"))
    ids = torch.from_numpy(answers.payload("logits", "ids").astype(np.int64))
    torch.testing.assert_close(answers.tensor("logits", "values"), logits.gather(1, ids), rtol=0, atol=1e-4)
    torch.testing.assert_close(torch.from_numpy(answers["logsumexp"].copy()), logits.logsumexp(-1), rtol=0, atol=1e-4)


@pytest.mark.parametrize("level", list(Level))
def test_a_lower_level_keeps_keys_tokens_and_hashes_and_drops_tensors(
    level: Level, pair_of: Callable[..., Deployment], prompts: list[list[int]], tmp_path: Path
) -> None:
    pair = pair_of("llama", "gqa")
    pair.serve(prompts[:3], Serving(max_new=9, capture=(1, 5), level=level), trace=tmp_path / "trace")
    trace = Trace.open(tmp_path / "trace")
    assert trace.sealed and trace.verify() == []
    has = {
        "features": trace.rows("received", depth=0).has("features").all(),
        "boundaries": trace.rows("reference").has("boundaries").all(),
        "slots": trace.rows("emitted").has("slots").all(),
        "state": trace.rows("received", depth=1).has("state").all(),
    }
    assert has == {
        "features": level >= Level.FEATURES,
        "boundaries": level >= Level.FEATURES,
        "slots": level >= Level.FULL,
        "state": level >= Level.FULL,
    }
    assert (trace.rows("received", depth=0)["hashes"] != 0).all()
    assert (trace.rows("reference")["hashes"] != 0).all()
    assert trace.account().lost == 0


def test_the_manifest_decides_the_run(run: Run) -> None:
    """Both models by fingerprint, the wiring as configured and as resolved, versions, precision, switches."""
    manifest = run.trace.manifest
    assert manifest["engine"] == "spectrace" and manifest["dtype"] == "float32"
    assert manifest["wiring"]["configured"]["boundaries"] == [0, 2, 4]
    assert manifest["wiring"]["resolved"]["boundaries"] == [0, 2, 4]
    for who, folder in (("target", run.target), ("draft", run.draft)):
        assert manifest[who]["path"] == str(folder)
        assert set(manifest[who]["fingerprints"]) == {"model.safetensors"}
        assert manifest[who]["config"] == json.loads((folder / "config.json").read_text("utf-8"))
    assert manifest["serving"]["depth"] == 4 and manifest["capture_hidden_mode"] == "full"
    assert {"torch", "transformers", "ray"} <= {name for name, version in manifest["versions"].items() if version}


def test_a_run_without_a_draft_records_the_target_alone(
    pair_of: Callable[..., Deployment], prompts: list[list[int]], tmp_path: Path
) -> None:
    pair = pair_of("llama", "gqa")
    pair.serve(prompts[:2], Serving(depth=0, max_new=5, capture=(0, 3)), trace=tmp_path / "trace")
    trace = Trace.open(tmp_path / "trace")
    assert trace.sealed and trace.verify() == []
    assert {name: len(trace.rows(name)) > 0 for name in FAMILIES} == {
        "emitted": True, "received": False, "drafted": False, "verified": False, "requests": True, "reference": True,
    }  # fmt: skip
    assert trace.manifest["wiring"]["resolved"]["boundaries"] == []


def test_a_family_that_cannot_have_rows_is_not_missed(
    pair_of: Callable[..., Deployment], prompts: list[list[int]], tmp_path: Path
) -> None:
    pair_of("llama", "gqa").serve(prompts[:2], Serving(depth=3, max_new=1), trace=tmp_path / "trace")
    assert Trace.open(tmp_path / "trace").verify() == []


def test_what_recording_lost_is_told_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call's answers do not depend on its recording, so a full disk is no error; it is a loss that is reported."""

    def refuse(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    create_trace(tmp_path / "trace", {})
    recorder = Recording(tmp_path / "trace", Level.LIGHT, {}).open("draft")
    monkeypatch.setattr(FolderWriter, "write", refuse)
    recorder.received(Keys(request=[0, 0], pass_=0, position=[0, 1]), token=[5, 6])
    loss = shut(recorder)
    assert loss and loss.startswith("draft-0: rows lost: 2 received;") and "No space left on device" in loss
    assert shut(None) is None


def test_a_seal_that_cannot_be_written_costs_no_answer(
    pair_of: Callable[..., Deployment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk may have room for every row and none for the last file."""
    sync = os.fsync

    def full(file: int) -> None:
        if os.readlink(f"/proc/self/fd/{file}").endswith("SEAL.partial"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(file)

    monkeypatch.setattr(os, "fsync", full)
    served = pair_of("llama", "gqa").serve([[5, 6, 7]], Serving(max_new=4, ignore_end=True), trace=tmp_path / "trace")
    assert len(served.requests[0].output) == 4
    assert [loss for loss in served.losses if "SEAL" in loss and "No space left" in loss]
    assert {path.name for path in (tmp_path / "trace").glob("SEAL*")} == set()
    assert not Trace.open(tmp_path / "trace").sealed

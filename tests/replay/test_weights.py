"""Weights that were served, and tables that map draft ids to tokens, against the checkpoint that a team believes in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spectrace.engine.checkpoint import (
    DraftCheckpoint,
    build_draft,
    read_draft,
    read_embedding,
    read_head,
    weight_fingerprints,
)
from spectrace.engine.draft import DraftModel
from spectrace.engine.spec import LaterNorm
from spectrace.engine.turned import in_other_order
from spectrace.replay.configuration import Configuration
from spectrace.replay.finding import Finding
from spectrace.replay.hypotheses import computing
from spectrace.replay.vocabulary import lint_table, rebuilt_table, vocabulary
from spectrace.replay.weights import LoadedWeights, loaded_weights
from spectrace.tracer.fingerprint import file_fingerprints, tensor_fingerprint
from spectrace.tracer.keys import Keys
from spectrace.tracer.manifest import create_trace
from spectrace.tracer.recorder import Recorder
from spectrace.tracer.rows import Level
from spectrace.tracer.trace import Trace

Record = Callable[..., Trace]
Table = Callable[..., DraftCheckpoint]
TABLES = ("V1", "V2", "V3", "V4", "V5")
WEIGHTS = ("P1:attention", "P1:fc", "P1:norm", "P1:mlp", "P2", "P3", "P4", "P5")


def named(finding: Finding) -> str:
    return finding.fault + (f":{finding.variant}" if finding.variant else "")


@pytest.fixture(scope="module")
def checkpoint(folders: tuple[Path, Path]) -> DraftCheckpoint:
    return read_draft(folders[1])


@pytest.fixture(scope="module")
def model(checkpoint: DraftCheckpoint, folders: tuple[Path, Path]) -> DraftModel:
    return build_draft(checkpoint, target=folders[0], dtype=torch.float32)


def test_a_clean_run_has_the_checkpoints_weights_and_tokens(
    clean: Trace, checkpoint: DraftCheckpoint, model: DraftModel, folders: tuple[Path, Path]
) -> None:
    found, words = loaded_weights(clean, checkpoint, model, target=folders[0]), vocabulary(clean, checkpoint)
    assert found == LoadedWeights(len(model.state_dict()), len(model.state_dict()), other_files=False)
    assert words.findings == () and words.pairs == words.configured > 5
    assert lint_table(checkpoint) == ()


@pytest.mark.parametrize("fault", WEIGHTS)
def test_a_tensor_that_was_not_loaded_is_named_alone(
    fault: str, record: Record, checkpoint: DraftCheckpoint, model: DraftModel, folders: tuple[Path, Path]
) -> None:
    trace = record(fault)
    found = loaded_weights(trace, checkpoint, model, target=folders[0])
    assert [named(finding) for finding in found.findings] == [fault]
    assert found.compared - found.equal == (2 if fault in ("P4", "P5") else 1)
    assert vocabulary(trace, checkpoint).findings == ()


@pytest.mark.parametrize("fault", TABLES)
def test_a_wrong_table_is_named_by_what_was_loaded_and_by_what_was_drafted(
    fault: str, record: Record, checkpoint: DraftCheckpoint, model: DraftModel
) -> None:
    """One that is read wrongly by what was drafted alone."""
    trace = record(fault)
    loaded, words = loaded_weights(trace, checkpoint, model).findings, vocabulary(trace, checkpoint).findings
    assert [named(finding) for finding in loaded] == ([] if fault == "V2" else [fault])
    assert len(words) == 1 and fault in (words[0].fault, *words[0].alike) and words[0].variant == ""


@pytest.mark.parametrize("fault", ["W3", "M3", "X1", "T1", "N1", "N3", "R3"])
def test_other_faults_have_the_right_weights(
    fault: str, record: Record, checkpoint: DraftCheckpoint, model: DraftModel
) -> None:
    trace = record(fault)
    assert loaded_weights(trace, checkpoint, model).findings == vocabulary(trace, checkpoint).findings == ()


def loaded(folder: Path, prints: dict[str, str], **manifest: object) -> Trace:
    """A trace whose draft says that it holds these weights."""
    create_trace(folder, {"dtype": "float32", **manifest})
    Recorder(folder, role="draft", facts={"loaded": prints} if prints else {}).close()
    return Trace.open(folder)


def held(model: DraftModel, **tensors: Tensor) -> dict[str, str]:
    """The fingerprints of a draft with some tensors replaced."""
    return weight_fingerprints(model.variant(tensors={name.replace("__", "."): t for name, t in tensors.items()}))


def test_a_table_that_changes_no_id_need_not_be_in_memory(
    new_draft: Callable[..., tuple[dict[str, object], dict[str, Tensor]]],
    write_draft: Callable[..., Path],
    target_of: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """Of a draft of all tokens; vLLM has none then."""
    checkpoint = read_draft(write_draft(tmp_path / "draft", *new_draft("mla")))
    model = build_draft(checkpoint, target=target_of("llama"), dtype=torch.float32)
    prints = {name: print_ for name, print_ in weight_fingerprints(model).items() if name != "d2t"}
    found = loaded_weights(loaded(tmp_path / "trace", prints), checkpoint, model)
    assert found.findings == () and found.compared == found.equal == len(prints)


def test_weights_of_another_step_are_one_finding(
    checkpoint: DraftCheckpoint, model: DraftModel, tmp_path: Path
) -> None:
    other = {
        name: tensor * 1.001 for name, tensor in model.state_dict().items() if name not in ("d2t", "embedding.weight")
    }
    trace = loaded(tmp_path / "trace", weight_fingerprints(model.variant(tensors=other)))
    assert [finding.fault for finding in loaded_weights(trace, checkpoint, model).findings] == ["P6"]


def test_other_mistakes_in_loading_are_recognised(
    checkpoint: DraftCheckpoint, model: DraftModel, tmp_path: Path
) -> None:
    q, head = model.state_dict()["attention.q.weight"], model.state_dict()["head.weight"]
    turned = q.reshape(4, 2, 6, -1).transpose(1, 2).reshape(q.shape).contiguous()
    ids = torch.arange(len(model.d2t))
    cases = {
        "P5": held(model, attention__q__weight=turned),
        "P1:attention": held(model, attention__q__weight=q * 2),
        "P2:other": held(model, head__weight=head * 2),
        "V2": held(model, d2t=model.d2t + ids),
        "V4": held(model, d2t=model.d2t.roll(-1)),
    }
    for name, prints in cases.items():
        found = loaded_weights(loaded(tmp_path / name, prints), checkpoint, model).findings
        assert [named(finding) for finding in found] == [name]


@pytest.fixture(scope="module")
def deep(target_of: Callable[..., Path], draft_of: Callable[..., Path]) -> tuple[DraftCheckpoint, DraftModel]:
    """A draft of two layers, with biases and norms of heads."""
    checkpoint = read_draft(draft_of("llama", "deep"))
    return checkpoint, build_draft(checkpoint, target=target_of("llama"), dtype=torch.float32)


def mistakes(model: DraftModel) -> dict[str, tuple[dict[str, Tensor], int]]:
    """What may be wrong in the memory of such a draft, by how it is to be named, and how many tensors of it are."""
    tensors, layer = model.state_dict(), "later.0."

    def turned(*names: str) -> dict[str, Tensor]:
        orders = {name: in_other_order(tensors[name], 12, model.spec) for name in names}
        assert not any(torch.equal(tensor, tensors[name]) for name, tensor in orders.items())
        return orders

    gate, up = f"{layer}mlp.gate.weight", f"{layer}mlp.up.weight"
    norm = f"{layer}input_norm.weight"
    return {
        "P4": ({gate: tensors[up], up: tensors[gate]}, 2),
        "P5": (turned("attention.q.weight", "attention.k.bias", f"{layer}attention.k.weight"), 3),
        "P7": ({"attention.q.bias": torch.zeros_like(tensors["attention.q.bias"])}, 1),
        "P7:o": ({f"{layer}attention.o.bias": torch.zeros_like(tensors["attention.o.bias"])}, 1),
        "N4:plain": ({norm: torch.ones_like(tensors[norm])}, 1),
        "N4:first": ({norm: tensors["feature_norm.weight"]}, 1),
        "N4:other": ({norm: tensors[norm] * 2}, 1),
        "P1:norm": ({f"{layer}mlp_norm.weight": torch.ones_like(tensors[norm])}, 1),
        "P1:attention": ({f"{layer}attention.o.weight": tensors[f"{layer}attention.o.weight"] * 2}, 1),
    }


def test_mistakes_in_any_layer_are_recognised(deep: tuple[DraftCheckpoint, DraftModel], tmp_path: Path) -> None:
    checkpoint, model = deep
    for name, (wrong, count) in mistakes(model).items():
        prints = weight_fingerprints(model.variant(tensors=wrong))
        found = loaded_weights(loaded(tmp_path / name.replace(":", "-"), prints), checkpoint, model)
        assert [named(finding) for finding in found.findings] == [name]
        assert found.compared - found.equal == count


def test_the_steps_that_show_in_memory_are_those_that_explain_most_of_it(
    deep: tuple[DraftCheckpoint, DraftModel], tmp_path: Path
) -> None:
    checkpoint, model = deep
    tensors, layers = model.state_dict(), ("", "later.0.")
    at = Configuration(checkpoint.spec, tensors, ())
    swapped = {
        f"{layer}mlp.{a}.weight": tensors[f"{layer}mlp.{b}.weight"]
        for layer in layers
        for a, b in (("gate", "up"), ("up", "gate"))
    }
    wrong = {**swapped, "later.0.input_norm.weight": torch.ones(48), "output_norm.weight": torch.full((48,), 2.0)}
    prints = weight_fingerprints(model.variant(tensors=wrong))
    prints = {name: print_ for name, print_ in prints.items() if not name.endswith((".q.bias", ".k.bias", ".v.bias"))}
    found = loaded_weights(loaded(tmp_path / "trace", prints), checkpoint, model)
    steps = found.seen(at, computing(at, {}))
    assert {(one.fault, one.title.rpartition(" ")[2]) for one in steps} == {
        ("P4", "swapped"), ("N4", "nothing"), ("P7", "dropped")
    }  # fmt: skip
    right = loaded_weights(loaded(tmp_path / "right", weight_fingerprints(model)), checkpoint, model)
    assert right.seen(at, computing(at, {})) == ()


@pytest.mark.parametrize(
    ("names", "name"),
    [
        (("attention.q.bias", "attention.k.bias", "attention.v.bias", "later.0.attention.q.bias"), "P7"),
        (("later.0.attention.o.bias",), "P7:o"),
        (("mlp.gate.bias", "mlp.down.bias"), "P7:mlp"),
        (("attention.q_norm.weight", "attention.k_norm.weight"), "P1:head norms"),
    ],
)
def test_biases_and_norms_that_an_engine_does_not_hold_are_named(
    names: tuple[str, ...], name: str, deep: tuple[DraftCheckpoint, DraftModel], tmp_path: Path
) -> None:
    checkpoint, model = deep
    prints = {one: print_ for one, print_ in weight_fingerprints(model).items() if one not in names}
    [found] = loaded_weights(loaded(tmp_path / "trace", prints), checkpoint, model).findings
    assert named(found) == name and "the engine holds no" in found.evidence[1]
    assert all(checkpoint.names[one] in found.evidence[1] for one in names)


def test_the_other_norm_that_the_files_hold_is_recognised(
    deep: tuple[DraftCheckpoint, DraftModel], tmp_path: Path
) -> None:
    checkpoint, model = deep
    other = {"later.0.input_norm.weight": torch.full((48,), 0.5)}
    trace = loaded(tmp_path / "trace", weight_fingerprints(model.variant(tensors=other)))
    [found] = loaded_weights(trace, checkpoint, model, spare={LaterNorm.HIDDEN: other}).findings
    assert named(found) == "N4" and "is their hidden_norm" in found.title


def test_quantised_weights_without_their_scales_are_one_finding_beside_others(
    deep: tuple[DraftCheckpoint, DraftModel], tmp_path: Path
) -> None:
    checkpoint, model = deep
    matrices = {name: t for name, t in model.state_dict().items() if t.ndim == 2 and name != "embedding.weight"}
    stored = {name: tensor * 100 for name, tensor in matrices.items()}
    other = {**stored, "later.0.mlp_norm.weight": torch.ones(48)}
    trace = loaded(tmp_path / "trace", weight_fingerprints(model.variant(tensors=other)))
    found = loaded_weights(trace, checkpoint, model, spare={"unscaled": stored}).findings
    assert [named(one) for one in found] == ["P8", "P1:norm"]
    assert "P8" not in [one.fault for one in loaded_weights(trace, checkpoint, model).findings]


def test_an_own_head_or_embedding_in_whose_place_the_target_s_is_are_told_from_others(
    deep: tuple[DraftCheckpoint, DraftModel],
    new_draft: Callable[..., tuple[dict[str, object], dict[str, Tensor]]],
    write_draft: Callable[..., Path],
    target_of: Callable[..., Path],
    tmp_path: Path,
) -> None:
    config, tensors = new_draft("gqa", draft_vocab_size=None)
    tensors["embed_tokens.weight"] = torch.randn(96, 48)
    checkpoint, target = read_draft(write_draft(tmp_path / "draft", config, tensors)), target_of("llama")
    model = build_draft(checkpoint, target=target, dtype=torch.float32)
    cases = {
        "A1:head": {"head.weight": read_head(target)},
        "A1": {"embedding.weight": read_embedding(target)},
        "P3": {"embedding.weight": torch.randn(96, 48)},
        "P2:other": {"head.weight": torch.randn(96, 48)},
    }
    for name, wrong in cases.items():
        trace = loaded(tmp_path / name, weight_fingerprints(model.variant(tensors=wrong)))
        assert [named(one) for one in loaded_weights(trace, checkpoint, model, target=target).findings] == [name]


@pytest.mark.parametrize("written", ["still there", "written since", "gone", "the same", "changed in memory"])
def test_weights_of_another_step_are_held_against_the_folder_that_was_served(
    written: str, checkpoint: DraftCheckpoint, model: DraftModel, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    tensors = load_file(folders[1] / "model.safetensors")
    moved = {name: tensor if name == "d2t" else tensor * 1.25 for name, tensor in tensors.items()}
    served = shutil.copytree(folders[1], tmp_path / "served")
    save_file(moved if written != "the same" else tensors, served / "model.safetensors")
    memory = build_draft(read_draft(served), target=folders[0], dtype=torch.float32)
    if written in ("the same", "changed in memory"):
        other = {name: t * 1.5 for name, t in memory.state_dict().items() if name not in ("d2t", "embedding.weight")}
        memory = memory.variant(tensors=other)
    told = {"path": str(served), "fingerprints": file_fingerprints(served)}
    trace = loaded(tmp_path / "trace", weight_fingerprints(memory), draft=told)
    if written == "gone":
        shutil.rmtree(served)
    if written == "written since":
        save_file(tensors, served / "model.safetensors")
    found = loaded_weights(trace, checkpoint, model, target=folders[0])
    [finding] = found.findings
    assert named(finding) == "P6" and str(served) in finding.evidence[-1]
    said = {
        "still there": "13 of 13 differ, by 25.0% of their size",
        "the same": "holds the right ones: the engine has changed them",
        "changed in memory": "holds yet other ones: the engine has changed them",
    }
    assert said.get(written, "how far they are off is not known") in finding.evidence[-1]
    assert bool(found.served) == (written == "still there")
    if found.served:
        assert torch.equal(found.served["fc.weight"], model.fc.weight * 1.25)


SPLIT = {"mlp.gate.weight": 0, "mlp.up.weight": 0, "mlp.down.weight": 1, "attention.q.weight": 0, "head.weight": 0}


@pytest.mark.parametrize("ranks", [1, 2])
def test_mistakes_in_loading_are_recognised_by_the_share_of_one_rank(
    ranks: int, checkpoint: DraftCheckpoint, model: DraftModel, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """A draft that is split over ranks says of each tensor what rank 0 holds of it."""
    tensors, head = model.state_dict(), read_head(folders[0])
    q, gate, up = (tensors[f"{name}.weight"] for name in ("attention.q", "mlp.gate", "mlp.up"))
    cases: dict[str, tuple[str, dict[str, Tensor]]] = {
        "P4": ("each of the two holds", {"mlp.gate.weight": up, "mlp.up.weight": gate}),
        "P5": ("", {"attention.q.weight": q.reshape(4, 2, 6, -1).transpose(1, 2).reshape(q.shape)}),
        "P2": ("it is the first", {"head.weight": head[: checkpoint.spec.draft_vocab]}),
        "P1:mlp": ("all zeros", {"mlp.down.weight": torch.zeros_like(tensors["mlp.down.weight"])}),
    }
    for name, (told, wrong) in cases.items():
        shares = {**tensors, **wrong}
        shares |= {split: shares[split].chunk(ranks, dim)[0] for split, dim in SPLIT.items()}
        prints = {held: tensor_fingerprint(share.contiguous()) for held, share in shares.items()}
        placed = {"draft": {split: f"Shard(dim={dim})" for split, dim in SPLIT.items()}}
        trace = loaded(tmp_path / name, prints, sharded=placed, tensor_parallel={"draft": ranks})
        [found] = loaded_weights(trace, checkpoint, model, target=folders[0]).findings
        assert named(found) == name and told in found.evidence[-1]


def test_a_norm_that_the_engine_does_not_hold_is_named(
    new_draft: Callable[..., tuple[dict[str, object], dict[str, Tensor]]],
    write_draft: Callable[..., Path],
    folders: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    normed = read_draft(write_draft(tmp_path / "draft", *new_draft(norm_before_fc=True)))
    model = build_draft(normed, target=folders[0], dtype=torch.float32)
    prints = {name: value for name, value in held(model).items() if not name.startswith("fuse_norms")}
    found = loaded_weights(loaded(tmp_path / "trace", prints), normed, model).findings
    assert [named(finding) for finding in found] == ["N2"] and "holds no input_norm.weight" in found[0].evidence[1]


def test_what_was_not_recorded_or_in_another_type_is_not_compared(
    checkpoint: DraftCheckpoint, model: DraftModel, tmp_path: Path
) -> None:
    nothing = loaded_weights(loaded(tmp_path / "nothing", {}), checkpoint, model)
    other = loaded_weights(loaded(tmp_path / "other", held(model), dtype="bfloat16"), checkpoint, model)
    assert nothing == other == LoadedWeights(0, 0)


def test_a_folder_with_other_files_is_told(checkpoint: DraftCheckpoint, model: DraftModel, tmp_path: Path) -> None:
    trace = loaded(tmp_path / "trace", held(model), draft={"fingerprints": {"model.safetensors": "0" * 32}})
    found = loaded_weights(trace, checkpoint, model)
    assert found.other_files is True and found.findings == ()


def drafted(folder: Path, ids: list[int], tokens: list[int]) -> Trace:
    create_trace(folder, {})
    with Recorder(folder, role="draft", level=Level.LIGHT, strict=True) as draft:
        keys = Keys(request=[0] * len(ids), pass_=0, position=0)
        draft.drafted(keys, draft_token=ids, token=tokens, state=torch.zeros(len(ids), 2))
    return Trace.open(folder)


def test_pairs_that_fit_no_misreading_are_called_just_that(checkpoint: DraftCheckpoint, tmp_path: Path) -> None:
    [other] = vocabulary(drafted(tmp_path / "other", [1, 2, 3], [90, 17, 55]), checkpoint).findings
    assert named(other) == "V3" and other.confidence < 1
    [both] = vocabulary(drafted(tmp_path / "both", [1, 1, 2], [90, 17, 55]), checkpoint).findings
    assert named(both) == "V3:inconsistent" and both.confidence < 1


def test_engines_that_do_not_tell_ids_from_tokens_are_not_judged(checkpoint: DraftCheckpoint, tmp_path: Path) -> None:
    found = vocabulary(drafted(tmp_path / "trace", [-1, -1], [90, 17]), checkpoint)
    assert (found.pairs, found.findings) == (0, ())


@pytest.fixture
def table(folders: tuple[Path, Path], tmp_path: Path) -> Table:
    """`table(d2t, t2d=)`: the checkpoint with another table, and a t2d if given."""

    def write(d2t: Tensor | None, *, t2d: Tensor | None = None) -> DraftCheckpoint:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        (folder / "config.json").write_text((folders[1] / "config.json").read_text("utf-8"), "utf-8")
        tensors = {**load_file(folders[1] / "model.safetensors"), "d2t": d2t, "t2d": t2d}
        save_file({k: v.contiguous() for k, v in tensors.items() if v is not None}, folder / "model.safetensors")
        return read_draft(folder)

    return write


def broken_tables(checkpoint: DraftCheckpoint) -> dict[str, Tensor]:
    right = checkpoint.tensors["d2t"]
    ids, vocab = torch.arange(len(right)), checkpoint.spec.target_vocab
    tokens = torch.randperm(vocab, generator=torch.Generator().manual_seed(1))[: len(ids)].sort().values
    return {"V2": right + ids, "V4": right.roll(1), "V5": torch.zeros_like(right), "V3": tokens - ids}


def kept(checkpoint: DraftCheckpoint) -> Tensor:
    t2d = torch.zeros(checkpoint.spec.target_vocab, dtype=torch.bool)
    t2d[checkpoint.tensors["d2t"] + torch.arange(checkpoint.spec.draft_vocab)] = True
    return t2d


def test_a_right_table_is_right_with_and_without_a_witness(checkpoint: DraftCheckpoint, table: Table) -> None:
    right = checkpoint.tensors["d2t"]
    assert lint_table(table(right)) == lint_table(table(right, t2d=kept(checkpoint))) == ()
    order = torch.randperm(len(right), generator=torch.Generator().manual_seed(0))
    by_frequency = (right + torch.arange(len(right)))[order] - torch.arange(len(right))
    assert lint_table(table(by_frequency)) == lint_table(table(by_frequency, t2d=kept(checkpoint))) == ()


@pytest.mark.parametrize("fault", ["V2", "V3", "V4", "V5"])
def test_a_broken_table_is_named_and_rebuilt_from_its_witness(
    fault: str, checkpoint: DraftCheckpoint, table: Table
) -> None:
    broken = table(broken_tables(checkpoint)[fault], t2d=kept(checkpoint))
    assert [named(finding) for finding in lint_table(broken)] == [f"{fault}:checkpoint"]
    rebuilt = rebuilt_table(broken)
    assert rebuilt is not None and torch.equal(rebuilt, checkpoint.tensors["d2t"])


def test_without_a_witness_tables_are_judged_by_themselves(checkpoint: DraftCheckpoint, table: Table) -> None:
    """What cannot be a table is wrong; shifted rows and zeros can be one; tokens and shifted rows can be undone."""
    tables = broken_tables(checkpoint)
    for fault, certain, undone in (("V2", True, True), ("V4", False, True), ("V5", False, False)):
        [found] = lint_table(table(tables[fault]))
        assert named(found) == f"{fault}:checkpoint" and (found.confidence > 0.8) == certain
        rebuilt = rebuilt_table(table(tables[fault]))
        assert (rebuilt is not None and torch.equal(rebuilt, checkpoint.tensors["d2t"])) == undone
    assert lint_table(table(tables["V3"])) == ()


IDS, LARGE = torch.arange(64), 49152
ODD = {
    "V2": torch.randperm(LARGE, generator=torch.Generator().manual_seed(2))[:64].sort().values - IDS,
    "V4": torch.cat((torch.tensor([LARGE - 64]), 700 * (IDS[1:] // 2))),
    "V5": torch.zeros(64, dtype=torch.int64),
}
"""Tables that look wrong: tokens drawn at random and sorted, one of the last before all others, the first ones."""


def judged(folder: Path, ids: Tensor, table: Tensor, came: Tensor) -> Trace:
    """Rounds of one draft each, of these ids in turn, by a table; and what the target came to in its place."""
    create_trace(folder, {})
    tokens = (ids + table[ids]).tolist()
    with Recorder(folder, role="draft", level=Level.LIGHT, strict=True) as draft:
        keys = Keys(request=[0] * len(ids), pass_=range(len(ids)), position=0)
        draft.drafted(keys, draft_token=ids.tolist(), token=tokens, state=torch.zeros(len(ids), 2))
    with Recorder(folder, role="scheduler", level=Level.LIGHT, strict=True) as scheduler:
        for pass_, (token, right) in enumerate(zip(tokens, came.tolist(), strict=True)):
            scheduler.verified(
                Keys(request=[0] * 2, pass_=pass_, node=range(2), position=0, round=pass_),
                parent=[-1, 0], token=[0, token], target_token=[right, 0], accepted=[True, token == right],
                cut=False, source_row=[0, 1],
            )  # fmt: skip
    return Trace.open(folder)


@pytest.fixture(params=ODD)
def odd(request: pytest.FixtureRequest, checkpoint: DraftCheckpoint) -> tuple[str, DraftCheckpoint]:
    """What a table looks like, and a checkpoint that has it."""
    spec = replace(checkpoint.spec, target_vocab=LARGE, draft_vocab=64)
    return request.param, replace(checkpoint, spec=spec, tensors={**checkpoint.tensors, "d2t": ODD[request.param]})


def test_a_table_that_only_looks_wrong_is_suspected_and_says_what_tells(odd: tuple[str, DraftCheckpoint]) -> None:
    fault, checkpoint = odd
    [found] = lint_table(checkpoint)
    assert named(found) == f"{fault}:checkpoint" and found.confidence <= 0.5 and "--target" in found.evidence[-1]


def test_a_table_is_not_suspected_of_what_would_make_none_of_it(checkpoint: DraftCheckpoint) -> None:
    """The last token of all comes first: its row cannot have been the last one."""
    ends_first = torch.cat((torch.tensor([LARGE - 1]), ODD["V4"][1:]))
    spec = replace(checkpoint.spec, target_vocab=LARGE, draft_vocab=64)
    assert lint_table(replace(checkpoint, spec=spec, tensors={**checkpoint.tensors, "d2t": ends_first})) == ()


def test_tokens_that_came_where_a_table_had_them_clear_it(odd: tuple[str, DraftCheckpoint], tmp_path: Path) -> None:
    """Half of the drafts are wrong all the same."""
    fault, checkpoint = odd
    ids = IDS.repeat(4)
    came = ids + ODD[fault][ids]
    came[::2] = came.roll(5)[::2]
    assert lint_table(checkpoint, judged(tmp_path / "trace", ids, ODD[fault], came)) == ()


def test_tokens_that_came_by_chance_leave_a_table_suspected(odd: tuple[str, DraftCheckpoint], tmp_path: Path) -> None:
    fault, checkpoint = odd
    ids, drawn = IDS.repeat(4), torch.randperm(256, generator=torch.Generator().manual_seed(1))
    tokens = ids + ODD[fault][ids]
    for name, came in {"other": tokens[drawn], "one": tokens[:1].expand(256)}.items():
        drafted = ids if name == "other" else torch.zeros_like(ids)  # one token all the time, drafted and come
        [found] = lint_table(checkpoint, judged(tmp_path / name, drafted, ODD[fault], came))
        assert found.fault == fault and found.confidence <= 0.5


def test_tokens_that_came_where_the_right_table_had_them_prove_it_wrong(
    odd: tuple[str, DraftCheckpoint], tmp_path: Path
) -> None:
    """Zeros can be undone by nothing; tokens in order that begin like them are no proof that zeros are right."""
    fault, checkpoint = odd
    rebuilt, ids = rebuilt_table(checkpoint), IDS.repeat(4)
    right = torch.where(IDS < 20, 0, 500) if rebuilt is None else rebuilt
    [found] = lint_table(checkpoint, judged(tmp_path / "trace", ids, ODD[fault], ids + right[ids]))
    assert named(found) == f"{fault}:checkpoint" and (found.confidence > 0.8) == (fault != "V5")


def test_another_table_that_was_drafted_by_says_nothing_of_the_checkpoints(
    odd: tuple[str, DraftCheckpoint], tmp_path: Path
) -> None:
    fault, checkpoint = odd
    ids, other = IDS.repeat(4), ODD[fault] + 3
    [found] = lint_table(checkpoint, judged(tmp_path / "trace", ids, other, ids + other[ids]))
    assert found.confidence <= 0.5


def test_a_table_that_was_never_filled_shows_by_a_witness_that_keeps_all(
    checkpoint: DraftCheckpoint, table: Table
) -> None:
    unset = table(torch.zeros_like(checkpoint.tensors["d2t"]), t2d=torch.ones(96, dtype=torch.bool))
    [found] = lint_table(unset)
    assert named(found) == "V5:checkpoint" and found.confidence == 1 and rebuilt_table(unset) is None


def test_a_table_that_keeps_the_first_tokens_may_be_zero(checkpoint: DraftCheckpoint, table: Table) -> None:
    first = torch.arange(96) < checkpoint.spec.draft_vocab
    assert lint_table(table(torch.zeros_like(checkpoint.tensors["d2t"]), t2d=first)) == ()


def test_a_checkpoint_without_its_table_is_told(checkpoint: DraftCheckpoint) -> None:
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if name != "d2t"}
    assert [named(one) for one in lint_table(replace(checkpoint, tensors=tensors))] == ["V1:checkpoint"]


def test_a_draft_of_all_tokens_needs_no_table(
    new_draft: Callable[..., tuple[dict[str, object], dict[str, Tensor]]],
    write_draft: Callable[..., Path],
    tmp_path: Path,
) -> None:
    config, tensors = new_draft("mla")
    whole = read_draft(write_draft(tmp_path / "draft", config, tensors))
    assert lint_table(whole) == () and rebuilt_table(whole) is None
    assert json.loads((tmp_path / "draft" / "config.json").read_text("utf-8"))["vocab_size"] == 96
    assert vocabulary(drafted(tmp_path / "trace", [5, 6], [5, 6]), whole).findings == ()

"""The scoreboard seeds what it says, shows the diagnosis nothing but the trace, and counts fairly."""

from __future__ import annotations

import json
import random
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))

from scoreboard import edits, tensors
from scoreboard.board import document, merged, write
from scoreboard.clean import clean
from scoreboard.judge import Judge
from scoreboard.kept import Kept
from scoreboard.mending import is_misread, mends
from scoreboard.options import options
from scoreboard.pairs import IDS, PAIRS, Pair, make_pairs
from scoreboard.quick import quick
from scoreboard.render import render
from scoreboard.run import chosen, main, plan
from scoreboard.scoring import Real, Run, failed, score, totals, unscored
from scoreboard.seeds import Seed, applies, draw
from scoreboard.stage import Recorded, Stage
from scoreboard.stage import read as read_recorded
from scoreboard.thin import OUTCOMES, ThinTrace, failed_view, seen, thinned, views

from spectrace.engine.checkpoint import read_draft
from spectrace.engine.fault import Drafting, Source
from spectrace.engine.faults import FAULTS
from spectrace.engine.sampling import Sampling
from spectrace.engine.serving import Serving
from spectrace.engine.spec import FuseNorm, GqaSpec, RopeKind, Stream
from spectrace.replay.diagnosis import Cause, Diagnosis, Verdict
from spectrace.tracer import Keys, Recorder, Trace, create_trace
from spectrace.tracer.errors import UserError

SMALL = tuple(name for name in PAIRS if name != "smollm2")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    return {pair.name: pair for pair in make_pairs(tmp_path_factory.mktemp("pairs"), SMALL)}


@pytest.fixture(scope="module")
def drawn(pairs: dict[str, Pair]) -> list[Seed]:
    """The faults of four seeds."""
    return [seed for number in range(1, 5) for pair in pairs.values() for seed in draw(number, pair)]


def a_seed(*faults: str, kind: str = "engine", alike: tuple[str, ...] = ()) -> Seed:
    return Seed(faults, "some variant", "toy", 1, kind, Serving(), ((1, 2),), alike=alike)  # type: ignore[arg-type]


def a_cause(fault: str, *, predicted: float | None = 2.0, alike: tuple[str, ...] = ()) -> Cause:
    return Cause(fault, "v", f"title of {fault}", 1.0, ("evidence",), 1.5, predicted, f"edit for {fault}", alike=alike)


def a_diagnosis(*causes: Cause, verdict: Verdict = Verdict.FAULT) -> Diagnosis:
    return Diagnosis(verdict, causes, {}, (), 1.5, 3.0, notes=("a note",))


# Seeds


def test_the_same_seed_draws_the_same_and_another_one_others(pairs: dict[str, Pair]) -> None:
    def drawn(number: int) -> list[Any]:
        found = plan([number], list(pairs.values()), few=False)
        return [(seed.name.rpartition("/")[0], seed.prompts, seed.served, seed.ranks) for seed in found]

    assert drawn(1) == drawn(1)
    one, two = drawn(1), drawn(2)
    assert sum(a in two for a in one) == 0


def test_what_is_left_out_does_not_change_what_is_drawn(pairs: dict[str, Pair]) -> None:
    toy = pairs["toy"]
    alone = draw(3, replace(toy, ids=("W1", "V4"), stacked=0))
    among = {seed.name: seed for seed in draw(3, toy)}
    for seed in alone:
        assert among[seed.name].served == seed.served and among[seed.name].prompts == seed.prompts


def test_every_id_is_seeded_into_two_pairs_even_without_smollm2(pairs: dict[str, Pair]) -> None:
    where: dict[str, set[str]] = {id: set() for id in IDS}
    for seed in plan([1], list(pairs.values()), few=False):
        if len(seed.faults) == 1:
            where[seed.faults[0]].add(seed.pair)
    assert {id: names for id, names in where.items() if len(names) < 2} == {}


def test_there_are_clean_runs_of_every_kind(pairs: dict[str, Pair]) -> None:
    cases = [(pair.name, seed.variant) for pair in pairs.values() for seed in clean(1, pair)]
    assert len(cases) == len(set(cases)) >= 34
    assert {variant for _, variant in cases} == {
        "as it is", "bf16", "two ranks", "one at a time", "eight at a time", "chunked prefill", "temperature 1",
        "drawn drafts", "trees", "fixed window", "undertrained", "other data", "longer context",
    }  # fmt: skip


def test_w3_is_seeded_in_all_three_places(pairs: dict[str, Pair]) -> None:
    kinds = [seed.kind for seed in draw(1, pairs["toy"]) if seed.faults == ("W3",)]
    assert kinds == ["engine", "config", "conversion"]


def test_faults_are_served_in_every_way_that_their_pair_can_do_and_about_half_of_them_plainly(
    pairs: dict[str, Pair], drawn: list[Seed]
) -> None:
    for name, pair in pairs.items():
        served = {seed.served_as for seed in drawn if seed.pair == name}
        assert "chains, greedy" in served
        assert any("temperature" in one for one in served) <= bool({"temperature 1", "drawn drafts"} & {*pair.cases})
        assert any("bfloat16" in one for one in served) <= ("bf16" in pair.cases)
    ways = {seed.served_as for seed in drawn}
    assert ways >= {
        "chains, greedy", "trees, greedy", "chains, temperature 1", "drawn drafts, temperature 1",
        "chains, greedy, fixed window", "chains, greedy, bfloat16",
    }  # fmt: skip
    single = [seed for seed in drawn if len(seed.faults) == 1 and seed.faults[0] not in ("X3", "X4")]
    assert 0.45 < sum(seed.served_as == "chains, greedy" for seed in single) / len(single) < 0.7
    assert {seed.served_as for seed in drawn if len(seed.faults) > 1} == {"chains, greedy"}


def test_every_way_is_one_in_which_the_fault_can_be_had_with_what_it_needs(
    pairs: dict[str, Pair], drawn: list[Seed]
) -> None:
    for seed in drawn:
        assert not applies(pairs[seed.pair], seed.served, seed.ranks)
        assert seed.faults != ("X3",) or seed.serving.fixed_window
        assert seed.faults != ("X4",) or seed.serving.topk > 1
        assert seed.faults != ("T2",) or seed.serving.chunk
        assert seed.faults not in (("X1",), ("M3",)) or seed.serving.concurrency > 2


def test_few_repairs_are_shared_by_all_faults_of_a_pair(drawn: list[Seed]) -> None:
    for number in range(1, 5):
        of_toy = [seed for seed in drawn if (seed.pair, seed.number) == ("toy", number)]
        assert len({(seed.serving, seed.dtype, seed.ranks) for seed in of_toy}) <= 16 < len(of_toy)


def test_a_theta_is_spoilt_by_a_factor_that_is_on_no_grid(pairs: dict[str, Pair]) -> None:
    thetas = set()
    for number in range(20):
        [option, _] = [one for one in options(pairs["toy"], "R3", random.Random(number)) if "times" in one.variant]
        assert option.edit
        config = option.edit.apply(edits.read(pairs["toy"].draft)).config
        factor = config["rope_theta"] / 500.0
        assert 1.599 < max(factor, 1 / factor) < 3.001
        thetas.add(config["rope_theta"])
    assert len(thetas) == 20 and min(thetas) < 500 < max(thetas)


def test_no_drawn_wiring_is_the_one_that_is_right(pairs: dict[str, Pair]) -> None:
    for pair in pairs.values():
        right = read_draft(pair.draft).wiring
        assert right
        for id in ("W1", "W2", "W3", "W4", "W5", "W6"):
            for option in options(pair, id, random.Random(5)):
                if option.edit:
                    config = option.edit.apply(edits.read(pair.draft)).config
                    assert config.get("eagle_aux_hidden_state_layer_ids") != list(right.boundaries)


def test_quick_has_every_id_once_and_few_runs(pairs: dict[str, Pair]) -> None:
    few = plan([1], list(pairs.values()), few=True)
    single = [seed.faults[0] for seed in few if len(seed.faults) == 1]
    assert sorted(single) == sorted(IDS)
    assert 8 <= sum(not seed.faults for seed in few) <= 12
    whole = {seed.name: seed for seed in plan([1], list(pairs.values()), few=False)}
    assert all(len(seed.prompts) < len(whole[seed.name].prompts) for seed in few)
    assert quick([seed for seed in whole.values() if seed.faults == ("W3",)])


def test_runs_are_chosen_by_id_or_by_name(pairs: dict[str, Pair]) -> None:
    found = plan([1], [pairs["toy"]], few=False)
    assert {seed.faults for seed in chosen(found, ["W3"])} == {("W3",), ("W3", "N3"), ("W3", "R1")}
    assert {seed.variant for seed in chosen(found, ["longer context"])} == {"longer context"}
    assert chosen(found, []) == found


# Edits


def flipped(folder: Path, edit: edits.Edit, out: Path) -> Any:
    return read_draft(edits.write(edit.apply(edits.read(folder)), out))


def test_edits_of_a_deep_draft_are_read_as_they_are_meant(pairs: dict[str, Pair], tmp_path: Path) -> None:
    """Weights that are changed leave the reading as it is."""
    for name, context in (("toy_deep", 64), ("fitted_deep", 32)):
        folder = pairs[name].draft
        right = read_draft(folder).spec
        assert right.context == context and isinstance(right.attention, GqaSpec)
        wanted = {
            "P7": replace(right, attention=replace(right.attention, qkv_bias=False)),
            "A2": replace(right, windows=(None, None)),
            "A1": replace(right, embedding_scale=1.0),
        }
        for id in ("N4", "P5", "P6", "P7", "A1", "A2"):
            found = [option for option in options(pairs[name], id, random.Random(1)) if option.edit]
            assert found
            for number, option in enumerate(found):
                assert option.edit
                read = flipped(folder, option.edit, tmp_path / f"{name}-{id}-{number}")
                weighs = option.variant.endswith("the target's")
                assert read.spec == (right if weighs else wanted.get(id, right))
                assert not read.report.missing_tensors


def test_edits_of_the_config_are_read_as_they_are_meant(pairs: dict[str, Pair], tmp_path: Path) -> None:
    folder = pairs["toy"].draft
    right = read_draft(folder).spec
    wanted = {
        "N1": replace(right, residual=Stream.PRE_NORM),
        "N3": replace(right, feedback=Stream.PRE_NORM),
        "N2": replace(right, fuse_norm=FuseNorm.NONE),
        "R5": replace(right, rope=replace(right.rope, interleaved=False)),
    }
    for id, spec in wanted.items():
        for option in options(pairs["toy"], id, random.Random(1)):
            if option.edit:
                assert flipped(folder, option.edit, tmp_path / id / option.kind).spec == spec
    dropped = flipped(folder, edits.Edit("", edits.drop_scaling), tmp_path / "R4").spec
    assert dropped.rope.kind is RopeKind.DEFAULT and dropped.rope.theta == right.rope.theta
    lost = flipped(folder, edits.Edit("", lambda draft: edits.set_theta(draft, None)), tmp_path / "R3").spec
    assert lost.rope.theta == 10_000


def test_edits_of_the_wiring_keep_both_keys_in_step(tmp_path: Path) -> None:
    folder = Path(__file__).resolve().parents[1] / "models" / "smollm2" / "draft"
    moved = flipped(folder, edits.Edit("", lambda draft: edits.rewire(draft, (3, 16, 27))), tmp_path / "a")
    assert moved.wiring.boundaries == (3, 16, 27) and not moved.report.unread_fields
    assert flipped(folder, edits.Edit("", edits.forget_wiring), tmp_path / "b").wiring is None
    other = flipped(folder, edits.Edit("", edits.output_ids), tmp_path / "c")
    assert other.wiring.boundaries == (1, 4, 17)


def test_wirings_do_what_their_faults_say() -> None:
    assert edits.early((0, 3, 16)) == (0, 2, 15)
    assert edits.late((0, 3, 30), 30, by=2) == (2, 5, 30)
    assert edits.lose_first((0, 3, 16), 30) == (3, 16, 27)
    assert edits.first_twice((0, 3, 16)) == (0, 0, 3)
    assert edits.move_slot((0, 3, 16), 1, -1) == (0, 2, 16)


def test_a_broken_table_still_names_tokens_of_the_vocabulary(pairs: dict[str, Pair]) -> None:
    draft = edits.read(pairs["toy"].draft)
    rows = torch.arange(len(draft.tensors["d2t"]))
    right = rows + draft.tensors["d2t"]
    for broken in (tensors.zero_d2t(draft), tensors.roll_d2t(draft), tensors.stale_d2t(draft, 3)):
        tokens = rows + broken.tensors["d2t"]
        assert not torch.equal(tokens, right)
        assert tokens.min() >= 0 and tokens.max() < draft.config["vocab_size"]


def test_edits_of_tensors_touch_what_they_say_and_nothing_else(pairs: dict[str, Pair]) -> None:
    draft = edits.read(pairs["toy"].draft)

    def touched(other: edits.Draft) -> set[str]:
        assert other.config == draft.config
        return {name for name in draft.tensors if not torch.equal(draft.tensors[name], other.tensors[name])}

    assert touched(tensors.swap_gate_and_up(draft)) == {
        "midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight"
    }  # fmt: skip
    assert touched(tensors.reinitialise(draft, "fc", 1)) == {"fc.weight"}
    assert touched(tensors.reinitialise(draft, "norm", 1)) == {"midlayer.hidden_norm.weight"}
    assert touched(tensors.random_embedding(draft, 1)) == {"embed_tokens.weight"}
    assert touched(tensors.target_head(draft, torch.ones(128, 80))) == {"lm_head.weight"}
    assert all(draft.tensors[name].ndim == 2 for name in touched(tensors.noisy(draft, 0.1, 1)))


def test_edits_of_a_deep_drafts_tensors_touch_what_they_say_and_nothing_else(pairs: dict[str, Pair]) -> None:
    draft = edits.read(pairs["fitted_deep"].draft)

    def touched(other: edits.Draft) -> set[str]:
        held = [{name: tensor for name, tensor in one.tensors.items()} for one in (draft, other)]
        assert held[1].keys() <= held[0].keys()
        return {name for name, old in held[0].items() if name not in held[1] or not torch.equal(old, held[1][name])}

    first, later = "midlayer.self_attn", "layers.1.self_attn"
    assert touched(tensors.lose_bias(draft)) == {f"{at}.{x}_proj.bias" for at in (first, later) for x in "qkv"}
    rows = {f"{at}.{x}_proj.{kind}" for at in (first, later) for x in "qk" for kind in ("weight", "bias")}
    assert touched(tensors.reorder_rows(draft)) == rows
    assert touched(tensors.target_embedding(draft, torch.ones(96, 48))) == {"embed_tokens.weight"}
    plain, first_one = tensors.later_norms(draft, "plain"), tensors.later_norms(draft, "first")
    assert touched(plain) == touched(first_one) == {name := "layers.1.input_layernorm.weight"}
    assert (plain.tensors[name] == 0).all()  # these norms multiply by 1 + weight
    assert torch.equal(first_one.tensors[name], draft.tensors["midlayer.hidden_norm.weight"])
    by = [(tensors.moved(draft, 1).tensors[name] / value - 1).float().std() for name, value in draft.tensors.items()
          if value.is_floating_point() and value.numel() > 500]  # fmt: skip
    assert by and all(float(one) == pytest.approx(0.1, rel=0.2) for one in by)


@pytest.mark.parametrize("name", ["toy", "toy_gqa"])
def test_rows_are_reordered_as_the_engine_reorders_them(name: str, pairs: dict[str, Pair], tmp_path: Path) -> None:
    pair = pairs[name]
    reordered = flipped(pair.draft, edits.Edit("", tensors.reorder_rows), tmp_path / "made")
    right, breaks = read_draft(pair.draft), FAULTS["P5"].breaks
    assert isinstance(breaks, Drafting) and breaks.weights
    wanted = {**right.tensors, **breaks.weights(right.tensors, Source(right.spec, pair.target))}
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in reordered.tensors.items())


def test_a_draft_in_eight_bits_is_read_as_it_was_but_for_rounding_and_without_scales_as_the_engine_takes_it(
    pairs: dict[str, Pair], tmp_path: Path
) -> None:
    for name, source in (("toy_fp8", "toy/gqa"), ("fitted_fp8", "fitted/quiet")):
        pair, breaks = pairs[name], FAULTS["P8"].breaks
        right = read_draft(Path(__file__).resolve().parents[1] / "models" / source)
        eight = read_draft(pair.draft)
        assert eight.spec == right.spec and len(eight.scales) == 8 and pair.quantised
        for tensor, value in right.tensors.items():
            error = (eight.tensors[tensor].float() - value.float()).abs()
            assert (error <= (value.float().abs() / 16).maximum(value.float().abs().amax() / 2**9)).all(), tensor
        raw = flipped(pair.draft, edits.Edit("", tensors.lose_scales), tmp_path / name)
        assert isinstance(breaks, Drafting) and breaks.weights and not raw.scales
        stored = breaks.weights(eight.tensors, Source(eight.spec, pair.target, eight.scales))
        assert stored.keys() == eight.scales.keys()
        assert all(torch.equal(raw.tensors[tensor].float(), value) for tensor, value in stored.items())


# Scores


def test_a_cause_names_a_fault_by_its_id_or_by_one_it_cannot_be_told_from() -> None:
    run = score(a_seed("N3"), a_diagnosis(a_cause("W1"), a_cause("N1", alike=("N3",))), real=Real(2.0), seconds=1.0)
    assert (run.named, run.rank, run.predicted, run.error) == ("W1", 2, 2.0, 0.0)
    assert run.reason.startswith("W1 named")
    assert score(a_seed("N3"), a_diagnosis(a_cause("W1")), real=Real(2.0), seconds=1.0).rank is None
    assert score(a_seed("W1", alike=("W3",)), a_diagnosis(a_cause("W3")), real=Real(2.0), seconds=1.0).rank == 1


def test_where_several_causes_name_a_fault_the_repair_of_all_is_what_was_foretold() -> None:
    found = a_diagnosis(a_cause("W1", predicted=1.8), a_cause("W1", predicted=1.9))
    assert score(a_seed("W1"), found, real=Real(3.0), seconds=1.0).predicted == 3.0


def an_edit(id: str, folder: Path, *lines: str) -> Cause:
    """A cause whose command edits the config `c` of a folder, as a diagnosis writes it."""
    code = ("import json, pathlib", f"p = pathlib.Path('{folder}/config.json')", "c = json.loads(p.read_text())")
    text = "\n".join((*code, *lines, "p.write_text(json.dumps(c, indent=2))"))
    return replace(a_cause(id), command=f'python -c "\n{text}"')


def spoilt(pair: Pair, folder: Path, edit: Any) -> Path:
    return edits.write(edit(edits.read(pair.draft)), folder)


def test_an_edit_mends_a_config_if_the_folder_reads_as_the_right_one_once_it_is_made(
    pairs: dict[str, Pair], tmp_path: Path
) -> None:
    toy = pairs["toy"]
    ids = "eagle_aux_hidden_state_layer_ids"
    wrong = spoilt(toy, tmp_path / "w", lambda draft: edits.rewire(draft, (0, 3, 5)))
    before = (wrong / "config.json").read_text("utf-8")
    assert is_misread(wrong, toy.draft) and not is_misread(toy.draft, toy.draft)
    assert mends(an_edit("W2", wrong, f"c['{ids}'] = [0, 3, 4]"), wrong, toy.draft)
    assert not mends(an_edit("W2", wrong, f"c['{ids}'] = [0, 3, 5]"), wrong, toy.draft)
    assert not mends(an_edit("W2", wrong, f"c['{ids}'] = [0, 3, 4]; c['norm_output'] = False"), wrong, toy.draft)
    assert not mends(an_edit("W2", wrong, f"c['{ids}'] = []"), wrong, toy.draft)
    assert not mends(an_edit("W2", wrong, "raise ValueError"), wrong, toy.draft)
    assert (wrong / "config.json").read_text("utf-8") == before


def test_an_edit_of_another_folder_or_in_words_alone_mends_nothing(pairs: dict[str, Pair], tmp_path: Path) -> None:
    toy, lines = pairs["toy"], ("c['norm_output'] = True",)
    wrong = spoilt(toy, tmp_path / "draft-1", lambda draft: edits.flip(draft, "norm_output"))
    other = edits.write(edits.read(wrong), tmp_path / "draft-11")
    assert mends(an_edit("N3", wrong, *lines), wrong, toy.draft)
    assert (
        not mends(an_edit("N3", other, *lines), wrong, toy.draft) and edits.read(other).config["norm_output"] is False
    )
    for command in ("", f"touch {wrong}/served", f"spectrace run --draft {wrong}/"):
        assert not mends(replace(a_cause("N3"), fix="set norm_output to true", command=command), wrong, toy.draft)
    assert not (wrong / "served").exists()


def test_a_theta_mends_with_the_right_number_alone(pairs: dict[str, Pair], tmp_path: Path) -> None:
    toy = pairs["toy"]
    wrong = spoilt(toy, tmp_path / "w", lambda draft: edits.set_theta(draft, 50.0))
    for theta, right in (("500.0", True), ("500.0000001", True), ("5000.0", False), ("501.0", False)):
        assert mends(an_edit("R3", wrong, f"c['rope_theta'] = {theta}"), wrong, toy.draft) == right


@pytest.mark.parametrize("kind", ["config", "conversion"])
def test_every_config_that_can_be_spoilt_is_mended_by_putting_back_what_it_held(
    kind: str, pairs: dict[str, Pair], tmp_path: Path
) -> None:
    checked = set()
    for pair in pairs.values():
        right = edits.read(pair.draft).config
        lines = ["c.clear()", *(f"c[{name!r}] = {value!r}" for name, value in right.items())]
        for id in IDS:
            for number, option in enumerate(options(pair, id, random.Random(2))):
                kept = id not in checked and option.variant != "norm's weights gone"
                if option.edit and option.kind == kind and kept:
                    wrong = spoilt(pair, tmp_path / f"{pair.name}-{id}-{number}", option.edit.apply)
                    if is_misread(wrong, pair.draft):
                        checked.add(id)
                        assert mends(an_edit(id, wrong, *lines), wrong, pair.draft)
    assert checked >= {"W1", "W2", "W3", "W4", "W5", "W6", "N1", "N2", "N3", "R3", "R5"}
    assert "R4" in checked or kind == "config"


def test_the_edit_is_judged_of_the_cause_that_names_the_fault() -> None:
    def judge(cause: Cause) -> bool:
        return cause.fix == "edit for N3"

    def right(*causes: Cause) -> bool | None:
        seed = a_seed("N3", kind="config")
        return score(seed, a_diagnosis(*causes), real=Real(2.0), seconds=1.0, is_mended=judge).edit_right

    assert right(a_cause("W1"), a_cause("N3")) is True
    assert right(a_cause("N1", alike=("N3",)), a_cause("N3")) is False
    assert right(a_cause("W1")) is right() is False
    assert score(a_seed("N3"), a_diagnosis(a_cause("N3")), real=Real(2.0), seconds=1.0).edit_right is None
    named = score(a_seed("N3"), a_diagnosis(a_cause("W1"), a_cause("N3")), real=Real(2.0), seconds=1.0, is_mended=judge)
    assert (named.named, named.fix) == ("W1", "edit for N3")


def test_a_cause_that_is_not_there_counts_beside_the_right_one_too() -> None:
    found = a_diagnosis(a_cause("N3"), a_cause("K1"), a_cause("N1", alike=("N3",)), a_cause("Q4"))
    run = score(a_seed("N3"), found, real=Real(2.0), seconds=1.0)
    assert (run.rank, run.wrong, run.others) == (1, False, ("K1", "Q4"))
    assert score(a_seed("W1", alike=("W3",)), a_diagnosis(a_cause("W3")), real=Real(2.0), seconds=1.0).others == ()
    both = score(a_seed("W3", "N3"), a_diagnosis(*map(a_cause, ("M1", "N3", "W3"))), real=Real(2.0), seconds=1.0)
    assert (both.rank, both.others) == (3, ("M1",))
    fine = score(a_seed("N1"), a_diagnosis(a_cause("N1")), real=Real(2.0), seconds=1.0)
    found = totals([run, both, fine])
    assert (found["false_causes"], found["scored"], found["stacked"]["false_causes"]) == (1, 2, 1)
    page = render(json.loads(json.dumps(document([run, both, fine], command="", secs=0.0))))
    assert "| runs with a cause named that is not there | 1 of 2 |" in page
    listed = page.partition("## Causes that are not there")[2].partition("##")[0]
    assert "| 1 | K1, Q4 |" in listed and "| 3 | M1 |" in listed and listed.count("\n| ") == 3


def test_of_several_faults_each_needs_a_cause_of_its_own() -> None:
    seed, one_for_both = a_seed("W3", "N3"), a_cause("W3", alike=("N3",))
    run = score(seed, a_diagnosis(one_for_both), real=Real(2.0), seconds=1.0)
    assert (run.rank, run.ranks, run.wrong) == (None, {"W3": 1, "N3": None}, True)
    for causes, ranks in (
        ((one_for_both, a_cause("N3")), {"W3": 1, "N3": 2}),
        ((a_cause("M1", alike=("W3", "N3")), a_cause("W3")), {"W3": 2, "N3": 1}),
        ((a_cause("N3", alike=("W3",)), a_cause("W3", alike=("N3",))), {"W3": 2, "N3": 1}),
        ((a_cause("M1", alike=("N3",)), a_cause("N3")), {"W3": None, "N3": 1}),
        ((), {"W3": None, "N3": None}),
    ):
        assert score(seed, a_diagnosis(*causes), real=Real(2.0), seconds=1.0).ranks == ranks


def test_predictions_are_due_exactly_where_nothing_is_drawn_or_rounded_and_missing_ones_are_counted() -> None:
    def told(value: float | None, *, dtype: str = "float32", **sampling: Any) -> Run:
        seed = replace(a_seed("W1"), dtype=dtype, serving=Serving(sampling=Sampling(**sampling)))
        return score(seed, a_diagnosis(a_cause("W1", predicted=value)), real=Real(2.0), seconds=1.0)

    runs = [told(2.0), told(2.05), told(None), told(None, temperature=1.0), told(2.2, temperature=1.0)]
    runs += [told(2.0, dtype="bfloat16"), told(2.04, temperature=1.0, sampled_drafts=True)]
    missed = score(a_seed("W1"), a_diagnosis(a_cause("N3", predicted=None)), real=Real(2.0), seconds=1.0)
    found = totals([*runs, missed])["predictions"]
    assert found["greedy"] == {"compared": 2, "exact": 1, "within_0.10": 2, "max_error": 0.05}
    assert found["other"] == {"compared": 3, "exact": 1, "within_0.10": 2, "max_error": 0.2}
    assert (found["compared"], found["not_foretold"]) == (5, 2)
    page = render(json.loads(json.dumps(document(runs, command="", secs=0.0))))
    assert "greedy float32 | exactly in 1 of 2, within 0.10 in 2; largest error 0.050 |" in page
    assert "in bfloat16 | exactly in 1 of 3, within 0.10 in 2; largest error 0.200 |" in page
    assert "| named, and not foretold | 2 |" in page


def test_of_several_faults_all_have_to_be_named_and_the_last_place_counts() -> None:
    seed, each = a_seed("W3", "N3"), {"W3": 2.1, "N3": 1.2}
    both = score(seed, a_diagnosis(a_cause("N3"), a_cause("W3")), real=Real(3.0, each), seconds=1.0)
    assert (both.rank, both.ranks, both.predicted, both.error) == (2, {"W3": 2, "N3": 1}, 3.0, 0.0)
    assert both.each == {"W3": (2.0, 2.1), "N3": (2.0, 1.2)}
    one = score(seed, a_diagnosis(a_cause("W3")), real=Real(3.0, each), seconds=1.0)
    assert (one.rank, one.error) == (None, None)


@pytest.mark.parametrize("verdict", [Verdict.FAULT, Verdict.ENGINE_STATE])
def test_naming_anything_on_a_clean_run_is_a_false_alarm(verdict: Verdict) -> None:
    clean_seed = a_seed(kind="clean")
    assert score(clean_seed, a_diagnosis(verdict=verdict), real=Real(2.0), seconds=1.0).false_alarm
    assert score(
        clean_seed, a_diagnosis(a_cause("W1"), verdict=Verdict.HEALTHY), real=Real(2.0), seconds=1.0
    ).false_alarm
    for fine in (Verdict.HEALTHY, Verdict.WEAK_DRAFT, Verdict.OTHER_DATA, Verdict.INSUFFICIENT):
        assert not score(clean_seed, a_diagnosis(verdict=fine), real=Real(2.0), seconds=1.0).false_alarm


def test_a_run_is_wrong_in_one_sense_on_the_page_and_in_the_totals() -> None:
    clean_seed = a_seed(kind="clean")
    fine = score(clean_seed, a_diagnosis(verdict=Verdict.INSUFFICIENT), real=Real(2.0), seconds=1.0)
    alarm = score(clean_seed, a_diagnosis(a_cause("W1")), real=Real(2.0), seconds=1.0)
    raised = failed(clean_seed, ValueError("no row"), while_="diagnosing", scored=True)
    unserved = failed(clean_seed, ValueError("no Ray"), while_="serving", scored=False)
    assert [run.wrong for run in (fine, alarm, raised, unserved)] == [False, True, True, False]
    found = totals([fine, alarm, raised, unserved])
    assert (found["clean"], found["false_alarms"], found["clean_undecided"], found["errors"]) == (3, 1, 1, 2)
    page = render(json.loads(json.dumps(document([fine, alarm, raised, unserved], command="", secs=0.0))))
    missed = page.partition("## Missed")[2].partition("##")[0]
    assert "W1 named" in missed and "no row" in missed and "no Ray" not in missed
    assert "| clean runs undecided | 1 of 3 |" in page


def some_runs() -> list[Run]:
    right, second = a_diagnosis(a_cause("W1")), a_diagnosis(a_cause("N3"), a_cause("W2", predicted=2.05))
    return [
        score(a_seed("W1"), right, real=Real(2.0), seconds=3.0),
        score(a_seed("W2"), second, real=Real(2.0), seconds=3.0),
        score(a_seed("N1"), a_diagnosis(verdict=Verdict.HEALTHY), real=Real(2.0), seconds=3.0),
        unscored(a_seed("N2"), "changes no feature, no position and no token", real=2.0, served=2.0),
        failed(a_seed("N3"), ValueError("a | bar\nand more"), while_="diagnosing", scored=True),
        score(a_seed("W3", "N3"), a_diagnosis(a_cause("W3"), a_cause("N3")), real=Real(3.0), seconds=3.0),
        score(a_seed(kind="clean"), a_diagnosis(verdict=Verdict.HEALTHY), real=Real(2.0), seconds=3.0),
        score(a_seed(kind="clean"), right, real=Real(2.0), seconds=3.0),
    ]


def test_totals_count_what_was_scored_and_keep_clean_and_stacked_apart() -> None:
    found = totals(some_runs())
    assert (found["faults"], found["scored"], found["unscored_share"]) == (5, 4, 0.2)
    assert (found["first"], found["first_share"], found["top3"]) == (1, 0.25, 2)
    assert (found["clean"], found["false_alarms"], found["errors"]) == (2, 1, 1)
    assert found["predictions"]["compared"] == found["predictions"]["within_0.10"] == 2
    assert (found["stacked"]["all_named"], found["stacked"]["scored"]) == (1, 1)
    assert found["by_id"]["N2"] == {"scored": 0, "unscored": 1, "first": 0, "top3": 0, "pairs": []}
    assert totals([])["first_share"] is None


def test_the_page_says_what_was_missed_and_why_from_the_json_alone() -> None:
    found = json.loads(json.dumps(document(some_runs(), command="make scoreboard", secs=12.3)))
    page = render(found)
    missed, left = page.partition("## Missed")[2].split("## Not scored")
    assert "N3 named: evidence" in missed and "healthy, nothing named: a note" in missed
    assert "diagnosing: ValueError: a \\| bar |" in missed
    assert "changes no feature" in left and "changes no feature" not in missed
    assert "| cause named first | 1 of 4 (25.0 %) |" in page
    assert "| W1 | 1/1 |" in page and "| N1 | 0/1 |" in page and "| N2 | not scored |" in page
    assert "**fault: W1**" in page.partition("## Clean runs")[2]
    assert render(json.loads(json.dumps(document([], command="make scoreboard", secs=0.0))))


def test_a_run_holds_what_others_read() -> None:
    run = some_runs()[0].to_json()
    assert run.keys() >= {"fault", "pair", "seed", "named", "rank", "predicted", "real", "seconds", "scored"}
    assert [run.to_json()["fault"] for run in some_runs()[-3:]] == [["W3", "N3"], None, None]


# Blindness


class FakeStage(Stage):
    """Records nothing: every run comes to what it was told."""

    def __init__(self, folder: Path, *, repaired: Recorded) -> None:
        super().__init__(folder)
        self.answer = repaired

    def record(self, seed: Seed, pair: Pair, **_: Any) -> Path:
        trace = self.folder / "trace-1"
        trace.mkdir()
        return trace

    def repaired(self, seed: Seed, pair: Pair, **_: Any) -> Recorded:
        return self.answer


def judged(
    monkeypatch: pytest.MonkeyPatch, folder: Path, seed: Seed, pair: Pair, recorded: Recorded, found: Any
) -> tuple[Run, list[Any]]:
    asked: list[Any] = []

    def diagnose(*given: Any) -> Diagnosis:
        asked.append(given)
        if isinstance(found, Exception):
            raise found
        return found  # type: ignore[no-any-return]

    monkeypatch.setattr("scoreboard.judge.read", lambda _trace: recorded)
    monkeypatch.setattr("scoreboard.judge.Trace.open", lambda trace: trace)
    stage = FakeStage(folder, repaired=Recorded(3.0, {"received": [(1,)]}))
    return Judge(stage, diagnose).run(seed, pair), asked


def test_a_diagnosis_is_given_the_believed_draft_and_no_hint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pairs: dict[str, Pair]
) -> None:
    toy, served = pairs["toy"], Recorded(1.5, {"received": [(2,)]})
    by_kind = {seed.kind: seed for seed in draw(1, toy) if seed.faults == ("W3",)}
    for kind, seed in by_kind.items():
        (tmp_path / kind).mkdir()
        run, [given] = judged(monkeypatch, tmp_path / kind, seed, toy, served, a_diagnosis(a_cause("W3")))
        trace, checkpoint, target = given
        assert (run.rank, run.real, run.scored) == (1, 3.0, True)
        assert target == toy.target and trace.name == "trace-1" and not trace.exists()
        assert (checkpoint.folder == toy.draft) == (kind != "config")
        assert checkpoint.wiring.boundaries == ((3, 4, 2) if kind == "config" else (0, 3, 4))
        assert "W3" not in str(checkpoint.folder)


def test_a_seed_that_changes_nothing_is_not_scored_nor_diagnosed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pairs: dict[str, Pair]
) -> None:
    same = Recorded(3.0, {"received": [(1,)]})
    run, asked = judged(monkeypatch, tmp_path, a_seed("N1"), pairs["toy"], same, a_diagnosis())
    assert (run.scored, run.reason, asked) == (False, "changes no feature, no position and no token", [])


def test_a_fault_that_hides_behind_another_is_not_scored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pairs: dict[str, Pair]
) -> None:
    served = Recorded(1.0, {"received": [(7,)]})
    seed = a_seed("W3", "M3")
    monkeypatch.setattr(
        FakeStage, "repaired", lambda self, seed, pair, left=(): served if left == ("M3",) else self.answer
    )
    run, asked = judged(monkeypatch, tmp_path, seed, pairs["toy"], served, a_diagnosis())
    assert (run.scored, run.reason, asked) == (False, "W3 is masked: without it the same is recorded", [])


def test_a_diagnosis_that_raises_is_a_miss_and_not_a_crash(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pairs: dict[str, Pair]
) -> None:
    served = Recorded(1.5, {"received": [(2,)]})
    run, _ = judged(monkeypatch, tmp_path, a_seed("N1"), pairs["toy"], served, ValueError("no such row"))
    assert (run.scored, run.rank, run.verdict) == (True, None, "error")
    assert run.reason == "diagnosing: ValueError: no such row"


def test_the_real_repair_at_a_temperature_is_the_mean_over_several_draws(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pairs: dict[str, Pair]
) -> None:
    served: list[int] = []

    def repaired(self: FakeStage, seed: Seed, pair: Pair, left: tuple[str, ...] = ()) -> Recorded:
        served.append(seed.serving.sampling.seed)
        return Recorded(2.0 + len(set(served)), {"received": [(1,)]})

    monkeypatch.setattr(FakeStage, "repaired", repaired)
    warm = replace(a_seed("N1"), serving=Serving(sampling=Sampling(1.0, 70)))
    few = replace(pairs["toy"], draws=0)
    for seed, pair, draws, mean in ((warm, pairs["toy"], 4, 4.5), (a_seed("N1"), few, 1, 3.0), (warm, few, 0, None)):
        served.clear()
        (folder := tmp_path / str(draws)).mkdir()
        other = Recorded(1.0, {"received": [(2,)]})
        run, _ = judged(monkeypatch, folder, seed, pair, other, a_diagnosis(a_cause("N1")))
        assert (run.real, run.real_runs, len(set(served))) == (mean, draws, max(draws, 1))
        assert seed.serving.sampling.seed in served and (run.error is None) == (not draws)
    page = render(json.loads(json.dumps(document([replace(run, real=3.0, real_runs=4)], command="", secs=0.0))))
    assert "| N1 v | 1 | 1.500 | 2.000 | 3.000 (4) |" in page


def test_the_edit_that_a_diagnosis_prints_is_tried_on_the_folder_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pairs: dict[str, Pair]
) -> None:
    toy, served = pairs["toy"], Recorded(1.5, {"received": [(2,)]})
    flip = edits.Edit("norm_output flipped", lambda draft: edits.flip(draft, "norm_output"))
    for kind in ("config", "conversion"):
        seed = replace(a_seed("N3", kind=kind), edit=flip)
        (folder := tmp_path / kind).mkdir()
        cause = an_edit("N3", folder / "draft-0", "c['norm_output'] = True")
        assert judged(monkeypatch, folder, seed, toy, served, a_diagnosis(cause))[0].edit_right is True
        (folder := tmp_path / f"{kind} again").mkdir()
        assert judged(monkeypatch, folder, seed, toy, served, a_diagnosis(a_cause("N3")))[0].edit_right is False
    for seed in (a_seed("N3"), replace(a_seed("P4", kind="config"), edit=edits.Edit("", tensors.swap_gate_and_up))):
        (folder := tmp_path / seed.faults[0]).mkdir()
        assert judged(monkeypatch, folder, seed, toy, served, a_diagnosis(a_cause("N3")))[0].edit_right is None


# With less in the trace


PROMPT, REQUESTS = 9, 10


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten requests with prompts of nine tokens, each row of which is emitted, received and drafted from."""
    folder = tmp_path_factory.mktemp("thin") / "trace"
    create_trace(folder, {"dtype": "float32"})
    with (
        Recorder(folder, role="target", strict=True) as target,
        Recorder(folder, role="draft", strict=True) as draft,
    ):
        for request in range(REQUESTS):
            at: dict[str, Any] = {"request": request, "pass_": 0, "position": np.arange(PROMPT)}
            features = torch.full((PROMPT, 8), float(request)) + torch.arange(PROMPT)[:, None]
            target.emitted(Keys(**at), token=[1] * PROMPT, slots=features, slot_width=4)
            draft.received(Keys(**at), token=[1] * PROMPT, features=features, slot_width=4)
            draft.drafted(Keys(**at), token=[1] * PROMPT)
            deeper = Keys(request=request, pass_=0, position=[1], node=[0], depth=1)
            draft.received(deeper, token=[1], state=torch.zeros(1, 4), parent=[8])
            target.requests(
                Keys(request=request, pass_=0, position=0, node=0),
                id=str(request), prompt_tokens=[[1] * PROMPT], output_tokens=[[7, 8]], cached_prefix=0,
                temperature=0.0, finish_reason="stop", rounds=0, correct_drafts=0, depth_limit=2,
            )  # fmt: skip
    return folder


def through(folder: Path, name: str) -> ThinTrace:
    [view] = [view for view in views(Trace.open(folder), a_seed("N1")) if view.name == name]
    return ThinTrace(folder, view)


@pytest.mark.parametrize(("percent", "left"), [(50, 5), (20, 2), (5, 1)])
def test_a_share_of_the_requests_is_whole_and_says_nothing_of_the_others(
    percent: int, left: int, recorded: Path
) -> None:
    trace = through(recorded, f"{percent} % of requests")
    requests = np.unique(trace.rows("requests")["request"])
    assert len(requests) == left
    for family, rows in (("emitted", PROMPT), ("received", PROMPT + 1), ("drafted", PROMPT)):
        assert np.array_equal(np.unique(trace.rows(family)["request"]), requests)
        assert trace.account()[family].expected == len(trace.rows(family)) == rows * left
    held = trace.rows("received", depth=0)
    first = held["request"][:, None] + held["position"][:, None].astype(np.float32)
    assert (held.tensor("features").numpy() == first).all()
    assert trace.account().lost == 0 and Trace.open(recorded).account()["emitted"].recorded == PROMPT * REQUESTS


def test_a_cut_prefix_is_missing_from_the_drafts_rows_of_text_alone(recorded: Path) -> None:
    for name, requests in (("prefixes cut", REQUESTS), ("half of the prefixes cut", REQUESTS // 2)):
        trace = through(recorded, name)
        cut = np.unique(trace.rows("requests")["request"][: len(trace.view.cut)])
        assert len(cut) == len(trace.view.cut) == requests
        for request in range(REQUESTS):
            first = PROMPT // 3 if request in trace.view.cut else 0
            for family in ("received", "drafted"):
                positions = trace.rows(family, request=request, depth=0)["position"]
                assert positions.tolist() == list(range(first, PROMPT))
            assert len(trace.rows("received", request=request, depth=1)) == 1
            assert len(trace.rows("emitted", request=request)) == PROMPT


def test_which_requests_are_left_hangs_on_the_seed_alone(recorded: Path) -> None:
    def drawn(seed: Seed) -> list[frozenset[int]]:
        return [view.requests for view in views(Trace.open(recorded), seed)]

    assert drawn(a_seed("N1")) == drawn(a_seed("N1")) != drawn(a_seed("N3"))


def test_recorded_facts_are_seen_as_the_trace_is(recorded: Path) -> None:
    whole = read_recorded(recorded).facts
    for view in views(Trace.open(recorded), a_seed("N1")):
        trace = ThinTrace(recorded, view)
        for family, facts in seen(view, whole).items():
            rows = trace.rows(family)
            columns = [rows[name].tolist() for name in ("request", "pass", "depth", "node", "position")]
            assert sorted(zip(*columns, strict=True)) == sorted(fact[1:6] for fact in facts)


def test_what_is_said_of_less_is_right_undecided_silent_or_wrong() -> None:
    def came(seed: Seed, *causes: Cause, verdict: Verdict = Verdict.FAULT, sign: bool = True) -> str:
        return thinned(seed, a_diagnosis(*causes, verdict=verdict), sign=sign).outcome

    n3, both, fine = a_seed("N3"), a_seed("W3", "N3"), a_seed(kind="clean")
    assert came(n3, a_cause("N3")) == came(n3, a_cause("N1", alike=("N3",))) == "right"
    assert came(both, a_cause("N3"), a_cause("W3")) == "right"
    assert came(both, a_cause("N3")) == "in part"
    assert came(n3, a_cause("W1"), a_cause("N3")) == came(both, a_cause("W1")) == "wrong"
    for verdict in (Verdict.INSUFFICIENT, Verdict.ENGINE_STATE):
        assert came(n3, verdict=verdict) == "insufficient"
    for verdict in (Verdict.HEALTHY, Verdict.WEAK_DRAFT, Verdict.OTHER_DATA):
        assert came(n3, verdict=verdict) == "silent"
        assert came(n3, verdict=verdict, sign=False) == "no sign"
        assert came(fine, verdict=verdict) == "right"
    assert came(fine, verdict=Verdict.INSUFFICIENT) == "insufficient"
    assert came(fine, verdict=Verdict.ENGINE_STATE) == came(fine, a_cause("N3")) == "wrong"
    assert thinned(n3, a_diagnosis(a_cause("N3"), a_cause("M1")), sign=True).others == ("M1",)
    assert failed_view(ValueError("no\nrows")).said == "ValueError: no"


def test_views_are_counted_and_all_but_right_ones_are_listed_with_what_was_said_of_the_whole() -> None:
    seed, right, wrong = a_seed("N3"), a_diagnosis(a_cause("N3")), a_diagnosis(a_cause("M1"))
    run = score(seed, right, real=Real(2.0), seconds=1.0)
    assert "thinned" not in run.to_json() and "thin" not in totals([run])
    said = {"prefixes cut": thinned(seed, wrong, sign=True), "no target": thinned(seed, right, sign=True)}
    found = document(
        [replace(run, thinned={view: asdict(one) for view, one in said.items()}), run], command="", secs=0.0
    )
    assert found["totals"]["thin"] == {"prefixes cut": {"wrong": 1}, "no target": {"right": 1}}
    page = render(json.loads(json.dumps(found))).partition("## With less in the trace")[2]
    assert f"| prefixes cut | {' | '.join('01'[one == 'wrong'] for one in OUTCOMES)} |" in page
    assert "| prefixes cut | wrong | M1 (1.00) | N3 | evidence |" in page and page.count("wrong |") == 2


def test_every_view_is_diagnosed_blind_and_without_the_target_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pairs: dict[str, Pair], recorded: Path
) -> None:
    asked: list[Any] = []

    def diagnose(*given: Any) -> Diagnosis:
        asked.append(given)
        return a_diagnosis(verdict=Verdict.HEALTHY)

    monkeypatch.setattr(FakeStage, "record", lambda self, seed, pair, **_: shutil.copytree(recorded, tmp_path / "t"))
    stage = FakeStage(tmp_path, repaired=Recorded(3.0, {"received": []}))
    run = Judge(stage, diagnose, thin=True).run(a_seed("N1"), pairs["toy"])
    assert len(asked) == 1 + len(run.thinned) == 7
    assert [target for _, _, target in asked] == [pairs["toy"].target] * 6 + [None]
    assert {one["outcome"] for one in run.thinned.values()} == {"silent"}


@pytest.mark.parametrize("faults", ["N1", "N1+M1"])
def test_kept_runs_are_diagnosed_again_and_nothing_is_served(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pairs: dict[str, Pair], recorded: Path, faults: str
) -> None:
    ids = tuple(faults.split("+"))
    seed, kept = replace(a_seed("N1"), faults=ids), Kept(tmp_path / "kept", lambda _trace, _found: "a page")
    monkeypatch.setattr(FakeStage, "record", lambda self, seed, pair, **_: shutil.copytree(recorded, tmp_path / "t"))
    stage = FakeStage(tmp_path, repaired=Recorded(3.0, {"received": []}))
    first = Judge(stage, lambda *_: a_diagnosis(verdict=Verdict.HEALTHY), keep=kept).run(seed, pairs["toy"])
    assert first.rank is None and not (tmp_path / "t").exists()
    assert {path.name for path in kept.folder(seed).iterdir()} == {
        "trace", "run.json", "diagnosis.json", "diagnosis.txt"
    }  # fmt: skip

    monkeypatch.setattr(FakeStage, "record", None)
    shown: list[Path] = []

    def diagnose(trace: Trace, *_: Any) -> Diagnosis:
        shown.append(trace.folder)
        return a_diagnosis(*map(a_cause, ids))

    again = Judge(stage, diagnose, again=kept)
    run = again.run(seed, pairs["toy"])
    assert (
        shown[0].parent == tmp_path
        and shown[0].name.startswith("trace-")
        and len(Trace.open(shown[0]).rows("requests"))
    )
    assert (run.rank, run.real, set(run.each)) == (len(ids), 3.0, set(ids) if len(ids) > 1 else set())
    assert (stored := kept.run(seed)) and stored.to_json() == json.loads(json.dumps(first.to_json()))
    other = again.run(replace(seed, number=99), pairs["toy"])
    assert not other.scored and "is not kept" in other.reason


def test_what_was_not_scored_is_not_diagnosed_again(tmp_path: Path, pairs: dict[str, Pair]) -> None:
    seed, kept = a_seed("N1"), Kept(tmp_path, lambda _trace, _found: "a page")
    kept.folder(seed).mkdir()
    kept.put_run(seed, unscored(seed, "changes nothing"))
    stage = FakeStage(tmp_path, repaired=Recorded(3.0, {"received": []}))
    run = Judge(stage, lambda *_: pytest.fail("diagnosed"), again=kept).run(seed, pairs["toy"])
    assert (run.scored, run.reason) == (False, "changes nothing")


def test_no_folder_of_this_machine_is_in_a_score(tmp_path: Path) -> None:
    cause = replace(a_cause("N3"), fix=f"in {tmp_path}/draft/config.json set norm_output (eagle/medusa) to 1/2")
    run = score(a_seed("N3"), a_diagnosis(cause), real=Real(2.0), seconds=1.0)
    assert run.fix == "in .../config.json set norm_output (eagle/medusa) to 1/2"
    lost = failed(a_seed("N3"), UserError(f"{tmp_path / 'trace'}: torn"), while_="diagnosing", scored=True)
    assert lost.reason == "diagnosing: UserError: .../trace: torn"


# The command


def called(*arguments: str) -> Any:
    return CliRunner().invoke(main, arguments)


def test_a_pair_that_does_not_exist_is_named_with_those_that_do() -> None:
    found = called("--pairs", "toy,toi", "--list")
    assert found.exit_code == 2 and "no pair is called toi; there are smollm2, toy," in found.output


@pytest.mark.parametrize(
    ("arguments", "page", "command"),
    [
        (("--pairs", "toy", "--only", "no such"), "build/scoreboard", "--seed 1 --only 'no such' --pairs toy"),
        (("--pairs", "toy", "--only", "none", "--out", "OUT"), "OUT", "--seed 1 --only none --pairs toy"),
        (("--quick", "--level", "full"), "build/scoreboard", "--seed 1 --quick --level full"),
        (("--budget", "60", "--threads", "2", "--seed", "5"), "docs", "--seed 5 --budget 60 --threads 2"),
    ],
)  # fmt: skip
def test_a_board_says_how_to_have_it_again_and_one_that_is_not_whole_stays_out_of_the_docs(
    arguments: tuple[str, ...], page: str, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    pairs: dict[str, Pair],
) -> None:  # fmt: skip
    asked: list[Any] = []
    monkeypatch.setattr("scoreboard.run.make_pairs", lambda _folder, _names: [pairs["toy"]])
    monkeypatch.setattr("scoreboard.run._all", lambda *given: asked.append(given) or [])
    monkeypatch.setattr("scoreboard.run.torch.set_num_threads", lambda _: None)
    monkeypatch.chdir(tmp_path)
    found = called(*arguments)
    assert found.exit_code == 0, found.output
    [(*_, out, said)] = asked
    root = Path(__file__).resolve().parents[1]
    assert out == (Path("OUT") if page == "OUT" else root / page) and said == f'make scoreboard ARGS="{command}"'


def test_nothing_is_started_where_nothing_is_served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("scoreboard.stage.ensure_cluster", lambda _: pytest.fail("started"))
    with Stage(tmp_path):
        pass


def a_board(folder: Path, *pairs: str, options: str = "", secs: float = 7.0, seed: int = 1) -> Path:
    seeds = [*(replace(a_seed("N3"), pair=one, number=seed) for one in pairs)]
    runs = [score(one, a_diagnosis(a_cause("N3")), real=Real(2.0), seconds=1.0) for one in seeds]
    clean = replace(a_seed(kind="clean"), pair=pairs[0], number=seed)
    runs.append(score(clean, a_diagnosis(), real=Real(2.0), seconds=1.0))
    command = f'make scoreboard ARGS="--seed {seed}{options} --pairs {",".join(pairs)}"'
    write(document(runs, command=command, secs=secs), folder)
    return folder


def test_boards_of_different_pairs_become_one(tmp_path: Path) -> None:
    one, rest = a_board(tmp_path / "a", "toy", secs=9.0), a_board(tmp_path / "b", *(p for p in PAIRS if p != "toy"))
    found = merged([rest, one])
    assert found["command"] == 'make scoreboard ARGS="--seed 1"' and found["seconds"] == 9
    assert [run["pair"] for run in found["runs"]] == ["smollm2", "toy", *PAIRS]
    assert (found["totals"]["scored"], found["totals"]["clean"]) == (len(PAIRS), 2)
    assert called("--merge", str(rest), "--merge", str(one), "--out", str(tmp_path / "c")).exit_code == 0
    assert json.loads((tmp_path / "c" / "scoreboard.json").read_text("utf-8")) == json.loads(json.dumps(found))
    assert merged([one, a_board(tmp_path / "d", "fitted")])["command"].endswith('--seed 1 --pairs toy,fitted"')


def test_boards_of_different_seeds_become_one(tmp_path: Path) -> None:
    whole = [a_board(tmp_path / f"{seed}", *PAIRS, seed=seed, options=" --budget 60") for seed in (5, 2)]
    found = merged(whole)
    assert found["command"] == 'make scoreboard ARGS="--seed 2 --seed 5 --budget 60"'
    assert [run["seed"] for run in found["runs"] if run["pair"] == "toy"] == [2, 5]
    few = a_board(tmp_path / "few", "toy", seed=7, options=" --budget 60")
    with pytest.raises(UserError, match="lacks seed 7"):
        merged([*whole, few])


def test_boards_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    one = a_board(tmp_path / "a", "toy")
    other, same = (
        a_board(tmp_path / "b", "analytic", options=" --budget 60"),
        a_board(tmp_path / "c", "toy", "analytic"),
    )
    for folder, said in ((other, "different options"), (same, "pair toy, seed 1 is in"), (tmp_path, "can be read")):
        found = called("--merge", str(one), "--merge", str(folder), "--out", str(tmp_path / "out"))
        assert found.exit_code == 2 and said in " ".join(found.output.split())
    assert not (tmp_path / "out").exists()

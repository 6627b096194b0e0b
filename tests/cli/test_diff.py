"""`spectrace diff` says where two runs part and whether it matters, as a page and as one document."""

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from spectrace.engine.deployment import Deployment, Serving
from spectrace.engine.prompts import read_prompts
from spectrace.tracer.rows import Level

Say = Callable[..., Any]
TOY = Path(__file__).resolve().parents[2] / "models" / "toy"


@pytest.fixture(scope="module")
def traces(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Path]]:
    """`traces(*faults, **changes)`: twelve prompts on the toy pair, at level full."""
    root = tmp_path_factory.mktemp("traces")
    prompts = read_prompts(TOY / "prompts.jsonl", TOY / "target")[:12]
    with Deployment(TOY / "target", TOY / "draft", threads=1) as pair:

        @cache
        def served(*faults: str, **changes: Any) -> Path:
            folder = root / f"run{len(list(root.iterdir()))}"
            usual = {"max_new": 32, "level": Level.FULL, "faults": faults}
            assert not pair.serve(prompts, Serving(**{**usual, **changes}), trace=folder).losses
            return folder

        yield served


def test_a_wrong_wiring_is_named_and_its_cost_is_put_down_to_the_features(spectrace: Say, traces: Any) -> None:
    right, wrong = traces(), traces("W5")
    said = spectrace("diff", right, wrong)
    assert said.code == 1, said.err
    lines = said.out.splitlines()
    assert "DIFFERENT" in lines
    assert "emitted slot 0 at position 0 of request" in said.out
    assert "slot 0 of B is slot 2 of A" in said.out
    assert "comes with features alone" in said.out

    said = spectrace("diff", right, wrong, "--json")
    found = json.loads(said.out)
    assert said.code == 1
    assert (found["equal"], found["within_floor"], found["verdict"]) == (False, False, "different")
    first = found["first_divergence"]
    assert (first["family"], first["slot"], first["position"], first["beyond_floor"]) == ("emitted", 0, 0, True)
    assert set(first["pass"]) == set(first["request"]) == {"a", "b"}
    assert found["decisions"]["attribution"]["culprit"] == "features"
    assert found["decisions"]["tokens_lost"] > 0.5
    assert {"sites", "alignment", "config_differences", "coverage", "bytes_read", "moved"} <= set(found)
    assert found["alignment"]["paired"]["received"] > 100


def test_another_schedule_ends_with_zero_and_a_trace_equals_itself(spectrace: Say, traces: Any) -> None:
    said = spectrace("diff", traces(), traces(concurrency=2, chunk=3), "--json")
    assert said.code == 0, said.err
    assert json.loads(said.out)["within_floor"]
    said = spectrace("diff", traces(), traces(), "--json")
    found = json.loads(said.out)
    assert said.code == 0
    assert found["equal"] and found["first_divergence"] is None
    assert all(site["bit_equal"] == 1 and site["rows"] for site in found["sites"])


def test_the_plan_reads_no_tensor_and_says_why_rows_do_not_pair(spectrace: Say, traces: Any) -> None:
    said = spectrace("diff", traces(), traces("M3"), "--plan")
    assert said.code == 0, said.err
    assert "12 requests pair; 0 only in A, 0 only in B" in said.out
    assert "the other has not drafted this here" in said.out
    found = json.loads(spectrace("diff", traces(), traces("M3"), "--plan", "--json").out)
    assert len(found["requests"]) == 12
    assert all(one["parts"] is False for one in found["requests"])


def test_benign_repeats_are_the_floor_and_useless_ones_are_refused(spectrace: Say, traces: Any) -> None:
    repeat = traces(concurrency=2, chunk=3)
    said = spectrace("diff", traces(), traces(chunk=5), "--benign", repeat)
    assert said.code == 0, said.err
    assert f"benign repeats: {repeat}" in said.out.replace("\n", "")
    said = spectrace("diff", traces(), traces(chunk=5), "--benign", traces())
    assert said.code == 2
    assert "a trace is no repeat of itself" in said.complaint


def test_what_is_no_trace_or_has_other_prompts_is_one_line(spectrace: Say, traces: Any, tmp_path: Path) -> None:
    said = spectrace("diff", traces(), tmp_path / "nowhere")
    assert said.code == 2
    assert "nowhere" in said.complaint

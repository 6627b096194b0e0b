"""A run leaves a sealed trace that info, check and replay read; --json is one document with the promised names."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Say = Callable[..., object]
ACCEPTANCE = {
    "acceptance_length",
    "acceptance_untrimmed",
    "conditional_rates",
    "cumulative_rates",
    "rounds",
    "correct_drafts",
}


def _run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from spectrace.cli.main import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def pair(target_of: Callable[..., Path], draft_of: Callable[..., Path]) -> tuple[Path, Path]:
    return target_of("llama"), draft_of("llama", "gqa")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"tokens": [i + 5, 9 * i + 1, 60 - i]}) for i in range(5)), "utf-8")
    return path


@pytest.fixture(scope="module")
def recorded(
    pair: tuple[Path, Path], prompts: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, object]]:
    """A trace, and what `run --json` said of it."""
    out = tmp_path_factory.mktemp("run") / "trace"
    said = _run(
        "run", "--target", pair[0], "--draft", pair[1], "--prompts", prompts, "--out", out, "--level", "full",
        "--capture", "all", "--max-new", 24, "--threads", 1, "--json",
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    return out, json.loads(said.stdout)


def test_replay_finds_the_recorded_draft(recorded: tuple[Path, dict[str, object]]) -> None:
    said = _run("replay", recorded[0], "--json")
    assert said.returncode == 0, said.stderr
    compared = json.loads(said.stdout)["replay"]
    assert compared["tokens_equal"] == compared["answers"] > 0
    page = _run("replay", recorded[0])
    assert page.returncode == 0 and "acceptance length" in page.stdout


def test_run_says_what_it_recorded(recorded: tuple[Path, dict[str, object]]) -> None:
    _, said = recorded
    assert len(said["outputs"]) == 5
    assert said["acceptance"].keys() >= ACCEPTANCE
    assert said["manifest"]["wiring"]["resolved"]["boundaries"] == [0, 2, 4]
    assert said["manifest"]["wiring"]["resolved"]["key"] == "eagle_aux_hidden_state_layer_ids"
    assert all(said["families"][family]["rows"] > 0 for family in said["families"])


def test_info_repeats_it(spectrace: Say, recorded: tuple[Path, dict[str, object]]) -> None:
    said = spectrace("info", recorded[0], "--json")
    found = json.loads(said.out)
    assert said.code == 0
    for name in ("manifest", "families", "acceptance", "completeness"):
        assert found[name] == recorded[1][name]
    assert "acceptance length" in spectrace("info", recorded[0]).out


def test_check_passes_it_and_finds_one_flipped_bit(
    spectrace: Say, recorded: tuple[Path, dict[str, object]], tmp_path: Path
) -> None:
    said = spectrace("check", recorded[0], "--json")
    assert said.code == 0 and json.loads(said.out) == {"sealed": True, "ok": True, "problems": []}
    broken = shutil.copytree(recorded[0], tmp_path / "broken")
    segment = next((broken / "draft-0").glob("*received.features.arrow"))
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    said = spectrace("check", broken, "--json")
    problem = json.loads(said.out)["problems"][0]
    assert said.code == 3 and problem.keys() >= {"segment", "offset", "kind", "rows_lost"}
    assert segment.name in problem["segment"]


def test_replay_reproduces_it(
    spectrace: Say, recorded: tuple[Path, dict[str, object]], pair: tuple[Path, Path]
) -> None:
    said = spectrace("replay", recorded[0], "--draft", pair[1], "--json")
    found = json.loads(said.out)
    assert said.code == 0, said.err
    assert found["replay"]["tokens_equal"] == found["replay"]["answers"] > 0
    assert found["replay"]["max_error"] <= 1e-5
    assert found["replay"]["rows_per_second"] > 0 and found["replay"]["served_rows_per_second"] > 0
    for side in ("served", "replayed"):
        assert found["acceptance"][side].keys() >= ACCEPTANCE
    assert found["acceptance"]["served"]["rounds"] == found["acceptance"]["replayed"]["rounds"] > 0


def test_replay_of_a_damaged_trace_exits_with_three(
    spectrace: Say, recorded: tuple[Path, dict[str, object]], pair: tuple[Path, Path], tmp_path: Path
) -> None:
    broken = shutil.copytree(recorded[0], tmp_path / "broken")
    segment = next((broken / "draft-0").glob("*received.features.arrow"))
    os.truncate(segment, segment.stat().st_size // 2)
    said = spectrace("replay", broken, "--draft", pair[1])
    assert said.code == 3 and segment.name in said.complaint


def test_replay_with_another_draft_says_different(
    spectrace: Say,
    recorded: tuple[Path, dict[str, object]],
    pair: tuple[Path, Path],
    tmp_path: Path,
    new_draft: Callable[..., object],
    write_draft: Callable[..., Path],
) -> None:
    said = spectrace(
        "replay", recorded[0], "--draft", write_draft(tmp_path / "other", *new_draft("gqa", seed=5)), "--json"
    )
    found = json.loads(said.out)
    assert said.code == 1 and found["replay"]["tokens_equal"] < found["replay"]["answers"]
    config, tensors = new_draft("gqa", eagle_aux_hidden_state_layer_ids=[0, 2, 4, 5])
    wider = write_draft(tmp_path / "wider", config, tensors)
    said = spectrace("replay", recorded[0], "--draft", wider)
    assert said.code == 2 and "the trace is of another draft" in said.complaint


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of 400 kB; only root can make one."""
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", folder], capture_output=True)
    if made.returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_costs_rows_and_no_token(
    small_disk: Path, pair: tuple[Path, Path], prompts: Path, recorded: tuple[Path, dict[str, object]]
) -> None:
    said = _run(
        "run", "--target", pair[0], "--draft", pair[1], "--prompts", prompts, "--out", small_disk / "trace", "--level",
        "full", "--capture", "all", "--max-new", 24, "--threads", 1, "--json",
    )  # fmt: skip
    complaint = [line for line in said.stderr.splitlines() if line.startswith("spectrace: ")]
    assert said.returncode == 2 and len(complaint) == 1, said.stderr
    assert "the recording is incomplete" in complaint[0] and "No space left" in complaint[0]
    assert json.loads(said.stdout)["outputs"] == recorded[1]["outputs"]
    checked = _run("check", small_disk / "trace", "--json")
    assert checked.returncode != 0 and not json.loads(checked.stdout)["ok"]

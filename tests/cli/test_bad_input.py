"""Every bad input gets one line that says what and where, exit code 2 (3 for damage), and leaves nothing behind."""

from collections.abc import Callable
from pathlib import Path

import pytest

from spectrace.tracer.manifest import create_trace

Say = Callable[..., object]


@pytest.fixture
def run(
    spectrace: Callable[..., object],
    target_of: Callable[..., Path],
    draft_of: Callable[..., Path],
    tmp_path: Path,
) -> Callable[..., object]:
    """`run(wiring="0,1")` runs `spectrace run` on a good pair, with changes."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"tokens": [5, 6, 7]}\n', "utf-8")
    good = {
        "target": target_of("llama"),
        "draft": draft_of("llama", "gqa"),
        "prompts": prompts,
        "out": tmp_path / "trace",
    }

    def call(**changes: object) -> object:
        options = {**good, **changes}
        return spectrace("run", *(part for name, value in options.items() for part in (f"--{name}", value)))

    return call


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    return path


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"target": "nowhere"}, "nowhere: no such folder"),
        ({"draft": "nowhere"}, "nowhere: no such folder"),
        ({"prompts": "nowhere.jsonl"}, "nowhere.jsonl: cannot be read"),
        ({"wiring": "0,2"}, "--wiring: 2 boundaries, but fc of"),
        ({"wiring": "0,2,6"}, "boundary 6 does not exist; this target has boundaries 0 to 5"),
        ({"wiring": "0,two,4"}, "--wiring '0,two,4': expected boundaries separated by commas"),
        ({"capture": "0,9"}, "--capture: boundary 9 does not exist"),
        ({"fault": "Z9"}, "--fault Z9: no such fault; known are W1"),
        ({"draft": ""}, "--draft is empty: expected a path"),
        ({"target": ""}, "--target is empty: expected a path"),
        ({"temperature": "nan"}, "--temperature nan: expected a finite number"),
        ({"temperature": "inf"}, "--temperature inf: expected a finite number"),
        ({"tp": "3"}, "--tp 3 does not divide num_attention_heads 4, num_key_value_heads 2; it can be 1, 2"),
        (
            {"draft-tp": "3"},
            "--draft-tp 3 does not divide num_attention_heads 4, num_key_value_heads 2; it can be 1, 2",
        ),
        ({"place": "draft:small"}, "--place 'draft:small': expected target=RESOURCE or draft=RESOURCE:COUNT"),
    ],
)
def test_run_refuses_in_one_line(run: Say, tmp_path: Path, changes: dict[str, object], says: str) -> None:
    said = run(**changes)
    assert said.code == 2 and says in said.complaint
    assert not (tmp_path / "trace").exists()


def test_run_refuses_what_is_not_a_checkpoint(run: Say, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    said = run(draft=tmp_path / "empty")
    assert said.code == 2 and "no config.json in it" in said.complaint


def test_run_refuses_a_target_given_as_draft_and_a_draft_given_as_target(
    run: Say, target_of: Callable[..., Path], draft_of: Callable[..., Path]
) -> None:
    said = run(draft=target_of("llama"))
    assert said.code == 2 and "not an EAGLE-3 draft" in said.complaint
    said = run(target=draft_of("llama", "gqa"))
    assert said.code == 2 and "this is a draft" in said.complaint


def test_run_refuses_the_draft_of_another_target(run: Say, tmp_path: Path, new_target: Callable[..., Path]) -> None:
    wider = new_target(tmp_path / "wider", "llama", hidden_size=64, head_dim=16)
    said = run(target=wider)
    assert said.code == 2 and "this is the draft of another target" in said.complaint
    more = new_target(tmp_path / "more", "llama", vocab_size=100)
    said = run(target=more)
    assert said.code == 2 and "vocabulary 96" in said.complaint


def test_run_refuses_a_hybrid_target(run: Say, tmp_path: Path, new_target: Callable[..., Path]) -> None:
    hybrid = new_target(tmp_path / "hybrid", "lfm2", layer_types=["conv", "full_attention", "conv", "conv", "conv"])
    said = run(target=hybrid)
    assert said.code == 2 and "lfm2 has layers of kind conv" in said.complaint


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no prompt in it"),
        ("\n\n", "no prompt in it"),
        ("{]", "prompts.jsonl:1: not valid JSON"),
        ('{"tokens": []}', "neither a non-empty 'text' nor a list of 'tokens'"),
        ('{"tokens": [5]}\n{"prompt": "x"}', "prompts.jsonl:2: neither"),
        ('{"text": "hello"}', "no tokenizer in it, so prompts must be given as 'tokens'"),
        ('{"tokens": [5, 96]}', "96"),
        ('{"text": "\\ud800"}', "neither a non-empty 'text'"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_run_refuses_prompts_it_cannot_use(run: Say, tmp_path: Path, text: str, says: str) -> None:
    said = run(prompts=_write(tmp_path / "other" / "prompts.jsonl", text))
    assert said.code == 2 and says in said.complaint
    assert not (tmp_path / "trace").exists()


def test_run_refuses_a_folder_that_holds_something(run: Say, tmp_path: Path) -> None:
    _write(tmp_path / "trace" / "precious", "x")
    said = run()
    assert said.code == 2 and "exists and is not an empty folder" in said.complaint
    assert [path.name for path in (tmp_path / "trace").iterdir()] == ["precious"]


@pytest.mark.parametrize("command", ["info", "check", "replay"])
def test_readers_refuse_what_is_not_a_trace(spectrace: Say, tmp_path: Path, command: str) -> None:
    more = ("--draft", tmp_path) if command == "replay" else ()
    for path in (tmp_path / "nowhere", tmp_path):
        said = spectrace(command, path, *more)
        assert said.code == 2 and str(path) in said.complaint


@pytest.mark.parametrize("command", ["info", "check", "replay", "diagnose"])
def test_a_trace_with_no_name_is_not_the_current_folder(spectrace: Say, command: str) -> None:
    said = spectrace(command, "")
    assert said.code == 2 and said.complaint.endswith("TRACE is empty: expected a path")


@pytest.mark.parametrize("command", ["run", "replay", "diagnose", "demo"])
@pytest.mark.parametrize("threads", [0, 100_000])
def test_more_threads_than_a_machine_has_are_refused(spectrace: Say, command: str, threads: int) -> None:
    said = spectrace(command, "--threads", threads)
    assert said.code == 2 and f"'--threads': {threads} is not in the range 1<=x<=1024" in said.err


def test_an_option_misspelt_is_named(spectrace: Say) -> None:
    said = spectrace("run", "--dpeth", "3")
    assert said.code == 2 and "--dpeth" in said.err
    said = spectrace("diagnoze")
    assert said.code == 2 and "diagnoze" in said.err


def test_run_refuses_a_trace_below_a_file(run: Say, tmp_path: Path) -> None:
    said = run(out=_write(tmp_path / "file", "x") / "trace")
    assert said.code == 2 and "Not a directory" in said.complaint


def test_check_says_which_file_of_a_trace_is_a_folder(spectrace: Say, tmp_path: Path) -> None:
    (create_trace(tmp_path / "trace", {}) / "SEAL").mkdir()
    said = spectrace("check", tmp_path / "trace")
    assert said.code == 2 and "SEAL: Is a directory" in said.complaint

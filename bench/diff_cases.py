"""Pairs of configurations whose difference is known, recorded, compared, and written into docs/diff-cases.md.

Each pair is SmolLM2-135M with its draft and the same eight prompts, as somebody would record who wonders whether a
change matters. About five minutes on two cores. With --vllm PYTHON, of an environment in which vLLM and spectrace are
installed, the last pair is vLLM beside the reference engine.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
DRAFT, PROMPTS = ROOT / "models/smollm2/draft", ROOT / "models/smollm2/prompts/heldout.jsonl"
SPECTRACE = Path(sys.executable).with_name("spectrace")
BEGIN, END = "<!-- measured -->", "<!-- end -->"


@dataclass(frozen=True, slots=True)
class Case:
    """B's options beside A's, which are none; the verdict of one who knows, and whether the page is shown whole."""

    name: str
    options: tuple[str, ...]
    known: str
    shown: bool = False


CASES = (
    Case("wrong wiring", ("--wiring", "3,16,27"), "different", shown=True),
    Case("three ranks instead of one", ("--tp", "3"), "within the floor"),
    Case("bfloat16 instead of float32", ("--dtype", "bfloat16"), "within the floor", shown=True),
    Case("prompts in chunks of 16", ("--chunk", "16"), "within the floor"),
    Case("one request at a time instead of eight", ("--concurrency", "1"), "within the floor"),
)


def main() -> None:
    """Record A once and every B, compare, write the page; ends with 1 if a verdict is not the known one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=Path.home() / ".cache/spectrace/SmolLM2-135M-Instruct")
    parser.add_argument("--vllm", type=Path, help="python of an environment with vLLM and spectrace")
    options = parser.parse_args()
    rows, pages, wrong = [], [], 0
    with TemporaryDirectory() as scratch:
        prompts = Path(scratch) / "prompts.jsonl"
        prompts.write_text("\n".join(PROMPTS.read_text("utf-8").splitlines()[:8]), "utf-8")
        serve(options.target, prompts, Path(scratch) / "A", ("--capture", "0,3,16,27"))
        cases = [
            *CASES,
            *([Case("vLLM instead of the reference engine", (), "within the floor")] if options.vllm else []),
        ]
        for number, case in enumerate(cases):
            b = Path(scratch) / f"B{number}"
            if case.options:
                serve(options.target, prompts, b, case.options)
            else:
                serve_vllm(options.vllm, options.target, prompts, b)
            found = json.loads(compared(scratch, b.name, "--json"))
            wrong += found["verdict"] != case.known
            rows.append(row(case, found))
            if case.shown:
                pages.append(f"### {case.name.capitalize()}\n\n```\n{compared(scratch, b.name).rstrip()}\n```\n")
    page = ROOT / "docs/diff-cases.md"
    head, _, rest = page.read_text("utf-8").partition(BEGIN)
    table = "\n".join([HEAD, *rows])
    page.write_text(f"{head}{BEGIN}\n\n{table}\n\n" + "\n".join(pages) + END + rest.partition(END)[2], "utf-8")
    sys.exit(wrong > 0)


HEAD = (
    "| B, beside A | known | verdict | first | what slots hold | acceptance A, B | flips, ties | splits, ties |"
    " largest error |\n|---|---|---|---|---|---|---|---|---|"
)


def row(case: Case, found: dict) -> str:  # type: ignore[type-arg]
    """One line of the table."""
    first, decisions = found["first_divergence"] or {}, found["decisions"]
    where = (
        f"{first['family']} {first['what']} {first['slot'] if first['slot'] is not None else ''}".strip()
        if first
        else "-"
    )
    lengths = [decisions["acceptance"][side]["acceptance_length"] for side in "ab"]
    flips = sum(one["flips"] for one in decisions["flips"]), sum(one["ties"] for one in decisions["flips"])
    splits = len(decisions["splits"]), sum(one["tie"] is True for one in decisions["splits"])
    moved = "; ".join(one["says"] for one in found["moved"]) or "-"
    tolerance = found["smallest_passing_tolerance"]
    at = f"{where}, position {first.get('position', '-')}"
    return (
        f"| {case.name} | {case.known} | {found['verdict']} | {at} | {moved} | "
        f"{lengths[0]:.3f}, {lengths[1]:.3f} | {flips[0]}, {flips[1]} | {splits[0]}, {splits[1]} | "
        f"{'-' if tolerance is None else f'{tolerance:.1e}'} |"
    )


def serve(target: Path, prompts: Path, out: Path, options: tuple[str, ...]) -> None:
    command = [SPECTRACE, "run", "--target", target, "--draft", DRAFT, "--prompts", prompts, "--out", out]
    subprocess.run([*map(str, command), "--level", "full", *options], check=True, stdout=subprocess.DEVNULL)


def serve_vllm(python: Path, target: Path, prompts: Path, out: Path) -> None:
    """The same prompts, as tokens, through vLLM's `LLM`."""
    from spectrace.engine.prompts import read_prompts

    asked = {"prompts": [list(one) for one in read_prompts(prompts, target)], "max_new": 64, "ignore_end": False}
    (out.parent / "asked.json").write_text(json.dumps(asked), "utf-8")
    script = ROOT / "tests/tracer/attach/serve_vllm.py"
    serving = [python, script, target, DRAFT, out.parent / "asked.json", out.parent / "said.json"]
    command = [python.with_name("spectrace"), "record", "--out", out, "--level", "full", "--", *serving]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment["PATH"] = os.pathsep.join((str(python.parent), os.environ["PATH"]))
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL, env=environment)


def compared(folder: str, b: str, *options: str) -> str:
    """What the command says; run beside the traces, so that it calls them A and B."""
    command = [str(SPECTRACE), "diff", "A", b, *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise SystemExit(done.stderr)
    return done.stdout


if __name__ == "__main__":
    main()

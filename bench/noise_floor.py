"""Calibrate `replay/diff/floors.json`: what rounding does to SmolLM2-135M and its draft, by precision and boundary.

The same prompts are served in other batches, chunks and on other threads, and in bfloat16 beside float32; each run is
compared with the first of its precision. Five minutes on two cores; run it again when what computes changes.
"""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from spectrace.replay.diff.diff import diff
from spectrace.tracer.trace import Trace

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "replay" / "diff" / "floors.json"
VARIATIONS = (
    ("--concurrency", "1"),
    ("--concurrency", "3", "--chunk", "16"),
    ("--threads", "1"),
)


def main(target: Path) -> None:
    """Serve, compare and write the table."""
    with TemporaryDirectory() as scratch:
        prompts = Path(scratch) / "prompts.jsonl"
        lines = (ROOT / "models/smollm2/prompts/heldout.jsonl").read_text("utf-8").splitlines()[:12]
        prompts.write_text("\n".join(lines), "utf-8")
        runs = {}
        for dtype in ("float32", "bfloat16"):
            for at, options in enumerate(((), *VARIATIONS)):
                runs[dtype, at] = _served(target, prompts, Path(scratch) / f"{dtype}-{at}", dtype, options)
        pairs = {dtype: [(runs[dtype, 0], runs[dtype, at]) for at in (1, 2, 3)] for dtype in ("float32", "bfloat16")}
        pairs["bfloat16"].append((runs["float32", 0], runs["bfloat16", 0]))
        floors = {dtype: _table(of) for dtype, of in pairs.items()}
    OUT.write_text(json.dumps({"model": "SmolLM2-135M-Instruct", "floors": floors}, indent=1) + "\n", "utf-8")


def _served(target: Path, prompts: Path, out: Path, dtype: str, options: tuple[str, ...]) -> Trace:
    command = [Path(sys.executable).with_name("spectrace"), "run", "--target", target, "--prompts", prompts]
    command += ["--draft", ROOT / "models/smollm2/draft", "--out", out, "--level", "full", "--capture", "all"]
    subprocess.run([*map(str, command), "--dtype", dtype, *options], check=True, stdout=subprocess.DEVNULL)
    return Trace.open(out)


def _table(pairs: list[tuple[Trace, Trace]]) -> dict[str, object]:
    """The largest row error, and the largest median, of each kind of site over all pairs."""
    boundary: dict[str, list[float]] = {}
    others: dict[str, list[float]] = {}
    for a, b in pairs:
        for one in diff(a, b).compared:
            site, distance = one.site, one.distance
            if site.exact or distance.max_error is None:
                continue
            if site.what == "boundary":
                row = boundary.setdefault(str(site.slot), [0.0, 0.0])
            elif site.family == "emitted" and site.what == "logits":
                row = others.setdefault("target logits", [0.0, 0.0])
            elif site.family == "drafted":
                row = others.setdefault("draft logits" if site.what == "logits" else "draft", [0.0, 0.0])
            else:
                continue
            row[:] = max(row[0], distance.max_error), max(row[1], distance.median_error or 0.0)
    return {"boundary": boundary, **others}


if __name__ == "__main__":
    main(Path(sys.argv[1]))

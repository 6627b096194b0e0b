"""The two tools as commands: how each is asked, what it took, and what it said."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from comparator.planted import Planted
from comparator.tensors import Flaw, Sizes
from comparator.traces import write_trace

__all__ = ["EXACT", "OURS", "SETTINGS", "Said", "Setting", "Tools"]

_HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Setting:
    """A way to run SGLang's comparator: on which of a run's folders, with which arguments."""

    title: str
    folder: str
    arguments: tuple[str, ...]


_ZERO = ("--diff-threshold", ".*", "max_abs <= 0")
EXACT: Final = Setting("step by step, max_abs <= 0", "forwards", _ZERO)
SETTINGS: Final = (
    Setting("step by step, its default rel <= 1e-3", "forwards", ()),
    EXACT,
    Setting(
        "token aligner, max_abs <= 0", "committed",
        ("--token-aligner", "smart", "--grouping-skip-keys", "rank", "step", *_ZERO),
    ),
)  # fmt: skip
OURS: Final = "spectrace diff"


@dataclass(frozen=True, slots=True)
class Said:
    """What a tool made of a pair: its exit code, what it counts as different, in words, and what it says first."""

    code: int
    secs: float
    peak_bytes: int
    counted: str
    first: str
    named: bool = False


class Tools:
    """Writes runs below `folder`, and compares them."""

    def __init__(self, folder: Path, sglang_python: Path) -> None:
        self.folder, self.sglang_python = folder, sglang_python

    def write(self, name: str, sizes: Sizes, planted: Planted | None = None) -> None:
        """One run, twice: as a trace, and as dumps."""
        write_trace(self.folder / name / "trace", sizes, planted.flaw if planted else Flaw())
        self._sglang(
            "write", str(self.folder / name / "dumps"), json.dumps(asdict(sizes)), planted.number if planted else ""
        )

    def sglang(self, a: str, b: str, setting: Setting, planted: Planted | None = None) -> Said:
        """Its comparator, asked for nothing but records on stdout: no report file, no pictures."""
        paths = [str(self.folder / name / "dumps" / setting.folder) for name in (a, b)]
        asked = ["compare", "--baseline-path", paths[0], "--target-path", paths[1], *setting.arguments]
        out, took = self._timed(
            [str(self.sglang_python), str(_HERE / "dumps.py"), *asked, "--output-format", "json", "--report-path", ""]
        )
        records = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        compared = [one for one in records if one["type"].startswith("comparison_")]
        failed = [one for one in compared if not _passed(one)]
        if not records or records[-1]["type"] != "summary":
            return Said(**took, counted="fails", first=self._last_line())
        rows = sum(one["unified_shape"][0] for one in compared if one.get("unified_shape"))
        counted = f"{len(failed)} of {len(compared)}" + ("" if rows else ", no row compared")
        names = bool(planted and failed and failed[0]["name"] in planted.tensors)
        return Said(**took, counted=counted, first=_sentence(failed[0]) if failed else "", named=names)

    def ours(self, a: str, b: str, planted: Planted | None = None) -> Said | None:
        """`spectrace diff`, or None where there is no such command yet."""
        paths = [str(self.folder / name / "trace") for name in (a, b)]
        out, took = self._timed([str(Path(sys.executable).with_name("spectrace")), "diff", *paths, "--json"])
        if took["code"] == 2 and "No such command" in self._errors():
            return None
        found = json.loads(out) if out.startswith("{") else {}
        if not found:
            return Said(**took, counted="fails", first=self._last_line())
        alone = [f"B by itself: {one['title']}" for one in found["hand_off"]["b"]]
        moved, parts = [*(one["says"] for one in found["moved"]), *alone], found["first_divergence"]
        differing = [site for site in found["sites"] if site["bit_equal"] != 1]
        named = [one for one in moved if planted and planted.says and re.search(planted.says, one)]
        by_column = bool(planted and parts and parts["what"] in planted.columns)
        counted = f"{found['verdict']}, {len(differing)} of {len(found['sites'])}"
        first = _where(parts) + "".join(f"; {one}" for one in [*named, *moved][:1]) if parts else ""
        return Said(**took, counted=counted, first=first, named=bool(named) or by_column)

    def _sglang(self, *arguments: str) -> None:
        subprocess.run([str(self.sglang_python), str(_HERE / "dumps.py"), *arguments], check=True)

    def _timed(self, command: Sequence[str]) -> tuple[str, dict[str, Any]]:
        out = self.folder / "out"
        done = subprocess.run(
            [sys.executable, "-S", str(_HERE / "timed.py"), str(out), *command],
            check=True,
            capture_output=True,
            text=True,
        )
        return out.read_text("utf-8"), json.loads(done.stdout)

    def _errors(self) -> str:
        return (self.folder / "out.err").read_text("utf-8")

    def _last_line(self) -> str:
        return next(iter(self._errors().strip().splitlines()[::-1]), "")


def _passed(record: dict[str, Any]) -> bool:
    """As its own records count: a skipped one is no failure."""
    if record["type"] == "comparison_tensor":
        return bool(not record["errors"] and record["diff"] and record["diff"]["passed"])
    return bool(record.get("values_equal", record["type"] == "comparison_skip"))


def _where(parts: dict[str, Any]) -> str:
    slot = "" if parts["slot"] is None else f" {parts['slot']}"
    depth = f" at depth {parts['depth']}" if "depth" in parts else ""
    error = "" if parts["error"] is None else f", error {parts['error']:.1e}"
    where = f"request {parts['request']['b']}, position {parts['position']}"
    return f"{parts['family']} {parts['what']}{slot}{depth}, {where}{error}"


def _sentence(record: dict[str, Any]) -> str:
    step, diff = (record.get("location") or {}).get("step"), record.get("diff")
    where = record["name"] + ("" if step is None else f", step {step}")
    if diff:
        return f"{where}: rel {diff['rel_diff']:.1e}, max_abs {diff['max_abs_diff']:.1e} at {diff['max_diff_coord']}"
    if record.get("shape_mismatch"):
        return f"{where}: shapes {record['baseline']['shape']} and {record['target']['shape']}"
    return f"{where}: " + record.get("exception_message", record["type"]).splitlines()[0]

"""Faulty drafts that vLLM serves without a word: served, recorded, diagnosed, and the diagnosis judged.

python bench/faulty_drafts/run.py --vllm .venv-vllm --keep KEEP [--again] [--pairs smollm2] [--only d2t]
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "models"))

from faulty_drafts.judge import Said, judge
from faulty_drafts.kinds import KINDS, Kind
from faulty_drafts.page import render
from faulty_drafts.served import Ran, Stage
from scoreboard.pairs import Pair, make_pairs

from spectrace.replay.diagnosis import Cause

__all__ = ["main"]

_PAIRS = ("smollm2", "analytic", "analytic_qwen3")
_ROOT = Path(__file__).resolve().parents[2]


@click.command()
@click.option("--vllm", type=click.Path(exists=True, path_type=Path), default=_ROOT / ".venv-vllm", show_default=True)
@click.option("--keep", type=click.Path(path_type=Path), default=_ROOT / "build" / "faulty_drafts", show_default=True)
@click.option("--again", is_flag=True, help="Serve nothing; diagnose what was kept.")
@click.option("--serve", "only_serve", is_flag=True, help="Diagnose nothing.")
@click.option("--pairs", default=",".join(_PAIRS), show_default=True)
@click.option("--only", multiple=True, metavar="TEXT", help="Kinds with this in their name.")
@click.option("--budget", default=90.0, show_default=True, help="Seconds for one diagnosis.")
@click.option("--threads", default=2, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="The page; by default page.md in KEEP.")
def main(
    vllm: Path, keep: Path, again: bool, only_serve: bool, pairs: str, only: tuple[str, ...], budget: float,
    threads: int, out: Path | None,
) -> None:  # fmt: skip
    """Serve, record, diagnose, judge."""
    torch.set_num_threads(threads)
    keep.mkdir(parents=True, exist_ok=True)
    stage = Stage(keep.absolute(), vllm.absolute() / "bin", again)
    for pair in make_pairs(keep / "pairs", tuple(pairs.split(","))):
        for kind in _chosen(pair, only):
            sound, faulty = stage.sound(pair, kind.base), stage.faulty(pair, kind)
            if sound and faulty:
                _one(stage, kind, pair, sound, faulty, diagnosing=not only_serve, budget=budget)
    found = [json.loads(path.read_text("utf-8")) for path in sorted(keep.glob("*/*/found.json"))]
    page = render(found).replace(f"{keep.absolute()}/", "")  # whoever reads it has other folders
    (out or keep / "page.md").write_text(page, "utf-8")


def _chosen(pair: Pair, only: tuple[str, ...]) -> Iterator[Kind]:
    for kind in KINDS:
        if pair.name in kind.pairs and (not only or any(text in kind.name for text in only)):
            yield kind


def _one(stage: Stage, kind: Kind, pair: Pair, sound: Ran, faulty: Ran, *, diagnosing: bool, budget: float) -> None:
    def mends(cause: Cause) -> bool | None:
        mended = stage.mended(pair, faulty, sound_draft, cause.command)
        return mended.counters == sound_draft.counters if mended else None if stage.again else False

    sound_draft = stage.sound(pair, "") if kind.same else sound
    assert sound_draft
    found: dict[str, Any] = {
        "pair": pair.name, "kind": kind.name, "ids": kind.ids, "failure": faulty.failure,
        "warnings": [line for line in dict.fromkeys(faulty.warnings) if line not in sound.warnings],
        "served": faulty.length, "sound": sound_draft.length, "served_whole": faulty.whole_length,
        "sound_whole": sound_draft.whole_length, "counters": faulty.counters,
        "same_text": faulty.outputs == sound.outputs,
    }  # fmt: skip
    if faulty.counters and diagnosing:
        of = {"target": pair.target, "wrong": faulty.draft, "mends": mends, "budget_secs": budget}
        believed = faulty.draft if kind.same else sound.draft
        found["said"] = _said(judge(kind, faulty.trace, believed, page=_page(faulty, ""), **of))
        if kind.ids and kind.own and not kind.same:
            found["own"] = _said(judge(kind, faulty.trace, faulty.draft, page=_page(faulty, "-own"), **of))
    (faulty.folder / "found.json").write_text(json.dumps(found, indent=1), "utf-8")
    click.echo(_line(found))


def _page(faulty: Ran, what: str) -> Path:
    """Where the text of a diagnosis goes."""
    return faulty.folder.parent.parent / f"{faulty.folder.parent.name}-{faulty.folder.name}{what}.txt"


def _said(said: Said) -> dict[str, Any]:
    return asdict(said) | {"right": said.right}


def _line(found: dict[str, Any]) -> str:
    served = f"{found['served']:.3f}" if found["served"] else f"LOUD: {found['failure']}"
    told = [f"{found['pair']} / {found['kind']} {'|'.join(found['ids'])}: {served} of {found['sound']:.3f}"]
    for name in ("said", "own"):
        if one := found.get(name):
            right = "right" if one["right"] else "WRONG" if not one["named"] else "WRONG EDIT"
            told.append(
                f"    {name}: {right}: {one['verdict']} {one['fault']} {one['variant']}: {one['title'][:140]} "
                f"({one['foretold']} / {found['sound_whole']}; {one['secs']:.0f} s) {'; '.join(one['others'])[:200]}"
            )
    return "\n".join(told)


if __name__ == "__main__":
    main()

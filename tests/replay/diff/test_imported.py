"""States that a trainer wrote, imported, are laid beside those that an engine served: boundary by boundary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from spectrace.cli.importing import import_
from spectrace.replay.diff.diff import Verdict, diff
from spectrace.replay.texts import read_texts
from spectrace.tracer.rows import Level
from spectrace.tracer.trace import Trace

Record: TypeAlias = Callable[..., Trace]
WIRING = (0, 2, 4)


def trained(served: Trace, folder: Path, boundaries: tuple[int, ...], said: tuple[int, ...] = WIRING) -> Trace:
    """What SpecForge would have prepared of the texts that were served, its slots being these boundaries; imported."""
    rows = served.rows("reference", live=True, rank=0)
    (folder / "rows_0-8").mkdir(parents=True)
    for request, text in read_texts(served).items():
        mine = rows.where(request=request)
        last = [np.flatnonzero(mine["position"] == place)[-1:] for place in range(len(text.tokens) - 1)]
        mine = mine.take(np.concatenate(last)) if last else mine.take(np.zeros(0, np.int64))
        if len(mine) < len(text.tokens) - 1 or mine["token"].tolist() != list(text.tokens[:-1]):
            continue
        slots = torch.cat([mine.tensor("boundaries", f"b{boundary}") for boundary in boundaries], -1)
        mask = torch.arange(len(mine)) >= len(text.prompt)
        sample = {
            "input_ids": torch.tensor(text.tokens[:-1]),
            "loss_mask": mask.long(),
            "hidden_state": mine.tensor("boundaries", "b4")[None].clone(),
            "aux_hidden_state": slots[None].clone(),
        }
        torch.save(sample, folder / "rows_0-8" / f"data_{request}.ckpt")
    out = folder / "trace"
    options = ["--ids", ",".join(map(str, said)), "--convention", "input"]
    done = CliRunner().invoke(import_, [str(folder / "rows_0-8"), "--out", str(out), *options])
    assert done.exit_code == 0, done.output
    return Trace.open(out)


@pytest.mark.parametrize("level", [Level.FEATURES, Level.FULL])
def test_what_a_draft_was_trained_on_is_what_it_is_served(level: Level, record: Record, tmp_path: Path) -> None:
    served = record(capture=(0, 1, 2, 3, 4), chunk=None, concurrency=1)
    training = trained(served, tmp_path, WIRING)
    found = diff(training, record(level=level))
    assert found.verdict is Verdict.WITHIN
    crossed = [name for name in found.plan.families if "/" in name]
    assert crossed == ["reference/emitted", "reference/received"]
    assert all(found.plan.families[name].rows > 40 for name in crossed)
    assert {one.site.slot for one in found.compared if one.distance.max_error is not None} == {0, 1, 2}


def test_a_layer_that_was_labelled_wrongly_in_training_is_where_they_part(record: Record, tmp_path: Path) -> None:
    served = record(capture=(0, 1, 2, 3, 4), chunk=None, concurrency=1)
    found = diff(trained(served, tmp_path, (0, 3, 4)), record())
    assert found.verdict is Verdict.DIFFERENT
    assert found.first
    assert (found.first.site.family, found.first.site.slot) == ("reference/emitted", 1)
    assert {one.site.slot for one in found.compared if one.verdict is Verdict.DIFFERENT} == {1}


def test_a_slot_that_was_trained_on_another_boundary_is_not_passed_over(record: Record, tmp_path: Path) -> None:
    served = record(capture=(0, 1, 2, 3, 4), chunk=None, concurrency=1)
    found = diff(trained(served, tmp_path, (1, 2, 4), said=(1, 2, 4)), record())
    assert found.verdict is Verdict.PART
    assert "slot 0 of B: it says boundary 0, which A has not" in found.lacking

"""What a comparison of two large traces costs: bytes read, seconds, memory; equal ones, and with one row changed.

Both traces are recorded here, separately: the same rows in another order, in other batches and chunks. Each comparison
runs in a process of its own, with nothing of the traces in the page cache. Needs three times --gib of disk.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from spectrace.tracer.keys import Keys
from spectrace.tracer.manifest import create_trace, seal_trace
from spectrace.tracer.recorder import Recorder
from spectrace.tracer.rows import Level, Phase

SLOTS, WIDTH, DEPTH = 3, 4096, 3
ROW_BYTES = SLOTS * WIDTH * 2
PROMPT, OUTPUT, RUN = 1900, 101, 2  # tokens; drafts accepted a round


def texts(count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Prompts and outputs, the same at every call."""
    random = np.random.default_rng(0)
    return [(random.integers(0, 1000, PROMPT), random.integers(0, 1000, OUTPUT)) for _ in range(count)]


def features(request: int) -> torch.Tensor:
    """A request's rows by place [places, SLOTS * WIDTH]: any bits that are small bfloat16 numbers."""
    bits = np.random.default_rng(request).integers(0, 1 << 16, (PROMPT + OUTPUT, SLOTS * WIDTH), np.uint16)
    return torch.from_numpy(bits & 0xBFFF).view(torch.bfloat16)


def record(folder: Path, count: int, level: Level, *, order: np.random.Generator, chunk: int, flip: bool) -> None:
    """Serve the texts in an order of their own; `flip` negates one slot of one row."""
    facts = {"engine": "bench", "dtype": "bfloat16", "wiring": {"resolved": {"boundaries": [2, 16, 29]}}}
    create_trace(folder, facts)
    roles = ("target", "draft", "scheduler")
    recorders = {role: Recorder(folder, role=role, level=level, queue_bytes=1 << 30, strict=True) for role in roles}
    step = 0
    for number, request in enumerate(order.permutation(count).tolist()):
        rows = features(request)
        if flip and request == count // 2:
            rows[PROMPT // 2, WIDTH : 2 * WIDTH] *= -1
        step = serve(recorders, number, texts_of[request], rows, chunk, step)
    for recorder in recorders.values():
        recorder.close()
    seal_trace(folder)


def serve(
    recorders: dict[str, Recorder],
    request: int,
    text: tuple[np.ndarray, np.ndarray],
    rows: torch.Tensor,
    chunk: int,
    step: int,
) -> int:
    """One request: its prompt in chunks, then rounds of which RUN drafts are right; returns the next step."""
    tokens = np.concatenate(text)
    passes = [*range(0, PROMPT, chunk), PROMPT]
    for at, (start, end) in enumerate(pairwise(passes)):
        target(recorders, request, at, np.arange(start, end), tokens, rows, Phase.PREFILL, -1, step)
        fed(recorders, request, at, np.arange(start, end), tokens, rows, -1, step)
        step += 1
    for round_, root in enumerate(range(PROMPT, len(tokens) - DEPTH - 2, RUN + 1)):
        number = len(passes) - 1 + round_
        places = np.arange(root, root + DEPTH + 1)
        drafted(recorders, request, number - 1, root - 2, tokens, round_, step)
        target(recorders, request, number, places, tokens, rows, Phase.VERIFY, round_, step)
        node = np.arange(DEPTH + 1)
        keys = Keys(request=request, pass_=number, position=places, phase=Phase.VERIFY, round=round_, step=step)
        recorders["scheduler"].verified(
            keys,
            parent=node - 1, token=np.where(node <= RUN, tokens[places], 0), target_token=tokens[places + 1],
            accepted=node <= RUN, cut=False, source_row=node,
        )  # fmt: skip
        fed(recorders, request, number, places[: RUN + 1], tokens, rows, round_, step)
        step += 1
    recorders["scheduler"].requests(
        Keys(request=request, pass_=0, position=0), id=[str(request)], prompt_tokens=[text[0]], output_tokens=[text[1]],
        cached_prefix=0, temperature=0.0, finish_reason=["length"], rounds=round_ + 1,
        correct_drafts=RUN * (round_ + 1), depth_limit=DEPTH,
    )  # fmt: skip
    return step


def target(
    recorders: dict[str, Recorder], request: int, number: int, places: np.ndarray, tokens: np.ndarray,
    rows: torch.Tensor, phase: Phase, round_: int, step: int,
) -> None:  # fmt: skip
    keys = Keys(request=request, pass_=number, position=places, phase=phase, round=round_, step=step)
    fed_in = np.where(np.arange(len(places)) <= RUN, tokens[places], 0) if round_ >= 0 else tokens[places]
    recorders["target"].emitted(
        keys, token=fed_in, slots=rows[places[0] : places[-1] + 1], slot_width=WIDTH, target_token=tokens[places + 1]
    )


def fed(
    recorders: dict[str, Recorder], request: int, number: int, places: np.ndarray, tokens: np.ndarray,
    rows: torch.Tensor, round_: int, step: int,
) -> None:  # fmt: skip
    phase = Phase.DRAFT_EXTEND
    keys = Keys(request=request, pass_=number, position=places, phase=phase, round=round_ + 1, step=step)
    held = rows[places[0] : places[-1] + 1]
    recorders["draft"].received(keys, token=tokens[places + 1], features=held, slot_width=WIDTH)
    answers = np.where(np.arange(len(places)) == len(places) - 1, 7, -1)
    state = held[:, :WIDTH]
    recorders["draft"].drafted(keys, draft_token=answers, token=answers, state=state, hidden=state)


def drafted(
    recorders: dict[str, Recorder], request: int, number: int, base: int, tokens: np.ndarray, round_: int, step: int
) -> None:
    for depth in range(1, DEPTH):
        keys = Keys(
            request=request, pass_=number, position=base + depth, depth=depth, node=0, phase=Phase.DRAFT_DECODE,
            round=round_, step=step,
        )  # fmt: skip
        state = torch.full((1, WIDTH), float(depth), dtype=torch.bfloat16)
        parent = 0 if depth > 1 else -1
        recorders["draft"].received(keys, token=[7], state=state, parent=[max(parent, 0)])
        recorders["draft"].drafted(keys, draft_token=[7], token=[7], state=state, hidden=state)


def compare(a: Path, b: Path) -> Iterator[tuple[str, object]]:
    """What one comparison read and took, in this process."""
    from spectrace.replay.diff.diff import diff
    from spectrace.tracer.trace import Trace

    before, started = read_bytes(), time.perf_counter()
    found = diff(Trace.open(a), Trace.open(b))
    yield "secs", time.perf_counter() - started
    yield "verdict", found.verdict.value
    yield "first", str(found.first)
    yield "own_count_bytes", sum(found.bytes_read)
    yield "proc_read_bytes", read_bytes() - before
    yield "peak_rss_bytes", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    yield "rows", sum(pairs.rows for pairs in found.plan.families.values())


def read_bytes() -> int:
    """What this process had fetched from the disk so far."""
    lines = Path("/proc/self/io").read_text("ascii").splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


def forget(folder: Path) -> int:
    """Drop a trace from the page cache; returns its size in bytes."""
    size = 0
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            size += path.stat().st_size
    return size


def main() -> None:
    """Record, compare in processes of their own, print one line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=4.0, help="of rows of 24 KiB in each trace")
    parser.add_argument("--level", choices=("features", "full"), default="features")
    parser.add_argument("--compare", nargs=2, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path)
    options = parser.parse_args()
    if options.compare:
        print(json.dumps(dict(compare(*options.compare))))
        return
    count = max(int(options.gib * 2**30 / ROW_BYTES / (PROMPT + OUTPUT)), 2)
    texts_of.extend(texts(count))
    with TemporaryDirectory(dir=options.scratch) as scratch:
        level, folders = Level[options.level.upper()], [Path(scratch) / name for name in ("a", "b", "flipped")]
        for seed, folder in enumerate(folders):
            order = np.random.default_rng(seed)
            record(folder, count, level, order=order, chunk=(512, 300, 700)[seed], flip=folder.name == "flipped")
        for folder in folders[1:]:
            size = forget(folders[0]) + forget(folder)
            command = [sys.executable, __file__, "--compare", str(folders[0]), str(folder)]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            share = {name: f"{found[name] / size:.2%}" for name in ("own_count_bytes", "proc_read_bytes")}
            print(json.dumps({"b": folder.name, "size_bytes": size, **found, "share": share}, indent=1))


texts_of: list[tuple[np.ndarray, np.ndarray]] = []

if __name__ == "__main__":
    main()

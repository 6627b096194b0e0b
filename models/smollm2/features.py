"""The target's boundaries over its own text, computed once and kept as memory-mapped bf16 bits for training.

Per file of text a folder with tokens.i32, loss.u8, starts.i64 and, per token, b3.bf16, b16.bf16 (residual stream
entering layers 3 and 16) and final.bf16 (after the final norm, the head's input). Boundary 0 is the embedding of the
token and is not stored.
"""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from target import CACHE, ensure_target
from tqdm import tqdm
from transformers import AutoModelForCausalLM

__all__ = ["TEXTS", "main", "read_text"]

HERE = Path(__file__).parent
TEXTS = sorted((HERE / "text").glob("*.jsonl.gz"))
BATCH_TOKENS = 6144


def read_text(path: Path) -> list[dict]:
    """The answers of one file of text."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def batches(answers: list[dict]) -> list[list[int]]:
    """Indices grouped by length, so that padding costs little."""
    order = sorted(range(len(answers)), key=lambda i: len(answers[i]["prompt"]) + len(answers[i]["gen"]))
    groups, group = [], []
    for i in order:
        length = len(answers[i]["prompt"]) + len(answers[i]["gen"])
        if group and (len(group) + 1) * length > BATCH_TOKENS:
            groups.append(group)
            group = []
        group.append(i)
    return [*groups, group]


@torch.inference_mode()
def main(out: Path) -> None:
    """Compute the features of every file of text that has none yet."""
    model = AutoModelForCausalLM.from_pretrained(ensure_target(), dtype="float32")
    seen: dict[str, torch.Tensor] = {}
    for name, layer in (("b3", 3), ("b16", 16)):
        model.model.layers[layer].register_forward_pre_hook(lambda _, args, name=name: seen.__setitem__(name, args[0]))
    for path in TEXTS:
        folder = out / path.name.removesuffix(".jsonl.gz")
        if folder.exists():
            continue
        partial = folder.with_suffix(".partial")
        partial.mkdir(parents=True, exist_ok=True)
        write_features(model, seen, read_text(path), partial)
        partial.rename(folder)


def write_features(model: Any, seen: dict[str, torch.Tensor], answers: list[dict], out: Path) -> None:
    """One file's features; `seen` is where the model's hooks leave what they saw."""
    sequences = [answer["prompt"] + answer["gen"] for answer in answers]
    starts = np.cumsum([0, *map(len, sequences)])
    np.concatenate(sequences).astype(np.int32).tofile(out / "tokens.i32")
    loss = np.concatenate([[0] * len(a["prompt"]) + [1] * len(a["gen"]) for a in answers])
    loss.astype(np.uint8).tofile(out / "loss.u8")
    starts.astype(np.int64).tofile(out / "starts.i64")
    shape = (int(starts[-1]), model.config.hidden_size)
    files = {name: np.memmap(out / f"{name}.bf16", np.int16, "w+", shape=shape) for name in ("b3", "b16", "final")}
    for group in tqdm(batches(answers)):
        longest = max(len(sequences[i]) for i in group)
        ids = torch.full((len(group), longest), 2)
        for row, i in enumerate(group):
            ids[row, : len(sequences[i])] = torch.tensor(sequences[i])
        with torch.autocast("cpu", torch.bfloat16):
            seen["final"] = model.model(ids, use_cache=False).last_hidden_state
        for name, file in files.items():
            bits = seen[name].to(torch.bfloat16).view(torch.int16).numpy()
            for row, i in enumerate(group):
                file[starts[i] : starts[i + 1]] = bits[row, : len(sequences[i])]


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else CACHE / "features")

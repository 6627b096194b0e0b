"""Train the EAGLE-3 draft of SmolLM2-135M-Instruct on boundaries (0, 3, 16), with training-time test (models/ttt.py).

Resumes from its own checkpoint; the log is one JSON object a line.
"""

import hashlib
import json
import sys
import time
from itertools import count, islice, pairwise
from pathlib import Path

import click
import numpy as np
import torch
from features import TEXTS, read_text
from safetensors.torch import load_file, save_file
from target import CACHE, ensure_target
from torch import Tensor
from torch.nn import functional as F

sys.path.append(str(Path(__file__).resolve().parents[1]))

import ttt

from spectrace.engine.draft import DraftModel
from spectrace.engine.spec import DraftSpec, GqaSpec, RopeSpec

HERE = Path(__file__).parent
WIRING = (0, 3, 16)
KEPT = 8192
TEST_STEPS = 3
WALK_DEPTH = 3
HELD_OUT_SHARE = 24
WIDTH, HEADS, KV_HEADS, HEAD_DIM, MLP_WIDTH, VOCAB = 576, 9, 3, 64, 2048, 49152
SPEC = DraftSpec(
    width=WIDTH, target_width=WIDTH, slots=len(WIRING), mlp_width=MLP_WIDTH, target_vocab=VOCAB, draft_vocab=KEPT,
    attention=GqaSpec(HEADS, KV_HEADS, HEAD_DIM), rope=RopeSpec(theta=100000.0), norm_eps=1e-5,
)  # fmt: skip


def is_held_out(text: str) -> bool:
    """Whether a prompt is kept for measuring; decided by its words alone, so that new text cannot move it."""
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % HELD_OUT_SHARE == 0


def measuring_prompts() -> set[str]:
    """Texts of the prompts used for measuring, which no training answer may have."""
    lines = [line for path in (HERE / "prompts").glob("*.jsonl") for line in path.read_text("utf-8").splitlines()]
    return {json.loads(line)["text"] for line in lines}


class Part:
    """One file of text with its features, memory-mapped; answer i is rows starts[i]:starts[i+1]."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.answers = read_text(path)
        self.tokens = np.fromfile(folder / "tokens.i32", np.int32)
        self.loss = np.fromfile(folder / "loss.u8", np.uint8)
        self.starts = np.fromfile(folder / "starts.i64", np.int64)
        assert len(self.starts) == len(self.answers) + 1, f"{folder} is of another text: remove it, run features.py"
        self.features = {
            name: np.memmap(folder / f"{name}.bf16", np.int16, "r").reshape(-1, WIDTH)
            for name in ("b3", "b16", "final")
        }


class Text:
    """All the target's text, split into answers to train on and answers held out by their prompts."""

    def __init__(self, folder: Path) -> None:
        parts = [Part(path, folder / path.name.removesuffix(".jsonl.gz")) for path in TEXTS]
        self.answers = [answer for part in parts for answer in part.answers]
        self.spans = [(part, slice(start, end)) for part in parts for start, end in pairwise(part.starts.tolist())]
        self.lengths = np.array([span.stop - span.start for _, span in self.spans])
        measuring = measuring_prompts()
        held = [answer["text"] in measuring or is_held_out(answer["text"]) for answer in self.answers]
        self.train = [i for i, out in enumerate(held) if not out]
        self.held = [i for i, out in enumerate(held) if out]
        trained = {self.answers[i]["text"] for i in self.train}
        assert not trained & measuring
        assert not trained & {self.answers[i]["text"] for i in self.held}

    def batch(self, rows: list[int]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Padded tokens [B, T], loss mask [B, T] and features [B, T, F] of some answers."""
        longest = int(self.lengths[rows].max())
        tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
        mask = torch.zeros(len(rows), longest, dtype=torch.bool)
        features = {
            name: torch.zeros(len(rows), longest, WIDTH, dtype=torch.bfloat16) for name in ("b3", "b16", "final")
        }
        for row, (part, span) in enumerate(self.spans[i] for i in rows):
            length = span.stop - span.start
            tokens[row, :length] = torch.from_numpy(part.tokens[span].astype(np.int64))
            mask[row, :length] = torch.from_numpy(part.loss[span].astype(bool))
            for name, file in part.features.items():
                features[name][row, :length] = torch.from_numpy(file[span].copy()).view(torch.bfloat16)
        return tokens, mask, features

    def groups(self, batch_tokens: int, generator: np.random.Generator) -> list[list[int]]:
        """The training answers once, in random batches of similar length."""
        lengths = self.lengths[self.train] + generator.uniform(0, 24, len(self.train))
        groups: list[list[int]] = [[]]
        for i in np.array(self.train)[np.argsort(lengths)]:
            longest = int(self.lengths[[*groups[-1], i]].max())
            if groups[-1] and (len(groups[-1]) + 1) * longest > batch_tokens:
                groups.append([])
            groups[-1].append(int(i))
        return [groups[i] for i in generator.permutation(len(groups))]


class Trainer:
    """The draft, what it learns from, and how far it has come."""

    def __init__(self, text: Text, weights: dict[str, Tensor], kept: Tensor | None) -> None:
        """`kept` are the draft vocabulary's tokens, None for the most frequent ones of the text."""
        self.text = text
        self.embedding = weights["model.embed_tokens.weight"].float()
        trained = np.concatenate([text.answers[i]["gen"] for i in text.train])
        counts = np.bincount(trained, minlength=VOCAB)
        frequent = torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:KEPT]).copy())
        self.kept = frequent if kept is None else kept
        self.coverage = float(counts[self.kept.numpy()].sum() / counts.sum())
        self.kept_head = self.embedding[self.kept].to(torch.bfloat16)
        self.full_head = self.embedding.to(torch.bfloat16)
        self.draft = DraftModel(SPEC)
        self.initialise(weights)
        self.draft.d2t.copy_(self.kept - torch.arange(KEPT))

    @torch.no_grad()
    def initialise(self, weights: dict[str, Tensor]) -> None:
        """Head and norm from the target, `fc` passing the deepest slot through, the rest small and random."""
        for parameter in self.draft.parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=0.02)
        self.draft.embedding.weight.copy_(self.embedding)
        self.draft.embedding.weight.requires_grad_(False)
        self.draft.head.weight.copy_(self.embedding[self.kept])
        self.draft.output_norm.weight.copy_(weights["model.norm.weight"])
        self.draft.fc.weight[:, 2 * WIDTH :] += torch.eye(WIDTH)

    def inputs(self, tokens: Tensor, features: dict[str, Tensor]) -> Tensor:
        slots = {0: F.embedding(tokens, self.embedding), 3: features["b3"], 16: features["b16"]}
        return torch.cat([slots[boundary].float() for boundary in WIRING], -1).flatten(0, 1)

    def loss(self, rows: list[int]) -> Tensor:
        tokens, mask, features = self.text.batch(rows)
        with torch.autocast("cpu", torch.bfloat16):
            outputs = ttt.unroll(self.draft, tokens, self.inputs(tokens, features), TEST_STEPS)
            return ttt.loss(self.draft, outputs, mask, features["final"], self.kept_head)

    @torch.no_grad()
    def measure(self, limit: int = 96) -> dict[str, object]:
        """Held-out accuracy per step, and the greedy walk at depth 3 with the draft's own tokens.

        Accuracy is teacher-forced over answer tokens; a hit is the target's full-vocabulary argmax.
        """
        steps = np.zeros((TEST_STEPS, 2))
        walked = np.zeros(2)
        for i in self.text.held[:limit]:
            tokens, mask, features = self.text.batch([i])
            best = F.linear(features["final"], self.full_head).argmax(-1)
            with torch.autocast("cpu", torch.bfloat16):
                inputs = self.inputs(tokens, features)
                steps += ttt.hits(self.draft, ttt.unroll(self.draft, tokens, inputs, TEST_STEPS), mask, best)
                if self.text.answers[i]["temperature"] == 0:
                    free = ttt.unroll(self.draft, tokens, inputs, WALK_DEPTH, own_tokens=True)
                    drafts = [ttt.choices(self.draft, hidden).tolist() for hidden in free]
                    walked += ttt.count_rounds(tokens[0].tolist(), int(mask.int().argmax()), drafts)
        return {
            "accuracy": [round(x, 4) for x in (steps[:, 0] / steps[:, 1]).tolist()],
            "walk_acceptance": round(float(1 + walked[1] / walked[0]), 4),
        }

    def save(self, folder: Path) -> None:
        """Write the draft in EAGLE's layout: bf16, embedding left to the target, ids under both published keys."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(ttt.published(self.draft), folder / "model.safetensors")
        config = {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "dtype": "bfloat16",
            "hidden_size": WIDTH, "target_hidden_size": WIDTH, "intermediate_size": MLP_WIDTH, "num_hidden_layers": 1,
            "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "hidden_act": "silu",
            "rms_norm_eps": SPEC.norm_eps, "rope_theta": SPEC.rope.theta, "max_position_embeddings": 8192,
            "vocab_size": VOCAB, "draft_vocab_size": KEPT, "tie_word_embeddings": False,
            "bos_token_id": 1, "eos_token_id": 2,
            "eagle_aux_hidden_state_layer_ids": list(WIRING),
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [boundary - 1 for boundary in WIRING]},
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


@click.command()
@click.option("--steps", default=4000, help="Optimiser steps in all; the cosine ends there.")
@click.option("--batch-tokens", default=3072, help="Padded tokens a step.")
@click.option("--rate", default=1e-3, help="Peak learning rate of AdamW.")
@click.option("--seed", default=7)
@click.option("--measure-every", default=200)
@click.option("--features", "folder", type=Path, default=CACHE / "features")
@click.option("--run", type=Path, default=CACHE / "train", help="Where the checkpoint lives.")
@click.option("--out", type=Path, default=HERE / "draft")
@click.option("--stop-after", type=int, default=None, help="Stop at this step without ending the schedule.")
def main(
    steps: int, batch_tokens: int, rate: float, seed: int, measure_every: int, folder: Path, run: Path, out: Path,
    stop_after: int | None,
) -> None:  # fmt: skip
    """Train, or go on training, until --steps."""
    torch.manual_seed(seed)
    state = torch.load(run / "state.pt") if (run / "state.pt").exists() else None
    # The vocabulary is chosen once: the rows of a head stand for its tokens, whatever text is added later.
    kept = state["draft"]["d2t"] + torch.arange(KEPT) if state else None
    trainer = Trainer(Text(folder), load_file(ensure_target() / "model.safetensors"), kept)
    parameters = [p for p in trainer.draft.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda s: ttt.cosine(s, steps=steps))
    log = out.parent / "training-log.jsonl"
    training = ttt.TrainingState(run / "state.pt", draft=trainer.draft, optimiser=optimiser, schedule=schedule)
    step = training.load()
    text = trainer.text
    print(f"{len(text.train)} answers to train on, {len(text.held)} held out, coverage {trainer.coverage:.4f}")
    started, recent = time.time(), list[float]()
    batches = (rows for epoch in count() for rows in text.groups(batch_tokens, np.random.default_rng((seed, epoch))))
    for rows in islice(batches, step, stop_after or steps):
        recent.append(ttt.descend(trainer.loss(rows), optimiser, schedule, clip=0.5))
        step += 1
        if step % measure_every and step < (stop_after or steps):
            continue
        line = {
            "step": step,
            "loss": round(float(np.mean(recent)), 4),
            **trainer.measure(),
            "secs": round(time.time() - started),
        }
        recent.clear()
        print(json.dumps(line), flush=True)
        with log.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(line) + "\n")
        training.save(step)
        trainer.save(out)


if __name__ == "__main__":
    main()

"""What speculators 0.9.0 computes for EAGLE-3 drafts: its `Eagle3DraftModel`, loaded and stepped by its own code.

    ENV/bin/python bench/oracles/run_speculators.py CASES [--attention eager|sdpa|simple_flex_attention]

Real: the config class and `from_pretrained` (key names, verifier weights, layer ids), `shift_batch` and `CollateFn`
(which token goes with which feature, several requests packed in one row), and the training forward with its own steps,
masks and cache. `ttt_steps` is one more than the depths asked for, so that what the last depth hands on is seen where
it is taken. Values are taken by hooks on the model's own modules; `choice` is the forward's own answer, mapped by
the package's `_draft_to_verifier_ids` (of its sibling XPress: EAGLE-3's own code never reads d2t).

Not real: `datasets` is stood in for while the package is imported, and never called. The verifier's name in a draft's
config is replaced by the case's target folder (a null or blank name is left). Attention is "eager" unless told
otherwise, one of the package's own three ways; its default, "simple_flex_attention", runs uncompiled on a CPU and
agrees.
Features of the depths beyond a request's rows are zeros: no row that is written sees them.

Memory that torch hands out uninitialised is filled (NaN, or the largest integer): the package marks an embedding and a
head that a checkpoint lacks with NaN, to be taken from the verifier, but transformers 5 allocates them anew and the
mark is lost. Filled, the mark is there again, no run depends on what the memory held, and a missing d2t shows in
`choice`.
"""

import argparse
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers  # (looks for `datasets` itself: before the stand-in)
from asked import Case, Seen, answer_all, warned
from torch import Tensor

BLOCK = 128  # flex attention's block: packed rows must fill whole ones


class _Unused(types.ModuleType):
    """A module that can be imported from but whose functions must not be called."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*_args: object, **_kwargs: object) -> None:
            raise RuntimeError(f"{self.__name__}.{name} is a stand-in")

        return refuse


@contextmanager
def _stood_in(name: str) -> Iterator[None]:
    sys.modules[name] = _Unused(name)
    yield
    del sys.modules[name]


with _stood_in("datasets"):
    from loguru import logger as loguru_logger
    from speculators.models.eagle3 import Eagle3DraftModel, shift_batch
    from speculators.models.xpress.core import XPressDraftModel
    from speculators.train.data import CollateFn


class Watched(Seen):
    """What the hooks see of the package's draft."""

    def watch(self, model: Eagle3DraftModel) -> None:
        model.fc.register_forward_hook(lambda _m, _i, out: self.fused.append(out[0]))
        model.embed_tokens.register_forward_pre_hook(lambda _m, args: self.tokens.append(args[0][0]))
        model.rotary_emb.register_forward_pre_hook(lambda _m, args: self.positions.append(args[1][0]))
        model.layers[0].register_forward_pre_hook(lambda _m, args: self.taken.append(args[0][0].chunk(2, -1)[1]))
        model.lm_head.register_forward_hook(self._head)

    def _head(self, _module: torch.nn.Module, args: tuple[Tensor], out: Tensor) -> None:
        self.hidden.append(args[0][0])
        self.logits.append(out[0])


def load(case: Case, attention: str) -> Eagle3DraftModel:
    """The draft by the package's own loader, with the attention that its `build_draft_model` would have set."""
    draft = case.folder / "draft"
    config = Eagle3DraftModel.config_class.from_pretrained(draft)
    config.transformer_layer_config._attn_implementation = attention
    verifier = config.speculators_config.verifier if config.speculators_config else None
    if verifier is not None and verifier.name_or_path:
        verifier.name_or_path = str(case.folder / "target")
    return Eagle3DraftModel.from_pretrained(draft, config=config, dtype=torch.float32).eval()


def batch(case: Case, model: Eagle3DraftModel, attention: str) -> dict[str, Tensor]:
    """All requests in one packed row, aligned and packed by the package."""
    width = model.hidden_size
    samples = [sample(text, features, width) for text, features in zip(case.texts, case.features, strict=True)]
    rows = sum(len(text) - 1 for text in case.texts)
    if attention == "simple_flex_attention":
        rows = -(-rows // BLOCK) * BLOCK
    collate = CollateFn(rows, width, dtype=torch.float32, preprocess=shift_batch)
    collated = collate(samples)
    return {key: collated[key] for key in ("hidden_states", "input_ids", "document_ids", "loss_mask", "position_ids")}


def sample(text: Tensor, features: Tensor, width: int) -> dict[str, Tensor]:
    """One training sample as the package's dataset makes them, of all positions, the last ones without features."""
    length = len(text)
    return {
        "input_ids": text,
        "hidden_states": torch.cat((features, features.new_zeros(length - len(features), features.shape[1]))),
        "verifier_last_hidden_states": features.new_zeros(length, width),
        "loss_mask": torch.ones(length, dtype=torch.bool),
        "lengths": torch.tensor([length]),
        "position_ids": torch.arange(length),
    }


@torch.no_grad()
def run(case: Case, attention: str) -> Seen:
    """Load and step one draft."""
    model = load(case, attention)
    seen = Watched()
    seen.watch(model)
    best = model(**batch(case, model, attention), ttt_steps=case.depths + 1)
    seen.choices = [XPressDraftModel._draft_to_verifier_ids(model, ids[0]) for ids in best]
    return seen


def gather(case: Case, seen: Seen) -> dict[str, Tensor]:
    """The tensors of `outputs.safetensors`."""
    starts = torch.tensor([0] + [len(text) - 1 for text in case.texts]).cumsum(0)
    rows = torch.cat([torch.arange(n) + start for n, start in zip(case.lengths, starts.tolist(), strict=False)])
    return seen.gather(case.depths, lambda values: values[rows])


@contextmanager
def noted(notes: list[str]) -> Iterator[None]:
    """Collect what the package, transformers and Python warn about."""
    sink = loguru_logger.add(
        lambda text: notes.append(str(text).rstrip()),
        level="WARNING",
        format="{name}: {message}",
        filter=lambda record: "index.json" not in record["message"],  # of the target, which is one file
    )
    with warned(notes, "transformers", "speculators"):
        yield
    loguru_logger.remove(sink)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", type=Path)
    parser.add_argument("--attention", default="eager", choices=("eager", "sdpa", "simple_flex_attention"))
    args = parser.parse_args()
    loguru_logger.remove()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_default_handler()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    return answer_all(args.cases, partial(run, attention=args.attention), gather, noted)


if __name__ == "__main__":
    sys.exit(main())

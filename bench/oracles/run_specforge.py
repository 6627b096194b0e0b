"""What specforge 0.2.0 computes for EAGLE-3 drafts: its `LlamaForCausalLMEagle3`, built and stepped by its own code.

    ENV/bin/python bench/oracles/run_specforge.py CASES [--attention sdpa|flex_attention]

Real: the run configuration, the reading of the draft's config, the warm start from a checkpoint and the target's
embedding put in place of the draft's (what a training run does unless `load_target_embedding` is false: `case.json` may
say so); the shift of tokens against features (`TargetHead.preprocess`); and the training forward `OnlineEagle3Model`
with its own steps, mask and cache. Its length is one more than the depths asked for, so that what the last depth hands
on is seen where it is taken. All requests are one batch, padded on the right. Values are taken by hooks on the model's
own modules, positions where they are turned into rotations. Attention "sdpa" is the package's name for a plain loop
over the depths' keys; "flex_attention" runs uncompiled up to 128 positions, and agrees.

Not real: `triton` is stood in for while the losses are imported; the loss that it would compute is the package's own
reference, `_compute_loss`, of target scores that are all zero. TORCHDYNAMO_DISABLE runs what the package compiles as it
is written. `choice` is k + d2t[k] as in the forward's accuracy, which keeps it to itself. Features of the depths
beyond a request's rows are zeros: no row that is written sees them.
"""

import argparse
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
import transformers
from asked import Case, Seen, answer_all, warned
from torch import Tensor


class _Undecorated(types.ModuleType):
    """A `triton` whose kernels can be declared; its functions are never called."""

    def __getattr__(self, name: str) -> Callable[..., object]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda function=None, *_args, **_kwargs: function


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # flash_attn is not there
    import specforge.modeling.draft.llama3_eagle as llama3_eagle  # first: torch's compiler must not see the stand-in

    sys.modules["triton"] = _Undecorated("triton")
    sys.modules["triton.language"] = sys.modules["triton"].language = _Undecorated("triton.language")
    import specforge.core.loss as loss

    del sys.modules["triton"], sys.modules["triton.language"]
    import specforge.algorithms.eagle3.model as eagle3_model
    from specforge.algorithms.eagle3.providers import algorithm_providers
    from specforge.config import Config
    from specforge.modeling.target.target_head import TargetHead
    from specforge.training.model_loading import resolve_draft_config

eagle3_model.LogSoftmaxLoss = types.SimpleNamespace(apply=loss._compute_loss)


def run_config(case: Case, attention: str) -> Config:
    """The run configuration of a training run that starts from this draft."""
    model = {
        "target_model_path": str(case.folder / "target"),
        "draft_checkpoint_path": str(case.folder / "draft"),
        "load_target_embedding": case.settings.get("load_target_embedding", True),
        "torch_dtype": "float32",
    }
    training = {"strategy": "eagle3", "ttt_length": case.depths + 1, "attention_backend": attention}
    data = {"hidden_states_path": "none"}  # a required field; never read here
    return Config.model_validate({"model": model, "training": training, "data": data})


class Watched(Seen):
    """What the hooks see of the package's draft, all [requests, positions, ...]."""

    @contextmanager
    def watching(self, draft: llama3_eagle.LlamaForCausalLMEagle3) -> Iterator[None]:
        draft.fc.register_forward_hook(lambda _m, _i, out: self.fused.append(out))
        draft.embed_tokens.register_forward_pre_hook(lambda _m, args: self.tokens.append(args[0]))
        draft.midlayer.register_forward_pre_hook(
            lambda _m, _a, named: self.taken.append(named["hidden_states"]), with_kwargs=True
        )
        draft.lm_head.register_forward_hook(self._head)
        rotary, rotate = draft.midlayer.self_attn.rotary_emb, llama3_eagle.apply_rotary_pos_emb
        if isinstance(rotary, llama3_eagle.LlamaMutiRotaryEmbedding):
            rotary.register_forward_pre_hook(lambda _m, args: self.positions.append(args[1][0]))

        def seen_rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
            self.positions.append(at.expand(len(q), -1))
            return rotate(q, k, cos, sin, at)

        llama3_eagle.apply_rotary_pos_emb = seen_rotate
        try:
            yield
        finally:
            llama3_eagle.apply_rotary_pos_emb = rotate

    def _head(self, _module: torch.nn.Module, args: tuple[Tensor], out: Tensor) -> None:
        self.hidden.append(args[0])
        self.logits.append(out)


def load(case: Case, attention: str) -> llama3_eagle.LlamaForCausalLMEagle3:
    """The draft as a training run that starts from it builds it."""
    config = run_config(case, attention)
    providers = algorithm_providers().model
    draft_config = resolve_draft_config(config, provider=providers.draft_config)
    return providers.build_draft(config, draft_config).eval()


def batch(case: Case, draft: llama3_eagle.LlamaForCausalLMEagle3) -> dict[str, Tensor]:
    """All requests as one batch, padded on the right, tokens shifted against features by the package."""
    padded = torch.nn.utils.rnn.pad_sequence
    texts = padded(case.texts, batch_first=True)
    real = padded([torch.ones_like(text) for text in case.texts], batch_first=True)
    features = texts.new_zeros(*texts.shape, case.features[0].shape[1], dtype=torch.float32)
    for row, given in zip(features, case.features, strict=True):
        row[: len(given)] = given
    scores = torch.zeros(*texts.shape, draft.vocab_size)
    tokens, target, mask = TargetHead(str(case.folder / "target")).preprocess(texts, scores, real)
    out = {"input_ids": tokens, "attention_mask": real, "target": target, "loss_mask": mask, "hidden_states": features}
    if isinstance(draft.midlayer.self_attn.rotary_emb, llama3_eagle.LlamaMutiRotaryEmbedding):
        out["position_ids"] = torch.arange(texts.shape[1]).expand(3, *texts.shape)  # text: the same on all three axes
    return out


@torch.no_grad()
def run(case: Case, attention: str) -> Seen:
    """Load and step one draft."""
    draft = load(case, attention)
    model = eagle3_model.OnlineEagle3Model(draft, length=case.depths + 1, attention_backend=attention)
    seen = Watched()
    with seen.watching(draft):
        model(**batch(case, draft))
    best = [scores.argmax(-1) for scores in seen.logits]
    seen.choices = [ids + draft.d2t[ids] for ids in best]
    return seen


def gather(case: Case, seen: Seen) -> dict[str, Tensor]:
    """The tensors of `outputs.safetensors`."""

    def rows(values_BTX: Tensor) -> Tensor:
        return torch.cat([values[:length] for values, length in zip(values_BTX, case.lengths, strict=True)])

    return seen.gather(case.depths, rows)


def noted(notes: list[str]) -> AbstractContextManager[None]:
    """Collect what the package, transformers and Python warn about."""
    return warned(notes, "transformers", "specforge")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", type=Path)
    parser.add_argument("--attention", default="sdpa", choices=("sdpa", "flex_attention"))
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_default_handler()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    return answer_all(args.cases, partial(run, attention=args.attention), gather, noted)


if __name__ == "__main__":
    sys.exit(main())

"""What faults do to a draft's tensors, each answering with those it changes. Whatever is random has a fixed seed."""

import re
from collections.abc import Callable

import torch
from torch import Tensor, nn

from spectrace.engine.checkpoint import read_embedding, read_head
from spectrace.engine.fault import Setting, Source, Tensors
from spectrace.engine.quantised import dequantised
from spectrace.engine.spec import DraftSpec, IdMap
from spectrace.engine.turned import in_other_order, rotated

__all__ = [
    "first_norm", "gate_and_up", "later_step", "no_later_layer", "no_own_embedding", "no_own_head", "no_scales",
    "no_table", "no_whole_head", "other_table", "plain_input_norm", "plain_norm", "random_embedding", "reordered",
    "rolled_table", "targets_embedding", "targets_head", "unloaded", "without_scales", "zero_table",
]  # fmt: skip

_SEED = 20260101
_STEP = 0.1  # of a number
_BLOCK = (128, 128)
_FP8_MOST, _ROUNDING = 448.0, 2.0**-8  # the largest number of float8_e4m3fn; how far bfloat16 may be from one
_LATER_NORM = re.compile(r"later\.\d+\.input_norm\.weight")


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(_SEED)


def _ids(tensors: Tensors) -> Tensor:
    return torch.arange(len(tensors["d2t"]), device=tensors["d2t"].device)


def other_table(tensors: Tensors, source: Source) -> Tensors:
    """Some other tokens of the vocabulary, in order."""
    vocab, count = source.spec.target_vocab, source.spec.draft_vocab
    tokens = torch.randperm(vocab, generator=_generator())[:count].sort().values
    return {"d2t": tokens.to(tensors["d2t"].device) - _ids(tensors)}


def rolled_table(tensors: Tensors, source: Source) -> Tensors:
    """Each id takes the offset of the id before it; tokens stay within the vocabulary."""
    ids = _ids(tensors)
    return {"d2t": (ids + tensors["d2t"].roll(1)) % source.spec.target_vocab - ids}


def zero_table(tensors: Tensors, _source: Source) -> Tensors:
    """No offset is left."""
    return {"d2t": torch.zeros_like(tensors["d2t"])}


def unloaded(module: str) -> Callable[[Tensors, Source], Tensors]:
    """A linear layer as torch makes it."""

    def weights(tensors: Tensors, _source: Source) -> Tensors:
        real = tensors[f"{module}.weight"]
        fresh = nn.init.kaiming_uniform_(torch.empty(real.shape), a=5**0.5, generator=_generator())
        return {f"{module}.weight": fresh.to(real)}

    return weights


def _plain(norm: Tensor, spec: DraftSpec) -> Tensor:
    """A norm's weight that changes nothing, as it is before it is loaded."""
    return torch.zeros_like(norm) if spec.unit_offset_norms else torch.ones_like(norm)


def plain_norm(tensors: Tensors, source: Source) -> Tensors:
    """The output norm as torch makes it."""
    return {"output_norm.weight": _plain(tensors["output_norm.weight"], source.spec)}


def _later_norms(tensors: Tensors) -> list[str]:
    return [name for name in tensors if _LATER_NORM.fullmatch(name)]


def plain_input_norm(tensors: Tensors, source: Source) -> Tensors:
    """Layers after the first apply a norm that the checkpoint does not have: it is as torch makes it."""
    return {name: _plain(tensors[name], source.spec) for name in _later_norms(tensors)}


def first_norm(tensors: Tensors, _source: Source) -> Tensors:
    """Layers after the first apply the first one's norm over the features."""
    return dict.fromkeys(_later_norms(tensors), tensors["feature_norm.weight"])


def targets_head(tensors: Tensors, source: Source) -> Tensors:
    """As many rows of the target's head as the draft's has."""
    return {"head.weight": read_head(source.target)[: source.spec.draft_vocab].to(tensors["head.weight"])}


def targets_embedding(tensors: Tensors, source: Source) -> Tensors:
    """The target's embedding, as it is stored."""
    return {"embedding.weight": read_embedding(source.target).to(tensors["embedding.weight"])}


def random_embedding(tensors: Tensors, _source: Source) -> Tensors:
    """As large as the real one, and about nothing."""
    real = tensors["embedding.weight"]
    return {"embedding.weight": (torch.randn(real.shape, generator=_generator()) * real.float().std().cpu()).to(real)}


def gate_and_up(tensors: Tensors, _source: Source) -> Tensors:
    """The two halves of the MLP's way in, in the wrong order."""
    return {"mlp.gate.weight": tensors["mlp.up.weight"], "mlp.up.weight": tensors["mlp.gate.weight"]}


def reordered(tensors: Tensors, source: Source) -> Tensors:
    """What of queries and keys is rotated, its rows in the order that the other kind of RoPE takes them in."""
    spec = source.spec
    return {name: in_other_order(tensors[name], rows, spec) for name, rows in rotated(tensors, spec)}


def later_step(tensors: Tensors, source: Source) -> Tensors:
    """Every number that is trained, moved by some per cent of itself, as more training might."""
    spec, generator = source.spec, _generator()
    owned = {"d2t": False, "embedding.weight": spec.own_embedding, "head.weight": spec.own_head}
    moved = {}
    for name in sorted(tensors):
        if owned.get(name, True):
            real = tensors[name].float().cpu()
            moved[name] = (real * (1 + _STEP * torch.randn(real.shape, generator=generator))).to(tensors[name])
    return moved


def without_scales(tensors: Tensors, source: Source) -> Tensors:
    """Quantised tensors as they are stored, taken for what they stand for."""
    return {name: _stored(tensors[name], scale.to(tensors[name].device)) for name, scale in source.scales.items()}


def _stored(real: Tensor, scale: Tensor) -> Tensor:
    """What a tensor was before it was multiplied by its scale, to the last bit where that was in fp8."""
    wide = real.float() / dequantised(torch.ones_like(real), scale, _BLOCK)
    eighth = wide.clamp(-_FP8_MOST, _FP8_MOST).to(torch.float8_e4m3fn).float()
    is_fp8 = bool(((eighth - wide).abs() <= _ROUNDING * wide.abs()).all())
    return (eighth if is_fp8 else wide).to(real)


def no_table(setting: Setting) -> str:
    """Whether there is no d2t to break."""
    spec = setting.spec
    whole = not setting.table or spec.draft_vocab == spec.target_vocab or spec.id_map is IdMap.NONE
    return "the draft's vocabulary is the whole of the target's: there is no d2t; use another draft" if whole else ""


def _too_wide(what: str, spec: DraftSpec) -> str:
    if spec.width == spec.target_width:
        return ""
    return f"the target's {what} is of width {spec.target_width}, but the draft is of {spec.width}; use another draft"


def no_own_head(setting: Setting) -> str:
    """Whether the target's head is the draft's already, or too wide for it."""
    if not setting.spec.own_head:
        return "the draft has the target's head already; use a draft with a head of its own"
    return _too_wide("head", setting.spec)


def no_whole_head(setting: Setting) -> str:
    """Whether the draft has no head that the target's would fit in place of."""
    spec = setting.spec
    if spec.own_head and spec.draft_vocab != spec.target_vocab:
        rows = f"{spec.draft_vocab} rows, the target's {spec.target_vocab}"
        return f"the draft's head has {rows}; use a draft of the whole vocabulary"
    return no_own_head(setting)


def no_own_embedding(setting: Setting) -> str:
    """Whether the target's embedding is the draft's already, or too wide for it."""
    if not setting.spec.own_embedding:
        return "the draft has the target's embedding already; use a draft with one of its own"
    return _too_wide("embedding", setting.spec)


def no_later_layer(setting: Setting) -> str:
    """Whether there is but one layer."""
    return "" if setting.spec.layers > 1 else "the draft has one layer; use a draft of several"


def no_scales(setting: Setting) -> str:
    """Whether no tensor is stored with a scale."""
    return "" if setting.scaled else "the draft is not quantised: there are no scales; use one that is"

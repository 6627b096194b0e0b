"""Drafts that vLLM serves without a word, each broken in one place: pure functions from a sound draft to a faulty one.

Shapes: K draft vocabulary, V target vocabulary, H draft width, A slots, F target width.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from scoreboard import edits
from scoreboard.edits import Draft

__all__ = ["BASES", "KINDS", "Kind"]

_IDS, _NESTED = "eagle_aux_hidden_state_layer_ids", "eagle_config"
_SEED = 5
_SMOLLM2, _LLAMA, _QWEN3 = "smollm2", "analytic", "analytic_qwen3"
_PLAIN = (_SMOLLM2, _LLAMA)


@dataclass(frozen=True, slots=True)
class Kind:
    """One thing done to a draft's folder, on some pairs. The sound draft is the pair's own, changed as `base` says.

    `ids` of the fault catalogue name it, none where nothing is wrong with what is served; `names` are tensors and
    fields, one of which an edit in words has to say. `same`: the engine is given the folder that is believed, which is
    right, and reads it otherwise; elsewhere it is given a copy with the fault in it. `own`: the faulty folder itself
    holds, somewhere, what the repair needs, or says that it does not.
    """

    name: str
    ids: tuple[str, ...]
    names: tuple[str, ...]
    edit: Callable[[Draft], Draft]
    pairs: tuple[str, ...] = _PLAIN
    base: str = ""
    same: bool = False
    own: bool = True


def _without(tensor: str, draft: Draft) -> Draft:
    kept = {name: held for name, held in draft.tensors.items() if not f".{name}".endswith(f".{tensor}")}
    assert len(kept) == len(draft.tensors) - 1
    return replace(draft, tensors=kept)


def _holding(draft: Draft, **tensors: torch.Tensor) -> Draft:
    return replace(draft, tensors={**draft.tensors, **tensors})


def _configured(draft: Draft, *lost: str, **fields: object) -> Draft:
    config = {name: value for name, value in draft.config.items() if name not in lost}
    return replace(draft, config={**config, **fields})


def _tokens_K(draft: Draft) -> torch.Tensor:
    return draft.tensors["d2t"] + torch.arange(len(draft.tensors["d2t"]))


def _absolute(draft: Draft) -> Draft:
    return _holding(draft, d2t=_tokens_K(draft))


def _own_embedding(draft: Draft) -> Draft:
    """An embedding that training never touched, exported beside the rest."""
    shape = int(draft.config["vocab_size"]), int(draft.config["hidden_size"])
    fresh_VH = 0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(_SEED))
    return _holding(draft, **{"embed_tokens.weight": fresh_VH.to(draft.tensors["fc.weight"].dtype)})


def _rewired(draft: Draft, *ids: int) -> Draft:
    """These ids at the top level, and no others."""
    return _configured(draft, _NESTED, **{_IDS: list(ids)})


def _moved(draft: Draft, by: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Draft:
    return _rewired(draft, *by(tuple(draft.config[_IDS])))


def _under(draft: Draft, key: str, by: int) -> Draft:
    """The ids within `eagle_config` alone."""
    return _configured(draft, _IDS, **{_NESTED: {key: [i + by for i in draft.config[_IDS]]}})


def _swapped_slots(wiring: tuple[int, ...]) -> tuple[int, ...]:
    return (wiring[1], wiring[0], *wiring[2:])


# Sound drafts that are not the pair's own


def _narrow(draft: Draft) -> Draft:
    """Without the ids that would, doubled, lead out of the vocabulary."""
    tokens_K = _tokens_K(draft)
    kept = int((tokens_K + torch.arange(len(tokens_K)) < draft.config["vocab_size"]).sum())
    marks_V = torch.zeros(int(draft.config["vocab_size"]), dtype=torch.bool)
    marks_V[tokens_K[:kept]] = True
    head_KH = draft.tensors["lm_head.weight"][:kept]
    draft = _holding(draft, d2t=draft.tensors["d2t"][:kept], t2d=marks_V, **{"lm_head.weight": head_KH})
    return _configured(draft, draft_vocab_size=kept)


def _unordered(draft: Draft) -> Draft:
    """Trained on its first two slots the other way round."""
    weight_HAF = draft.tensors["fc.weight"].unflatten(1, (len(draft.config[_IDS]), -1))
    order = _swapped_slots(tuple(range(weight_HAF.shape[1])))
    return _moved(_holding(draft, **{"fc.weight": weight_HAF[:, list(order)].flatten(1)}), _swapped_slots)


def _output_ids(draft: Draft) -> Draft:
    """Exported by a trainer whose ids name the layer that a stream leaves."""
    return _under(draft, _IDS, -1)


def _weighed(draft: Draft) -> Draft:
    """A norm per slot whose gains differ, and an `fc` that makes up for them."""
    gains = (0.25, 1.0, 4.0)
    weight_HAF = draft.tensors["fc.weight"].unflatten(1, (len(gains), -1)) / torch.tensor(gains)[:, None]
    names = [f"fc_norm.{slot}.weight" for slot in range(len(gains))]
    norms = {name: gain * draft.tensors[name] for name, gain in zip(names, gains, strict=True)}
    return _holding(draft, **{"fc.weight": weight_HAF.flatten(1), **norms})


BASES: Mapping[str, Callable[[Draft], Draft]] = {
    "narrow": _narrow,
    "unordered": _unordered,
    "output ids": _output_ids,
    "weighed": _weighed,
}


def _missing(tensor: str, id: str, *alike: str) -> Kind:
    name = tensor.removesuffix(".weight").rpartition(".")[2]
    return Kind(f"{name} missing", (id, *alike), (tensor,), partial(_without, tensor))


KINDS = (
    _missing("d2t", "V1", "V5"),
    Kind("d2t zero", ("V5", "V1"), ("d2t",), edits.zero_d2t),
    Kind("d2t absolute", ("V2",), ("d2t",), _absolute, base="narrow"),
    Kind("d2t rolled by one", ("V4",), ("d2t",), edits.roll_d2t),
    Kind("d2t of another run", ("V3",), ("d2t",), lambda draft: edits.stale_d2t(draft, _SEED)),
    _missing("lm_head.weight", "P2"),
    Kind("embed_tokens random", ("P3",), ("embed_tokens",), _own_embedding),
    _missing("self_attn.q_proj.weight", "P1"),
    _missing("fc.weight", "P1"),
    _missing("norm.weight", "P1"),
    _missing("hidden_norm.weight", "P1"),
    _missing("input_layernorm.weight", "P1"),
    _missing("post_attention_layernorm.weight", "P1"),
    Kind("gate and up swapped", ("P4",), ("gate_proj", "up_proj"), edits.swap_gate_and_up),
    Kind("norm_before_residual flipped", ("N1",), ("norm_before_residual",),
         lambda draft: edits.flip(draft, "norm_before_residual"), pairs=(_SMOLLM2,)),
    Kind("norm_output flipped", ("N3",), ("norm_output",), lambda draft: edits.flip(draft, "norm_output"),
         pairs=(_SMOLLM2,)),
    Kind("fc_norm lost", ("N2",), ("fc_norm",), lambda draft: edits.drop_fuse_norm(draft, keep_tensors=False),
         pairs=(_QWEN3,), base="weighed", own=False),
    Kind("rope_theta changed", ("R3",), ("rope_theta",), lambda draft: _configured(draft, rope_theta=500_000.0)),
    Kind("rope_theta lost", ("R3",), ("rope_theta",), lambda draft: edits.set_theta(draft, None), pairs=(_SMOLLM2,)),
    Kind("ids absent", ("W4",), (_IDS,), edits.forget_wiring),
    Kind("ids under a key that nobody reads", ("W4",), (_IDS,), lambda draft: _under(draft, "layer_ids", 0),
         pairs=(_SMOLLM2,)),
    Kind("ids one late", ("W2",), (_IDS,), lambda draft: _moved(draft, lambda own: edits.late(own, 30)),
         pairs=(_SMOLLM2,)),
    Kind("ids one early", ("W1",), (_IDS,), lambda draft: _moved(draft, edits.early), pairs=(_LLAMA, _QWEN3)),
    Kind("one id late", ("W2",), (_IDS,), lambda draft: _moved(draft, lambda own: edits.move_slot(own, 1, 1)),
         pairs=(_SMOLLM2, _LLAMA, _QWEN3)),
    Kind("output ids in the copy", ("W1",), (_IDS,), _output_ids, pairs=(_SMOLLM2, _QWEN3), own=False),
    Kind("output ids", ("W1",), (_IDS,), lambda draft: draft, pairs=(_QWEN3,), base="output ids", same=True),
    Kind("ids not in order", ("W5",), (_IDS,), lambda draft: draft, base="unordered", same=True),
    Kind("ids in another order in the copy", (), (), lambda draft: _moved(draft, _swapped_slots)),
    Kind("use_aux_hidden_state false", ("M2",), ("use_aux_hidden_state",),
         lambda draft: _configured(draft, **{_NESTED: {"use_aux_hidden_state": False}})),
)  # fmt: skip

"""ModelOpt's export: layers by number, and many flags within `eagle_config`; read, not written.

It captures boundaries in ascending order, and writes their ids as they were given. Its d2t may be in order of
frequency, and it has no t2d. Before December 2025 the first layer's two norms of its input had names of their own.
"""

from collections.abc import Collection, Iterator, Mapping

from torch import Tensor

from spectrace.engine.fields import Fields
from spectrace.engine.layouts.layout import NESTED, Layout

__all__ = ["MODELOPT"]

_FLAGS = frozenset({
    "next_layer_regular", "parallel_draft_heads_num_layers", "parallel_draft_step", "use_aux_hidden_state",
    "use_input_layernorm_in_first_layer", "use_last_layernorm", "use_mtp_layernorm",
})  # fmt: skip


def _told(fields: Fields, names: Collection[str]) -> bool:
    held = fields.peek(NESTED)
    by_number = not any(name.startswith("midlayer.") for name in names)
    return by_number and isinstance(held, dict) and not _FLAGS.isdisjoint(held)


def _remarks(_fields: Fields, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    gain = tensors.get("embedding_norm.weight")
    if gain is not None and bool((gain != gain.flatten()[0]).any()):
        yield (
            "ModelOpt from 0.41 on trains with input_layernorm over the fused features, too, before hidden_norm, and "
            "engines norm them once: served, such a draft is not the one that was trained, unless that gain is the "
            "same everywhere"
        )


MODELOPT = Layout(name="modelopt", title="ModelOpt", told=_told, first="layers.0", ascending=True, remarks=_remarks)

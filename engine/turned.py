"""The rows of queries and keys that RoPE rotates, and the other orders in which converters leave them.

RoPE takes a head's rows (i, i + D/2) as pairs, or (2i, 2i + 1). Rows that were put into the order of one kind are
garbled by the other, and so are rows that were put into an order twice.

Shapes: D rotated rows of a head.
"""

import re
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from spectrace.engine.spec import DraftSpec, MlaSpec

__all__ = ["head_order", "in_other_order", "rotated"]


def rotated(names: Iterable[str], spec: DraftSpec) -> Iterator[tuple[str, int]]:
    """The tensors that make queries and keys, biases too, and how many rows of each are a head's.

    MLA has one head of keys, which lies behind its latent.
    """
    shape = spec.attention
    if isinstance(shape, MlaSpec):
        rows = {"q": shape.key_dim, "q_up": shape.key_dim, "kv_down": shape.kv_rank + shape.rope_dim}
    else:
        rows = {"q": shape.head_dim, "k": shape.head_dim}
    for name in names:
        found = re.fullmatch(r"(?:later\.\d+\.)?attention\.(\w+)\.(?:weight|bias)", name)
        if found and found[1] in rows:
            yield name, rows[found[1]]


def head_order(spec: DraftSpec, rows: int, *, back: bool = False) -> list[int]:
    """Which of a head's rows stands where, in the order of the other kind of RoPE; `back`: so that this one rights it.

    GQA rotates the first rows of a head, MLA the last.
    """
    width = spec.rope_width
    first = rows - width if isinstance(spec.attention, MlaSpec) else 0
    order = torch.arange(width).reshape((-1, 2) if spec.rope.interleaved else (2, -1)).T.flatten()
    order = order.argsort() if back else order
    return [*range(first), *(first + order).tolist(), *range(first + width, rows)]


def in_other_order(tensor: Tensor, rows: int, spec: DraftSpec, *, back: bool = False) -> Tensor:
    """A tensor whose rows are those of heads, these rows in the other order."""
    order = torch.tensor(head_order(spec, rows, back=back), device=tensor.device)
    return tensor.reshape(-1, rows, *tensor.shape[1:])[:, order].reshape(tensor.shape)

"""The boundaries that feed a draft, by the layer ids of its config: these are converted here and nowhere else."""

from collections.abc import Sequence
from dataclasses import dataclass

from spectrace.engine.fields import Fields
from spectrace.engine.layouts.layout import LAYER_IDS, NESTED_IDS, TOP_IDS, IdKey
from spectrace.tracer.errors import UserError

__all__ = ["ID_KEYS", "IdKey", "Wiring", "check_boundaries", "read_wiring"]

ID_KEYS = (TOP_IDS, NESTED_IDS, LAYER_IDS)
"""Where published drafts keep their layer ids, and what they mean by them; the first that is there counts.

At the top level an id names the layer that a stream enters, so the boundary; under `eagle_config` the layer that it
leaves, one less (-1 is the embedding), but for `layer_ids`.
"""


@dataclass(frozen=True, slots=True)
class Wiring:
    """The boundaries that feed `fc`, in order, and where they came from: `raw_ids` as written under `key`."""

    boundaries: tuple[int, ...]
    key: str
    raw_ids: tuple[int, ...]


def read_wiring(fields: Fields, *, ascending: bool = False) -> Wiring | None:
    """The boundaries that a config's layer ids mean; ids under other keys that say something else stay unread.

    `ascending`: who wrote ids within `eagle_config` fed slots in the order of their boundaries, whatever order the ids
    are in.
    Raises UserError for ids that are none.
    """
    found: Wiring | None = None
    for one in ID_KEYS:
        holder, name = _holder(fields, one.key)
        if name not in holder:
            continue
        if found is None:
            ids = _read_ids(holder, name)
            boundaries = tuple(i + one.offset for i in ids)
            if ascending and one == NESTED_IDS and list(boundaries) != sorted(boundaries):
                fields.note(f"{one.key} is not in ascending order; ModelOpt feeds slots in that of their boundaries")
                boundaries = tuple(sorted(boundaries))
            found = Wiring(boundaries, one.key, ids)
        elif holder.peek(name) == [boundary - one.offset for boundary in found.boundaries]:
            holder.get(name)
        else:
            fields.note(f"{one.key} {holder.peek(name)} names other boundaries than {found.key}, which counts")
    return found


def _holder(fields: Fields, key: str) -> tuple[Fields, str]:
    outer, _, name = key.rpartition(".")
    return (fields.nested(outer), name) if outer else (fields, name)


def check_boundaries(where: str, boundaries: Sequence[int], layers: int, hint: str = "") -> None:
    """Raises UserError for a boundary that a target of so many layers does not have."""
    for boundary in boundaries:
        if not 0 <= boundary <= layers:
            raise UserError(
                f"{where}: boundary {boundary} does not exist; this target has boundaries 0 to {layers}, for its "
                f"{layers} layers{hint}"
            )


def _read_ids(fields: Fields, name: str) -> tuple[int, ...]:
    ids = fields.get(name)
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise UserError(f"{fields.path}: field {fields.name(name)} is {ids!r}, expected a list of layer ids")
    return tuple(ids)

"""SpecForge, offline: `rows_a-b/data_i.ckpt[.gz]`, a file per text, the last state with the final norm behind it.

Its names are a trap: `aux_hidden_state` are the slots, `hidden_state` is the last state. Online it is the other way.
"""

from spectrace.replay.dumps.load import Fields, one_per_file
from spectrace.replay.dumps.sample import Convention, Dialect, Norm, Sample

__all__ = ["SPECFORGE"]


def _read(fields: Fields) -> Sample:
    tokens = fields.tokens("input_ids")
    last = fields.states("hidden_state", len(tokens))
    return Sample(
        name=fields.path.name.removesuffix(".gz").removesuffix(".ckpt"),
        path=fields.path,
        tokens=tokens,
        slots=fields.slots("aux_hidden_state", len(tokens), last.shape[1]),
        last=last,
        mask=fields.mask("loss_mask", len(tokens)),
        norm=Norm.POST,
    )


SPECFORGE = Dialect(
    name="specforge",
    layout="*.ckpt[.gz] with input_ids, loss_mask, hidden_state, aux_hidden_state",
    convention=Convention.OUTPUT,
    knows=lambda path, fields: "aux_hidden_state" in fields,
    open=one_per_file((".ckpt", ".ckpt.gz"), _read),
)

"""AngelSlim, offline: `*.ckpt`: `hidden_states` are the slots, `target_hiddens` the last state, normed."""

from spectrace.replay.dumps.load import Fields, one_per_file
from spectrace.replay.dumps.sample import Convention, Dialect, Norm, Sample

__all__ = ["ANGELSLIM"]


def _read(fields: Fields) -> Sample:
    tokens = fields.tokens("input_ids")
    last = fields.states("target_hiddens", len(tokens))
    return Sample(
        name=fields.path.stem,
        path=fields.path,
        tokens=tokens,
        slots=fields.slots("hidden_states", len(tokens), last.shape[1]),
        last=last,
        mask=fields.mask("loss_mask", len(tokens)),
        norm=Norm.POST,
    )


ANGELSLIM = Dialect(
    name="angelslim",
    layout="*.ckpt with input_ids, target_hiddens, hidden_states, loss_mask",
    convention=Convention.OUTPUT,
    knows=lambda path, fields: "target_hiddens" in fields,
    open=one_per_file((".ckpt", ".pt"), _read),
)

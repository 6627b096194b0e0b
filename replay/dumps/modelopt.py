"""ModelOpt, offline: `*.pt`, a file per text. Its vLLM dump has no final norm behind the last state, and says so.

`hidden_states_prenorm` is only there since dumps through vLLM are; without it the last state is normed.
"""

from spectrace.replay.dumps.load import Fields, one_per_file
from spectrace.replay.dumps.sample import Convention, Dialect, Norm, Sample

__all__ = ["MODELOPT"]


def _read(fields: Fields) -> Sample:
    tokens = fields.tokens("input_ids")
    last = fields.states("hidden_states", len(tokens))
    return Sample(
        name=str(fields.values.get("conversation_id", fields.path.stem)),
        path=fields.path,
        tokens=tokens,
        slots=fields.slots("aux_hidden_states", len(tokens), last.shape[1]),
        last=last,
        mask=fields.mask("loss_mask", len(tokens)),
        norm=Norm.PRE if fields.values.get("hidden_states_prenorm") else Norm.POST,
    )


MODELOPT = Dialect(
    name="modelopt",
    layout="*.pt with input_ids, hidden_states, aux_hidden_states",
    convention=Convention.OUTPUT,
    knows=lambda path, fields: "aux_hidden_states" in fields,
    open=one_per_file((".pt",), _read),
)

"""vLLM's `extract_hidden_states`: `{request}.safetensors`, the layers that were asked for, in the order of their ids.

Every layer is a slot: id L is the stream that leaves the last one, before the final norm.
"""

from collections.abc import Mapping
from pathlib import Path

from spectrace.replay.dumps.load import Fields, one_per_file
from spectrace.replay.dumps.sample import Convention, Dialect, Sample

__all__ = ["VLLM", "has_layers"]


def has_layers(fields: Mapping[str, object]) -> bool:
    """Whether a file's fields are those that vLLM's connector writes."""
    return fields.keys() >= {"hidden_states", "token_ids"}


def _knows(path: Path, fields: Mapping[str, object]) -> bool:
    return has_layers(fields) and not path.name.startswith("hs_")


def _read(fields: Fields) -> Sample:
    tokens = fields.tokens("token_ids")
    states = fields.states("hidden_states", len(tokens), layers=True)
    return Sample(name=fields.path.stem, path=fields.path, tokens=tokens, slots=states.unbind(1))


VLLM = Dialect(
    name="vllm",
    layout="*.safetensors with hidden_states [T, layers, F], token_ids",
    convention=Convention.INPUT,
    knows=_knows,
    open=one_per_file((".safetensors",), _read),
)

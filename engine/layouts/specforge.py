"""SpecForge's layout: EAGLE's names, and layer ids within `eagle_config`, each the layer that a stream leaves.

They are written at the top, too, where vLLM takes them as they are meant: within `eagle_config` it reads them as
layers that streams enter, or not at all. SpecForge's trainer builds three slots, one layer and plain attention,
whatever a config says, so it has no words for others.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor

from spectrace.engine.fields import Fields
from spectrace.engine.layouts.layout import NESTED, NESTED_IDS, TOP_IDS, Layout, Verifier
from spectrace.engine.layouts.limits import ENGINES_ALONE, EVERYWHERE, ONE_PLAIN_LAYER, OWN_KEYS
from spectrace.engine.layouts.words import attention_words, fuse_words, rope_words, shape_words, stream_words
from spectrace.engine.spec import DraftSpec

__all__ = ["SPECFORGE"]

_IDS = NESTED_IDS.key.removeprefix(f"{NESTED}.")


def _told(fields: Fields, names: Collection[str]) -> bool:
    held = fields.peek(NESTED)
    nested = isinstance(held, dict) and held.get(_IDS) is not None
    return nested and any(name.startswith("midlayer.") for name in names)


def _remarks(fields: Fields, _tensors: Mapping[str, Tensor]) -> Iterator[str]:
    if "norm_output" in fields:
        yield (
            "norm_output is read as engines read it, whether the state is fed back behind the norm; SpecForge up to "
            "0.2.0 takes it for whether there is a norm before the head"
        )


def _config(spec: DraftSpec, boundaries: tuple[int, ...] | None, _: Verifier | None) -> dict[str, Any]:
    rope = rope_words(spec, both_mscales=True)
    ids = None if boundaries is None else [boundary - NESTED_IDS.offset for boundary in boundaries]
    feedback = {"norm_output": True} if stream_words(spec)["norm_output"] else {}  # false once meant no norm at all
    return {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **shape_words(spec),
        **attention_words(spec), "target_hidden_size": spec.target_width, "draft_vocab_size": spec.draft_vocab,
        **feedback, **fuse_words(spec), "rope_theta": spec.rope.theta,
        **({"rope_scaling": rope} if len(rope) > 1 else {}),
        **({TOP_IDS.key: list(boundaries), NESTED: {_IDS: ids}} if boundaries is not None else {}),
    }  # fmt: skip


SPECFORGE = Layout(
    name="specforge",
    title="SpecForge",
    told=_told,
    config=_config,
    remarks=_remarks,
    whole_tables=True,
    limits=(*EVERYWHERE, *OWN_KEYS, *ENGINES_ALONE, *ONE_PLAIN_LAYER),
)

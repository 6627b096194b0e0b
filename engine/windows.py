"""Which layers of a draft see a window only, by a config's fields, as transformers reads them for its model type."""

from typing import Final

from spectrace.engine.fields import Fields
from spectrace.tracer.errors import UserError

__all__ = ["SLIDING", "read_windows"]

SLIDING: Final = "sliding_attention"
_FULL: Final = "full_attention"
_SWITCHED: Final = ("qwen2", "qwen3")  # a window counts where use_sliding_window says so
_ALL_LAYERS: Final = ("mistral",)  # a window counts in every layer


def read_windows(body: Fields, layers: int) -> tuple[int | None, ...]:
    """How many positions back each layer sees, its own included; None: all of them.

    Llama's layers have a window where `layer_types` says so, which is how speculators and vLLM read their drafts.
    Engines pass a window over in many cases, so one that counts is noted. Raises UserError for other kinds of layers.
    """
    kinds = _kinds(body, layers)
    if SLIDING not in kinds:
        return (None,) * layers
    size = body.whole("sliding_window", 4096 if _switched(body) else None)
    if size < 1:
        raise UserError(f"{body.path}: field {body.name('sliding_window')} is {size}, expected a number above 0")
    body.note(
        f"{body.name('sliding_window')} {size} counts in {kinds.count(SLIDING)} of {layers} layers; not every engine "
        f"keeps to it"
    )
    return tuple(size if kind == SLIDING else None for kind in kinds)


def _kinds(body: Fields, layers: int) -> list[str]:
    model = str(body.peek("model_type") or "")
    switched, on = _switched(body), body.peek("use_sliding_window") in (True,)
    if switched and not on:
        return _switched_off(body, layers)
    if on:
        body.get("use_sliding_window")
    if "layer_types" in body:
        return _listed(body, layers)
    if switched:
        first = body.whole("max_window_layers", 28)
        return [SLIDING if layer >= first else _FULL for layer in range(layers)]
    if model in _ALL_LAYERS and "sliding_window" in body:
        return [SLIDING] * layers
    return [_FULL] * layers


def _switched(body: Fields) -> bool:
    return str(body.peek("model_type") or "").startswith(_SWITCHED)


def _switched_off(body: Fields, layers: int) -> list[str]:
    """Read what lies there and counts for nothing."""
    for name in ("sliding_window", "max_window_layers"):
        body.get(name)
    if "use_sliding_window" in body:
        body.flag("use_sliding_window")
    if "layer_types" in body and SLIDING in _listed(body, layers):
        body.note(
            f"{body.name('layer_types')} names {SLIDING}, which transformers passes over without use_sliding_window: "
            f"all layers see everything"
        )
    return [_FULL] * layers


def _listed(body: Fields, layers: int) -> list[str]:
    kinds, name = body.get("layer_types"), body.name("layer_types")
    if not isinstance(kinds, list) or len(kinds) < layers:
        raise UserError(
            f"{body.path}: field {name} is {kinds!r}, expected a list with an entry for each layer: {layers}"
        )
    for kind in kinds[:layers]:
        if kind not in (SLIDING, _FULL):
            raise UserError(f"{body.path}: field {name} names {kind!r}; expected {SLIDING} or {_FULL}")
    return [str(kind) for kind in kinds[:layers]]

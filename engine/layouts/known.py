"""All layouts, and which of them a draft's folder is of."""

from collections.abc import Collection
from typing import Final

from spectrace.engine.fields import Fields
from spectrace.engine.layouts.angelslim import ANGELSLIM
from spectrace.engine.layouts.eagle import EAGLE
from spectrace.engine.layouts.layout import Layout
from spectrace.engine.layouts.modelopt import MODELOPT
from spectrace.engine.layouts.specforge import SPECFORGE
from spectrace.engine.layouts.speculators import SPECULATORS
from spectrace.tracer.errors import UserError

__all__ = ["LAYOUTS", "WRITABLE", "layout_of", "writable"]

LAYOUTS: Final = (SPECULATORS, ANGELSLIM, MODELOPT, SPECFORGE, EAGLE)
"""In the order in which a folder is held against them; the last takes what is left."""

WRITABLE: Final = tuple(sorted(layout.name for layout in LAYOUTS if layout.config is not None))


def layout_of(fields: Fields, names: Collection[str]) -> Layout:
    """The layout of a config and the tensors beside it."""
    return next(layout for layout in LAYOUTS if layout.told(fields, names))


def writable(name: str) -> Layout:
    """A layout that can be written, by its name, or UserError."""
    for layout in LAYOUTS:
        if layout.name == name and layout.config is not None:
            return layout
    raise UserError(f"layout {name!r} cannot be written; expected one of {', '.join(WRITABLE)}")

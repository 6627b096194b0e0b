"""AngelSlim's layout: EAGLE's names and no layer ids, which its code fixes at outputs 1, L/2 - 1 and L - 4: the
boundaries that engines take where none are named. Read, not written.
"""

from spectrace.engine.layouts.layout import Layout

__all__ = ["ANGELSLIM"]

ANGELSLIM = Layout(
    name="angelslim",
    title="AngelSlim",
    told=lambda fields, _: "target_model_type" in fields,
    describes=frozenset({"target_model_type"}),
)

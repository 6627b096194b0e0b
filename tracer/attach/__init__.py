"""Recording engines that nobody edited: each module knows one, hooks its methods, and calls the recorder's verbs.

What is here is all that an engine loads when nothing is to be recorded.
"""

from __future__ import annotations

import os
from typing import Final

__all__ = ["LEVEL", "TRACE", "attach_vllm"]

TRACE: Final = "SPECTRACE_TRACE"
LEVEL: Final = "SPECTRACE_LEVEL"


def attach_vllm() -> None:
    """Our entry point of `vllm.general_plugins`: called in each of its processes, maybe more than once."""
    if os.environ.get(TRACE):
        from spectrace.tracer.attach.session import refuse

        try:
            from spectrace.tracer.attach.vllm import attach

            attach()
        except Exception as error:
            refuse("vLLM", error)

"""The requests of a trace as texts: prompt and output tokens by request number."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from spectrace.tracer.trace import Trace

__all__ = ["Text", "read_texts"]


@dataclass(frozen=True, slots=True)
class Text:
    """One finished request."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    depth: int
    temperature: float = 0.0

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.output


def read_texts(trace: Trace) -> Mapping[int, Text]:
    """Finished requests by number; a torn trace may have lost rounds of one, and then it is not among them."""
    rows, verified = trace.rows("requests"), trace.rows("verified", node=0)
    rounds = Counter(verified["request"].tolist())
    there = np.array([rounds[request] for request in rows["request"].tolist()], np.int64)
    rows = rows.take(there >= rows["rounds"])
    columns = zip(
        rows["request"].tolist(),
        rows["prompt_tokens"],
        rows["output_tokens"],
        rows["depth_limit"].tolist(),
        rows["temperature"].tolist(),
        strict=True,
    )
    return {
        request: Text(tuple(prompt.tolist()), tuple(output.tolist()), depth, temperature)
        for request, prompt, output, depth, temperature in columns
    }

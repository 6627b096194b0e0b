"""The requests of a trace as texts: prompt and output tokens by request number."""

from collections.abc import Mapping
from dataclasses import dataclass

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
    """Finished requests by number."""
    rows = trace.rows("requests")
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

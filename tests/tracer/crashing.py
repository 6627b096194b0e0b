"""Forks a recorder per folder named on stdin, so that a test can kill it at any moment.

Every value follows from (request, node), so a reader can tell whether what it got is what was recorded.
"""

from __future__ import annotations

import os
import sys

import numpy as np

from spectrace.tracer import Keys, Level, Recorder, create_trace

ROWS = 5
WIDTH = 64


def record_until_killed(folder: str) -> None:
    create_trace(folder, {})
    with Recorder(
        folder, role="draft", level=Level.FULL, batch_bytes=4000, batch_secs=0.002, segment_bytes=40_000
    ) as r:
        for request in range(2**31):
            keys = Keys(request=request, pass_=0, position=np.arange(ROWS))
            features = (request * ROWS + np.arange(ROWS * WIDTH, dtype=np.float32)).reshape(ROWS, WIDTH)
            r.received(keys, token=(request + np.arange(ROWS)) % 1000, features=features)


if __name__ == "__main__":
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            record_until_killed(line.strip())
        print(child, flush=True)
        os.waitpid(child, 0)
        print("dead", flush=True)

"""Run a command and say what it took. A process of its own: a child's peak memory begins at that of its parent."""

import json
import os
import subprocess
import sys
import time


def main() -> None:
    """`OUT COMMAND...`: its stdout goes to the file OUT; one JSON object on ours."""
    out, *command = sys.argv[1:]
    with open(out, "wb") as sink, open(f"{out}.err", "wb") as errors:
        started = time.perf_counter()
        child = subprocess.Popen(command, stdout=sink, stderr=errors)
        _, status, usage = os.wait4(child.pid, 0)
        secs = time.perf_counter() - started
    child.returncode = os.waitstatus_to_exitcode(status)
    print(json.dumps({"code": child.returncode, "secs": secs, "peak_bytes": usage.ru_maxrss * 1024}))


if __name__ == "__main__":
    main()

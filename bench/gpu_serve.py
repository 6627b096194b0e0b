"""An engine that answers some prompts and says what came; `gpu_check` starts it in a process of its own.

python bench/gpu_serve.py '{"target": DIR, "draft": DIR, "eager": true, "depth": 3, "folder": DIR}'
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

LENGTHS, NEW_TOKENS, VOCABULARY = (3, 5, 20, 1, 9, 14, 40, 7) * 4, 64, 60


def serve(target: str, draft: str, eager: bool, depth: int, folder: str) -> None:
    """What vLLM prints goes to `log` in the folder; outputs, counters and seconds to `said.json`."""
    log = os.open(Path(folder) / "log", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    from vllm import LLM, SamplingParams

    drawn = random.Random(1)
    prompts = [{"prompt_token_ids": [drawn.randrange(5, VOCABULARY) for _ in range(length)]} for length in LENGTHS]
    llm = LLM(
        model=target, max_model_len=1024, max_num_seqs=16, seed=0, disable_log_stats=False, enforce_eager=eager,
        skip_tokenizer_init=True, gpu_memory_utilization=0.5, enable_prefix_caching=False,
        speculative_config={"method": "eagle3", "model": draft, "num_speculative_tokens": depth},
    )  # fmt: skip
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    started = time.perf_counter()
    answers = llm.generate(prompts, sampling)
    secs = time.perf_counter() - started
    counters = {one.name: one.value for one in llm.get_metrics() if "spec_decode" in one.name and hasattr(one, "value")}
    said = {"outputs": [list(one.outputs[0].token_ids) for one in answers], "counters": counters, "secs": secs}
    (Path(folder) / "said.json").write_text(json.dumps(said), "utf-8")


if __name__ == "__main__":
    serve(**json.loads(sys.argv[1]))

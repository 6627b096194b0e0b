"""Serve a few prompts with vLLM and say what came: run by the interpreter of an environment that has vLLM.

python serve_vllm.py TARGET DRAFT ASKED.json SAID.json

`asked` holds `prompts`, and may hold `options` of the engine, `max_new`, `ignore_end`, how many `engines` to start one
after another, and `disk_bytes`, after which every write says that the disk is full.
"""

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

for name, value in {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}.items():
    os.environ.setdefault(name, value)


def fill_disk(room: int) -> None:
    """Let the recorder's files, which are written without buffers, take so many bytes."""
    write, left = os.writev, [room]

    def writev(file: int, parts: Any) -> int:
        left[0] -= sum(memoryview(part).nbytes for part in parts)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, parts)

    os.writev = writev


def answer(target: str, draft: str, given: dict[str, Any]) -> dict[str, Any]:
    """One engine from its start to its end: its outputs, and its own counters."""
    from vllm import LLM, SamplingParams

    usual = {
        "dtype": "float32", "max_model_len": 512, "max_num_seqs": 8, "seed": 0, "disable_log_stats": False,
        "skip_tokenizer_init": True, "enforce_eager": True,
    }  # fmt: skip
    speculative = {"method": "eagle3", "model": draft, "num_speculative_tokens": 3}
    llm = LLM(model=target, speculative_config=speculative, **{**usual, **given.get("options", {})})
    sampling = SamplingParams(
        temperature=0.0, max_tokens=given.get("max_new", 40), ignore_eos=given.get("ignore_end", True), detokenize=False
    )
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in given["prompts"]], sampling)
    counters = {
        metric.name.removeprefix("vllm:"): getattr(metric, "value", getattr(metric, "values", None))
        for metric in llm.get_metrics()
        if "spec_decode" in metric.name or "preemptions" in metric.name
    }
    return {"outputs": [list(one.outputs[0].token_ids) for one in answers], "counters": counters}


def main(target: str, draft: str, asked: str, said: str) -> None:
    given = json.loads(Path(asked).read_text("utf-8"))
    if room := given.get("disk_bytes"):
        fill_disk(room)
    told = [answer(target, draft, given) for _ in range(given.get("engines", 1))]
    Path(said).write_text(json.dumps(told[-1]), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Serve prompts with vLLM and say what came: run by the interpreter of an environment that has vLLM.

python serve.py ASKED.json SAID.json
"""

import json
import os
import sys
from pathlib import Path

for name, value in {
    "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}.items():  # fmt: skip
    os.environ.setdefault(name, value)


def main(asked: str, said: str) -> None:
    from vllm import LLM, SamplingParams

    given = json.loads(Path(asked).read_text("utf-8"))
    drafting = {"method": "eagle3", "model": given["draft"], "num_speculative_tokens": given["depth"]}
    llm = LLM(
        model=given["target"], speculative_config=drafting, dtype="float32", max_model_len=512, max_num_seqs=8, seed=0,
        disable_log_stats=False, skip_tokenizer_init=True, enforce_eager=True,
    )  # fmt: skip
    sampling = SamplingParams(temperature=0.0, max_tokens=given["max_new"], ignore_eos=True, detokenize=False)
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in given["prompts"]], sampling)
    counters = {
        metric.name.removeprefix("vllm:spec_decode_"): getattr(metric, "value", getattr(metric, "values", None))
        for metric in llm.get_metrics()
        if "spec_decode" in metric.name
    }
    outputs = [list(answer.outputs[0].token_ids) for answer in answers]
    Path(said).write_text(json.dumps({"outputs": outputs, "counters": counters}), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

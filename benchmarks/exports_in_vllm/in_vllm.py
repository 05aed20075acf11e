"""Greedy answers of vLLM with one drafter: a program for a Python that has vLLM.

Reads a job from standard input as JSON and writes the answers to the file that it names. Imports nothing of this
project, which that Python does not have. Run by `benchmarks.exports_in_vllm`.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

# KV cache in GiB: the default is a share of the machine's memory. One process, so that its last words are the error.
_ENVIRON = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
_PREFIX = "vllm:spec_decode_num_"


def main() -> None:
    """Job: arguments (of vLLM's LLM), prompts (lists of token ids), max_tokens, answers (a path)."""
    for name, value in _ENVIRON.items():
        os.environ.setdefault(name, value)
    job = json.load(sys.stdin)
    import vllm  # type: ignore[import-not-found]  # reads the environment

    llm = vllm.LLM(enforce_eager=True, disable_log_stats=False, **job["arguments"])
    params = vllm.SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in job["prompts"]], params, use_tqdm=False)
    counts = {found.name: getattr(found, "value", 0) for found in llm.get_metrics() if found.name.startswith(_PREFIX)}
    answers: dict[str, Any] = {
        "version": vllm.__version__,
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        "num_drafted": counts.get(f"{_PREFIX}draft_tokens", 0),
        "num_accepted": counts.get(f"{_PREFIX}accepted_tokens", 0),
    }
    with open(job["answers"], "w", encoding="utf-8") as out:
        json.dump(answers, out)


if __name__ == "__main__":
    main()

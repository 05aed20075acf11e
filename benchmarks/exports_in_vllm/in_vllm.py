"""Greedy answers of vLLM with one drafter after another: a program for a Python that has vLLM.

Reads jobs from standard input as JSON and writes the answers of each to the file that it names. Imports nothing of this
project, which that Python does not have. Run by `benchmarks.exports_in_vllm`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from typing import Any

# KV cache in GiB: the default is a share of the machine's memory. Unbound threads: others may be using the cores. One
# process, so that its last words are the error.
_ENVIRON = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
_PREFIX = "vllm:spec_decode_num_"


def main() -> None:
    """Job: arguments (of vLLM's LLM), prompts (lists of token ids), max_tokens, answers and log (paths).

    vLLM is imported once, which takes as long as all the rest. Each job is answered by a copy of this process, since an
    engine cannot be taken down whole.
    """
    for name, value in _ENVIRON.items():
        os.environ.setdefault(name, value)
    from vllm import LLM  # type: ignore[import-not-found]  # noqa: F401  # reads the environment

    for job in json.load(sys.stdin):
        process = multiprocessing.get_context("fork").Process(target=answer, args=(job,))
        process.start()
        process.join()


def answer(job: dict[str, Any]) -> None:
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    import vllm

    llm = vllm.LLM(enforce_eager=True, disable_log_stats=False, **job["arguments"])
    params = vllm.SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in job["prompts"]], params, use_tqdm=False)
    counts = {found.name: getattr(found, "value", 0) for found in llm.get_metrics() if found.name.startswith(_PREFIX)}
    answers = {
        "version": vllm.__version__,
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        "num_drafted": counts.get(f"{_PREFIX}draft_tokens", 0),
        "num_accepted": counts.get(f"{_PREFIX}accepted_tokens", 0),
    }
    with open(job["answers"], "w", encoding="utf-8") as out:
        json.dump(answers, out)


if __name__ == "__main__":
    main()
